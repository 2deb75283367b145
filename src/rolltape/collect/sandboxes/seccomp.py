"""A filter of system calls for podman: its default filter, without user namespaces and calls that attacks often use.

Docker's default filter refuses these already.
"""

import json
from pathlib import Path
from typing import Any

_PROFILES = (Path("/etc/containers/seccomp.json"), Path("/usr/share/containers/seccomp.json"))
_CLONE_NEWUSER = 0x10000000  # of linux/sched.h
_BY_FLAGS = ("clone", "unshare")  # allowed without the flag above, which is in their first argument
_UNKNOWN = "clone3"  # its flags are in memory, which a filter cannot read; the C library falls back to clone
_ENOSYS = 38
_NEVER = {
    *("add_key", "request_key", "keyctl", "perf_event_open", "bpf", "userfaultfd"),
    *("io_uring_setup", "io_uring_enter", "io_uring_register"),
}


def write_filter(path: Path) -> Path | None:
    """Write the filter; None if podman's default filter is missing here, or has another form."""
    try:
        profile = json.loads(next(one for one in _PROFILES if one.is_file()).read_bytes())
        path.write_text(json.dumps(_tighten(profile)))
    except (StopIteration, OSError, ValueError, KeyError, TypeError):
        return None
    return path


def _tighten(profile: dict[str, Any]) -> dict[str, Any]:
    taken = {*_BY_FLAGS, _UNKNOWN, *_NEVER}
    rules = [rule | {"names": [name for name in rule["names"] if name not in taken]} for rule in profile["syscalls"]]
    without = [{"index": 0, "value": _CLONE_NEWUSER, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}]
    own = [
        {"names": list(_BY_FLAGS), "action": "SCMP_ACT_ALLOW", "args": without},
        {"names": [_UNKNOWN], "action": "SCMP_ACT_ERRNO", "errnoRet": _ENOSYS},
        {"names": sorted(_NEVER), "action": "SCMP_ACT_ERRNO", "errnoRet": 1},
    ]
    return profile | {"syscalls": [*(rule for rule in rules if rule["names"]), *own]}
