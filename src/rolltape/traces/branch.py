"""Find the turns of a rollout's main branches, and the messages that a turn's prompt adds to earlier ones."""

from collections.abc import Iterable, Iterator

from rolltape.records.messages import Message, MessageChain
from rolltape.records.rollout import Rollout, Session
from rolltape.records.turn import Turn
from rolltape.tree import PlacedTurn, tree_of


def unrecorded_turns(rollout: Rollout, named: Iterable[Turn]) -> Iterator[Turn]:
    """The turns of main branches after the last turn that a step names; all of them if no step names a turn."""
    last: dict[str, int] = {}
    for turn in named:
        last[turn.session] = max(turn.sequence, last.get(turn.session, -1))
    for session in rollout.sessions:
        if last and session.id not in last:
            continue
        start = last.get(session.id, -1) + 1
        if session.turns and session.turns[-1].sequence >= start:
            yield from (turn for turn in main_branch(session) if turn.sequence >= start)


def main_branch(session: Session) -> list[Turn]:
    """The turns on the path to a session's last turn that is not auxiliary."""
    own = (placed for placed in reversed(tree_of(session).turns) if placed.turn.facts.auxiliary is None)
    placed: PlacedTurn | None = next(own, None)
    branch: list[Turn] = []
    while placed is not None:
        branch.append(placed.turn)
        placed = placed.parent
    return branch[::-1]


class NewMessages:
    """Remembers which step had a conversation first, to find what a later prompt adds to it."""

    def __init__(self) -> None:
        self._step_of: dict[int, int] = {}  # by the identity of a chain, which its turn keeps alive

    def add(self, step: int, *chains: MessageChain) -> None:
        """Remember a step whose conversation begins with these chains."""
        for chain in chains:
            self._step_of.setdefault(id(chain), step)

    def find(self, prompt: MessageChain) -> tuple[int | None, int, list[Message]]:
        """The step that a prompt continues (None: none), how many of its messages it keeps, and those that follow."""
        new: list[Message] = []
        limit = len(prompt)
        link: MessageChain | None = prompt
        while link is not None and id(link) not in self._step_of:
            new.extend(reversed(link.own[: max(limit - link.keep, 0)]))
            limit = min(limit, link.keep)
            link = link.parent
        step = None if link is None or not limit else self._step_of[id(link)]
        return step, limit if step is not None else 0, new[::-1]
