"""Ids as JSON, of which only what is new is written."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rolltape.capture.engines.ids_json import IdsAsJson

ids = st.lists(st.integers(0, 2**31 - 1), max_size=8)


@given(st.lists(st.tuples(st.sampled_from("ab"), ids, st.integers(0, 20)), max_size=12), st.integers(0, 200))
def test_text_is_the_list_whatever_came_before(prompts: list[tuple[str, list[int], int]], most_bytes: int) -> None:
    texts = IdsAsJson(most_bytes)
    latest: dict[str, list[int]] = {}
    for session, new, keep in prompts:
        prompt = [*latest.get(session, [])[:keep], *new]
        latest[session] = prompt
        assert json.loads(bytes(texts.encoded(session, np.array(prompt, np.int32)))) == prompt
