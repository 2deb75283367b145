"""Run an agent with a scripted model, and check how it changes its history, and so what its rollouts will train."""

import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import rolltape
from rolltape.collect.agents import Agent, AgentOutcome, Assignment, Connection, discard
from rolltape.collect.environments.protocol import AGENT, Answer, Ended, Message, Opening, Score
from rolltape.doctor.agent.scripted_model import ScriptedModel
from rolltape.doctor.results import CheckResult, fault, named, note, ok, warning, words
from rolltape.doctor.session_checks import describe_overhead, share
from rolltape.gateway.gateway import Gateway
from rolltape.gateway.settings import GatewaySettings
from rolltape.records.fork import Fork, ForkCause
from rolltape.records.rollout import Rollout
from rolltape.records.sample import Fate
from rolltape.records.wording import plural, quoted
from rolltape.samples.linearize import linearize
from rolltape.samples.summary import summarize
from rolltape.tiny import shipped_model

_PROMPT = "Follow the steps that come to your mind, one after the other, and say when you are done."
_GO_ON = "Go on."
_CHAT_TURNS = 4
_SHOWN = 60
# Forks that an agent makes on purpose, which lose no tokens.
_OF_ITS_KIND = frozenset({ForkCause.SUB_AGENT, ForkCause.COMPACTION, ForkCause.RETRY, ForkCause.SIBLING})
_ADVICE = {
    ForkCause.THINKING_STRIPPED: "have the agent send thinking back",
    ForkCause.TOOLS_CHANGED: "have the agent offer the same tools in every request",
    ForkCause.HISTORY_EDITED: "turn off what edits earlier messages, such as reminders and dates in the system prompt",
    ForkCause.RETOKENIZED: "name a renderer that bridges; see `bridging`",
}
_REWRITTEN = "have the agent send replies back unchanged, or train with --policy keep-head"


async def check_agent(
    agent: Agent, folder: Path | None, settings: GatewaySettings, timeout_s: float
) -> AsyncIterator[CheckResult]:
    """Run the agent once, through its own gateway, and report what was recorded.

    `folder` is the model whose template is used; None takes the shipped one.
    """
    model = ScriptedModel()
    with tempfile.TemporaryDirectory(prefix="rolltape-doctor-") as place:
        run = Path(place) / "run"
        async with Gateway(engine=model, model=folder or shipped_model(), tape=run, settings=settings) as gateway:
            model.prompts = gateway.service.prompts
            session = await gateway.open_session(task_id="doctor")
            connection = Connection(base_urls=session.base_urls, key=session.key, model="scripted")
            outcome = await agent.run(
                Assignment(
                    rollout=session.rollout,
                    task={"prompt": _PROMPT},
                    episode=_Conversation(),
                    connections={AGENT: connection},
                    max_turns=20,
                    timeout_s=timeout_s,
                    allowed_tools=None,
                    denied_tools=(),
                    seed=0,
                    logs=Path(place) / "logs",
                    scratch=Path(place) / "scratch",
                )
            )
            await session.finish(samples=False)
            status = gateway.status()
        stderr = Path(place) / "logs" / "stderr.txt"
        printed = stderr.read_text(errors="replace").strip() if stderr.is_file() else ""
        await discard(outcome)
        (rollout,) = rolltape.read(run).rollouts()
    yield named("run", _describe_run(rollout, outcome, model, printed))
    if not rollout.turns:
        return
    yield named("history", _describe_history(rollout))
    yield named("samples", _describe_samples(rollout))
    ignored = status.get("ignored_params")
    if ignored:
        some = "; ".join(list(ignored)[:3])
        yield named("parameters", note(f"requested and not applied: {some}"))
    yield named("overhead", describe_overhead(status["rates"]))


class _Conversation:
    """An episode with one seat, which asks the agent to continue a few times. A program gets only the first message."""

    seats = (AGENT,)

    def __init__(self) -> None:
        self._replies = 0

    def opening(self, seat: str) -> Opening:
        return Opening(messages=[{"role": "user", "content": _PROMPT}])

    def next_seat(self) -> str | None:
        return AGENT if self._replies < _CHAT_TURNS else None

    async def answer(self, seat: str, reply: Message) -> Answer:
        self._replies += 1
        done = self._replies >= _CHAT_TURNS
        return Answer(messages=[] if done else [{"role": "user", "content": _GO_ON}], done=done)

    async def score(self, seat: str, ended: Ended) -> Score:
        return Score(reward=None)


