"""Which earlier turn a turn continues."""

from rolltape.records.messages import Message, MessageChain
from rolltape.tree import Node, Tree, tree_of
from sessions import Recording, held, tool, user


def call(call_id: str) -> dict[str, object]:
    function = {"name": "run", "arguments": "{}"}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": call_id, "function": function}]}


def test_an_echoed_id_tells_which_of_two_equal_turns_is_continued() -> None:
    recording = Recording()
    first = recording.ask([user("u")], call("minted_1"))
    second = recording.ask([user("u")], call("minted_2"))
    for turn in (first, second):
        recording.ask([*held(turn), tool("ok")], "done")
    placed = tree_of(recording.session()).turns
    assert [turn.parent and turn.parent.sequence for turn in placed] == [None, None, 0, 1]


def test_without_an_id_the_recorded_tokens_tell_equal_turns_apart() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "hello", sampled_ids=[41, 42, 0])
    recording.ask([user("u")], "hello", sampled_ids=[43, 0])
    recording.record(
        prompt_messages=[*held(first), user("more")],
        prompt_ids=[*first.tokens.to_numpy().tolist(), *recording.render([user("more")])],
        **recording.answered("done"),
    )
    parent = tree_of(recording.session()).turns[2].parent
    assert parent is not None
    assert parent.sequence == 0


def test_without_ids_and_tokens_the_latest_of_equal_turns_is_continued() -> None:
    recording = Recording()
    for _ in range(2):
        recording.ask([user("u")], "hello", token_faithful=False, prompt_ids=None, sampled_ids=None, logprobs=None)
    recording.ask(
        [user("u"), {"role": "assistant", "content": "hello"}, user("more")],
        "done",
        token_faithful=False,
        prompt_ids=None,
        sampled_ids=None,
        logprobs=None,
    )
    parent = tree_of(recording.session()).turns[2].parent
    assert parent is not None
    assert parent.sequence == 1


def test_ids_that_the_model_samples_itself_count_among_messages_where_the_session_says_so() -> None:
    for matter, parents in ((False, [None, 0]), (True, [None, None])):
        recording = Recording(tool_ids_matter=matter)
        recording.ask([user("u")], call("functions.run:0"))
        recording.ask([user("u"), call("functions.run:7"), tool("ok")], "done")
        placed = tree_of(recording.session()).turns
        assert [turn.message_parent and turn.message_parent.sequence for turn in placed] == parents
        assert [turn.continues and turn.continues.sequence for turn in placed] == [None, 0], "the ids are the same"


def test_one_id_names_a_whole_conversation_prefix() -> None:
    left, right = Recording(), Recording()
    left.ask([user("u")], "a")
    right.ask([user("u")], "b")
    left_tree, right_tree = tree_of(left.session()), tree_of(right.session())
    assert left_tree.turns[0].prompt_node.id == right_tree.turns[0].prompt_node.id
    assert left_tree.turns[0].tip.id != right_tree.turns[0].tip.id


def test_a_session_of_thousands_of_turns_needs_no_recursion() -> None:
    recording = Recording()
    turn = recording.ask([user("u")], "ok")
    for _ in range(3000):
        turn = recording.go_on(turn, [user("more")], "ok")
    tree = tree_of(recording.session())
    assert tree.turns[-1].tip.depth == 2 * 3001
    assert tree.turns[-1].tip.ancestor(5) is tree.turns[2].tip.ancestor(5)


def test_ancestors_are_found_at_every_depth() -> None:
    tip = Node(None, None, None)
    path = [tip]
    message = Message.snapshot(user("x"), "m")
    for _ in range(300):
        tip = Node(tip, message, None)
        path.append(tip)
    assert all(tip.ancestor(depth) is path[depth] for depth in range(301))


def test_an_empty_tree_has_no_turns() -> None:
    assert Tree().turns == []
    assert MessageChain(()).to_list() == []
