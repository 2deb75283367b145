"""What must hold of the tree of every session, on random sessions, judged by the rule spelled out in lists."""

import msgspec
from hypothesis import given

from rolltape.records.messages import Message
from rolltape.records.rollout import Session
from rolltape.records.turn import Turn
from rolltape.tree import Tree, forks_of, tree_of
from sessions import Recording
from strategies import eventful_recordings, searching


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
@given(eventful_recordings(max_turns=12))
def test_a_turn_continues_the_longest_conversation_known_before_it(recording: Recording) -> None:
    session = recording.session()
    tree = tree_of(session)
    for placed in tree.turns:
        expected = _continued_by_the_book(session, placed.turn)
        assert (placed.parent.turn.id if placed.parent else None) == (expected.id if expected else None)


@searching
@given(eventful_recordings(max_turns=12))
def test_one_node_id_names_one_conversation(recording: Recording) -> None:
    session = recording.session()
    conversations: dict[object, tuple[bytes, ...]] = {}
    for placed in tree_of(session).turns:
        spelled = _spelled(session, placed.turn)
        assert conversations.setdefault(placed.prompt_node.id, spelled) == spelled
    assert len(set(conversations.values())) == len(conversations)


def _continued_by_the_book(session: Session, turn: Turn) -> Turn | None:
    """The longest known conversation; among equal ones the echoed id decides, else the tokens, else the latest."""
    messages = turn.prompt.to_list()
    spelled = _spelled(session, turn)
    known: list[tuple[int, Turn]] = []
    asked = [other for other in session.turns[: turn.sequence] if _spelled(session, other) == spelled]
    if asked and resumes(asked[-1], turn):
        return asked[-1]
    for other in session.turns[: turn.sequence]:
        conversation = _spelled(session, other) + ((_key(session, other.reply),) if other.reply else ())
        if other.reply is not None and spelled[: len(conversation)] == conversation:
            known.append((len(conversation) - 1, other))
    deepest = max((depth for depth, _ in known), default=0)
    twins = [other for depth, other in known if depth == deepest]
    if not twins:
        return None
    echo = messages[deepest - 1]
    named = [twin for twin in twins if twin.reply is not None and twin.reply.wire_ids & echo.wire_ids]
    ids = turn.prompt_ids.tolist()
    return max(named or twins, key=lambda twin: (_shared(twin.tokens.to_numpy().tolist(), ids), twin.sequence))


def resumes(interrupted: Turn, turn: Turn) -> bool:
    """Whether a prompt ends in the middle of a reply that was cut short before it was a message."""
    held = interrupted.tokens.to_numpy().tolist()
    cut_short = interrupted.reply is None and len(interrupted.sampled_ids) > 0
    return cut_short and turn.prompt_ids.tolist()[: len(held)] == held


def _shared(left: list[int], right: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _spelled(session: Session, turn: Turn) -> tuple[bytes, ...]:
    return turn.root.digest, *(_key(session, message) for message in turn.prompt.to_list())


def _key(session: Session, message: Message) -> bytes:
    return message.canonical_with_ids if session.head.tool_ids_matter else message.canonical


def _shape(tree: Tree) -> list[object]:
    placed = [
        (
            turn.turn.id,
            turn.parent.turn.id if turn.parent else None,
            turn.prompt_node.id,
            turn.reply_node.id if turn.reply_node else None,
        )
        for turn in tree.turns
    ]
    return [placed, msgspec.json.encode(forks_of(tree))]
