"""`rolltape view`: show runs in a web page."""

import sys
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from rolltape.cli.options import HostOption, PortOption, require_key
from rolltape.cli.parameters import argument, option
from rolltape.cli.screen import note, open_in_browser, plural, print_long, tracked
from rolltape.errors import UsageError


def view(
    given: Annotated[list[str], argument("RUN...", "Run directories, or URLs of published shards.")],
    *,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8500,
    key: Annotated[str | None, option("--key KEY", "Require this key.", envvar="ROLLTAPE_VIEW_KEY")] = None,
    base_path: Annotated[
        str, option("--base-path PATH", "Serve below this path, for a reverse proxy: /x for https://host/x/.")
    ] = "",
    no_browser: Annotated[bool, option("--no-browser", "Do not open a browser.")] = False,
    static: Annotated[
        Path | None, option("--static FOLDER", "Write the pages of RUN [ROLLOUT...] to files instead.")
    ] = None,
    keep_secrets: Annotated[
        bool, option("--keep-secrets", "With --static: do not mask texts that look like keys.")
    ] = False,
) -> int:
    """Show runs in a web page, live or finished.

    With --static, the pages are written to files that open without a server: one for RUN and one for each ROLLOUT (all
    of them if none is named).
    """
    if static is not None:
        return _write(static, given[0], given[1:], mask=not keep_secrets)
    if keep_secrets:
        raise UsageError("--keep-secrets needs --static; a served page masks nothing")
    return _serve(given, host, port, key, base_path, no_browser=no_browser)


def _serve(runs: list[str], host: str, port: int, key: str | None, base_path: str, *, no_browser: bool) -> int:
    from rolltape.view.serve import serve_view

    require_key(host, key, "--key")

    def ready(address: str) -> None:
        whole = f"{address}?key={quote(key, safe='')}" if key else address
        print(whole, flush=True)
        if not no_browser and sys.stdout.isatty():
            open_in_browser(whole)

    serve_view(runs, host=host, port=port, key=key, on_ready=ready, base_path=base_path)
    return 0


def _write(folder: Path, run: str, rollouts: list[str], *, mask: bool) -> int:
    from rolltape.view.static import StaticPages

    with StaticPages(run, mask=mask) as pages:
        chosen = pages.chosen(rollouts)
        for page in tracked(pages.write(folder, chosen), "pages", pages.count(chosen)):
            print_long(str(page))
        if pages.masked:
            note(f"masked {plural(pages.masked, 'text')} that look like keys; use --keep-secrets to keep them")
    return 0
