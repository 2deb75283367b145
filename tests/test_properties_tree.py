"""What must hold of the tree of every session, on random sessions, judged by the rule spelled out in lists."""

import msgspec
from hypothesis import given

from relations import Relations, had_ended
from rolltape.records.rollout import Session
from rolltape.records.turn import Turn
from rolltape.tree import Tree, forks_of, tree_of
from sessions import Recording, rollout_of
from strategies import eventful_recordings, recordings_of, searching


@searching
@given(eventful_recordings(max_turns=12))
def test_a_tree_grown_turn_by_turn_is_the_tree_made_from_scratch(recording: Recording) -> None:
    session = recording.session()
    growing = Tree(tool_ids_matter=session.head.tool_ids_matter)
    for count, turn in enumerate(session.turns, start=1):
        placed = growing.add(turn)
        assert placed.turn is turn
        if count % 3 == 0:
            assert _shape(growing) == _shape(tree_of(Session(session.head, session.turns[:count])))
    assert _shape(growing) == _shape(tree_of(session)) == _shape(tree_of(recording.given_whole()))


@searching
@given(recordings_of(max_turns=12))
def test_a_turn_continues_the_turn_with_the_longest_ids_that_its_prompt_begins_with(recording: Recording) -> None:
    session = recording.session()
    relations = Relations(rollout_of(session))
    for placed in tree_of(session).turns:
        expected = relations.continued[placed.turn.id]
        assert (placed.continues.turn.id if placed.continues else None) == (expected.id if expected else None)


@searching
@given(eventful_recordings(max_turns=12))
def test_messages_follow_the_longest_conversation_known_before_them(recording: Recording) -> None:
    session = recording.session()
    relations = Relations(rollout_of(session))
    for placed in tree_of(session).turns:
        expected = _echoed_by_the_book(relations, placed.turn)
        assert (placed.message_parent.turn.id if placed.message_parent else None) == (expected.id if expected else None)


@searching
@given(eventful_recordings(max_turns=12))
def test_one_node_id_names_one_conversation(recording: Recording) -> None:
    session = recording.session()
    relations = Relations(rollout_of(session))
    conversations: dict[object, tuple[bytes, ...]] = {}
    for placed in tree_of(session).turns:
        spelled = relations.spelled(placed.turn)
        assert conversations.setdefault(placed.prompt_node.id, spelled) == spelled
    assert len(set(conversations.values())) == len(conversations)


def _echoed_by_the_book(relations: Relations, turn: Turn) -> Turn | None:
    """The longest known conversation; among equal ones the echoed id decides, else the tokens, else the latest."""
    messages, spelled = turn.prompt.to_list(), relations.spelled(turn)
    known: list[tuple[int, Turn]] = []
    for other in relations.turns_beside(turn)[: turn.sequence]:
        conversation = relations.spelled(other, with_reply=True)
        if (
            other.reply is not None
            and had_ended(other, turn, shown=True)
            and spelled[: len(conversation)] == conversation
        ):
            known.append((len(conversation) - 1, other))
    deepest = max((depth for depth, _ in known), default=0)
    twins = [other for depth, other in known if depth == deepest]
    if not twins:
        return None
    echo = messages[deepest - 1]
    named = [twin for twin in twins if twin.reply is not None and twin.reply.wire_ids & echo.wire_ids]
    if len(named) != 1 and relations.continued[turn.id] in (named or twins):
        return relations.continued[turn.id]
    ids = turn.prompt_ids.tolist()
    return max(named or twins, key=lambda twin: (_shared(twin.tokens.to_numpy().tolist(), ids), twin.sequence))


def _shared(left: list[int], right: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _shape(tree: Tree) -> list[object]:
    placed = [
        (
            turn.turn.id,
            turn.parent.turn.id if turn.parent else None,
            turn.continues.turn.id if turn.continues else None,
            turn.message_parent.turn.id if turn.message_parent else None,
            turn.prompt_node.id,
            turn.reply_node.id if turn.reply_node else None,
        )
        for turn in tree.turns
    ]
    return [placed, msgspec.json.encode(forks_of(tree))]
