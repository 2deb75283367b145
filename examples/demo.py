"""Collect three environments with the model that ships with Rolltape, and look at what was recorded.

It needs no GPU, no download and no account, and prints each command as it could be typed. `python -m examples.demo`,
where the tasks and the functions that they name are found.
"""

import argparse
import asyncio
import os
import shlex
import shutil
import sys
import textwrap
from pathlib import Path

import aiohttp

import rolltape
from examples.rescoring import rescore
from rolltape.cli import run as rolltape_command
from rolltape.records.rollout import Rollout
from rolltape.tree import forks_of, tree_of
from rolltape.view.serve import served, stop_signal

PLACE = Path("runs/demo")  # belongs to the demo, which begins anew there


def heading(text: str, why: str) -> None:
    print(f"\n== {text}\n{why}")


def shell(*words: object) -> None:
    """Print a command and run it; the demo ends with the first one that fails."""
    command = [str(word) for word in words]
    lines = textwrap.wrap(f"$ rolltape {shlex.join(command)}", 78, subsequent_indent="    ", break_on_hyphens=False)
    print("", " \\\n".join(lines), sep="\n", flush=True)
    if code := rolltape_command(command):
        sys.exit(code)


def collect(path: Path, environment: str, tasks: int) -> None:
    source = f"examples/tasks/{environment}.jsonl"
    shell("collect", source, "--run", path, "-g", 6, "--limit", tasks, "--max-reply-tokens", 300)


def rollout_to_trace(rollouts: list[Rollout]) -> str:
    """One that found the number with the tool, if there is one."""
    by_tool = [one for one in rollouts if one.head.task_id == "guess-by-tool"]
    return max(by_tool, key=lambda one: one.reward or 0.0).id[:8]


def rollout_that_forked(rollouts: list[Rollout]) -> str:
    """The shortest one of those whose conversation forked twice."""
    games = [one for one in rollouts if one.head.source == "game.jsonl"]
    forked = [one for one in games if sum(len(forks_of(tree_of(session))) for session in one.sessions) >= 2]
    return min(forked, key=lambda one: len(one.turns)).id[:8]


def make_room(path: Path) -> None:
    """Remove the run of an earlier demo from the demo's own place; anything else stays, and is an error."""
    if not path.exists():
        return
    if path != PLACE or not (path / "run.json").is_file():
        sys.exit(f"{path} is there already; give another place")
    shutil.rmtree(path)


async def serve_page(path: Path, *, stay: bool) -> None:
    """Serve the page over a run and see that it answers; until Ctrl-C, if it is to stay."""
    async with served([str(path)]) as there:
        async with aiohttp.ClientSession(raise_for_status=True) as client:
            for place in (there.start, f"{there.address}api/runs"):
                await (await client.get(place)).read()
        print(f"\n{there.start}", flush=True)
        if not stay:
            print("It answers. Nobody is at the keyboard, so it ends here.")
            return
        print("Open it in a browser. Ctrl-C ends it.", flush=True)
        await stop_signal().wait()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("run", nargs="?", type=Path, default=PLACE, help=f"where to (default: {PLACE})")
    path = arguments.parse_args().run
    make_room(path)

    heading("Questions with a known answer", "Each task is attempted six times; a checker rewards the last number.")
    collect(path, "problem", 4)
    heading("Tools", "Python functions that the model may call: a calculator, one that hides a number.")
    collect(path, "message", 3)
    heading("A game", "Guess the number, told higher or lower, with as many guesses as halving needs.")
    collect(path, "game", 2)

    rollouts = list(rolltape.read(path).rollouts())
    heading("A trace", "What was asked, answered and rewarded in one rollout, step by step.")
    shell("trace", path, rollout_to_trace(rollouts))
    forked = rollout_that_forked(rollouts)
    heading(
        "A tree",
        "The model's chat template leaves the thoughts of earlier turns out, so a prompt\n"
        "departs from the ids that were sampled. The tree says where, and why; each turn\n"
        "becomes a sample of its own.",
    )
    shell("tree", path, forked)
    shell("samples", path, forked)
    heading("The ledger", "Where every sampled token goes, under one policy and under another.")
    shell("ledger", path)
    shell("ledger", path, "--policy", "keep-head")
    heading("A check", "Everything that must hold is verified token by token.")
    shell("check", path)
    heading(
        "A second opinion",
        "A trainer that holds the weights in bfloat16 finds other probabilities than the\n"
        "engine that sampled. All samples are scored so, and written as token records.",
    )
    print(f"\n{rescore(path)} samples scored by the model with its weights rounded to bfloat16")
    shell("tokens", path, "worst", "--limit", 3)
    heading("The page", f"All of this in a browser; `rolltape view {path}` brings it back.")
    asyncio.run(serve_page(path, stay=sys.stdin.isatty() and sys.stdout.isatty() and not os.environ.get("CI")))


if __name__ == "__main__":
    main()
