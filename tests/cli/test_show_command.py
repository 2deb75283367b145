"""`rolltape show`: facts, tree, transcript and tokens, on a terminal and in a pipe."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

import rolltape
from commands import STYLE, Cli, on_terminal, rows
from rolltape.traces import TraceWriter

TINY = Path(__file__).parents[2] / "src" / "rolltape" / "tiny" / "models" / "tiny"
HOSTILE = "\x1b]0;owned\x07\x1b[31mred\u202e\u200b\u2066\x9b1mend"
RAW = re.compile(r"[\x07\x9b\u202e\u200b\u2066]|\x1b(?!\[[0-9;]*m)")
COLOR = re.compile(r"\x1b\[[0-9;]*[34]8;5;\d+")


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def record(path: Path, *, finished: bool = True) -> Path:
    """A rollout with thinking, a call, a long result, characters of several tokens, and text that would steer."""
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))

    def ids(text: str) -> list[int]:
        encoded: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return encoded

    call = {"type": "function", "function": {"name": "look", "arguments": '{"city": "東京"}'}}
    result = "\n".join(f"line {number}" for number in range(200))
    with rolltape.open(path) as tape:
        rollout = tape.rollout(task_id="t", step=1, attempt=0)
        session = rollout.session(tokenizer=str(TINY))
        reply = ids("<think>so</think>東京 🌧<|im_end|>")
        first = session.record_turn(
            prompt_messages=[said("user", f"look {HOSTILE}")],
            prompt_ids=ids(f"look {HOSTILE}\n"),
            sampled_ids=reply,
            logprobs=[-0.5, None, *[-0.01] * (len(reply) - 3), -9.0],
            reply=said("assistant", "東京 🌧", reasoning_content="so it is", tool_calls=[call]),
            finish="stop",
            weight_version="7",
            started_at=100.0,
            ended_at=107.0,
        )
        session.record_turn(
            after=first,
            new_messages=[said("tool", result)],
            new_prompt_ids=ids(result),
            sampled_ids=ids("done<|im_end|>"),
            logprobs=[-0.25] * len(ids("done<|im_end|>")),
            reply=said("assistant", "done"),
            finish="stop",
            weight_version="8",
            started_at=110.0,
            ended_at=165.0,
        )
        session.record_turn(
            prompt_messages=[said("user", "another question")],
            prompt_ids=[1, 2],
            sampled_ids=[3],
            logprobs=[-1.0],
            reply=said("assistant", "another answer"),
            finish="stop",
            started_at=120.0,
            ended_at=121.0,
        )
        if finished:
            rollout.finish(reward=0.5, reward_terms={"right": 0.5, "style": float("nan")})
        return path


def trained(run: Path, *, samples: int, **outputs: torch.Tensor) -> None:
    """Export the first samples of the only rollout, as a trainer does."""
    chosen = list(rolltape.linearize(next(iter(rolltape.read(run).rollouts()))).samples())[:samples]
    inference = torch.cat([torch.from_numpy(sample.logprobs.copy()) for sample in chosen])
    batch = {
        "input_ids": torch.cat([torch.from_numpy(sample.ids.copy()) for sample in chosen]),
        "trained_mask": torch.cat([torch.from_numpy(sample.trained_mask.copy()) for sample in chosen]),
        "inference_logprobs": inference,
        "advantages": torch.ones(len(chosen)),
        "rewards": [0.5] * len(chosen),
        "lengths": [len(sample.ids) for sample in chosen],
        "sample_ids": [sample.id for sample in chosen],
    }
    with rolltape.TokenExporter(run, rank=0, world_size=1) as exporter:
        exporter.export(1, 0, batch, {"logprobs": inference + 0.1, **outputs})
        exporter.mark_stable(1)


@pytest.fixture
def talk(tmp_path: Path) -> Path:
    return record(tmp_path / "talk")


def test_a_rollout_is_shown_from_its_facts_to_its_tokens(cli: Cli, talk: Path) -> None:
    result = cli("show", talk)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0].endswith("task t, attempt 0, finished, reward 0.5")
    assert lines[1] == "reward terms: right 0.5, style nan"
    assert lines[2] == "3 turns, 1 fork, 1 min 5 s, stopped: completed"
    assert re.fullmatch(r"\d+ sampled tokens: \d+ trained, 1 masked:no_logprob; 2 samples under exact", lines[3])
    tree, transcript, first, second = result.out.split("\n\n")[1:]
    assert tree.startswith("session 0: 3 turns")
    assert tree + "\n" == cli("tree", talk).out.partition("\n")[2]
    assert transcript.startswith("turn 0.0  prompt")
    assert re.match(r"sample 0 of 2 \(exact\): [\d,]+ tokens, \d+ trained, 1 masked:no_logprob, reward 0.5\n", first)
    assert re.fullmatch(r"\S \S «\S»", second.splitlines()[1])


def test_the_transcript_has_every_turn_and_all_that_was_said(cli: Cli, talk: Path) -> None:
    lines = cli("show", talk, "--part", "transcript").out.splitlines()
    assert "  thinks       so it is" in lines
    assert "  assistant    東京 🌧" in lines
    assert '  calls        look({"city": "東京"})' in lines
    assert "  tool         line 0" in lines
    assert "               line 199" in lines
    assert [line.split()[1] for line in lines if line.startswith("turn ")] == ["0.0", "0.1", "0.2"]
    assert "  assistant    another answer" in lines
    assert "[sub_agent]" in next(line for line in lines if line.startswith("turn 0.2"))


def test_what_an_environment_said_of_a_step_is_with_its_turn(cli: Cli, tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="t") as rollout:
        turn = rollout.session().record_turn(
            prompt_messages=[said("user", "guess")],
            prompt_ids=[1],
            sampled_ids=[2],
            logprobs=[-1.0],
            reply=said("assistant", "7"),
            finish="stop",
        )
        traces = TraceWriter(rollout)
        traces.step(turn=turn, reward=0.25, env_state={"secret": 9})
        traces.step(prompt={"board": "x"}, policy_response=said("assistant", "a move without a turn"), reward=0.5)
        rollout.finish(reward=0.75)
    lines = cli("show", tmp_path / "run", "--part", "transcript").out.splitlines()
    at = lines.index("  step 0       reward 0.25")
    assert lines[at + 1] == '  env_state    {"secret":9}'
    assert lines[at + 2 :] == [
        "step 1, reward 0.5",
        '  message      {"board": "x"}',
        "  assistant    a move without a turn",
        "total 0.75 = 0.75 in 2 steps",
    ]


def test_one_part_is_shown_alone(cli: Cli, talk: Path) -> None:
    assert "turn 0.0" not in cli("show", talk, "--part", "tree", "--part", "tokens").out
    only = cli("show", talk, "--part", "tokens").out.splitlines()
    assert only[2].startswith("sample 0 of 2")
    assert "reward terms" not in "\n".join(only)
    sample = rows(cli("samples", talk, "--json"))[0]["sample"]
    assert cli("show", talk, sample).out == f"{only[3]}\n"
    for wrong in ([sample, "--part", "tree"], ["--json", "--part", "transcript"]):
        refused = cli("show", talk, *wrong)
        assert (refused.code, refused.out) == (2, "")
        assert "shows only tokens; use `rolltape tree` or `rolltape trace`" in refused.err


def test_values_stand_behind_the_tokens_in_a_pipe(cli: Cli, talk: Path) -> None:
    out = cli("show", talk, "--part", "tokens", "--color-by", "logprob").out
    assert "«trained» ‹sampled, not trained here› context, each with =its logprob" in out
    assert "«<think>»=-0.5 ‹so› «</think>»=-0.01" in out
    assert "«<|im_end|>»=-9" in out
    assert "«done»=8" in cli("show", talk, "--color-by", "version").out
    first, _ = rows(cli("show", talk, "--json", "--color-by", "probability"))
    values = first["probability"]
    assert len(values) == len(first["line"].split(" "))
    assert [round(value, 4) for value in values if value is not None][:2] == [0.6065, 0.99]


def test_a_measure_that_the_run_lacks_is_refused_with_those_it_has(cli: Cli, talk: Path) -> None:
    refused = cli("show", talk, "--color-by", "entropy")
    assert (refused.code, refused.out) == (2, "")
    assert "--color-by entropy: the run has no token record of sample " in refused.err
    assert refused.err.endswith("; available: trained, logprob, probability, version\n")
    trained(talk, samples=1)
    refused = cli("show", talk, "--color-by", "entropy")
    assert (refused.code, refused.out) == (2, "")
    assert "token record 1.0.0 of sample" in refused.err
    assert refused.err.endswith("available: trained, logprob, probability, version, advantage, ratio, mismatch_kl\n")
    assert "'--color-by'" in cli("show", talk, "--color-by", "nothing").err


def test_a_trainers_figures_are_shown_and_what_is_missing_is_said(cli: Cli, talk: Path) -> None:
    sample = next(rolltape.linearize(next(iter(rolltape.read(talk).rollouts()))).samples())
    entropy = torch.full((len(sample.ids),), 1.5)
    entropy[sample.prompt_tokens] = float("nan")
    trained(talk, samples=1, entropy=entropy)
    result = cli("show", talk, "--part", "tokens", "--color-by", "entropy")
    assert "«<think>»=nan ‹so› «</think>»=1.5" in result.out
    assert "rolltape: --color-by entropy: the run has no token record of sample" in result.err
    assert result.out.count("=1.5") == int(sample.trained_mask.sum()) - 1
    assert "«<think>»=1.105" in cli("show", talk, "--color-by", "ratio").out


def test_tokens_have_colors_on_a_terminal(talk: Path) -> None:
    printed = on_terminal("show", talk, "--part", "tokens", columns=90, TERM="xterm-256color")
    assert COLOR.search(printed)
    plain = STYLE.sub("", printed)
    assert "trained:  trained   masked " in plain
    assert "東京 🌧<|im_end|>" in plain
    assert "«" not in plain
    heat = on_terminal("show", talk, "--part", "tokens", "--color-by", "logprob", columns=90, TERM="xterm-256color")
    assert "logprob:  -0.05   -0.3   -1   -2.3   -4.6   -7 " in STYLE.sub("", heat)
    assert "\x1b[38;5;231;48;5;160m<|im_end|>" in heat


def test_few_colors_and_none_are_enough(talk: Path) -> None:
    few = on_terminal("show", talk, "--part", "tokens", columns=90, TERM="xterm")
    assert not COLOR.search(few)
    assert "\x1b[30;46m<think>" in few
    for plain in (
        on_terminal("show", talk, "--part", "tokens", columns=90, NO_COLOR="1"),
        on_terminal("show", talk, "--part", "tokens", columns=90, TERM="dumb"),
    ):
        assert "\x1b" not in plain
        assert "«<think>» ‹so›" in plain


@pytest.mark.parametrize("more", [[], ["--full"], ["--color-by", "logprob"]], ids=" ".join)
def test_text_of_a_rollout_cannot_steer_the_terminal(cli: Cli, talk: Path, more: list[str]) -> None:
    for printed in (on_terminal("show", talk, *more, columns=80, TERM="xterm-256color"), cli("show", talk, *more).out):
        assert not RAW.search(printed)
        assert r"\u001b[31mred\u202e\u200b\u2066\u009b1mend" in STYLE.sub("", printed).replace("\n", "")


def test_long_texts_are_folded_on_a_terminal_only(cli: Cli, talk: Path) -> None:
    folded = STYLE.sub("", on_terminal("show", talk, columns=80))
    assert "… 182 lines, 1,550 characters" in folded
    assert re.search(r"\n… [\d,]+ tokens …\n", folded)
    assert "line 100" not in folded
    whole = STYLE.sub("", on_terminal("show", talk, "--full", columns=80))
    assert "line 100" in whole
    assert "…" not in whole.partition("turn 0.0")[2]
    assert "line 100" in cli("show", talk).out


def test_long_replies_and_many_turns_are_folded_on_a_terminal_with_and_without_colors(cli: Cli, tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="t") as rollout:
        session = rollout.session()
        messages, ids = [said("user", "go")], [1]
        for turn in range(40):
            sampled = list(range(1000, 6000 if turn == 0 else 1003))
            reply = said("assistant", f"reply {turn}")
            session.record_turn(
                prompt_messages=messages,
                prompt_ids=ids,
                sampled_ids=sampled,
                logprobs=[-0.5] * len(sampled),
                reply=reply,
                finish="stop",
            )
            messages, ids = [*messages, reply, said("user", "more")], [*ids, *sampled, 2]
        rollout.finish(reward=1.0)
    # The first reply has 5,000 tokens, of which 600 are shown. Of 80 parts 24 are shown first, and 12 last.
    tokens = ("show", tmp_path / "run", "--part", "tokens")
    for printed in (
        STYLE.sub("", on_terminal(*tokens, columns=80, TERM="xterm-256color")),
        on_terminal(*tokens, columns=80, NO_COLOR="1"),
    ):
        assert "… 4,400 tokens …" in printed
        assert "… 88 tokens, among them 22 replies …" in printed
        assert len(printed) < 8_000
    piped = cli(*tokens).out
    assert "«3000»" in piped
    assert "…" not in piped


def test_middle_turns_are_folded_on_a_terminal_unless_all_are_asked_for(cli: Cli, tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="t") as rollout:
        session = rollout.session()
        messages, ids = [said("user", "go")], [1]
        for turn in range(500):
            reply = said("assistant", f"reply {turn}.")
            # Turn 250 answers a shorter prompt than the one before it: a fork.
            prompt = (messages[:3], ids[:3]) if turn == 250 else (messages, ids)
            session.record_turn(
                prompt_messages=prompt[0],
                prompt_ids=prompt[1],
                sampled_ids=[1000 + turn],
                logprobs=[-0.5],
                reply=reply,
                finish="stop",
            )
            messages, ids = [*prompt[0], reply, said("user", "more")], [*prompt[1], 1000 + turn, 2]
        rollout.finish(reward=1.0)
    shown = ("show", tmp_path / "run", "--part", "tree", "--part", "transcript")
    folded = STYLE.sub("", on_terminal(*shown, columns=80))
    assert "… 482 turns, among them 1 fork; --full shows all" in folded
    assert "… 483 turns; --full shows all" in folded  # the last passage is the reward
    turns = [line.split()[1] for line in folded.splitlines() if line.startswith("turn ")]
    assert turns == [f"0.{turn}" for turn in (*range(12), *range(495, 500))]
    assert len(folded) < 8_000
    for whole in (STYLE.sub("", on_terminal(*shown, "--full", columns=80)), cli(*shown).out):
        assert "…" not in whole
        assert sum(line.startswith("turn ") for line in whole.splitlines()) == 500
    assert "…" not in on_terminal("tree", tmp_path / "run", columns=80)


def test_the_transcript_fits_a_narrow_terminal(talk: Path) -> None:
    printed = on_terminal("show", talk, "--part", "transcript", columns=44, errors=False)
    body = [line for line in STYLE.sub("", printed).splitlines() if line.startswith("  ")]
    assert max(map(len, body)) <= 44


def test_a_line_without_end_is_cut_with_a_count(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="t") as rollout:
        rollout.session().record_turn(
            prompt_messages=[said("user", "x" * 100_000)],
            prompt_ids=[1],
            sampled_ids=[2],
            logprobs=[-1.0],
            reply=said("assistant", "日本" * 300),
            finish="stop",
        )
        rollout.finish(reward=1.0)
    printed = STYLE.sub("", on_terminal("show", tmp_path / "run", columns=80))
    assert "… 99,600 characters" in printed
    assert "… 200 characters" in printed
    assert len(printed) < 6_000


def test_a_rollout_that_runs_is_shown_as_if_it_had_ended(cli: Cli, tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape:
        rollout = tape.rollout(task_id="t")
        rollout.session().record_turn(
            prompt_messages=[said("user", "go")],
            prompt_ids=[1],
            sampled_ids=[2],
            logprobs=[-1.0],
            reply=said("assistant", "on"),
            finish="stop",
        )
        out = cli("show", tmp_path / "run").out
        rollout.finish(reward=1.0)
    assert "1 sample under exact, as if it had ended now" in out
    assert out.endswith("1 «2»\n")


def test_a_rollout_without_samples_says_where_to_look(cli: Cli, tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="t") as rollout:
        rollout.session()
        rollout.fail("the machine went away")
    out = cli("show", tmp_path / "run").out
    assert "failed (the machine went away)" in out
    assert out.endswith("No samples: nothing in this rollout trains; `rolltape ledger` shows why.\n")
