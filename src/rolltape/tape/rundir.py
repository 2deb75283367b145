"""The directory of a run, and the places, local or at a URL, that hold its shards.

    RUN/run.json                   schema, name, created
    RUN/published.json             further locations (fsspec URLs) that hold shards of this run
    RUN/journals/WRITER.sqlite     one SQLite journal per writing process, and
    RUN/journals/WRITER.owner      the file that the process keeps locked while it lives
    RUN/shards/SHARD/              sealed Parquet files; without its MANIFEST.json a shard is half-written, and ignored

A minor schema version only adds keys inside the JSON objects on the tape, and new event kinds. Code that rewrites a
tape keeps both. So a reader of an older minor version can read and seal a newer tape.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import fsspec  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from rolltape.errors import DamagedTapeError, NewerTapeError, RecordError, RunNotFound, TapeError, TapeWriteError
from rolltape.records.jsonable import valid_text
from rolltape.tape.recording.fields import is_unicode
from rolltape.tape.stored import check_shortage

SCHEMA = "1.0"
RUN_FILE = "run.json"
PUBLISHED_FILE = "published.json"
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700  # for the owner only: a run holds prompts, replies and keys

_LONG_S = 30.0  # to hold a lock that is held for milliseconds
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:(:|//)")


class RunDirectory:
    """A run on a local disk."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path = path
        self.about = about
        self.journals = path / "journals"
        self.shards = path / "shards"

    @classmethod
    def made_or_opened(cls, path: str | os.PathLike[str], name: str | None) -> "RunDirectory":
        """The run at `path`, which is made if there is none. A given name must be the name that it was made with."""
        root = _local(path)
        if name is not None and (not isinstance(name, str) or not name.strip() or not is_unicode(name)):
            raise RecordError(f"run {root}: its name is {name!r}; give a text that is not empty, and valid Unicode")
        try:
            make_private_folder(root / "journals")
            with locked(root):
                if not (root / RUN_FILE).exists():
                    about = {"schema": SCHEMA, "name": name or valid_text(root.name), "created": time.time()}
                    write_whole(root / RUN_FILE, json.dumps(about).encode())
        except OSError as error:
            raise TapeWriteError(f"run {root}: cannot be made or written: {error.strerror or error}") from error
        run = cls.opened(root)
        if name is not None and run.name != name:
            raise TapeError(
                f"run {root}: its name is {run.name!r}, not {name!r}; ids depend on it, so it cannot change"
            )
        return run

    @classmethod
    def opened(cls, path: str | os.PathLike[str]) -> "RunDirectory":
        """The run at `path`, which must exist."""
        root = _expanded(path)
        try:
            raw = (root / RUN_FILE).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise RunNotFound(f"{root}: no run there ({RUN_FILE} is missing){_name_runs(root)}") from None
        except OSError as error:
            raise TapeError(f"{root}: {RUN_FILE} cannot be read: {error}") from error
        return cls(root, checked_about(raw, str(root)))

    @property
    def name(self) -> str:
        return str(self.about["name"])

    def journal_paths(self) -> list[Path]:
        """Every writer's journal, in the order of their names."""
        try:
            return sorted(self.journals.glob("*.sqlite"))
        except OSError as error:
            check_shortage(error, self.journals)
            raise

    def published(self) -> list[str]:
        """The further locations that hold shards of this run."""
        try:
            value = json.loads((self.path / PUBLISHED_FILE).read_bytes())
            return [str(url) for url in value.get("locations", [])]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise DamagedTapeError(f"{self.path / PUBLISHED_FILE}: cannot be read: {error}") from None

    def add_published(self, url: str) -> None:
        """Make readers of this run look for shards at `url` too."""
        with locked(self.path):
            known = self.published()
            if url not in known:
                write_whole(self.path / PUBLISHED_FILE, json.dumps({"locations": [*known, url]}).encode())


def _local(path: str | os.PathLike[str]) -> Path:
    """The path of a run to record. A journal needs a local disk, so URLs are refused."""
    text = os.fspath(path)
    if not isinstance(text, str) or not is_unicode(text) or "\0" in text:
        raise RecordError(f"run {text!r}: not a path in valid Unicode; give another")
    if _URL.match(text):
        raise RecordError(
            f"run {text}: a run is recorded on a local disk, not at a URL; give a path, "
            "and publish there with `rolltape seal --to`"
        )
    return _expanded(text)


def _expanded(path: str | os.PathLike[str]) -> Path:
    with contextlib.suppress(RuntimeError):  # no such user: the path is used as it is
        return Path(path).expanduser().absolute()
    return Path(path).absolute()


def is_too_new(schema: object) -> bool:
    """Whether a schema is of a later major version than this program reads. Raises ValueError if it is no version."""
    return int(str(schema).partition(".")[0]) > int(SCHEMA.partition(".")[0])


