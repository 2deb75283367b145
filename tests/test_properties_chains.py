"""Chains of shared beginnings against plain lists: whatever is shared in storage, the contents are the same."""

from itertools import takewhile

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rolltape.records.messages import Message, MessageChain
from rolltape.records.turn import TokenChain
from strategies import searching

# Which earlier chain is continued, how much of it is kept, and what follows.
LINKS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.lists(st.integers(0, 2), max_size=4)), max_size=10)


@searching
@given(LINKS)
def test_token_chains_are_the_lists_that_they_stand_for(links: list[tuple[int, int, list[int]]]) -> None:
    chains, lists = [TokenChain(np.array([0, 1], np.int32))], [[0, 1]]
    for which, keep, own in links:
        base = which % len(chains)
        kept = min(keep, len(lists[base]))
        chains.append(TokenChain(np.array(own, np.int32), chains[base], kept))
        lists.append(lists[base][:kept] + own)
    for chain, plain in zip(chains, lists, strict=True):
        assert len(chain) == len(plain)
        assert chain.to_numpy().tolist() == plain
        assert chain.slice(1, 3).tolist() == plain[1:3]
        for other, other_plain in zip(chains, lists, strict=True):
            shared = list(takewhile(lambda pair: pair[0] == pair[1], zip(plain, other_plain, strict=False)))
            assert chain.common_prefix(other) == len(shared)


@searching
@given(LINKS)
def test_message_chains_are_the_lists_that_they_stand_for(links: list[tuple[int, int, list[int]]]) -> None:
    spoken = [Message.snapshot({"role": "user", "content": str(word)}, "a message") for word in range(3)]
    chains, lists = [MessageChain(spoken[:2])], [spoken[:2]]
    for which, keep, own in links:
        base = which % len(chains)
        kept = min(keep, len(lists[base]))
        chains.append(MessageChain([spoken[word] for word in own], chains[base], kept))
        lists.append(lists[base][:kept] + [spoken[word] for word in own])
    for chain, plain in zip(chains, lists, strict=True):
        assert len(chain) == len(plain)
        assert chain.to_list() == plain
        assert chain.last() is (plain[-1] if plain else None)
