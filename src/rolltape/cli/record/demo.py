"""`rolltape demo`: a model learns while you watch, recorded by Rolltape; nothing is downloaded."""

import os
import shutil
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from rolltape.cli.app import run as rolltape_command
from rolltape.cli.options import NoBrowserOption
from rolltape.cli.parameters import argument, option
from rolltape.cli.screen import note, open_in_browser, print_long
from rolltape.errors import ExportError, UsageError


def demo(
    run: Annotated[Path | None, argument("RUN", "Run directory to create (default: runs/demo).")] = None,
    *,
    no_browser: NoBrowserOption = False,
    scripted: Annotated[
        bool, option("--scripted", "Only record a scripted agent's session, in RUN (default: runs/scripted).")
    ] = False,
    tasks: Annotated[
        Path | None, option("--tasks FOLDER", "Only write the example tasks to this folder, for collect.")
    ] = None,
) -> int:
    """Train the shipped model and show the recorded run.

    The model learns for six steps, which takes about half a minute on two cores and needs no GPU, no download, and no
    account. The page is open from the start; on a terminal it stays until Ctrl-C.
    """
    if tasks is not None:
        if run is not None or scripted:
            raise UsageError("--tasks only writes task files; leave out RUN and --scripted")
        return _write_tasks(tasks)
    if scripted:
        return _record_scripted(Path("runs/scripted") if run is None else run)
    return _play(run, no_browser=no_browser)


def _play(run: Path | None, *, no_browser: bool) -> int:
    from rolltape.demo.story import PLACE, CommandFailed, make_room, play

    path = PLACE if run is None else run
    make_room(path)
    stays = sys.stdin.isatty() and sys.stdout.isatty() and not os.environ.get("CI")

    def show(address: str) -> None:
        print(f"\nWatch it: {address}", flush=True)
        if stays and not no_browser:
            open_in_browser(address)

    def wait() -> None:
        if not stays:
            print("It answers. The demo ends here, because this is not a terminal.")
            return
        print("Ctrl-C ends it.", flush=True)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()

    try:
        play(path, rolltape_command, show, wait)
    except CommandFailed as failed:
        return failed.code
    return 0


def _record_scripted(path: Path) -> int:
    from rolltape.demo import record_scripted

    if path.exists():
        raise UsageError(f"{path} exists; name a new folder, or remove it")
    record_scripted(path)
    note(f"recorded in {path}; rolltape ls {path} lists it")
    return 0


def _write_tasks(folder: Path) -> int:
    from rolltape.demo import tasks

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(Path(tasks.__file__).parent.glob("*.jsonl")):
            target = folder / file.name
            if target.exists():
                raise UsageError(f"{target} exists; name another folder, or remove it")
            shutil.copy(file, target)
            print_long(str(target))
    except OSError as error:
        raise ExportError(f"--tasks {folder}: cannot be written: {error.strerror}; name another folder") from None
    return 0
