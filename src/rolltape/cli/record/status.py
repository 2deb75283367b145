"""`rolltape status`: how a running gateway fares."""

from typing import Annotated, Any

import typer

from rolltape.cli.exits import UsageError
from rolltape.cli.options import JsonOption
from rolltape.cli.output.screen import count, print_json, print_line, print_table, span


def status(
    url: Annotated[str, typer.Argument(metavar="URL", help="The gateway's address.")] = "http://127.0.0.1:8400",
    admin_key: Annotated[
        str | None, typer.Option("--admin-key", envvar="ROLLTAPE_ADMIN_KEY", help="As the gateway was given it.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Say how a running gateway fares."""
    said = _asked(url.rstrip("/"), admin_key)
    if as_json:
        print_json(said)
    else:
        _print(said)
    return 0


def _asked(url: str, admin_key: str | None) -> dict[str, Any]:
    import json
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url}: give the gateway's address, as http://127.0.0.1:8400")
    request = Request(f"{url}/status", headers={"Authorization": f"Bearer {admin_key}"} if admin_key else {})
    try:
        with urlopen(request, timeout=10) as answer:
            said: dict[str, Any] = json.load(answer)
    except HTTPError as error:
        raise UsageError(f"{url}: {error.code} {error.reason}; is the admin key right?") from None
    except (URLError, TimeoutError, OSError) as error:
        raise UsageError(f"{url}: no gateway answers there ({getattr(error, 'reason', error)})") from None
    except ValueError:
        raise UsageError(f"{url}: what answers there is no gateway") from None
    return said


def _print(said: dict[str, Any]) -> None:
    counts, rates = said["counts"], said["rates"]
    turns = counts.get("turns", 0)
    state = "ending" if said["draining"] else "paused" if said["paused"] else "running"
    weights = "" if said["version"] is None else f", weights {said['version']}"
    print_line(f"run {said['run']}: {state}{weights}, up {span(said['up_s'])}, model {said['model']}", "bold")
    rows = [
        ("sessions open", count(said["sessions"]), f"{count(said['in_flight'])} turns in flight"),
        ("turns", count(turns), f"{rates['turns_per_s']:.1f} a second in the last minute"),
        (
            "sampled tokens",
            count(counts.get("sampled_tokens", 0)),
            f"{rates['sampled_tokens_per_s']:.0f} a second in the last minute",
        ),
        ("added to a turn", f"{rates['added_ms_median']:.1f} ms", f"median; 99 % under {rates['added_ms_p99']:.1f} ms"),
        ("prompts bridged", _share(counts.get("bridged", 0), turns), _reasons(said["unbridged"])),
        (
            "forks per session",
            f"{said['forks_per_session']:.2f}",
            f"{count(counts.get('forks', 0))} in {count(counts.get('sessions', 0))} sessions",
        ),
        ("ended on a stop id", _share(counts.get("stop_kept", 0), _stops(counts)), "of replies that stopped"),
        ("undelivered", count(counts.get("undelivered", 0)), ""),
        ("malformed calls", count(counts.get("malformed_call", 0)), ""),
        ("denied tools", count(counts.get("denied_tool", 0)), ""),
        (
            "aborted",
            count(counts.get("finish_abort", 0)),
            f"{count(counts.get('interrupted', 0))} interrupted, went on",
        ),
        ("engine errors", count(counts.get("finish_error", 0)), ""),
        ("refused requests", count(counts.get("errors", 0)), f"retries answered: {count(counts.get('retries', 0))}"),
        ("auxiliary", count(counts.get("auxiliary", 0)), "recorded, not trained"),
    ]
    print_table(["", "figure", "note"], rows, left=["", "note"], flexible=["note"])
    print_line("")
    engines = [
        [engine["name"], "up" if engine["up"] else "down", count(engine["sessions"]), engine["error"] or ""]
        for engine in said["engines"]
    ]
    print_table(
        ["engine", "state", "sessions", "error"], engines, left=["engine", "state", "error"], flexible=["error"]
    )


def _stops(counts: dict[str, int]) -> int:
    return counts.get("stop_kept", 0) + counts.get("stop_missing", 0)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _reasons(unbridged: dict[str, int]) -> str:
    parts = sorted(unbridged.items(), key=lambda item: -item[1])
    return "not: " + ", ".join(f"{count(number)} {why}" for why, number in parts) if parts else ""
