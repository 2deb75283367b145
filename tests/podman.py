"""For tests of containers: podman as it works here, and an image made of this machine's own programs.

No registry is asked. The tests are skipped where podman does not work, and fail there with CI=true.
"""

import fcntl
import io
import os
import platform
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from rolltape.collect.sandboxes.visible import base_python

IMAGE = f"localhost/rolltape-test:{platform.python_version()}-2"
# crun, cgroups by systemd and podman's own limits fail on machines that are containers themselves.
_CONFIG = """
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
"""
_PROGRAMS = (
    "sh",
    "bash",
    "cat",
    "cp",
    "rm",
    "mkdir",
    "sleep",
    "ls",
    "env",
    "chmod",
    "chown",
    "ln",
    "git",
    "grep",
    "true",
)
_PACKAGES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py.py")
_LEFT_OUT = {
    "test",
    "idlelib",
    "lib2to3",
    "ensurepip",
    "tkinter",
    "turtledemo",
    "__pycache__",
    "distutils",
    "site-packages",
}


def needs_podman() -> str:
    """The image that tests use; the test is skipped where no container of it runs."""
    if (why := _why_not()) is not None:
        pytest.skip(f"podman does not work here: {why}")
    return IMAGE


def containers(label: str) -> list[str]:
    """The ids of all containers with a label."""
    done = podman("ps", "--all", "--quiet", "--no-trunc", f"--filter=label={label}")
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def podman(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["podman", *arguments], capture_output=True, text=True)


@cache
def _why_not() -> str | None:
    if shutil.which("podman") is None or shutil.which("runc") is None:
        return "podman or runc is not installed"
    if os.geteuid() != 0:
        return "these tests enter networks of containers, which takes root"
    place = Path(tempfile.gettempdir(), f"rolltape-podman-{os.geteuid()}")
    place.mkdir(mode=0o700, exist_ok=True)
    (place / "containers.conf").write_text(_CONFIG)
    os.environ["CONTAINERS_CONF"] = str(place / "containers.conf")
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if podman("image", "exists", IMAGE).returncode:
            _make_image(place / "image.tar")
    done = podman("run", "--rm", "--init", "--network=none", IMAGE, "/bin/sh", "-c", "exit 7")
    return None if done.returncode == 7 else done.stderr.strip() or f"exit code {done.returncode}"


def _make_image(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        for folder, mode in (("tmp", 0o1777), ("root", 0o755), ("etc", 0o755)):
            member = tarfile.TarInfo(folder)
            member.type, member.mode = tarfile.DIRTYPE, mode
            archive.addfile(member)
        passwd = b"root:x:0:0::/root:/bin/sh\nagent:x:1000:1000::/tmp:/bin/sh\n"
        member = tarfile.TarInfo("etc/passwd")
        member.size, member.mode = len(passwd), 0o644
        archive.addfile(member, io.BytesIO(passwd))
        python = Path(base_python())
        files = {f"/bin/{name}": Path(os.path.realpath(found)) for name in _PROGRAMS if (found := shutil.which(name))}
        files |= {str(python): python, "/usr/bin/python3": python}
        modules = Path(os.__file__).parent
        packages = Path(pytest.__file__).parents[1]
        target = modules / "site-packages"
        files |= {str(one): one for one in _below(modules)}
        files |= {str(target / one.relative_to(packages)): one for name in _PACKAGES for one in _below(packages / name)}
        for library in {one for source in files.values() if _has_libraries(source) for one in _libraries(source)}:
            files[library] = Path(os.path.realpath(library))
        for name, source in sorted(files.items()):
            archive.add(source, name.lstrip("/"))
    done = podman("import", "--change", "ENV PATH=/bin:/usr/bin", str(path), IMAGE)
    assert done.returncode == 0, done.stderr
    path.unlink()


def _below(path: Path) -> Iterator[Path]:
    """The files of a folder that the image needs, or the file itself."""
    if path.is_file() and path.suffix not in (".a", ".pyc"):
        yield path
    elif path.is_dir() and path.name not in _LEFT_OUT:
        for one in path.iterdir():
            yield from _below(one)


def _has_libraries(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _libraries(path: Path) -> list[str]:
    listed = subprocess.run(["ldd", str(path)], capture_output=True, text=True).stdout
    return [word for word in listed.split() if word.startswith("/") and Path(word).is_file()]