def _describe_run(rollout: Rollout, outcome: AgentOutcome, model: ScriptedModel, printed: str) -> CheckResult:
    turns = plural(len(rollout.turns), "turn")
    last = f"; it printed {quoted(printed.splitlines()[-1])}" if printed else ""
    if model.unwritten is not None:
        return fault(model.unwritten, "give --model the folder of a model with a renderer of its own")
    if outcome.broken is not None:
        return fault(f"{outcome.broken}{last}", "run the agent by hand; see docs/how-to/agents/index.md")
    if not rollout.turns:
        return fault(f"the agent sent the model no request{last}", "check that it uses the gateway's address and key")
    if outcome.timed_out:
        return fault(f"it did not end in time, after {turns}{last}", "raise --agent-timeout")
    if outcome.exit_code:
        return warning(
            f"{turns}, exit code {outcome.exit_code}{last}", "run the agent by hand; see docs/how-to/agents/index.md"
        )
    what = f"calls of {model.called}" if model.called else "only text, because no tool is safe to call"
    return ok(f"{turns} on a scripted model, {what}", turns=len(rollout.turns), tool=model.called)


def _describe_history(rollout: Rollout) -> CheckResult:
    """The changes that the agent made to its history between requests."""
    forks = linearize(rollout).forks
    rules = Counter(rule for turn in rollout.turns for rule in turn.facts.extra.get("echoes", ()))
    aside = Counter(turn.facts.auxiliary for turn in rollout.turns if turn.facts.auxiliary is not None)
    parts = [f"side requests: {', '.join(map(str, aside))}"] if aside else []
    if rules:
        parts.append(f"replies came back changed, and were recognized: {', '.join(map(words, rules))}")
    causes = Counter(fork.cause for fork in forks)
    figures = {"forks": dict(causes), "echoes": dict(rules), "auxiliary": dict(aside)}
    if not forks:
        return ok("; ".join(["every prompt extends the one before", *parts]), **figures)
    listed = ", ".join(f"{times} × {words(cause)}" for cause, times in causes.most_common())
    edits = [fork for fork in forks if fork.cause not in _OF_ITS_KIND and not _is_templates(fork)]
    if not edits:
        by_template = any(map(_is_templates, forks))
        advice = "the template drops thinking; pass --thinking-retention all to keep it" if by_template else None
        return note("; ".join([f"prompts that extend no earlier one: {listed}", *parts]), advice, **figures)
    measured = "; ".join([f"the agent rewrites its history: {listed}{_first_edit(edits[0])}", *parts])
    return warning(measured, _ADVICE.get(edits[0].cause, _REWRITTEN), **figures)


def _is_templates(fork: Fork) -> bool:
    """Whether the model's template left out thinking that the agent had sent back."""
    return fork.cause is ForkCause.THINKING_STRIPPED and fork.message_index is None


def _first_edit(fork: Fork) -> str:
    """The first difference, as text."""
    if fork.text is None:
        return "" if fork.message_index is None else f" (from message {fork.message_index} on)"
    before, after = (quoted(str(side)[:_SHOWN], _SHOWN) for side in (fork.text.before, fork.text.after))
    return f" (message {fork.message_index}: {before} became {after})"


def _describe_samples(rollout: Rollout) -> CheckResult:
    """The samples of this agent's rollout under each cut policy."""
    summary = summarize(rollout)
    sampled = sum(len(turn.sampled_ids) for turn in rollout.turns)
    shares = {name: one.ledger.get(Fate.TRAINED, 0) for name, one in summary.policies.items()}
    figures = {name: {"samples": one.samples, "trained": shares[name]} for name, one in summary.policies.items()}
    listed = [
        f"{name} {plural(one.samples, 'sample')}, {share(shares[name], sampled)} trained"
        for name, one in summary.policies.items()
    ]
    same = len({(one.samples, shares[name]) for name, one in summary.policies.items()}) == 1
    exact = summary.policies["exact"]
    measured = f"{plural(exact.samples, 'sample')} per rollout, {share(shares['exact'], sampled)} of tokens trained"
    measured = f"{measured} under every policy" if same else "; ".join(listed)
    aside = sum(len(turn.sampled_ids) for turn in rollout.turns if turn.facts.auxiliary is not None)
    if exact.samples == 1 and shares["exact"] == sampled - aside:
        return ok(measured, **figures)
    return note(measured, "see `history`; rolltape samples --compare shows policies on a run", **figures)
