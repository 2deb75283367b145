"""prime-rl's trainer gets the groups of a run by its own packer and sender, and gives its weights to its servers."""

import http.server
import json
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from live_jobs import SUMS, function_engine, job
from prime_rl_contract import use_prime_rl
from rolltape.errors import GroupsError
from rolltape.gateway.engines.protocol import Generation
from rolltape.groups import Group
from rolltape.integrations import LiveGroups
from rolltape.integrations.prime_rl import PrimeRlFeed
from rolltape.records.sample import Sample

pytestmark = pytest.mark.filterwarnings("ignore::rolltape.export.formats.LeftOutWarning")


@pytest.fixture(autouse=True)
def prime_rl(monkeypatch: pytest.MonkeyPatch) -> None:
    use_prime_rl(monkeypatch)


class Server:
    """prime-rl's inference server, as far as weights go."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                owner.loaded.append(f"{self.path} {body['weight_dir']}")
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


def right_or_wrong(prompt: str, wanted: Generation) -> str:
    """Right and wrong in turn, so that groups have advantages."""
    right_or_wrong.calls += 1  # type: ignore[attr-defined]
    return "2" if right_or_wrong.calls % 2 else "no"  # type: ignore[attr-defined]


right_or_wrong.calls = 0  # type: ignore[attr-defined]


def feed(live: LiveGroups, folder: Path, **options: Any) -> PrimeRlFeed:
    given: dict[str, Any] = {"env_name": "sums", "seq_len": 512, "temperature": 1.0, **options}
    return PrimeRlFeed(live, folder, **given)


def received(folder: Path, step: int, ranks: int = 1) -> list[list[Any]]:
    """What the trainer's ranks get of a step, by prime-rl's receiver."""
    from prime_rl.configs.shared import FileSystemTransportConfig
    from prime_rl.transports.rollouts import setup_micro_batch_receiver

    transport = FileSystemTransportConfig()
    return [setup_micro_batch_receiver(folder, rank, step, transport).receive() for rank in range(ranks)]


def sequences(micro_batches: list[Any]) -> list[tuple[Any, ...]]:
    """Ids, trained mask, logprobs and advantages of each sequence that trains."""
    found = []
    for batch in micro_batches:
        start = 0
        for length in batch.sequence_lengths:
            part = slice(start, start + length)
            columns = (batch.input_ids, batch.loss_mask, batch.inference_logprobs, batch.advantages)
            if any(batch.loss_mask[part]):
                found.append(tuple(tuple(column[part]) for column in columns))
            start += length
    return sorted(found)


def expected(samples: list[Sample]) -> list[tuple[Any, ...]]:
    made = []
    for sample in samples:
        mask = sample.trained_mask
        logprobs = np.where(mask, sample.logprobs, 0).tolist()
        advantages = (mask * float(sample.advantage or 0)).tolist()
        made.append((tuple(sample.ids.tolist()), tuple(mask.tolist()), tuple(logprobs), tuple(advantages)))
    return sorted(made)


def samples_of(groups: list[Group]) -> list[Sample]:
    return [sample for group in groups for sample in group.samples]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_trainers_ranks_get_every_sample_of_a_step_once(ranks: int, tmp_path: Path) -> None:
    with job(tmp_path / "run", function_engine(right_or_wrong)) as live:
        with feed(live, tmp_path / "out", train_workers=ranks) as fed:
            assert fed.step == 1
            groups = live.request(SUMS[:3], step=1).wait()
            assert fed.send(groups) == len(samples_of(groups)) == 6
            assert fed.step == 2
        got = received(tmp_path / "out", 1, ranks)
        assert len({len(micro_batches) for micro_batches in got}) == 1, "all ranks have as many micro-batches"
        assert sequences([one for micro_batches in got for one in micro_batches]) == expected(samples_of(groups))


def test_the_trainers_weights_go_to_the_servers_while_no_reply_is_in_flight(server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "out" / "broadcasts" / "step_1"
    with (
        job(tmp_path / "run", function_engine(right_or_wrong)) as live,
        feed(live, tmp_path / "out", inference=[server.url]) as fed,
    ):
        fed.send(live.request(SUMS[:1], step=1).wait())
        with pytest.raises(GroupsError, match=r"broadcasts/step_1: prime-rl's trainer wrote no weights within 0\.01 s"):
            fed.load_weights(1, timeout_s=0.01)
        folder.mkdir(parents=True)
        (folder / "STABLE").touch()
        fed.load_weights(1)
        assert server.loaded == [f"/update_weights {folder}"]
        (group,) = live.request(SUMS[1:2], step=2).wait()
        assert {version for sample in group.samples for version, _ in sample.versions} == {"1"}


def test_servers_that_cannot_be_reached_leave_the_version_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "out" / "broadcasts" / "step_1"
    folder.mkdir(parents=True)
    (folder / "STABLE").touch()
    with (
        job(tmp_path / "run", function_engine(right_or_wrong)) as live,
        feed(live, tmp_path / "out", inference=["http://127.0.0.1:9"]) as fed,
    ):
        with pytest.raises(GroupsError, match="give the addresses of prime-rl's inference servers"):
            fed.load_weights(1)
        (group,) = live.request(SUMS[:1], step=1).wait()
        assert {version for sample in group.samples for version, _ in sample.versions} == {"0"}


def test_a_trainer_that_goes_on_from_a_checkpoint_gets_what_came_after_it_again(tmp_path: Path) -> None:
    sent: dict[int, list[str]] = {}
    with job(tmp_path / "run", function_engine(right_or_wrong)) as live, feed(live, tmp_path / "out") as fed:
        for step in (1, 2, 3):
            groups = live.request(SUMS[step : step + 1], step=step).wait()
            sent[step] = [sample.id for sample in samples_of(groups)]
            fed.send(groups)
    with (
        job(tmp_path / "run", function_engine(right_or_wrong)) as live,
        feed(live, tmp_path / "out", resume_step=1) as fed,
    ):
        assert fed.step == 2
        groups = live.request(SUMS[2:3], step=2).wait()
        assert [sample.id for sample in samples_of(groups)] == sent[2]
        assert fed.send(groups) == 2


def test_a_checkpoint_that_nothing_is_known_of_is_refused_by_its_file(tmp_path: Path) -> None:
    with (
        job(tmp_path / "run", function_engine(right_or_wrong)) as live,
        pytest.raises(
            GroupsError, match=r"step_7\.json: what was sent up to step 7 cannot be read: .*give a resume_step"
        ),
    ):
        feed(live, tmp_path / "out", resume_step=7)


def test_a_step_with_nothing_to_train_is_not_sent(tmp_path: Path) -> None:
    def say(prompt: str, wanted: Generation) -> str:
        if "2 + 1" in prompt:
            raise RuntimeError("out of memory")
        return "2"

    with job(tmp_path / "run", function_engine(say)) as live, feed(live, tmp_path / "out") as fed:
        sound, broken = live.request(SUMS[:2], step=1).wait()
        assert fed.send([broken]) == 0
        assert fed.step == 1
        assert not (tmp_path / "out" / "rollouts").exists()
        assert fed.send([sound]) == 2
        assert len(sequences(received(tmp_path / "out", 1)[0])) == 2


def test_samples_longer_than_the_trainers_sequences_are_left_out_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def long_or_short(prompt: str, wanted: Generation) -> str:
        return "2" if "1 + 1" in prompt else "many words " * 12

    with job(tmp_path / "run", function_engine(long_or_short)) as live:
        groups = live.request(SUMS[:2], step=1).wait()
        lengths = sorted({len(sample.ids) for sample in samples_of(groups)})
        assert len(lengths) == 2
        with feed(live, tmp_path / "out", seq_len=lengths[0]) as fed, caplog.at_level(logging.WARNING):
            assert fed.send(groups) == 2
    trained = sum(sample.trained_tokens for sample in samples_of(groups) if len(sample.ids) == lengths[1])
    assert f"2 samples with {trained} trained tokens are longer than seq_len {lengths[0]}" in caplog.text


def test_without_prime_rl_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prime_rl.trainer.batch", None)
    with (
        job(tmp_path / "run", function_engine(right_or_wrong)) as live,
        pytest.raises(ImportError, match=r"needs prime-rl 0\.8 in this environment: .*install rolltape into"),
    ):
        feed(live, tmp_path / "out")
