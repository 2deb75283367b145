"""Weight versions as the integers that some frameworks count them in."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rolltape.errors import ExportError
from rolltape.records.sample import Sample

_LARGEST = 2**31 - 1


class VersionNumbers:
    """Numbers versions: all by the integer that they spell, or all by their place among those announced."""

    def __init__(self, announced: Sequence[str] = ()) -> None:
        spelled = all(map(_is_number, announced))
        self._places = {} if spelled else {version: place for place, version in enumerate(announced)}

    def of_tokens(self, sample: Sample) -> npt.NDArray[np.int32]:
        """For each token the version that sampled it; -1 where there is none, or where it is not known exactly."""
        known = [self._number(first, sample) if first == last else -1 for first, last in sample.versions]
        return np.array([*known, -1], dtype=np.int32)[sample.version_index]

    def bounds(self, sample: Sample) -> tuple[int, int] | None:
        """The oldest and the newest version that may have sampled a trained token; None: none was given."""
        used = [sample.versions[index] for index in np.unique(sample.version_index[sample.trained_mask]) if index >= 0]
        if not used:
            return None
        oldest = min(self._number(first, sample) for first, _ in used)
        return oldest, max(self._number(last, sample) for _, last in used)

    def _number(self, version: str, sample: Sample) -> int:
        if not self._places and _is_number(version):
            return int(version)
        if version not in self._places:
            raise ExportError(
                f"sample {sample.id}: weight version {version!r} is no 32-bit integer and not among those announced; "
                "give versions=run.versions()"
            )
        return self._places[version]


def _is_number(version: str) -> bool:
    return version.isascii() and version.isdigit() and int(version) <= _LARGEST
