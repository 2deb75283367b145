"""`rolltape trace`: print a rollout's prompts, replies, and rewards, step by step."""

from collections.abc import Iterator
from typing import Any

from rolltape.cli.options import JsonOption, OneRollout, RunArgument, WholePromptsOption
from rolltape.cli.runs import SelectedRollouts, open_run, report_problems
from rolltape.cli.screen import arrow, number, print_json, print_line, print_preview
from rolltape.records.ids import short_turn
from rolltape.records.jsonable import encode_numbers
from rolltape.records.trace import Trace, TraceStep
from rolltape.records.wording import message_line
from rolltape.samples.facts import title
from rolltape.traces import trace_of
from rolltape.traces.transcript import NOT_RECORDED, remarks, reward_sum, step_facts


def trace(
    run: RunArgument,
    *,
    which: OneRollout,
    whole_prompts: WholePromptsOption = False,
    as_json: JsonOption = False,
) -> int:
    """Print a rollout's prompts, replies, and rewards by step.

    Long texts are shortened; `rolltape show` prints them whole in a pipe, and --json has them too.
    """
    tape = open_run(run)
    selected = SelectedRollouts(tape, which, counted_only=True)
    rollout = selected.only()
    with selected.named_in_errors():
        found = trace_of(rollout)
    if as_json:
        print_json(found.to_dict(whole_prompts=whole_prompts))
    else:
        print_line(title(rollout), style="bold")
        _print_steps(found, whole_prompts)
    return report_problems(tape)


def _print_steps(trace: Trace, whole_prompts: bool) -> None:
    if trace.filtered is not None:
        print_line(f"filtered: {trace.filtered}", "yellow")
    for what in trace.pruned:
        print_line(f"pruned: {what}", "yellow")
    for step in trace.steps:
        print_line(_headline(step), "bold")
        for line in _messages(trace, step, whole_prompts):
            print_preview(f"  {line}")
        if step.error is not None:
            print_line(f"  {arrow()} error: {step.error}")
        _print_remarks(step)
    if trace.total_reward is not None:
        print_line(reward_sum(trace), "bold")
    _print_remarks(trace)


def _headline(step: TraceStep) -> str:
    parts = [f"turn {short_turn(turn)}" for turn in step.turns]
    if step.prompt_tokens is not None:
        parts.append(f"prompt {step.prompt_tokens}")
    if step.sampled_tokens is not None:
        parts.append(f"sampled {step.sampled_tokens}")
    parts += [str(step.finish)] if step.finish is not None else []
    parts += step_facts(step)
    parts += [f"turn reward {number(reward)}" for reward in step.turn_rewards.values()]
    return f"step {step.index}" + (f"  {', '.join(parts)}" if parts else "")


def _messages(trace: Trace, step: TraceStep, whole_prompts: bool) -> Iterator[str]:
    prompt = trace.whole_prompt(step.index) if whole_prompts else step.prompt
    if step.messages_from not in (None, step.index - 1) and not whole_prompts:
        yield f"… continues from {step.kept_messages} messages of step {step.messages_from}"
    if isinstance(prompt, list):
        for message in prompt:
            yield f"{message.get('role', 'message')}: {message_line(message)}"
    elif prompt is not None:
        yield f"prompt: {_as_json(prompt)}"
    if step.policy_response is not None:
        spoken = "role" in step.policy_response
        yield f"{arrow()} {message_line(step.policy_response) if spoken else _as_json(step.policy_response)}"


def _print_remarks(described: Trace | TraceStep) -> None:
    for name, text in remarks(described):
        print_line(f"  {name}: {text}", "yellow" if name == NOT_RECORDED else "")


def _as_json(value: Any) -> str:
    return encode_numbers(value, "output").decode()
