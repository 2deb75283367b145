"""Ids as JSON, of which only what is new is written."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rolltape.gateway.engines.protocol import IdsAsJson

ids = st.lists(st.integers(0, 2**31 - 1), max_size=8)


@given(st.lists(st.tuples(ids, st.integers(0, 20)), max_size=12))
def test_text_is_the_list_whatever_came_before(prompts: list[tuple[list[int], int]]) -> None:
    text = IdsAsJson()
    latest: list[int] = []
    for new, keep in prompts:
        latest = [*latest[:keep], *new]
        assert json.loads(bytes(text.encoded(np.array(latest, np.int32)))) == latest
