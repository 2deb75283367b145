"""`rolltape view`: a web page over runs."""

import os
import sys
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from rolltape.cli.exits import UsageError


def view(
    given: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run directories, or the URLs of their shards.")],
    host: Annotated[str, typer.Option("--host", help="Not loopback: --key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 8500,
    key: Annotated[
        str | None, typer.Option("--key", envvar="ROLLTAPE_VIEW_KEY", help="Asked of whoever looks.")
    ] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
    static: Annotated[
        Path | None, typer.Option("--static", metavar="FOLDER", help="Write pages for RUN [ROLLOUT...] there instead.")
    ] = None,
    keep_secrets: Annotated[
        bool, typer.Option("--keep-secrets", help="With --static: leave in what looks like a key.")
    ] = False,
) -> int:
    """Look at runs in a web page, live or finished.

    With --static the page is written to files instead, which open without a server: that of RUN, and one for each
    ROLLOUT (all of them if none is named).
    """
    if static is not None:
        return _write(static, given[0], given[1:], mask=not keep_secrets)
    if keep_secrets:
        raise UsageError("--keep-secrets is for --static: nothing is masked in a page that is served")
    return _serve(given, host, port, key, no_open=no_open)


def _serve(runs: list[str], host: str, port: int, key: str | None, *, no_open: bool) -> int:
    from rolltape.view.guard import is_loopback
    from rolltape.view.serve import serve_view

    if not is_loopback(host) and not key:
        raise UsageError(f"--host {host} is not loopback; give --key too, so that not everybody may look")

    def ready(address: str) -> None:
        whole = f"{address}?key={quote(key, safe='')}" if key else address
        print(whole, flush=True)
        if not no_open and sys.stdout.isatty() and _has_display():
            import webbrowser

            webbrowser.open(whole)

    serve_view(runs, host=host, port=port, key=key, on_ready=ready)
    return 0


def _has_display() -> bool:
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def _write(folder: Path, run: str, rollouts: list[str], *, mask: bool) -> int:
    from rolltape.cli.output.screen import note, plural, print_long, tracked
    from rolltape.view.static import StaticPages

    with StaticPages(run, mask=mask) as pages:
        chosen = pages.chosen(rollouts)
        for page in tracked(pages.write(folder, chosen), "pages", pages.count(chosen)):
            print_long(str(page))
        if pages.masked:
            note(f"masked {plural(pages.masked, 'text')} that look like keys; --keep-secrets leaves them in")
    return 0
