"""What is given on the command line reaches engine, gateway, judge and record, and keys reach no record."""

import asyncio
import json
from pathlib import Path

import pytest

import rolltape
from collect.fake_judge import FakeJudge, Says, in_turn
from collecting import SUMS, collected, command, instant, rollouts, task_file
from commands import Cli
from rolltape.collect.environments import judge
from rolltape.collect.environments.judge import Judge
from rolltape.collect.runners.gateway import resolve_model
from rolltape.errors import CollectError
from rolltape.records.rollout import StopReason
from rolltape.records.turn import LogprobKind
from rolltape.tiny import shipped_model

SECRET = "sk-nobody-may-see-this"
GRADES = '{"polite": {"reason": "yes", "grade": 10}}'


@pytest.fixture(autouse=True)
def _no_judge_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (judge.URL_VARIABLE, judge.MODEL_VARIABLE, judge.KEY_VARIABLE, "ROLLTAPE_ENGINE_KEY"):
        monkeypatch.delenv(variable, raising=False)


def assert_nowhere(secret: str, *places: Path) -> None:
    """That no file in these places holds it."""
    files = [file for place in places for file in ([place] if place.is_file() else place.rglob("*")) if file.is_file()]
    assert files
    assert not [file for file in files if secret.encode() in file.read_bytes()]


def test_sampling_is_forced_and_recorded(tmp_path: Path, cli: Cli) -> None:
    run = tmp_path / "run"
    flags = ("--temperature", 0.5, "--top-p", 0.9, "--top-k", 40, "--max-reply-tokens", 3, "--force", "min_p=0.1")
    with instant(lambda asked: "1 2 3 4 5 6 7 8").in_thread() as engine:
        how = ("--engine", f"sglang:{engine.url}", "--model", shipped_model(), "-g", 1, "--logprobs", "raw")
        assert cli("collect", task_file(tmp_path, SUMS[:1]), "--run", run, *how, *flags).code == 0
        asked = engine.said[0].asked.body["sampling_params"]
    wanted = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1}
    assert wanted.items() <= asked.items()
    assert asked["max_new_tokens"] == 3
    (rollout,) = rollouts(run)
    assert (wanted | {"max_tokens": 3}).items() <= rollout.turns[0].facts.sampling.items()
    assert rollout.turns[0].facts.logprob_kind is LogprobKind.RAW
    assert rollout.outcome.stop_reason is StopReason.MAX_TOKENS


def test_a_context_budget_ends_an_attempt_above_it(tmp_path: Path, cli: Cli) -> None:
    run = tmp_path / "run"
    with instant().in_thread() as engine:
        how = ("--engine", f"sglang:{engine.url}", "--model", shipped_model(), "-g", 1, "--context-budget", 5)
        assert cli("collect", task_file(tmp_path, SUMS[:1]), "--run", run, *how).code == 0
        assert engine.requests == 0
    assert rollouts(run)[0].outcome.stop_reason is StopReason.CONTEXT_OVERFLOW


@pytest.mark.parametrize("flag", ["--step", "--limit", "--group-size"])
def test_a_number_that_the_tape_cannot_hold_is_refused_before_a_run_is_made(
    flag: str, tmp_path: Path, cli: Cli
) -> None:
    result = cli("collect", task_file(tmp_path, SUMS[:1]), "--run", tmp_path / "run", flag, 2**63)
    wanted = f"rolltape: {flag} is 9223372036854775808; give at most 9223372036854775807\n"
    assert (result.code, result.err) == (2, wanted)
    assert not (tmp_path / "run").exists()


def test_the_source_is_named_as_told(tmp_path: Path, cli: Cli) -> None:
    run = tmp_path / "run"
    with instant().in_thread() as engine:
        how = ("--engine", f"sglang:{engine.url}", "--model", shipped_model(), "-g", 1)
        flags = ("--source-name", "sums-v2", "--split", "test")
        assert cli("collect", task_file(tmp_path, SUMS[:1]), "--run", run, *how, *flags).code == 0
    assert rollouts(run)[0].head.source == "sums-v2#test"


