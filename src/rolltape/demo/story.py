"""The output of `rolltape demo`: the training, the commands that show the run, the page, and what to do next."""

import shlex
import shutil
import textwrap
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import rolltape
from rolltape.demo.learning import TASKS, learn
from rolltape.errors import TapeWriteError, UsageError
from rolltape.integrations.background import BackgroundLoop
from rolltape.records.rollout import Rollout
from rolltape.tree import forks_of, tree_of
from rolltape.view.serve import ServedAddress, served

PLACE = Path("runs/demo")  # the demo's own folder, which it replaces
STEPS, GROUP_SIZE = 6, 6

_INTRODUCTION = f"""\
The model that ships with Rolltape (5.8 million parameters) learns five tasks:
four with sums, one of them with a calculator, and a number to guess. A right
answer alone has the reward 0.25. In a sentence, such as "The answer is 85.", it
has the reward 1. In each step, the model attempts each task {GROUP_SIZE} times through the
gateway. A trainer in numpy then learns from the samples, and gives its weights
back to the engine."""

NEXT = """\
Your tasks: a line is {"id": "t1", "prompt": "What is 2 + 2?", "answer": 4}.
  rolltape collect tasks.jsonl --run runs/tasks

Your engine (sglang:URL or vllm:URL) and the folder of its model or tokenizer:
  rolltape doctor --engine vllm:http://127.0.0.1:8000 --model FOLDER
  rolltape collect tasks.jsonl --run runs/engine \\
      --engine vllm:http://127.0.0.1:8000 --model FOLDER

Your agent:
  rolltape collect tasks.jsonl --run runs/agent --agent claude-code \\
      --engine vllm:http://127.0.0.1:8000 --model FOLDER

docs/quickstart.md in the repository says more about each of these."""

Command = Callable[[Sequence[str]], int]


class CommandFailed(Exception):
    """A command of the demo failed; it has printed the reason."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


def make_room(path: Path) -> None:
    """Remove the run of an earlier demo from the demo's own folder; anything else stays, and is an error."""
    if not path.exists():
        return
    if path != PLACE or not _is_of_demo(path):
        raise UsageError(f"{path} exists; name a new folder, or remove it")
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise TapeWriteError(
            f"{path}: the last demo cannot be removed: {error.strerror}; name another folder"
        ) from None


def _is_of_demo(path: Path) -> bool:
    """Whether a folder is a run with only rollouts of the demo."""
    if not (path / "run.json").is_file():
        return False
    return all(row.source == TASKS.name for row in rolltape.read(path).index())


def play(path: Path, command: Command, on_page: Callable[[str], None], wait: Callable[[], None]) -> None:
    """Train on a new run with the page open, show the recorded rollouts, and `wait` before the page closes."""
    with rolltape.open(path) as tape, page_of(path) as page:
        _heading("A model learns", _INTRODUCTION)
        on_page(page.start)
        for step in learn(tape, steps=STEPS, group_size=GROUP_SIZE):
            if step.step == 0:
                print(f"\n{'step':>4}  {'reward':>6}  {'rollouts':>8}  {'samples':>7}  {'trained tokens':>14}")
            figures = f"{step.rollouts:8}  {step.samples:7}  {step.trained_tokens:14,}"
            print(f"{step.step:4}  {step.reward:6.3f}  {figures}", flush=True)
        tape.close()  # so that the page does not call it being recorded
        _show(path, command)
        _heading("Next", NEXT)
        _see_that_it_answers(page)
        print(f"\n{page.start}\nThis is the page of the run. `rolltape view {path}` opens it again.", flush=True)
        wait()


@contextmanager
def page_of(path: Path) -> Iterator[ServedAddress]:
    """Serve the page of a run in a new thread."""
    background = BackgroundLoop("rolltape-demo-page")
    stack = AsyncExitStack()
    try:
        yield background.submit(stack.enter_async_context(served([str(path)]))).result()
    finally:
        background.submit(stack.aclose()).result()
        background.close()


def _show(path: Path, command: Command) -> None:
    def shell(*words: object) -> None:
        line = [str(word) for word in words]
        lines = textwrap.wrap(f"$ rolltape {shlex.join(line)}", 78, subsequent_indent="    ", break_on_hyphens=False)
        print("", " \\\n".join(lines), sep="\n", flush=True)
        if code := command(line):
            raise CommandFailed(code)

    rollouts = list(rolltape.read(path).rollouts())
    before, after = _before_and_after(rollouts)
    _heading(
        "Before and after",
        "These are two attempts at one task: the one with the lowest reward of the first\n"
        "step, and the one with the highest reward of the last step.",
    )
    shell("trace", path, before)
    shell("trace", path, after)
    forked = _forked_rollout(rollouts)
    _heading(
        "A tree",
        "The chat template drops the thinking of earlier turns. So the next prompt does\n"
        "not begin with the sampled ids: this is a fork. The tree shows where it is, and\n"
        "why. Each turn becomes its own sample.",
    )
    shell("tree", path, forked)
    shell("samples", path, forked)
    _heading("The ledger", "The ledger shows what became of every sampled token, here under two cut policies.")
    shell("ledger", path)
    shell("ledger", path, "--policy", "keep-head")
    _heading("A check", "`check` verifies the whole recording, token by token.")
    shell("check", path)
    _heading(
        "The trainer's view",
        "The trainer computes in bfloat16, and the engine in float32. On these tokens,\ntheir logprobs differ most.",
    )
    shell("tokens", path, "worst", "--limit", 3)


def _heading(text: str, why: str) -> None:
    print(f"\n== {text}\n{why}", flush=True)


def _before_and_after(rollouts: Sequence[Rollout]) -> tuple[str, str]:
    """The ids of one task's rollouts with the lowest reward of the first step and the highest of the last."""
    of_task = [one for one in rollouts if one.head.task_id == "add" and one.reward is not None]
    first = [one for one in of_task if one.head.step == 0]
    last = [one for one in of_task if one.head.step == STEPS - 1]
    return min(first, key=_reward).id[:8], max(last, key=_reward).id[:8]


def _reward(rollout: Rollout) -> float:
    return rollout.reward or 0.0


def _forked_rollout(rollouts: Sequence[Rollout]) -> str:
    """The shortest game whose conversation forked at least twice, or forked most."""
    games = [one for one in rollouts if one.head.task_id == "guess-20"]
    forks = {one.id: sum(len(forks_of(tree_of(session))) for session in one.sessions) for one in games}
    return min(games, key=lambda one: (-min(forks[one.id], 2), len(one.turns))).id[:8]


def _see_that_it_answers(page: ServedAddress) -> None:
    for address in (page.start, f"{page.address}api/runs"):
        with urllib.request.urlopen(address) as answer:
            answer.read()
