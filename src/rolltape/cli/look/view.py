"""`rolltape view`: show runs in a web page."""

import contextlib
import getpass
import re
import sys
from pathlib import Path
from typing import Annotated

from rolltape.cli.options import HostOption, NoBrowserOption, PortOption, require_key
from rolltape.cli.parameters import argument, given_flags, option
from rolltape.cli.screen import note, open_in_browser, plural, print_long, tracked
from rolltape.errors import NoSuchRollout, UsageError

_LIFETIME = re.compile(r"([0-9]{1,6}(?:\.[0-9]+)?)([mhd])")
_UNITS_S = {"m": 60, "h": 3600, "d": 24 * 3600}


def view(
    given: Annotated[list[str], argument("RUN...", "Run directories, or URLs of published shards.")],
    *,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8500,
    key: Annotated[str | None, option("--key KEY", "Require this key.", envvar="ROLLTAPE_VIEW_KEY")] = None,
    base_path: Annotated[
        str, option("--base-path PATH", "Serve below this path, for a reverse proxy: /x for https://host/x/.")
    ] = "",
    annotate: Annotated[
        bool, option("--annotate", "Print a link; the first browser that opens it may write tags and notes.")
    ] = False,
    author: Annotated[
        str | None, option("--author NAME", "With --annotate: author of the notes (default: your user name).")
    ] = None,
    share: Annotated[
        list[str] | None,
        option("--share ROLLOUT", "Print a link that opens only this rollout, without the key; repeatable."),
    ] = None,
    expires: Annotated[
        str, option("--expires TIME", "With --share: how long the link works, such as 12h or 7d, at most 365d.")
    ] = "7d",
    no_browser: NoBrowserOption = False,
    static: Annotated[
        Path | None,
        option(
            "--static FOLDER", "Write the pages of RUN [ROLLOUT...], or the comparison of two RUNs, to files instead."
        ),
    ] = None,
    keep_secrets: Annotated[
        bool, option("--keep-secrets", "With --static: do not mask texts that look like keys.")
    ] = False,
) -> int:
    """Show runs in a web page, live or finished.

    With --static, the pages are written to files that open without a server: one for RUN, one for each ROLLOUT (all of
    them if none is named), and one for each of their groups. With two RUNs, one page that compares them task by task is
    written.
    """
    if static is not None:
        if served := given_flags({"--annotate": annotate, "--author": author, "--share": share}):
            raise UsageError(f"{served[0]}: --static writes files, without a server; leave out one of them")
        if len(given) == 2 and _is_run(given[1]):
            return _write_comparison(static, given[0], given[1], mask=not keep_secrets)
        return _write(static, given[0], given[1:], mask=not keep_secrets)
    if keep_secrets:
        raise UsageError("--keep-secrets needs --static; a served page masks nothing")
    if author is not None and not annotate:
        raise UsageError("--author needs --annotate")
    if share and not key:
        raise UsageError("--share needs --key: the link is signed with it")
    lifetime_s = _parse_lifetime(expires)
    require_key(host, key, "--key")
    shared = _find_shared(given, share or [])

    from rolltape.view.serve import ServedAddress, serve_view

    def ready(address: ServedAddress) -> None:
        whole = address.link(key)
        print(whole, flush=True)
        for place, rollout in shared:
            print(address.share_link(list(address.runs.runs)[place], rollout, lifetime_s), flush=True)
        for why in address.read_only:
            note(why)
        if not no_browser and sys.stdout.isatty():
            open_in_browser(whole)

    writer = (author or getpass.getuser()) if annotate else None
    serve_view(given, host=host, port=port, key=key, on_ready=ready, base_path=base_path, author=writer)
    return 0


def _is_run(given: str) -> bool:
    """Whether a word names a run and not a rollout."""
    return "://" in given or Path(given).is_dir()


def _parse_lifetime(given: str) -> int:
    """The seconds of a time such as 12h or 7d."""
    found = _LIFETIME.fullmatch(given)
    seconds = 0.0 if found is None else float(found[1]) * _UNITS_S[found[2]]
    if not 1 <= seconds <= 365 * _UNITS_S["d"]:
        raise UsageError(f"--expires {given}: give a number and m, h or d, such as 12h or 7d, at most 365d")
    return int(seconds)


def _find_shared(runs: list[str], wanted: list[str]) -> list[tuple[int, str]]:
    """For each rollout, the index of its run in `runs`, and its id."""
    import rolltape

    found = []
    for name in wanted:
        holders = []
        for place, run in enumerate(runs):
            with contextlib.suppress(NoSuchRollout):
                holders.append((place, rolltape.read(run).find(name).id))
        if len(holders) != 1:
            raise UsageError(
                f"--share {name}: {len(holders)} of the runs have such a rollout; give an id that exactly one has"
            )
        found += holders
    return found


def _write_comparison(folder: Path, a: str, b: str, *, mask: bool) -> int:
    from rolltape.view.static import write_comparison

    page, masked = write_comparison(folder, a, b, mask=mask)
    print_long(str(page))
    _note_masked(masked)
    return 0


def _note_masked(masked: int) -> None:
    if masked:
        note(f"masked {plural(masked, 'text')} that look like keys; use --keep-secrets to keep them")


def _write(folder: Path, run: str, rollouts: list[str], *, mask: bool) -> int:
    from rolltape.view.static import StaticPages

    with StaticPages(run, mask=mask) as pages:
        chosen = pages.chosen(rollouts)
        for page in tracked(pages.write(folder, chosen), "pages", pages.count(chosen)):
            print_long(str(page))
        _note_masked(pages.masked)
    return 0