def checked_about(raw: bytes, where: str) -> dict[str, Any]:
    """The content of a run.json that this program can read."""
    try:
        about: dict[str, Any] = json.loads(raw)
        too_new, _ = is_too_new(about["schema"]), about["name"]
    except (ValueError, KeyError, TypeError):
        raise DamagedTapeError(f"{where}: {RUN_FILE} is not one that Rolltape wrote") from None
    if too_new:
        raise NewerTapeError(
            f"{where}: written with schema {about['schema']}, this program reads up to {SCHEMA.partition('.')[0]}.x; "
            "update rolltape"
        )
    return about


@contextlib.contextmanager
def locked(directory: Path, name: str = "run.lock", *, for_long: bool = False) -> Iterator[None]:
    """Hold a run's lock against other processes and threads of this machine.

    If a process holds it for very long, the error names that process. With `for_long`, it waits without limit.
    """
    try:
        handle = open_private(directory / name, "ab")
    except OSError as error:
        raise TapeWriteError(f"run {directory}: cannot be written: {error.strerror or error}") from error
    with handle:
        if for_long:
            fcntl.flock(handle, fcntl.LOCK_EX)
        else:
            _lock(handle.fileno(), f"run {directory}: process {{}} holds {name}; end that process, and try again")
        yield


def _lock(descriptor: int, refusal: str) -> None:
    give_up_at, pause_s = time.monotonic() + _LONG_S, 0.001
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= give_up_at:
                raise TapeWriteError(refusal.format(_holder(descriptor))) from None
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.02)
        else:
            return


def _holder(descriptor: int) -> str:
    """The process that has locked an open file, or "?" if the system does not report it."""
    about = os.fstat(descriptor)
    place = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5] == place:
                return fields[4]
    return "?"


def open_private(path: Path, mode: str = "wb") -> IO[bytes]:
    """Open a file of a run for writing. A new file is readable by its owner only, whatever the umask."""
    handle: IO[bytes] = open(path, mode, opener=private_opener)  # noqa: SIM115 - the caller closes it
    return handle


def private_opener(path: str | os.PathLike[str], flags: int) -> int:
    """As `open_private`, for callers that need a descriptor: `os.open` with the right mode."""
    try:
        descriptor = os.open(path, flags | os.O_EXCL, PRIVATE_FILE) if flags & os.O_CREAT else -1
    except FileExistsError:
        if flags & os.O_EXCL:
            raise
        descriptor = -1
    if descriptor < 0:
        return os.open(path, flags, PRIVATE_FILE)
    os.fchmod(descriptor, PRIVATE_FILE)
    return descriptor


def _name_runs(folder: Path) -> str:
    """The runs in a folder that is no run itself, as the end of an error message; empty if there are none."""
    runs = sorted(file.parent.name for file in folder.glob(f"*/{RUN_FILE}"))
    if not runs:
        return ""
    return f"; name one of the runs in it: {', '.join(runs[:5])}{', …' if len(runs) > 5 else ''}"


def make_private_folder(path: Path, *, parents: bool = True) -> None:
    """Make a folder of a run for its owner only, whatever the umask. With `parents`, also make the run's folder.

    An existing folder stays as it is: users who share a run set its mode themselves.
    """
    if parents:
        path.parent.parent.mkdir(parents=True, exist_ok=True)
    for folder in (path.parent, path) if parents else (path,):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(PRIVATE_FOLDER)
            folder.chmod(PRIVATE_FOLDER)


def make_private_file(path: Path) -> None:
    """Make an empty file for a library that would make it with other permissions. SQLite's logs get the same."""
    os.close(private_opener(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC))


def is_in_run(path: Path) -> bool:
    """Whether a file lies, or would lie, in a run's directory."""
    return any((folder / RUN_FILE).exists() for folder in path.absolute().parents)


