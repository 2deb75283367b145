"""The page has words for all that a tape may say of turns and forks."""

import re
from pathlib import Path

import pytest

from rolltape.records.fork import ForkCause
from rolltape.records.sample import Fate
from rolltape.records.turn import TurnFlag

_WORDS = (Path(__file__).parents[2] / "viewer/src/words.ts").read_text()


@pytest.mark.parametrize(("table", "known"), [("FLAG", TurnFlag), ("CAUSE", ForkCause), ("FATE", Fate)])
def test_each_is_explained(table: str, known: type[TurnFlag] | type[ForkCause] | type[Fate]) -> None:
    (body,) = re.findall(rf"export const {table}: Record<string, string> = {{(.*?)\n}};", _WORDS, re.DOTALL)
    explained = set(re.findall(r"^  \"?([a-z_:]+)\"?:", body, re.MULTILINE))
    assert {one.value for one in known} - explained == set()
