"""The parts of this machine that a program in a sandbox sees: the system, a little of /etc, and its installation."""

import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

Mount = tuple[str, ...]  # arguments of bwrap, the last of which is the target

_SYSTEM = tuple(map(Path, ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")))
# No private keys, no accounts, no settings of services.
_ETC = (
    *("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "timezone", "os-release", "mime.types"),
    *("services", "protocols", "inputrc", "terminfo", "fonts", "ca-certificates", "ca-certificates.conf", "ssl/certs"),
    *("ssl/openssl.cnf", "ssl/cert.pem", "pki/tls/certs", "pki/tls/cert.pem", "pki/ca-trust", "crypto-policies"),
)
_ETC_OF_NETWORK = ("resolv.conf", "hosts", "nsswitch.conf", "gai.conf", "host.conf")
_OF_PREFIX = ("bin", "lib", "lib64", "libexec", "include", "share", "ssl", "pyvenv.cfg")
_LONGEST_SHEBANG = 256  # bytes
_MAX_LINKS = 40


def base_python() -> str:
    """The interpreter of this process, outside of any virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def is_of_system(path: Path) -> bool:
    """Whether a path is in a folder of the system, which every machine and image has itself."""
    return _is_inside(path, _SYSTEM)


def system_mounts(*, network: bool) -> list[Mount]:
    """Mounts of the system, read-only. With `network`, also of the files by which it finds other machines."""
    mounts: list[Mount] = []
    for path in _SYSTEM:
        if path.is_symlink():
            mounts.append(("--symlink", str(path.readlink()), str(path)))
        elif path.is_dir():
            mounts.append(("--ro-bind", str(path), str(path)))
    etc = (Path("/etc", name) for name in (*_ETC, *(_ETC_OF_NETWORK if network else ())))
    mounts += [("--ro-bind", str(path), str(path)) for path in etc if path.exists()]
    return mounts


@lru_cache(maxsize=64)
def install_mounts(
    command: tuple[str, ...],
    search: str,
    *,
    programs: tuple[str, ...] = (),
    reads: tuple[str, ...] = (),
    hidden: tuple[str, ...] = (),
) -> list[Mount]:
    """Mounts of the program of a command, files among its arguments, and more programs and paths to read.

    `search` is its PATH. The first node and python3 there are mounted too, since many programs are their scripts.
    `hidden` folders are covered even if they are below something visible.
    """
    seen = _Visible()
    for name in (command[0], *programs, "node", "python3"):
        if (program := shutil.which(name, path=search)) is not None:
            seen.add_program(Path(program).absolute(), search)
    for word in (*(word for word in command[1:] if os.path.isabs(word) and os.path.isfile(word)), *reads):  # noqa: PTH113, PTH117
        seen.add(Path(word))
    return seen.mounts(Path(one) for one in hidden)


class _Visible:
    def __init__(self) -> None:
        self._paths: set[Path] = set()
        self._links: dict[Path, str] = {}
        self._programs: set[Path] = set()

    def add(self, path: Path) -> None:
        if not _is_inside(path, _SYSTEM):
            self._paths.add(path)

    def add_program(self, program: Path, search: str) -> None:
        """Add a program with all links that lead to it, its installation, and its interpreter."""
        if program in self._programs or not program.exists():
            return
        self._programs.add(program)
        for step in _steps(program):
            if parts := _installed_with(step):
                for part in parts:
                    self.add(part)
                if (root := _environment_root(step)) is not None:
                    self.add_program(root / "bin" / "python", search)
                    self.add_program(_base_of(root) / "python3", search)
            elif step.is_symlink():
                self._links[step] = str(step.readlink())
            else:
                self.add(step)
        if (interpreter := _interpreter(program, search)) is not None:
            self.add_program(interpreter, search)

    def mounts(self, hidden: Iterable[Path]) -> list[Mount]:
        shown = [path for path in sorted(self._paths) if not _is_inside(path, self._paths - {path})]
        mounts: list[Mount] = [("--ro-bind", str(path), str(path)) for path in shown]
        for link, target in sorted(self._links.items()):
            if not _is_inside(link, (*shown, *_SYSTEM)):
                mounts.append(("--symlink", target, str(link)))
        # Links are resolved for both, so a hidden folder is covered at each visible place.
        real = [(path, Path(os.path.realpath(path))) for path in (*shown, *_SYSTEM)]
        for one in map(Path, map(os.path.realpath, hidden)):
            mounts += [("--tmpfs", str(at / one.relative_to(path))) for at, path in real if one.is_relative_to(path)]
        return mounts


def with_parents(mounts: Iterable[Mount]) -> Iterator[str]:
    """The arguments of bwrap for mounts, in order. Folders above them are made so that every user can enter them."""
    made: set[Path] = set()
    covered: set[Path] = set()
    for mount in mounts:
        target = Path(mount[-1])
        for parent in reversed(target.parents[:-1]):
            if parent not in made and not _is_inside(parent, covered):
                yield from ("--perms", "0755", "--dir", str(parent))
                made.add(parent)
        (covered if mount[0].endswith("bind") else made).add(target)
        yield from mount


def _is_inside(path: Path, folders: Iterable[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _steps(path: Path) -> Iterator[Path]:
    """A path, each link on the way to its target, and the target."""
    real = Path(os.path.realpath(path))
    for _ in range(_MAX_LINKS):
        yield path
        if not path.is_symlink():
            break
        path = Path(os.path.normpath(path.parent / path.readlink()))
    if path != real:
        yield real


def _installed_with(program: Path) -> list[Path]:
    """The folders of a program's installation; empty if it is a single file, or part of the system."""
    parts, above = program.parts, program.parent.parent
    if _is_inside(program, _SYSTEM):
        return []
    if "node_modules" in parts:
        return [Path(*parts[: parts.index("node_modules") + 1])]
    root = _environment_root(program)
    if root is None and program.parent.name == "shims" and (above / "versions").is_dir():  # of pyenv
        return [above]
    if root is None and program.parent.name == "bin":
        is_python = any(above.glob("lib/python3*/os.py"))
        is_node = (above / "include/node").is_dir() and (above / "bin/node").is_file()
        root = above if is_python or is_node else None
    # A project's folder may be its environment; its other files stay hidden.
    return [] if root is None else [path for name in _OF_PREFIX if (path := root / name).exists()]


def _environment_root(program: Path) -> Path | None:
    """The virtual environment or conda environment that contains a program."""
    roots = (one for one in program.parents if (one / "pyvenv.cfg").is_file() or (one / "conda-meta").is_dir())
    return next(roots, None)


def _base_of(root: Path) -> Path:
    """The folder of the interpreter with which a virtual environment was made."""
    try:
        lines = (root / "pyvenv.cfg").read_text().splitlines()
    except OSError:
        return root / "bin"
    pairs = (line.partition("=")[::2] for line in lines)
    return next((Path(value.strip()) for name, value in pairs if name.strip() == "home"), root / "bin")


def _interpreter(script: Path, search: str) -> Path | None:
    """The interpreter of a script, from its first line; None if it is not a script."""
    try:
        with script.open("rb") as file:
            first = file.readline(_LONGEST_SHEBANG)
    except OSError:
        return None
    if not first.startswith(b"#!"):
        return None
    words = os.fsdecode(first[2:]).split()
    if words and Path(words[0]).name == "env":
        name = next((word for word in words[1:] if not word.startswith("-") and "=" not in word), "")
        found = shutil.which(name, path=search)
        return None if found is None else Path(found)
    return Path(words[0]) if words and os.path.isabs(words[0]) else None  # noqa: PTH117