@pytest.mark.slow
async def test_an_endpoint_that_gives_text_is_asked_for_the_model_that_is_named(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out.jsonl"
    async with FakeJudge(in_turn("4")) as endpoint:
        how = ("--engine", f"openai:{endpoint.base_url}", "--model", "gpt-nobody", "--engine-key", SECRET, "-o", out)
        process = command(task_file(tmp_path, SUMS[2:3]), "--run", run, "-g", 2, *how)
        printed, noted = await asyncio.to_thread(process.communicate)
    assert process.returncode == 0, noted
    assert [body["model"] for body in endpoint.bodies] == ["gpt-nobody"] * 2
    assert endpoint.keys == [f"Bearer {SECRET}"] * 2
    assert [(one.head.model, one.reward) for one in rollouts(run)] == [("gpt-nobody", 1.0)] * 2
    assert {json.loads(line)["info"]["model"] for line in out.read_text().splitlines()} == {"gpt-nobody"}
    assert SECRET not in printed + noted
    assert_nowhere(SECRET, run, out)


@pytest.mark.slow
async def test_a_judge_is_told_once_for_all_tasks_and_its_key_is_in_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_JUDGE_KEY", SECRET)
    run, out = tmp_path / "run", tmp_path / "out.jsonl"
    open_one = {"environment": "rubric", "prompt": "Say hello.", "criteria": ["polite"]}
    own = open_one | {"prompt": "Say bye.", "judge": {"model": "judge-of-its-own"}}
    async with FakeJudge(in_turn(GRADES)) as fake:
        how = ("--judge-url", fake.base_url, "--judge-model", "judge-of-all", "--judge-key-env", "MY_JUDGE_KEY")
        process = command(task_file(tmp_path, [open_one, own]), "--run", run, "-g", 1, "-o", out, *how)
        printed, noted = await asyncio.to_thread(process.communicate)
    assert process.returncode == 0, noted
    assert {body["model"] for body in fake.bodies} == {"judge-of-all", "judge-of-its-own"}
    assert set(fake.keys) == {f"Bearer {SECRET}"}
    assert [one.reward for one in rollouts(run)] == [1.0, 1.0]
    assert SECRET not in printed + noted
    assert_nowhere(SECRET, run, out)


async def test_another_judge_cannot_go_on_with_a_collection(tmp_path: Path) -> None:
    source, run = (
        task_file(tmp_path, [{"environment": "rubric", "prompt": "Hi.", "criteria": ["polite"]}]),
        tmp_path / "r",
    )
    async with FakeJudge(in_turn(GRADES)) as fake, instant() as engine:
        first = Judge(base_url=fake.base_url, model="one")
        await collected(source, run, engine, group_size=1, judge=first)
        with pytest.raises(CollectError, match="judge was 'one' and is 'two'"):
            await collected(
                source, run, engine, group_size=1, judge=Judge(base_url=fake.base_url, model="two"), resume=True
            )
        await collected(
            source, run, engine, group_size=1, judge=Judge(base_url="http://elsewhere/v1", model="one"), resume=True
        )


def test_without_a_judge_a_rubric_says_how_to_name_one(tmp_path: Path, cli: Cli) -> None:
    task = {"environment": "rubric", "prompt": "Hi.", "criteria": ["polite"]}
    result = cli("collect", task_file(tmp_path, [task]), "--run", tmp_path / "run")
    assert result.code == 2
    assert "its judge has no base_url; add it to the task, give --judge-url, or set ROLLTAPE_JUDGE_URL" in result.err


async def test_a_text_cut_at_its_limit_is_no_overflow(tmp_path: Path) -> None:
    body = {"choices": [{"message": {"role": "assistant", "content": "4 5"}, "finish_reason": "length"}]}
    run = tmp_path / "run"
    async with FakeJudge(in_turn(Says(body=json.dumps(body)))) as endpoint:
        engines = (f"openai:{endpoint.base_url}",)
        (result,) = await collected(task_file(tmp_path, SUMS[:1]), run, group_size=1, engines=engines, model="some-gpt")
    assert result.stop_reason is StopReason.MAX_TOKENS


def test_a_model_folder_is_what_the_tiny_engine_runs(tmp_path: Path, cli: Cli) -> None:
    folder = tmp_path / "mine"
    folder.symlink_to(shipped_model())
    result = cli("collect", task_file(tmp_path, SUMS[:1]), "--run", tmp_path / "run", "-g", 1, "--model", folder)
    assert result.code == 0
    assert rolltape.read(tmp_path / "run").index()[0].head.model == "mine"


SGLANG, OPENAI = "sglang:http://127.0.0.1:1", "openai:http://127.0.0.1:1/v1"


@pytest.mark.parametrize(
    ("model", "engine", "said"),
    [
        ("Qwen/Nobody", SGLANG, "--model Qwen/Nobody: there is no such folder, and no tokenizer of that name in the"),
        ("./nothing here", SGLANG, "--model ./nothing here: there is no such folder"),
        ("qwen", "tiny", "--model qwen: there is no such folder, and the tiny engine runs a folder's model"),
        (None, SGLANG, f"--engine {SGLANG}: the model is not known; give --model"),
        (None, OPENAI, f"--engine {OPENAI}: the model is not known; give --model"),
    ],
)
def test_a_model_that_cannot_be_found_is_refused_before_a_run_is_made(
    model: str | None, engine: str, said: str, tmp_path: Path, cli: Cli
) -> None:
    flags = () if model is None else ("--model", model)
    result = cli("collect", task_file(tmp_path), "--run", tmp_path / "run", "--engine", engine, *flags)
    assert result.code == 2
    assert said in result.err
    assert not (tmp_path / "run").exists()


def test_a_name_whose_tokenizer_is_in_the_hub_cache_is_that_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    revision = tmp_path / "models--Qwen--Some" / "snapshots" / ("a" * 40)
    revision.mkdir(parents=True)
    (revision / "tokenizer.json").touch()
    (tmp_path / "models--Qwen--Some" / "refs").mkdir()
    (tmp_path / "models--Qwen--Some" / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    found = resolve_model("Qwen/Some", None, [SGLANG])
    assert (found.folder, found.name) == (revision, "Qwen/Some")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--max-time", "nan"), "--max-time is nan; give more than 0"),
        (("--max-cost", "5"), "--max-cost is 5, but nothing has a price; give --price-in and --price-out"),
        (("--price-in", "1"), "--price-in and --price-out go together; give both"),
    ],
)
def test_what_is_wrong_with_settings_is_told_by_the_names_of_flags(
    flags: tuple[str, ...], problem: str, tmp_path: Path, cli: Cli
) -> None:
    failed = cli("collect", task_file(tmp_path), "--run", tmp_path / "run", *flags)
    assert (failed.code, failed.err) == (2, f"rolltape: {problem}\n")
