"""Complete groups for a trainer, each given once, and a limit on how far collection runs ahead.

`tape.groups(…)` returns a stream of them.
"""

import sys
import warnings
from types import ModuleType
from typing import TYPE_CHECKING, Unpack

from rolltape.groups.group import Group, UnfinishedAttempt
from rolltape.groups.run_ahead import RunAheadLimit
from rolltape.groups.stream import GroupOptions, GroupStream, Skipped, groups
from rolltape.renamed import renamed

if TYPE_CHECKING:
    from rolltape.tape.recording.tape import Tape

__all__ = ["Group", "GroupStream", "RunAheadLimit", "Skipped", "UnfinishedAttempt", "groups"]


class _CallableModule(ModuleType):
    """Keeps `rolltape.groups(tape, …)` of 0.1.0 working: the name is that of this package now."""

    def __call__(self, tape: "Tape", **options: Unpack[GroupOptions]) -> GroupStream:
        warnings.warn("rolltape.groups(tape, …) is deprecated: use tape.groups(…)", DeprecationWarning, stacklevel=2)
        return groups(tape, **options)


sys.modules[__name__].__class__ = _CallableModule

__getattr__ = renamed(__name__, {"Room": "RunAheadLimit"})
