"""The place of a tag or note on the command line: a rollout, a turn, or some of its tokens."""

import getpass
from dataclasses import dataclass
from typing import Annotated

from rolltape.cli.options import TryOption
from rolltape.cli.parameters import option
from rolltape.cli.runs import SelectedRollouts
from rolltape.errors import UsageError
from rolltape.records.events import TokenRange
from rolltape.records.ids import complete_turn_id
from rolltape.records.rollout import Rollout
from rolltape.tape.recording.annotating import check_place


@dataclass(frozen=True)
class PlaceOptions:
    """Which part of a rollout is meant, and who says something of it."""

    turn: Annotated[str | None, option("--turn TURN", "This turn: its id, or SESSION.TURN as in `rolltape trace`.")] = (
        None
    )
    tokens: Annotated[
        str | None, option("--tokens N[:M]", "Token N of the turn, or N up to M; those of its prompt come first.")
    ] = None
    try_index: TryOption = None
    by: Annotated[str | None, option("--by NAME", "Who says it (default: your user name).")] = None

    def author(self) -> str:
        """Who says it."""
        return self.by or getpass.getuser()

    def find(self, selected: SelectedRollouts) -> tuple[Rollout, str | None, TokenRange | None]:
        """The rollout, the turn and the tokens that are meant; raises NoSuchRollout if it does not have them."""
        (rollout,) = selected
        if self.tokens is not None and self.turn is None:
            raise UsageError(f"--tokens {self.tokens}: give --turn as well")
        turn = None if self.turn is None else complete_turn_id(self.turn, *rollout.key)
        tokens = None if self.tokens is None else _parse_tokens(self.tokens)
        check_place(rollout, turn, tokens)
        return rollout, turn, tokens

    def given(self) -> list[str]:
        """The flags that name a place."""
        named = {"--turn": self.turn, "--tokens": self.tokens, "--by": self.by}
        return [flag for flag, value in named.items() if value is not None]


def _parse_tokens(given: str) -> TokenRange:
    start, _, stop = given.partition(":")
    if not all(one.isascii() and one.isdecimal() for one in (start, stop or "0")) or len(given) > 30:
        raise UsageError(f"--tokens {given}: give a number, such as 120, or a range, such as 120:140")
    first = int(start)
    return first, int(stop) if stop else first + 1


def place_text(turn: str | None, tokens: TokenRange | None) -> str:
    """A place within a rollout in a few characters: SESSION.TURN and the tokens."""
    if turn is None:
        return ""
    short = ".".join(turn.rsplit(".", 2)[1:])
    if tokens is None:
        return short
    start, stop = tokens
    return f"{short} token {start:,}" if stop == start + 1 else f"{short} tokens {start:,}:{stop:,}"
