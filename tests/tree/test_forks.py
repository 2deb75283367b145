"""Every fork names its cause and shows the first difference, on sessions as agents make them."""

from typing import Any

from rolltape.records.fork import Fork, ForkCause
from rolltape.tree import arrivals_of, forks_of, tree_of
from sessions import Recording, held, says, system, tool, user


def only_fork(recording: Recording) -> Fork:
    forks = forks_of(tree_of(recording.session()))
    assert len(forks) == 1, forks
    return forks[0]


def call(name: str, arguments: str, call_id: str = "call_1") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def coding(recording: Recording, *rounds: str) -> list[Any]:
    """A coding agent at work: a task, then a tool call answered per round."""
    turns = [recording.ask([system("you are a coder"), user("fix the bug")], call("run", '{"what": "tests"}', "c0"))]
    for number, result in enumerate(rounds, 1):
        reply = call("edit", f'{{"line": {number}}}', f"c{number}")
        turns.append(recording.go_on(turns[-1], [tool(result, f"c{number - 1}")], reply))
    return turns


def test_a_session_that_only_goes_on_has_no_forks() -> None:
    recording = Recording()
    coding(recording, "1 failed", "2 failed", "ok")
    assert forks_of(tree_of(recording.session())) == []


def test_echoes_that_mean_the_same_are_no_forks() -> None:
    recording = Recording()
    first = recording.ask([system("s"), user("u")], call("run", '{"timeout": 5000.0, "cmd": "ls"}'))
    echo = call("run", '{"cmd":"ls","timeout":5000}', "call_renamed") | {"content": ""}
    marked = {"role": "user", "content": [{"type": "text", "text": "u", "cache_control": {"type": "ephemeral"}}]}
    developer = {"role": "developer", "content": "s"}
    recording.record(
        prompt_messages=[developer, marked, echo, tool("a.py")],
        prompt_ids=[*first.tokens.to_numpy().tolist(), *recording.render([tool("a.py")])],
        **recording.answered("done"),
    )
    tree = tree_of(recording.session())
    assert forks_of(tree) == []
    assert tree.turns[1].parent is tree.turns[0]


def test_sub_agent_with_its_own_tools_and_prompt() -> None:
    recording = Recording(tools=[{"name": "task"}])
    main = recording.ask([system("lead"), user("fix it")], call("task", '{"goal": "find it"}'))
    scout = recording.ask([system("scout"), user("find it")], "in parser.py", tools=[{"name": "grep"}])
    recording.go_on(main, [tool("in parser.py")], "fixed")
    fork = only_fork(recording)
    assert (fork.cause, fork.turn, fork.departs_from) == (ForkCause.SUB_AGENT, scout.id, main.id)
    assert fork.message_index == 0
    assert fork.text is not None
    assert (fork.text.before, fork.text.after) == ("lead", "scout")


def test_sub_agents_that_share_prompt_and_tools_run_beside_each_other_or_in_turn() -> None:
    recording = Recording(tools=[{"name": "task"}])
    main = recording.ask([system("s"), user("fix it")], call("task", '{"n": 1}'))
    first = recording.ask([system("s"), user("look in a.py")], "looking")
    recording.go_on(first, [user("and?")], "nothing there")
    main = recording.go_on(main, [tool("nothing")], call("task", '{"n": 2}'))
    recording.ask([system("s"), user("search b.py")], "found it")
    recording.go_on(main, [tool("found it")], "fixed")
    causes = [fork.cause for fork in forks_of(tree_of(recording.session()))]
    assert causes == [ForkCause.SUB_AGENT, ForkCause.SUB_AGENT]


def test_compaction_replaces_history_by_a_summary() -> None:
    recording = Recording()
    turns = coding(recording, "1 failed", "2 failed", "3 failed")
    after = recording.ask([system("you are a coder"), user("summary of the work so far : line 3 is wrong")], "on it")
    recording.go_on(after, [user("go")], "done")
    fork = only_fork(recording)
    assert (fork.cause, fork.departs_from, fork.message_index) == (ForkCause.COMPACTION, turns[-1].id, 1)
    assert fork.text is not None
    assert fork.text.after == "summary of the work so far : line 3 is wrong"


def test_compaction_that_keeps_the_task_and_the_latest_messages() -> None:
    recording = Recording()
    turns = coding(recording, "1 failed", "2 failed", "3 failed")
    task = [system("you are a coder"), user("fix the bug")]
    recording.ask([*task, user("earlier work was cut"), says(turns[-1]), tool("ok")], "done")
    assert only_fork(recording).cause is ForkCause.COMPACTION


