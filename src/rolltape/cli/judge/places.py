"""The place of a tag or note on the command line: a rollout, a turn, or some of its tokens."""

import getpass
from dataclasses import dataclass
from typing import Annotated

from rolltape.cli.options import TryOption, TurnOption
from rolltape.cli.parameters import given_flags, option
from rolltape.cli.runs import SelectedRollouts
from rolltape.errors import RecordError, UsageError
from rolltape.records.ids import complete_turn_id, is_short_turn, parse_turn_id, short_turn
from rolltape.records.rollout import Rollout, TokenRange
from rolltape.tape.recording.annotating import check_place


@dataclass(frozen=True)
class PlaceOptions:
    """The options for the place of a tag or note in a rollout, and its author."""

    turn: TurnOption = None
    tokens: Annotated[
        str | None, option("--tokens N[:M]", "Token N of the turn, or N up to M; those of its prompt come first.")
    ] = None
    try_index: TryOption = None
    by: Annotated[str | None, option("--by NAME", "Author (default: your user name).")] = None

    def author(self) -> str:
        """The author: of --by, else the user."""
        return self.by or getpass.getuser()

    def find(self, selected: SelectedRollouts) -> tuple[Rollout, str | None, TokenRange | None]:
        """Find the rollout, the turn and the tokens; raises NoSuchRollout if the rollout does not have them."""
        (rollout,) = selected
        if self.tokens is not None and self.turn is None:
            raise UsageError(f"--tokens {self.tokens}: give --turn as well")
        turn = None if self.turn is None else complete_turn_id(check_turn(self.turn), *rollout.key)
        tokens = None if self.tokens is None else _parse_tokens(self.tokens)
        check_place(rollout, turn, tokens)
        return rollout, turn, tokens

    def given(self) -> list[str]:
        """The flags that name a place or an author."""
        return given_flags({"--turn": self.turn, "--tokens": self.tokens, "--by": self.by})


def check_turn(given: str) -> str:
    """Check the value of --turn; raises UsageError if it cannot be a turn."""
    try:
        return given if is_short_turn(given) else parse_turn_id(given).id
    except RecordError:
        raise UsageError(f"--turn {given}: not a turn's id; give one, or SESSION.TURN, such as 0.3") from None


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
    if tokens is None:
        return short_turn(turn)
    start, stop = tokens
    return short_turn(turn) + (f" token {start:,}" if stop == start + 1 else f" tokens {start:,}:{stop:,}")


def place_flags(turn: str | None, tokens: TokenRange | None, try_index: int | None) -> str:
    """The options that name a place within a rollout."""
    flags = [] if try_index is None else [f"--try {try_index}"]
    if turn is None:
        return " ".join([*flags, "no --turn"])
    flags.append(f"--turn {short_turn(turn)}")
    if tokens is not None:
        flags.append(f"--tokens {tokens[0]}:{tokens[1]}")
    return " ".join(flags)
