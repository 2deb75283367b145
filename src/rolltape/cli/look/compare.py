"""`rolltape compare`: compare two runs, or two parts of one, task by task."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from rolltape.cli.options import JsonOption
from rolltape.cli.parameters import argument, name_flags, option
from rolltape.cli.screen import number, plural, print_json, print_line, print_table
from rolltape.errors import NoAnswer, UsageError

_PAGE = 500
_SIDES = "Sides"


@dataclass(frozen=True)
class ComparedParts:
    """The options that select the compared rollouts of the two runs."""

    a_step: Annotated[
        str, option("--a-step STEPS", "Only this step of A, or a range such as 10-19.", section=_SIDES)
    ] = ""
    b_step: Annotated[str, option("--b-step STEPS", "Only this step of B, or a range.", section=_SIDES)] = ""
    a_version: Annotated[
        str, option("--a-version VERSION", "Only rollouts of A with this weight version.", section=_SIDES)
    ] = ""
    b_version: Annotated[
        str, option("--b-version VERSION", "Only rollouts of B with this weight version.", section=_SIDES)
    ] = ""
    a_model: Annotated[str, option("--a-model MODEL", "Only rollouts of A by this model.", section=_SIDES)] = ""
    b_model: Annotated[str, option("--b-model MODEL", "Only rollouts of B by this model.", section=_SIDES)] = ""


def compare(
    run_a: Annotated[str, argument("RUN_A", "Run directory, or URL of published shards.")],
    run_b: Annotated[str, argument("RUN_B", "The run to compare with; the same to compare two parts of it.")],
    *,
    parts: ComparedParts,
    measure: Annotated[
        str, option("--measure NAME", "What is compared: reward, solved, turns, tokens, or term.NAME.")
    ] = "reward",
    limit: Annotated[int | None, option("--limit N", "Only the N tasks that differ most.", min=1)] = None,
    as_json: JsonOption = False,
) -> int:
    """Compare two runs, or two parts of one, task by task.

    Tasks are paired by source and id. The difference is B minus A. It is tested by a paired t-test over tasks.
    """
    from rolltape.view.compare.comparison import comparing

    query = {name: value for name, value in vars(parts).items() if value} | {"measure": measure}
    try:
        with comparing(run_a, run_b, query) as answer:
            whole = answer({"limit": "0"})
            tasks = _tasks(answer, whole["tasks"] if limit is None else min(limit, whole["tasks"]))
            if as_json:
                for task in tasks:
                    print_json(_task_record(task))
                print_json(_record(whole))
            else:
                _print_tasks(tasks, measure)
                _print_measures(whole["measures"])
                print_line(whole["result"]["statement"])
                print_line(_counts(whole))
    except NoAnswer as error:
        raise UsageError(name_flags(str(error), (*vars(parts), "measure"))) from error
    return 0


def _tasks(answer: Callable[[dict[str, str]], dict[str, Any]], most: int) -> Iterator[dict[str, Any]]:
    for offset in range(0, most, _PAGE):
        yield from answer({"offset": str(offset), "limit": str(min(_PAGE, most - offset))})["rows"]


def _print_tasks(tasks: Iterator[dict[str, Any]], measure: str) -> None:
    rows = []
    for task in tasks:
        sides = [task["a"] or {}, task["b"] or {}]
        attempts = [str(side.get("attempts", "")) for side in sides]
        means = [number(side.get("mean")) for side in sides]
        rows.append([task["source"] or "", task["task"], *attempts, *means, number(task["difference"])])
    columns = ["source", "task", "attempts A", "attempts B", f"{measure} A", f"{measure} B", "difference"]
    print_table(columns, rows, left=["source", "task"], flexible=["task"], spare=["source", "attempts A", "attempts B"])


def _print_measures(measures: list[dict[str, Any]]) -> None:
    print_line("")
    fields = ("a", "b", "difference", "low", "high", "p")
    rows = [[one["measure"], *(number(one[field]) for field in fields)] for one in measures]
    columns = ["measure", "mean A", "mean B", "difference", "95% from", "to", "p"]
    print_table(columns, rows, left=["measure"], flexible=["measure"])
    print_line("")


def _counts(whole: dict[str, Any]) -> str:
    result = whole["result"]
    parts = [
        f"{plural(result['tasks'], 'task')} on both sides: {result['higher']:,} higher in B, "
        f"{result['lower']:,} lower, {result['same']:,} the same"
    ]
    if result["sign_p"] is not None:
        parts[0] += f" (sign test p = {number(result['sign_p'])})"
    words = {"only_a": "only in A", "only_b": "only in B", "unrewarded": "without it on one side"}
    parts += [f"{whole[name]:,} {text}" for name, text in words.items() if whole[name]]
    unnamed = sum(whole["unnamed"])
    parts += [f"{plural(unnamed, 'rollout')} of tasks without an id left out"] if unnamed else []
    parts += [f"{plural(whole['on_both'], 'rollout')} on both sides"] if whole["on_both"] else []
    return "; ".join(parts)


def _task_record(task: dict[str, Any]) -> dict[str, Any]:
    sides = {
        f"{letter}_{name}": None if task[letter] is None else task[letter][name]
        for letter in ("a", "b")
        for name in ("rollouts", "attempts", "solved", "mean")
    }
    return {"source": task["source"], "task": task["task"], **sides, "difference": task["difference"]}


def _record(whole: dict[str, Any]) -> dict[str, Any]:
    counts = {name: whole[name] for name in ("only_a", "only_b", "unrewarded", "on_both")}
    return {**whole["result"], **counts, "measures": whole["measures"]}