def test_retry_samples_the_same_prompt_again() -> None:
    recording = Recording()
    prompt = [system("s"), user("u")]
    first = recording.ask(prompt, "bad")
    second = recording.ask(prompt, "good")
    recording.go_on(second, [user("more")], "done")
    fork = only_fork(recording)
    assert (fork.cause, fork.turn, fork.departs_from) == (ForkCause.RETRY, second.id, first.id)
    tree = tree_of(recording.session())
    assert arrivals_of(tree).abandoned == {0}


def test_going_on_without_the_reply_abandons_it() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "no call in here")
    recording.ask([user("u"), user("call a tool please")], call("run", "{}"))
    fork = only_fork(recording)
    assert (fork.cause, fork.departs_from, fork.message_index) == (ForkCause.ABANDONED_REPLY, first.id, 1)
    tree = tree_of(recording.session())
    assert arrivals_of(tree).abandoned == {0}


def test_edited_history_keeps_its_later_messages() -> None:
    recording = Recording()
    turns = coding(recording, "1 failed", "2 failed")
    messages = held(turns[-1])
    messages[0] = system("you are a careful coder")
    recording.ask([*messages, tool("ok")], "done")
    fork = only_fork(recording)
    assert (fork.cause, fork.message_index) == (ForkCause.HISTORY_EDITED, 0)
    assert fork.text is not None
    assert (fork.text.at, fork.text.before, fork.text.after) == (11, "oder", "areful coder")


def test_an_edited_tool_result_is_edited_history() -> None:
    recording = Recording()
    first = recording.ask([user("u")], call("run", "{}"))
    recording.go_on(first, [tool("a long result")], "reads it")
    recording.go_on(first, [tool("a short result")], "reads that")
    assert only_fork(recording).cause is ForkCause.HISTORY_EDITED


def test_going_back_to_an_earlier_message_is_edited_history() -> None:
    recording = Recording()
    few_shot = [user("1 + 1"), {"role": "assistant", "content": "2"}, user("2 + 2")]
    recording.ask(few_shot, "4")
    recording.ask(few_shot[:1], "3")
    assert only_fork(recording).cause is ForkCause.HISTORY_EDITED


def rewritten(echo: dict[str, Any], reply: str | dict[str, Any]) -> Fork:
    recording = Recording()
    recording.ask([user("u")], reply)
    recording.ask([user("u"), echo, user("more")], "done")
    fork = only_fork(recording)
    assert (fork.departs_from, fork.message_index) == ("r.0.0.0", 1)
    return fork


def test_reply_that_comes_back_with_other_white_space() -> None:
    fork = rewritten({"role": "assistant", "content": "let me look"}, "let me look\n")
    assert fork.cause is ForkCause.REPLY_WHITESPACE
    assert fork.text is not None
    assert (fork.text.at, fork.text.before, fork.text.after) == (11, "\n", "")


def test_reply_that_comes_back_without_its_thinking() -> None:
    reply = {"role": "assistant", "content": "look", "reasoning_content": "what now ?"}
    assert rewritten({"role": "assistant", "content": "look"}, reply).cause is ForkCause.THINKING_STRIPPED
    inline = "<think> what now ? </think> look"
    assert rewritten({"role": "assistant", "content": "look"}, inline).cause is ForkCause.THINKING_STRIPPED


def test_reply_that_comes_back_changed() -> None:
    fork = rewritten({"role": "assistant", "content": "let me see"}, "let me look")
    assert fork.cause is ForkCause.REPLY_REWRITTEN
    assert fork.text is not None
    assert (fork.text.before, fork.text.after) == ("look", "see")


def test_only_the_first_of_several_calls_echoed_is_a_rewritten_reply() -> None:
    both = call("a", "{}") | {"tool_calls": call("a", "{}")["tool_calls"] + call("b", "{}")["tool_calls"]}
    assert rewritten(call("a", "{}"), both).cause is ForkCause.REPLY_REWRITTEN


def test_equal_messages_with_other_tokens_are_retokenized() -> None:
    recording = Recording()
    first = recording.ask([user("u")], "hel lo", sampled_ids=[41, 42, 0])
    ids = [*first.prompt_ids.tolist(), 43, 0, *recording.render([user("more")])]
    recording.record(prompt_messages=[*held(first), user("more")], prompt_ids=ids, **recording.answered("done"))
    fork = only_fork(recording)
    assert (fork.cause, fork.message_index, fork.text) == (ForkCause.RETOKENIZED, None, None)
    assert fork.tokens.at == len(first.prompt_ids)
    assert (fork.tokens.before[:2], fork.tokens.after[:2]) == ((41, 42), (43, 0))


