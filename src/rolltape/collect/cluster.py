"""The old home of the Ray runner; import it from `rolltape.collect`."""

import warnings

from rolltape.collect.runners.ray import ClusterSettings, RayRunner

__all__ = ["ClusterSettings", "RayRunner"]

warnings.warn(
    "rolltape.collect.cluster has moved; import ClusterSettings and RayRunner from rolltape.collect",
    DeprecationWarning,
    stacklevel=2,
)