def user_cache() -> Path:
    """Rolltape's folder in the user's cache. Raises RuntimeError if there is no home directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "rolltape"


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that readers, also after a crash, find either the old content or the new one."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")  # two threads may write it
    with open_private(fresh, "wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    fresh.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory safe against power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Place:
    """A location that holds a run's shards under `shards/`, and a run.json."""

    def __init__(self, location: str | os.PathLike[str]) -> None:
        text = os.fspath(location)
        try:
            # A path stays as it is: fsspec reads "::" anywhere in it as a chain of URLs.
            self._files, root = (
                fsspec.core.url_to_fs(text) if _URL.match(text) else (LocalFileSystem(), _expanded(text))
            )
        except (ValueError, ImportError) as error:
            raise TapeError(f"{location}: {error}") from None
        self.root = str(root).rstrip("/")
        self.is_local = isinstance(self._files, LocalFileSystem)
        self.url = str(Path(self.root).absolute()) if self.is_local else str(self._files.unstrip_protocol(self.root))

    def path(self, *names: str) -> str:
        return "/".join((self.root, *names))

    def _label(self, *names: str) -> str:
        """A path for errors, with the protocol of the place."""
        return "/".join((self.url, *names))

    def about(self) -> bytes | None:
        """The content of its run.json, or None if there is none."""
        return self.read(RUN_FILE)

    def shard_ids(self) -> list[str]:
        """The directories under `shards/`, also half-written ones."""
        try:
            if self.is_local:
                return sorted(one.name for one in Path(self.path("shards")).iterdir())  # much faster than fsspec
            with _os_errors():
                self._files.invalidate_cache()
                found = self._files.ls(self.path("shards"), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(str(one).rstrip("/").rpartition("/")[2] for one in found)

    def read(self, *names: str) -> bytes | None:
        try:
            with _os_errors():
                data: bytes = self._files.cat_file(self.path(*names))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise TapeError(f"{self._label(*names)}: cannot be read: {error}") from error
        return data

    def open(self, mode: str, *names: str) -> IO[Any]:
        path = self.path(*names)
        try:
            if mode == "wb" and self.is_local:
                make_private_folder(Path(path).parent)
                return open_private(Path(path))
            with _os_errors():
                if mode == "wb":
                    self._files.makedirs(self.path(*names[:-1]), exist_ok=True)
                handle: IO[Any] = self._files.open(path, mode)
        except OSError as error:
            if mode == "wb":
                raise TapeWriteError(f"{self._label(*names)}: cannot be written: {error.strerror or error}") from error
            raise TapeError(f"{self._label(*names)}: {error}") from error
        return handle

    def write(self, data: bytes, *names: str) -> None:
        """Write a whole file. A local file is complete, or does not exist under its name."""
        if self.is_local:
            path = Path(self.path(*names))
            try:
                make_private_folder(path.parent)
                write_whole(path, data)
            except OSError as error:
                raise TapeWriteError(f"{path}: cannot be written: {error.strerror or error}") from error
            return
        with self.open("wb", *names) as handle:
            handle.write(data)

    def put(self, folder: Path, *names: str) -> None:
        """Copy the files of a local folder here."""
        for path in folder.iterdir():
            if path.is_file():
                with path.open("rb") as source, self.open("wb", *names, path.name) as copy:
                    shutil.copyfileobj(source, copy)

    def make_safe(self, *names: str) -> None:
        """Make a file that was written here safe against power loss, as far as the place can."""
        if self.is_local:
            path = Path(self.path(*names))
            with path.open("rb") as handle:
                os.fsync(handle.fileno())
            sync_directory(path.parent)

    def checksum(self, *names: str) -> tuple[int, str]:
        """The size and SHA-256 of a file."""
        digest, size = hashlib.sha256(), 0
        with self.open("rb", *names) as handle:
            while chunk := handle.read(1 << 20):
                digest.update(chunk)
                size += len(chunk)
        return size, digest.hexdigest()

    def remove_shard(self, shard: str) -> None:
        """Remove a shard, its manifest first, so that what is left counts as half-written."""
        try:
            with _os_errors():
                if self._files.exists(self.path("shards", shard, "MANIFEST.json")):
                    self._files.rm_file(self.path("shards", shard, "MANIFEST.json"))
                self._files.rm(self.path("shards", shard), recursive=True)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise TapeWriteError(f"{self._label('shards', shard)}: cannot be removed: {error}") from error


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    """Turn an error of a storage client, such as one about missing credentials, into an OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # of anybody's storage client
        raise OSError(f"{type(error).__name__}: {error}") from error


class FoundRun(NamedTuple):
    """A run that is there, not read yet."""

    location: str
    about: dict[str, Any]  # its run.json
    directory: RunDirectory | None  # None: it is not on this machine's disks
    place: Place


def find_run(location: str | os.PathLike[str]) -> FoundRun:
    """The run at a path or an fsspec URL. Raises RunNotFound."""
    text = os.fspath(location) if isinstance(location, os.PathLike) else location
    if not isinstance(text, str) or not is_unicode(text) or "\0" in text:
        raise RunNotFound(f"{text!r}: no run there; it is not a path or URL in valid Unicode")
    place = Place(text)
    if place.is_local:
        directory = RunDirectory.opened(place.root)
        return FoundRun(str(directory.path), directory.about, directory, place)
    raw = place.about()
    if raw is None:
        raise RunNotFound(f"{place.url}: no run there ({RUN_FILE} is missing)")
    return FoundRun(place.url, checked_about(raw, place.url), None, place)
