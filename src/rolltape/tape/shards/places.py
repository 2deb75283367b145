"""Where shards lie: a local directory or any fsspec URL, behind the few operations that sealing and reading need."""

import hashlib
import os
import shutil
from pathlib import Path
from typing import IO, Any, NamedTuple

import fsspec  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from rolltape.errors import RunNotFound, TapeError, TapeWriteError
from rolltape.tape.recording.fields import is_unicode
from rolltape.tape.rundir import RUN_FILE, RunDirectory, checked_about, sync_directory


class Place:
    """A location that holds a run's shards under `shards/`, and a run.json."""

    def __init__(self, location: str | os.PathLike[str]) -> None:
        try:
            self._files, root = fsspec.core.url_to_fs(os.fspath(location))
        except (ValueError, ImportError) as error:
            raise TapeError(f"{location}: {error}") from None
        self.root = str(root).rstrip("/")
        self.is_local = isinstance(self._files, LocalFileSystem)
        self.url = str(Path(self.root).absolute()) if self.is_local else str(self._files.unstrip_protocol(self.root))

    def path(self, *names: str) -> str:
        return "/".join((self.root, *names))

    def about(self) -> bytes | None:
        """The content of its run.json; None: there is none."""
        return self.read(RUN_FILE)

    def shard_ids(self) -> list[str]:
        """The directories under `shards/`, half-written ones included."""
        try:
            if self.is_local:
                return sorted(one.name for one in Path(self.path("shards")).iterdir())  # quicker by far than fsspec
            self._files.invalidate_cache()
            found = self._files.ls(self.path("shards"), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(str(one).rstrip("/").rpartition("/")[2] for one in found)

    def read(self, *names: str) -> bytes | None:
        try:
            data: bytes = self._files.cat_file(self.path(*names))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise TapeError(f"{self.path(*names)}: cannot be read: {error}") from error
        return data

    def open(self, mode: str, *names: str) -> IO[Any]:
        try:
            if mode == "wb":
                self._files.makedirs(self.path(*names[:-1]), exist_ok=True)
            handle: IO[Any] = self._files.open(self.path(*names), mode)
        except OSError as error:
            kind = TapeWriteError if mode == "wb" else TapeError
            raise kind(f"{self.path(*names)}: {error}") from error
        return handle

    def write(self, data: bytes, *names: str) -> None:
        """A whole file; a local one is complete under its name, or not there."""
        if self.is_local:
            final = Path(self.path(*names))
            fresh = final.with_name(f".{final.name}")
            self.write_through(fresh, data)
            fresh.replace(final)
            sync_directory(final.parent)
            return
        with self.open("wb", *names) as handle:
            handle.write(data)

    def write_through(self, path: Path, data: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as handle:
                handle.write(data)
                handle.flush()
                os.fsync(handle.fileno())
        except OSError as error:
            raise TapeWriteError(f"{path}: {error}") from error

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
            if self._files.exists(self.path("shards", shard, "MANIFEST.json")):
                self._files.rm_file(self.path("shards", shard, "MANIFEST.json"))
            self._files.rm(self.path("shards", shard), recursive=True)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise TapeWriteError(f"{self.path('shards', shard)}: cannot be removed: {error}") from error


class FoundRun(NamedTuple):
    """A run that is there, not read yet."""

    location: str
    about: dict[str, Any]  # its run.json
    directory: RunDirectory | None  # None: it is not on this machine's disks
    place: Place


def find_run(location: str | os.PathLike[str]) -> FoundRun:
    """The run at a path or an fsspec URL; raises RunNotFound."""
    text = os.fspath(location)
    if not isinstance(text, str) or not is_unicode(text) or "\0" in text:
        raise RunNotFound(f"{text!r}: no run there; it is no path or URL in valid Unicode")
    place = Place(text)
    if place.is_local:
        directory = RunDirectory.opened(place.root)
        return FoundRun(str(directory.path), directory.about, directory, place)
    raw = place.about()
    if raw is None:
        raise RunNotFound(f"{place.url}: no run there ({RUN_FILE} is missing)")
    return FoundRun(place.url, checked_about(raw, place.url), None, place)
