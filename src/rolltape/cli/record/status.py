"""`rolltape status`: show the status of a running gateway."""

import json
from typing import Annotated, Any

from rolltape.cli.options import JsonOption
from rolltape.cli.parameters import argument, option
from rolltape.cli.screen import count, print_json, print_line, print_table, span
from rolltape.errors import UsageError
from rolltape.records.wording import plural

_EXAMPLE = "http://127.0.0.1:8400"


def status(
    gateway: Annotated[
        str, argument("GATEWAY", "Address of the gateway, or the run that it records in (default: port 8400 here).")
    ] = _EXAMPLE,
    *,
    admin_key: Annotated[
        str | None,
        option(
            "--admin-key KEY",
            "Admin key of the gateway (default: found in the run of a gateway that you started here).",
            envvar="ROLLTAPE_ADMIN_KEY",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Show gateway status."""
    answer = _fetch_status(*_find(gateway.rstrip("/"), admin_key))
    if as_json:
        print_json(answer)
    else:
        _print(answer)
    return 0


def _find(gateway: str, admin_key: str | None) -> tuple[str, str | None]:
    """The address and the key of a gateway, which may be given by its run."""
    from rolltape.gateway.admin_key import find_gateway, read_admin_key

    found = find_gateway(gateway)
    if found is not None:
        admin_key = admin_key or read_admin_key(found.run)
    if gateway.startswith(("http://", "https://")):
        return gateway, admin_key
    if found is None:
        raise UsageError(f"GATEWAY {gateway}: no gateway of yours records there; give an address such as {_EXAMPLE}")
    return found.url, admin_key


def _fetch_status(url: str, admin_key: str | None) -> dict[str, Any]:
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    request = Request(f"{url}/status", headers={"Authorization": f"Bearer {admin_key}"} if admin_key else {})
    try:
        with urlopen(request, timeout=10) as response:
            answer: dict[str, Any] = json.load(response)
    except HTTPError as error:
        if error.code in (401, 403):
            what = "refuses the admin key that was given" if admin_key else "requires its admin key"
            advice = "give the one of its run, in RUN/admin.header" if admin_key else "give it with --admin-key"
            raise UsageError(f"{url}: the gateway {what}; {advice}") from None
        raise UsageError(f"{url}: the server there is not a gateway; /status answered {error.code}") from None
    except (URLError, TimeoutError, OSError) as error:
        reason = getattr(error, "reason", error)
        why = getattr(reason, "strerror", None) or reason
        raise UsageError(f"{url}: no gateway answers ({why}); start one there, or give another address") from None
    except ValueError:
        raise UsageError(f"{url}: the server there is not a gateway; /status did not answer with JSON") from None
    return answer


def _print(answer: dict[str, Any]) -> None:
    counts, rates = answer["counts"], answer["rates"]
    turns = counts.get("turns", 0)
    state = "shutting down" if answer["draining"] else "paused" if answer["paused"] else "running"
    weights = "" if answer["version"] is None else f", weights {answer['version']}"
    print_line(f"run {answer['run']}: {state}{weights}, up {span(answer['up_s'])}, model {answer['model']}", "bold")

    # Only `rolltape collect` starts agents, and can put them into a sandbox.
    print_line("sandbox: none for agents that you start; on this machine, they can read what you can read")

    def counted(name: str) -> str:
        return count(counts.get(name, 0))

    stopped = counts.get("stop_kept", 0) + counts.get("stop_missing", 0)
    tokens_per_s, turns_per_s = rates["sampled_tokens_per_s"], rates["turns_per_s"]
    rows = [
        ("open sessions", count(answer["sessions"]), f"{plural(answer['in_flight'], 'turn')} in flight"),
        ("turns", counted("turns"), f"{turns_per_s:.1f} per second in the last minute"),
        ("sampled tokens", counted("sampled_tokens"), f"{tokens_per_s:.0f} per second in the last minute"),
        (
            "gateway overhead",
            f"{rates['added_ms_median']:.1f} ms",
            f"median per turn; p99 {rates['added_ms_p99']:.1f} ms",
        ),
        ("prompts bridged", _share(counts.get("bridged", 0), turns), _reasons(answer["unbridged"])),
        (
            "forks per session",
            f"{answer['forks_per_session']:.2f}",
            f"{plural(counts.get('forks', 0), 'fork')} in {plural(counts.get('sessions', 0), 'session')}",
        ),
        ("stop token kept", _share(counts.get("stop_kept", 0), stopped), "of replies that stopped"),
        ("undelivered", counted("undelivered"), "replies that the agent did not receive in full"),
        ("malformed calls", counted("malformed_call"), ""),
        ("denied tools", counted("denied_tool"), ""),
        ("aborted", counted("finish_abort"), f"{counted('interrupted')} interrupted and continued"),
        ("engine errors", counted("finish_error"), ""),
        ("refused requests", counted("errors"), f"{counted('retries')} retries answered"),
        ("auxiliary", counted("auxiliary"), "recorded, not trained"),
    ]
    print_table(["", "value", "note"], rows, left=["", "note"], flexible=["note"])
    if ignored := answer.get("ignored_params"):
        print_line("")
        by_turns = [[what, count(times)] for what, times in ignored.items()]
        print_table(
            ["requested and not applied", "turns"],
            by_turns,
            left=["requested and not applied"],
            flexible=["requested and not applied"],
        )
    print_line("")
    engines = [
        [engine["name"], "up" if engine["up"] else "down", count(engine["sessions"]), engine["error"] or ""]
        for engine in answer["engines"]
    ]
    columns = ["engine", "state", "sessions", "error"]
    print_table(columns, engines, left=["engine", "state", "error"], flexible=["error"])


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _reasons(misses: dict[str, int]) -> str:
    parts = sorted(misses.items(), key=lambda item: -item[1])
    return "rendered in full: " + ", ".join(f"{count(times)} {why}" for why, times in parts) if parts else ""