def test_thinking_left_out_by_the_template_though_the_message_kept_it() -> None:
    recording = Recording()
    reply = {"role": "assistant", "content": "look", "reasoning_content": "what now ?"}
    first = recording.ask([user("u")], reply)
    stripped = recording.render([user("u"), {"role": "assistant", "content": "look"}, user("more")])
    recording.record(prompt_messages=[*held(first), user("more")], prompt_ids=stripped, **recording.answered("done"))
    assert only_fork(recording).cause is ForkCause.THINKING_STRIPPED


def test_thinking_left_out_further_back_by_the_template() -> None:
    recording = Recording()
    thinks = {"role": "assistant", "content": "look", "reasoning_content": "what now ?"}
    first = recording.ask([user("u")], thinks)
    second = recording.go_on(first, [tool("ok")], thinks | {"content": "done"})
    plain = [{"role": "assistant", "content": text} for text in ("look", "done")]
    stripped = recording.render([user("u"), plain[0], tool("ok"), plain[1], user("more")])
    recording.record(prompt_messages=[*held(second), user("more")], prompt_ids=stripped, **recording.answered("yes"))
    assert only_fork(recording).cause is ForkCause.THINKING_STRIPPED


def test_thinking_left_out_turn_after_turn_is_named_each_time() -> None:
    recording = Recording()
    messages, rendered = [user("u")], [user("u")]
    for word in ("look", "go", "wait"):
        reply = {"role": "assistant", "content": word, "reasoning_content": "what am I to do about all of this ?"}
        ids = recording.render(rendered)
        recording.record(prompt_messages=messages, prompt_ids=ids, **recording.answered(reply))
        messages = [*messages, reply, user("more")]
        rendered += [{"role": "assistant", "content": word}, user("more")]
    assert [fork.cause for fork in forks_of(tree_of(recording.session()))] == [ForkCause.THINKING_STRIPPED] * 2


def test_other_tools_for_the_same_conversation() -> None:
    recording = Recording(tools=[{"name": "run"}])
    first = recording.ask([user("u")], "ok")
    recording.ask([*held(first), user("more")], "done", tools=[{"name": "run"}, {"name": "edit"}])
    fork = only_fork(recording)
    assert (fork.cause, fork.message_index) == (ForkCause.TOOLS_CHANGED, None)
    assert fork.text is not None
    assert "edit" in str(fork.text.after)


def test_spacing_and_key_order_of_tools_do_not_count() -> None:
    recording = Recording(tools=[{"name": "run", "parameters": {"a": 1, "b": 2.0}}])
    first = recording.ask([user("u")], "ok")
    recording.go_on(first, [user("more")], "done", tools=[{"parameters": {"b": 2, "a": 1}, "name": "run"}])
    assert forks_of(tree_of(recording.session())) == []


def test_auxiliary_calls_are_no_forks() -> None:
    recording = Recording()
    first = recording.ask([system("s"), user("u")], "ok")
    recording.ask([system("write a title"), user("u")], "A title", auxiliary="title")
    recording.ask([*held(first), user("how is it going ?")], "well", auxiliary="probe")
    recording.go_on(first, [user("more")], "done")
    assert forks_of(tree_of(recording.session())) == []


def test_a_long_rewritten_reply_in_the_middle_is_explained_at_its_place() -> None:
    recording = Recording()
    turns = coding(recording, "1 failed", "2 failed")
    messages = held(turns[-1])
    messages[4] = call("edit", '{"line": 99}', "c1")
    recording.ask([*messages, tool("ok")], "done")
    fork = only_fork(recording)
    assert (fork.cause, fork.departs_from, fork.message_index) == (ForkCause.REPLY_REWRITTEN, turns[1].id, 4)


SUMMARY = "The tests fail in parser.py at line 3 .\nNext the edit of line 3 has to be tried again ."


def causes(recording: Recording) -> list[ForkCause]:
    return [fork.cause for fork in forks_of(tree_of(recording.session()))]


def test_a_compaction_by_a_request_without_tools_is_one_each_time() -> None:
    recording = Recording(tools=[{"name": "run"}])
    task = [system("you are a coder"), user("fix the bug")]
    messages = task
    for number in range(3):
        summary = f"{SUMMARY}\nThis was summary number {number} of the whole work ."
        turn = recording.ask(messages, call("run", "{}", f"c{number}"))
        asked = [*held(turn), tool("failed " * 90, f"c{number}"), user("write a summary")]
        recording.ask(asked, summary, tools=[], prompt_ids=recording.render(asked))
        messages = [*task, user(f"another model began this . its summary :\n{summary}")]
    recording.ask(messages, "done")
    assert causes(recording) == [ForkCause.COMPACTION] * 6


