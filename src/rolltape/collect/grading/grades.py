"""Score ended attempts, and keep what is needed to score them later if it failed."""

import logging
import stat
import tarfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec

from rolltape.collect.environments.protocol import Ended, Environment, Episode, GroupEnvironment, Score, compares
from rolltape.collect.functions import call_environment, describe_error, time_limit
from rolltape.collect.records import NOT_COMPARED, chat_messages, main_turns
from rolltape.collect.sandboxes.checks import WorkspaceChecks
from rolltape.collect.sandboxes.workspace import Workspace, only_inside, walk
from rolltape.collect.tasks import Task
from rolltape.errors import CollectError
from rolltape.records.jsonable import as_float, shown
from rolltape.records.rollout import Rollout, StopReason
from rolltape.tape.recording.tape import Tape
from rolltape.traces import amend
from rolltape.traces.build import merge_events

log = logging.getLogger("rolltape.collect")

_MAX_KEPT_BYTES = 2**30


async def score_seats(
    environment: Environment, episode: Episode, ended: Mapping[str, Ended], limit_s: float
) -> dict[str, Score]:
    """Score an attempt for each seat. If scoring fails for one, none is graded."""
    try:
        with time_limit(limit_s):
            scores = {
                seat: _check_score(await call_environment(environment.name, episode.score, seat, one))
                for seat, one in ended.items()
            }
    except Exception as error:  # the user's code, or a judge that is down
        log.warning("environment %s: an attempt could not be graded", environment.name, exc_info=error)
        why = describe_error(error)
        return {seat: Score(reward=None, ungraded=why) for seat in ended}
    if compares(environment):
        later = {"ungraded": NOT_COMPARED}
        return {
            seat: score if score.reward is not None or score.ungraded else msgspec.structs.replace(score, **later)
            for seat, score in scores.items()
        }
    return scores


async def compare_attempts(
    environment: GroupEnvironment, task: Task, ended: Mapping[str, Ended], seed: int, limit_s: float
) -> Mapping[str, Score]:
    """Score the attempts of a group by comparison, by rollout. If that fails, none is graded."""
    try:
        with time_limit(limit_s):
            scores = await call_environment(environment.name, environment.compare, task, ended, seed)
        return {rollout: _check_score(scores[rollout]) for rollout in ended}
    except Exception as error:  # as above
        log.warning("%s: its attempts could not be compared", task.where, exc_info=error)
        return dict.fromkeys(ended, Score(reward=None, ungraded=f"not compared: {describe_error(error)}"))


def record_score(tape: Tape, rollout: str, score: Score, by: str, try_index: int | None = None) -> None:
    """Record a score of a finished rollout, or why there is still none."""
    if score.reward is not None and score.ungraded is None:
        tape.score(rollout, reward=score.reward, terms=dict(score.terms), by=by, try_index=try_index)
    if data := score.to_data():
        amend(tape, rollout, reward_data=data, by=by, try_index=try_index)


def _check_score(score: object) -> Score:
    """What an environment returned, as plain numbers."""
    if not isinstance(score, Score):
        raise CollectError(f"the score is {shown(score)}; return a Score")
    if not isinstance(score.terms, Mapping):
        raise CollectError(f"the score's terms are {shown(score.terms)}; give a mapping from name to number")
    if not isinstance(score.reward_data, Mapping | None):
        raise CollectError(f"the score's reward_data is {shown(score.reward_data)}; give a mapping")
    for name in ("ungraded", "compared"):
        if not isinstance(getattr(score, name), str | None):
            raise CollectError(f"the score's {name} is {shown(getattr(score, name))}; give a text")
    reward = None if score.reward is None else as_float(score.reward, "the score's reward")
    terms = {str(name): as_float(term, f"the score's term {name!r}") for name, term in score.terms.items()}
    return msgspec.structs.replace(score, reward=reward, terms=terms)


def load_ended(rollout: Rollout, checks: WorkspaceChecks | None = None) -> Ended:
    """How the agent of a finished rollout ended, from the tape. `checks` are for its working directory."""
    turn = next((one for one in reversed(main_turns(rollout)) if one.reply is not None), None)
    extra = load_agent_end(rollout)
    text = extra.get("compared", extra.get("text"))
    return Ended(
        stop_reason=rollout.outcome.stop_reason or StopReason.COMPLETED,
        messages=[] if turn is None else chat_messages(turn),
        text=text if text is not None else "" if turn is None or turn.reply is None else turn.reply.text,
        folder=None if checks is None else checks.folder,
        checks=checks,
        exit_code=extra.get("exit_code"),
    )


def load_agent_end(rollout: Rollout) -> dict[str, Any]:
    """The recorded end of an agent: its exit code, its output, the place of its files."""
    extra: dict[str, Any] = merge_events(rollout.events).final.get("extra") or {}
    return extra


def keep_folder(folder: Path, path: Path) -> None:
    """Pack the plain files, folders and links that a program left, so that they can be checked later.

    Unreadable ones are left out.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as packed:
        room = _MAX_KEPT_BYTES
        for one in walk(folder):
            try:
                member = packed.gettarinfo(one, arcname=str(one.relative_to(folder)))
                if not (member.isreg() or member.isdir() or member.issym()):
                    continue
                opened = one.open("rb") if member.isreg() else nullcontext()
            except PermissionError:
                continue
            with opened as content:
                if (room := room - member.size) < 0:
                    raise CollectError(f"the working directory has more than {_MAX_KEPT_BYTES:,} bytes and is not kept")
                packed.addfile(member, content)
    path.chmod(stat.S_IRUSR | stat.S_IWUSR)


def unpack_folder(path: Path, scratch: Path) -> Workspace:
    """A workspace below `scratch` with the files that a program left. Links that lead out of it are left out."""
    workspace = Workspace.make(scratch, {})
    with tarfile.open(path) as packed:
        packed.extractall(workspace.work, filter=only_inside)
    return workspace
