"""`ShownRollout`: the answers about one rollout, as the index had it when it was asked for."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from rolltape.errors import NoAnswer
from rolltape.records.messages import Message
from rolltape.records.rollout import Rollout
from rolltape.samples import Linearized, linearize
from rolltape.samples.compare import compare
from rolltape.samples.spelling import Spellings
from rolltape.tape.index.search import distinct_messages
from rolltape.tape.stored import Problem
from rolltape.view.annotating import build_annotations
from rolltape.view.answers import parse_policy, to_plain
from rolltape.view.rollout.detail import build_comparison, build_detail, build_raw
from rolltape.view.rollout.images import Image, find_images
from rolltape.view.rollout.masking import Mask
from rolltape.view.rollout.tokens import pack_sample, pack_turn, read_turn
from rolltape.view.served_runs import ServedRun


class LoadedRollout(NamedTuple):
    """A rollout, and its parts that cannot be read."""

    rollout: Rollout
    problems: list[Problem]


class ShownRollout(NamedTuple):
    """One row of the table. The methods load its rollout: call them in a thread."""

    run: ServedRun
    row: dict[str, Any]
    tries: list[int]
    advantage: float | None
    versions: Sequence[str]  # of weights, in the run's order
    spellings: Spellings
    load: Callable[[], LoadedRollout]

    @property
    def rollout(self) -> Rollout:
        return self.load().rollout

    def detail(self, policy: str | None) -> dict[str, Any]:
        """Everything about the rollout."""
        detail = build_detail(self._linearized(policy), self.advantage, self.spellings)
        problems = list(map(str, self.load().problems))
        return {"row": self.row, **detail, "tries": self.tries, "problems": problems}

    def annotate(self, write: Callable[[Rollout], None]) -> dict[str, Any]:
        """Call `write` with the rollout. Return its tags and notes afterwards."""
        rollout = self.rollout
        write(rollout)
        self.run.index.advance()
        return build_annotations(self.run.index.annotations(rollout.key))

    def raw(self) -> dict[str, Any]:
        return build_raw(self.rollout)

    def texts(self) -> list[Any]:
        """All texts of the rollout: those of its head, its messages and its events."""
        rollout = self.rollout
        messages = [message.to_dict() for message in distinct_messages(rollout)]
        return [to_plain(rollout.head), *messages, *map(to_plain, rollout.events)]

    def message(self, digest: str) -> Message:
        for message in distinct_messages(self.rollout):
            if message.digest.hex() == digest:
                return message
        raise NoAnswer(f"the rollout has no message {digest[:64]!r}", 404)

    def image(self, digest: str, index: int) -> Image:
        images = find_images(self.message(digest).to_dict())
        if index >= len(images) or images[index].type is None:
            raise NoAnswer(f"message {digest[:64]!r} has no image {index} that can be shown", 404)
        return images[index]

    def images(self) -> Iterator[tuple[str, int, bytes]]:
        """All images that can be shown: the digest of the message, the index in it, the bytes."""
        for message in distinct_messages(self.rollout):
            for index, image in enumerate(find_images(message.to_dict())):
                if image.type is not None:
                    yield message.digest.hex(), index, image.content

    def tokens(self, index: int, policy: str | None, *, record: str | None = None, mask: Mask | None = None) -> bytes:
        """A sample's tokens, packed, with the columns of the trainer's record at `record`, or of the latest."""
        made = self._linearized(policy)
        if index >= len(made):
            raise NoAnswer(f"the rollout has {len(made)} samples under {made.policy.name}, and no sample {index}", 404)
        sample = made.sample(index, self.advantage)
        session = next(one for one in made.rollout.sessions if one.id == sample.session)
        records = self.run.records
        exported = None if records is None else records.find(sample, record)
        if exported is None and record:
            raise NoAnswer(f"the trainer wrote no record {record[:40]!r} of sample {index}", 404)
        return pack_sample(sample, session, self.spellings.of(session), exported, mask)

    def turn_tokens(self, turn: str) -> bytes:
        """A turn's tokens, prompt and reply, packed."""
        made = self._linearized(None)
        tokens = read_turn(made, turn)
        if tokens is None:
            raise NoAnswer(f"the rollout has no turn {turn[:64]!r}", 404)
        session = next(one for one in made.rollout.sessions if turn.startswith(f"{one.id}."))
        return pack_turn(tokens, session, self.spellings.of(session))

    def compare(self, left: str | None, right: str | None) -> dict[str, Any]:
        """The rollout under two policies."""
        one, other = parse_policy(left or "exact"), parse_policy(right or "keep-head")
        compared = compare(self.rollout, one, other, versions=self.versions, as_if_finished=True)
        return build_comparison(compared, self.advantage)

    def _linearized(self, policy: str | None) -> Linearized:
        """The rollout under a policy; a running one is treated as if it had ended now."""
        return linearize(self.rollout, parse_policy(policy), versions=self.versions, as_if_finished=True)
