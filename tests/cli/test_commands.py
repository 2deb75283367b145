"""Each command on a recorded run: what it prints, for people and for scripts."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

import rolltape
from commands import Cli, rows
from rolltape.cli import run as rolltape_command
from rolltape.cli.look import query
from rolltape.cli.runs import OpenedRun
from rolltape.export import read_rollouts, read_samples, read_turns
from rolltape.records.policy import Credit, CutPolicy


def test_ls_lists_rollouts_with_their_rewards(cli: Cli, run: Path, rollout_id: str) -> None:
    result = cli("ls", run)
    assert result.code == 0
    assert result.err == ""
    header, first, _, summary = result.out.splitlines()
    assert header.split() == ["rollout", "try", "step", "task", "attempt", "status", "reward", "turns", "sampled"]
    assert first.split() == [rollout_id[:8], "0", "1", "t", "0", "finished", "1", "2", "4"]
    assert summary == "2 rollouts, 2 finished, mean reward 0.5, 5 sampled tokens"


def test_ls_json_keeps_numbers_that_are_not_finite(cli: Cli, run: Path) -> None:
    first, second = rows(cli("ls", run, "--json"))
    assert first["reward_terms"] == {"a": {"$float": "nan"}}
    assert second["reward"] == 0.0


def test_ls_leaves_rewards_that_are_not_finite_out_of_the_mean(cli: Cli, run: Path) -> None:
    with rolltape.open(run) as tape:
        for attempt, reward in enumerate((float("nan"), float("-inf")), 2):
            with tape.rollout(task_id="t", step=1, attempt=attempt) as rollout:
                rollout.finish(reward=reward)
    summary = cli("ls", run).out.splitlines()[-1]
    assert summary == "4 rollouts, 4 finished, mean reward 0.5, 2 rewards not finite, 5 sampled tokens"


def test_ls_says_that_a_rollout_is_ungraded_where_nobody_filtered_it(cli: Cli, tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "exp") as tape:
        tape.rollout(task_id="a").finish(reason="ungraded: the judge is down")
        filtered = tape.rollout(task_id="b")
        filtered.finish(reward=1.0)
        tape.filter(filtered.id, "too easy")
    remarks = [line.split()[6] for line in cli("ls", tmp_path / "exp").out.splitlines()[1:3]]
    assert remarks == ["(ungraded)", "(filtered)"]


def test_ls_takes_filters_and_a_limit(cli: Cli, run: Path) -> None:
    assert len(rows(cli("ls", run, "--json", "--limit", 1))) == 1
    assert len(rows(cli("ls", run, "--json", "--step", 1, "--task", "t"))) == 2
    nothing = cli("ls", run, "--step", 9)
    assert (nothing.code, nothing.out) == (2, "")
    assert nothing.err.startswith("rolltape: --step 9: no rollouts match in run exp")


def test_tree_shows_each_fork_with_its_first_difference(cli: Cli, run: Path, rollout_id: str) -> None:
    lines = cli("tree", run, rollout_id[:8]).out.splitlines()
    assert lines[0] == f"rollout {rollout_id[:8]}, step 1, task t, attempt 0, finished, reward 1"
    assert lines[1] == "session 0: 2 turns, 4 sampled tokens, 1 fork"
    assert "● 1  prompt 6, sampled 1, length, weights 8  [reply_whitespace]" in lines
    assert '      text at 5: " so" → "so"' in lines
    assert "      tokens at 3: 11 12 → 12 3 4" in lines


def test_tree_json_holds_turns_and_forks(cli: Cli, run: Path, rollout_id: str) -> None:
    (session,) = rows(cli("tree", run, rollout_id, "--json"))
    assert [turn["parent"] for turn in session["turns"]] == [None, None]
    assert session["forks"][0]["cause"] == "reply_whitespace"
    assert session["forks"][0]["tokens"] == {"at": 3, "before": [11, 12], "after": [12, 3, 4]}


def test_recorded_text_cannot_steer_the_terminal(cli: Cli, run: Path, rollout_id: str) -> None:
    for verb in ("tree", "show"):
        out = cli(verb, run, rollout_id).out
        assert "\x1b" not in out
        assert "\u202e" not in out
    assert r"\u001b[31mand?\u202e" in cli("tree", run, rollout_id).out
    assert "\x1b" not in cli("query", run, "SELECT text FROM messages").out


def test_samples_list_advantages_over_the_whole_group(cli: Cli, run: Path, rollout_id: str) -> None:
    for sample in rows(cli("samples", run, rollout_id, "--json")):
        assert (sample["reward"], sample["advantage"]) == (1.0, 0.5)
        assert "ids" not in sample
    assert {row["advantage"] for row in rows(cli("samples", run, "--json", "--advantage", "none"))} == {None}
    assert cli("samples", run).out.splitlines()[-1].startswith("3 samples of 2 rollouts under exact: ")


def test_samples_take_the_choices_of_a_policy(cli: Cli, run: Path, rollout_id: str) -> None:
    split = rows(cli("samples", run, rollout_id, "--reward-share", "split", "--json"))
    assert [sample["reward"] for sample in split] == [0.5, 0.5]
    cut = rows(cli("samples", run, rollout_id, "--max-sample-tokens", 3, "--json"))
    assert max(sample["tokens"] for sample in cut) == 3
    fresh = rows(cli("samples", run, rollout_id, "--max-staleness", 0, "--json"))
    assert [sample["versions"] for sample in fresh] == [[{"first": "8", "last": "8"}]]


def test_compare_names_the_tokens_on_which_policies_differ(cli: Cli, run: Path, rollout_id: str) -> None:
    *apart, exact, slime = rows(cli("samples", run, rollout_id, "--compare", "slime", "--json"))
    assert (exact["policy"], exact["trained"], slime["policy"]) == ("exact", 3, "slime")
    assert sum(exact[kind] for kind in ("trained", "masked", "dropped")) == 4
    assert sum(slime[kind] for kind in ("trained", "masked", "dropped")) == 4
    assert all(row["one"] != row["other"] for row in apart)
    assert apart
    assert "with different fates:" in cli("samples", run, rollout_id, "--compare", "slime").out
    other = rows(cli("ls", run, "--json"))[1]["rollout"]
    assert "same fate under both" in cli("samples", run, other, "--compare", "slime").out


def test_ledger_accounts_for_every_token(cli: Cli, run: Path, rollout_id: str) -> None:
    (row,) = rows(cli("ledger", run, rollout_id, "--turns", "--json"))
    assert row["sampled"] == 4
    assert row["totals"] == {"trained": 3, "masked:no_logprob": 1}
    assert sum(entry["stop"] - entry["start"] for entry in row["entries"]) == 4
    out = cli("ledger", run, rollout_id, "--turns").out.splitlines()
    assert f"{rollout_id[:8]} 0.0     1-2  masked:no_logprob  11" in out
    assert out[-1] == "4 sampled tokens of 1 rollout under exact"


def test_show_prints_ids_or_text(cli: Cli, run: Path, rollout_id: str, tmp_path: Path) -> None:
    shown = cli("show", run, rollout_id, "--part", "tokens").out.splitlines()
    assert shown[2] == "sample 0 of 2 (exact): 5 tokens, 2 trained, 1 masked:no_logprob, reward 1"
    assert shown[3] == "1 2 «10» ‹11› «12»"
    words = ["?", "<user>", "<gen>", "a b", "x"]
    Tokenizer(models.WordLevel(dict(zip(words, range(5), strict=True)), unk_token="?")).save(str(tmp_path / "tok.json"))
    line = rows(cli("show", run, rollout_id, "--tokenizer", tmp_path / "tok.json", "--json"))[1]["line"]
    assert line == "<user> <gen> #10 #12 a␣b x «#20»"


def test_show_finds_a_sample_by_its_id(cli: Cli, run: Path, rollout_id: str) -> None:
    listed = rows(cli("samples", run, rollout_id, "--policy", "slime", "--json"))
    assert cli("show", run, listed[-1]["sample"]).out.endswith("«20»\n")
    other = rows(cli("samples", run, rollout_id, "--max-sample-tokens", 3, "--json"))[0]["sample"]
    assert cli("show", run, other).code == 2
    assert cli("show", run, other, "--max-sample-tokens", 3).out == "1 2 «10»\n"


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_export_reads_back(cli: Cli, run: Path, tmp_path: Path, suffix: str) -> None:
    for what in ("samples", "turns", "rollouts"):
        result = cli("export", run, "--what", what, "-o", tmp_path / f"{what}.{suffix}")
        assert (result.code, result.out) == (0, "")
        assert f"{what} written to" in result.err
    assert [len(sample.ids) for sample in read_samples(tmp_path / f"samples.{suffix}")] == [5, 7, 3]
    turns = [turn for rollout in rolltape.read(run).rollouts() for turn in rollout.turns]
    back = list(read_turns(tmp_path / f"turns.{suffix}"))
    assert [turn.prompt_ids.tolist() for turn in back] == [turn.prompt_ids.tolist() for turn in turns]
    assert [turn.prompt_messages for turn in back] == [turn.prompt_messages for turn in turns]
    assert [repr(turn.facts) for turn in back] == [repr(turn.facts) for turn in turns]
    rollouts = list(read_rollouts(tmp_path / f"rollouts.{suffix}", tmp_path / f"turns.{suffix}"))
    assert [repr(rollout) for rollout in rollouts] == [repr(rollout) for rollout in rolltape.read(run).rollouts()]


def test_export_to_standard_output(run: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert rolltape_command(["export", str(run), "--policy", "keep-head"]) == 0
    lines = capfdbinary.readouterr().out.splitlines()
    assert {json.loads(line)["schema"] for line in lines} == {"rolltape.sample/1"}


def test_query_has_the_four_tables(cli: Cli, run: Path) -> None:
    for table, count in {"rollouts": 2, "turns": 3, "messages": 7, "samples": 3}.items():
        assert rows(cli("query", run, f"SELECT count(*) AS n FROM {table}", "--json")) == [{"n": count}]


def test_query_prints_csv_json_and_tables(cli: Cli, run: Path) -> None:
    sql = "SELECT t.finish, r.reward, t.sampled_ids AS ids FROM turns t JOIN rollouts r USING (rollout)"
    order = {"length,1.0,[20]", 'stop,1.0,"[10, 11, 12]"', "stop,0.0,[30]"}
    assert set(cli("query", run, sql, "--format", "csv").out.splitlines()) == {"finish,reward,ids", *order}
    assert {"finish": "length", "reward": 1.0, "ids": [20]} in rows(cli("query", run, sql, "--json"))
    assert cli("query", run, sql).out.splitlines()[0].split() == ["finish", "reward", "ids"]
    nan = "SELECT reward_terms['a'] AS a FROM rollouts ORDER BY attempt"
    assert rows(cli("query", run, nan, "--json"))[0] == {"a": {"$float": "nan"}}


def test_columns_of_a_query_with_one_name_are_told_apart_and_none_is_lost(cli: Cli, run: Path) -> None:
    sql = "SELECT 1 AS a, 2 AS a, 3 AS a_1, 4 AS a"
    assert rows(cli("query", run, sql, "--json")) == [{"a": 1, "a_1": 2, "a_1_1": 3, "a_2": 4}]
    assert cli("query", run, sql, "--format", "csv").out == "a,a_1,a_1_1,a_2\n1,2,3,4\n"


def test_a_query_shows_times_with_their_zone(cli: Cli, run: Path) -> None:
    (row,) = rows(cli("query", run, "SELECT now() AS a, [now()] AS b, date_trunc('day', now()) AS c", "--json"))
    assert str(row["a"])[:10] == str(row["c"])[:10]
    assert row["b"] == [row["a"]]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_csv('{file}')",
        "SELECT * FROM '{file}'",
        "COPY (SELECT 1) TO '{file}'",
        "ATTACH '{file}'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "SET autoinstall_known_extensions = true; INSTALL httpfs",
    ],
)
def test_a_query_reaches_nothing_but_the_run_unless_it_may(cli: Cli, run: Path, tmp_path: Path, sql: str) -> None:
    file = tmp_path / "a.csv"
    file.write_text("a,b\n1,2\n")
    done = cli("query", run, sql.format(file=file))
    assert (done.code, file.read_text()) == (2, "a,b\n1,2\n")
    if "read_csv" in sql:
        assert "--external-access allows it" in done.err
        assert rows(cli("query", run, sql.format(file=file), "--external-access", "--json")) == [{"a": 1, "b": 2}]


def test_a_query_in_a_pipe_is_not_cut(cli: Cli, run: Path) -> None:
    assert cli("query", run, "SELECT repeat('long ', 40) AS a, 1 AS b").out.splitlines()[1].split() == [
        *["long"] * 40,
        "1",
    ]


def test_query_builds_only_the_tables_that_are_named(cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    table = query._table

    def counted(name: str, tape: OpenedRun, policy: CutPolicy, credit: Credit) -> object:
        built.append(name)
        return table(name, tape, policy, credit)

    monkeypatch.setattr(query, "_table", counted)
    assert cli("query", run, "SELECT turns, sampled_tokens FROM rollouts").code == 0
    assert cli("query", run, "SELECT 'samples'").code == 0
    assert built == ["rollouts"]


def test_seal_then_everything_is_as_before(cli: Cli, run: Path, tmp_path: Path) -> None:
    before = [cli(*command, run).out for command in (["ls"], ["samples"], ["ledger"], ["query"])[:3]]
    sealed = cli("seal", run)
    assert (sealed.code, sealed.out) == (0, "2 rollouts, 3 turns, and 5 sampled tokens sealed in 1 shard\n")
    assert [cli(*command, run).out for command in (["ls"], ["samples"], ["ledger"])] == before
    away = tmp_path / "away"
    assert rows(cli("seal", run, "--to", away, "--json"))[0]["rollouts"] == 2
    assert cli("ls", away).out == before[0]


def test_prune_asks_first(cli: Cli, run: Path) -> None:
    told = cli("prune", run, "--before-step", 2, "--dry-run")
    assert (told.code, told.out) == (0, "would delete 3 turns with 5 sampled tokens of 2 rollouts\n")
    refused = cli("prune", run, "--before-step", 2)
    assert refused.code == 2
    assert refused.err.startswith("rolltape: --yes: required to delete 3 turns")
    assert cli("prune", run, "--side-array", "experts", "--yes").code == 0
    assert all(not turn.side for rollout in rolltape.read(run).rollouts() for turn in rollout.turns)
    assert cli("prune", run, "--before-step", 2, "--yes").out.startswith("deleted 3 turns")
    assert "(side array experts pruned, turns pruned)" in cli("ls", run).out
    assert cli("check", run).code == 0


def test_a_rollout_without_its_turns_says_that_they_were_pruned(cli: Cli, run: Path, rollout_id: str) -> None:
    cli("prune", run, "--before-step", 2, "--yes")
    for command in (["show"], ["tree"], ["show", "--part", "tree"]):
        out = cli(command[0], run, rollout_id, *command[1:]).out
        assert "session 0: its turns were pruned\n" in out
        assert "0 turns" not in out
    facts = cli("show", run, rollout_id).out.splitlines()
    assert "pruned: turns" in facts
    assert "4 sampled tokens: 4 dropped:pruned; 0 samples under exact" in facts


def test_check_holds_on_a_sound_run(cli: Cli, run: Path) -> None:
    result = cli("check", run)
    assert result.code == 0
    assert result.out == "2 rollouts, 3 turns, 5 sampled tokens checked under exact, keep-head, slime: no breaches\n"
    policies = ["exact", "keep-head", "slime"]
    assert rows(cli("check", run, "--json")) == [
        {"rollouts": 2, "turns": 3, "sampled_tokens": 5, "policies": policies, "token_steps": 0, "breaches": 0}
    ]


def test_only_the_latest_try_becomes_samples(cli: Cli, run: Path, rollout_id: str) -> None:
    with (
        rolltape.open(run) as tape,
        tape.rollout(task_id="t", step=1, attempt=0, new_try=True) as rollout,
    ):
        rollout.session().record_turn(
            prompt_messages=[{"role": "user", "content": "fix it"}],
            prompt_ids=[1, 2],
            sampled_ids=[77],
            logprobs=[-1.0],
            reply={"role": "assistant", "content": "new"},
            finish="stop",
        )
        rollout.finish(reward=3.0)
    listed = rows(cli("samples", run, "--json"))
    assert [(row["try_index"], row["advantage"]) for row in listed if row["rollout"] == rollout_id] == [(1, 1.5)]
    assert cli("show", run, rollout_id).out.endswith("1 2 «77»\n")
    assert len(rows(cli("samples", run, rollout_id, "--try", 0, "--json"))) == 2
    assert len(rows(cli("ls", run, "--json"))) == 3