def test_a_summary_that_is_cut_and_framed_is_a_compaction_though_the_message_looks_edited() -> None:
    recording = Recording()
    reminder = "today is monday . " * 20
    first = recording.ask([system("s"), user(f"{reminder} fix the bug")], call("run", "{}", "c0"))
    last = recording.go_on(first, [tool("failed " * 90, "c0")], "all done now")
    without_last = [*held(first), tool("failed " * 90, "c0"), user("write a summary")]
    asked = recording.ask(without_last, f"<analysis>\nwhat was this all about , I wonder\n</analysis>\n{SUMMARY}")
    recording.ask([system("s"), user(f"{reminder} go on from : {SUMMARY}"), says(last), user("and now ?")], "done")
    forks = forks_of(tree_of(recording.session()))
    assert [fork.cause for fork in forks] == [ForkCause.COMPACTION] * 2
    assert forks[1].departs_from == asked.id


def test_a_reply_handed_to_another_conversation_is_no_compaction() -> None:
    recording = Recording()
    first = recording.ask([system("s"), user("make a plan for this long piece of work " * 9)], SUMMARY)
    recording.ask([system("s"), user(f"what do you think of this ?\n{SUMMARY}")], "fine")
    recording.go_on(first, [user("a reviewer finds it fine")], "good")
    assert causes(recording) == [ForkCause.SUB_AGENT]


def test_a_tool_added_in_mid_task_though_a_sub_agent_had_those_tools_before() -> None:
    recording = Recording(tools=[{"name": "run"}])
    more = [{"name": "run"}, {"name": "edit"}]
    main = recording.ask([system("s"), user("fix it")], call("run", "{}", "c0"))
    recording.ask([system("scout"), user("look")], "found it", tools=more)
    recording.ask([*held(main), tool("failed", "c0")], "done", tools=more)
    forks = forks_of(tree_of(recording.session()))
    assert [fork.cause for fork in forks] == [ForkCause.SUB_AGENT, ForkCause.TOOLS_CHANGED]
    assert forks[1].departs_from == main.id


def test_a_tool_that_the_system_prompt_names_too_is_added_in_mid_task() -> None:
    recording = Recording(tools=[{"name": "run"}])
    main = recording.ask([system("tools : run"), user("fix it")], call("run", "{}", "c0"))
    messages = [system("tools : run edit"), user("fix it"), says(main), tool("failed", "c0")]
    recording.ask(messages, "done", tools=[{"name": "run"}, {"name": "edit"}])
    fork = only_fork(recording)
    assert (fork.cause, fork.message_index) == (ForkCause.TOOLS_CHANGED, 0)


def test_empty_thinking_left_out_by_the_template() -> None:
    recording = Recording()
    marks = [901, 902]
    body = recording.body({"role": "assistant", "content": "look around"})
    first = recording.ask([user("u")], "look around", sampled_ids=[*marks, *body, 0])
    recording.ask([*held(first), user("more")], "done")
    assert only_fork(recording).cause is ForkCause.THINKING_STRIPPED


def test_thinking_that_the_gateway_says_its_template_dropped_though_the_rest_is_tokenized_anew() -> None:
    recording = Recording()
    reply = {"role": "assistant", "content": "hel lo", "reasoning_content": "hm"}
    first = recording.ask([user("u")], reply, sampled_ids=[41, 42, 0])
    plain = recording.render([user("u"), {"role": "assistant", "content": "hello"}, user("more")])
    recording.ask([*held(first), user("more")], "done", prompt_ids=plain, extra={"prefix_miss": "new_user_message"})
    assert only_fork(recording).cause is ForkCause.THINKING_STRIPPED


def test_thinking_that_the_prompt_opened_is_left_out_by_the_template() -> None:
    recording = Recording()
    asked = [*recording.render([user("u")]), 901]
    body = recording.body({"role": "assistant", "content": "look around"})
    reply = {"role": "assistant", "content": "look around", "reasoning_content": "hm"}
    first = recording.ask([user("u")], reply, prompt_ids=asked, sampled_ids=[77, 902, *body, 0])
    plain = recording.render([user("u"), {"role": "assistant", "content": "look around"}, user("more")])
    recording.ask([*held(first), user("more")], "done", prompt_ids=plain)
    assert only_fork(recording).cause is ForkCause.THINKING_STRIPPED
