"""What an engine gives is checked against what it must, and said."""

import asyncio
from typing import Any

import numpy as np
import pytest

from rolltape.doctor.engine.probing import generation
from rolltape.errors import CheckpointError, EngineError, EngineFault, RunNotFound
from rolltape.gateway.engines import http
from rolltape.gateway.engines.opening import open_engine
from rolltape.gateway.engines.protocol import Generated
from rolltape.gateway.turn.generate import check_generated, describe_generated
from rolltape.records.turn import Finish, LogprobKind, Segment

ENGINE = open_engine("vllm:http://127.0.0.1:1")


def given(ids: list[int], **fields: Any) -> Generated:
    logprobs = np.full(len(ids), -0.5)
    return Generated(**{"ids": np.array(ids, np.int32), "logprobs": logprobs, "finish": Finish.STOP, **fields})


def test_a_trimmed_stop_id_and_missing_logprobs_stand_out() -> None:
    wanted = generation([1], stop_ids=[9])
    line = describe_generated(ENGINE, wanted, given([3, 4], logprobs=np.array([-0.5, np.nan])))
    assert line.endswith("ids, logprobs of unknown kind, MISSING for 1, the stop id TRIMMED, no weight version")
    line = describe_generated(ENGINE, wanted, given([3, 9], logprobs=None))
    assert "NO logprobs, the stop id kept" in line
    line = describe_generated(ENGINE, wanted, given([3], finish=Finish.LENGTH, logprob_kind=LogprobKind.RAW))
    assert "logprobs raw, the stop id not seen yet" in line


def test_text_alone_is_said_to_train_nothing() -> None:
    engine = open_engine("openai:http://127.0.0.1:1/v1")
    assert "its replies cannot be trained" in describe_generated(engine, generation([1]), given([], logprobs=None))


@pytest.mark.parametrize(("kind", "program"), [("vllm", "vLLM"), ("sglang", "SGLang"), ("llamacpp", "llama.cpp")])
async def test_another_server_at_the_address_is_said_at_once(
    kind: str, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "ASK_TIMEOUT_S", 1.0)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\n\r\n")  # its body never ends
        await reader.read()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = "http://{}:{}".format(*server.sockets[0].getsockname())
        engine = open_engine(f"{kind}:{url}")
        with pytest.raises(EngineFault) as raised:
            await engine.facts()
        await engine.close()
    assert str(raised.value).startswith(
        f"{kind} {url}: /health answered 404, so the server there is not {program}; give the"
    )


def test_parts_that_do_not_belong_together_are_a_fault() -> None:
    with pytest.raises(EngineFault, match="2 sampled ids but 3 logprobs"):
        check_generated(ENGINE, generation([1]), given([1, 2], logprobs=np.zeros(3)))
    with pytest.raises(EngineFault, match="2 sampled ids but segments of 1"):
        check_generated(ENGINE, generation([1]), given([1, 2], segments=(Segment(0, 1, "v", "v"),)))


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("sglang:http://127.0.0.1:30000", "sglang http://127.0.0.1:30000"),
        ("vllm:http://127.0.0.1:8000", "vllm http://127.0.0.1:8000"),
        ("llamacpp:http://127.0.0.1:8080", "llamacpp http://127.0.0.1:8080"),
        ("openai:http://127.0.0.1:8000/v1", "openai http://127.0.0.1:8000/v1"),
        ("tiny", "tiny engine (tiny)"),
    ],
)
def test_a_text_names_an_engine(spec: str, name: str) -> None:
    assert open_engine(spec).name == name


def test_the_tiny_engine_is_found_under_its_old_name() -> None:
    with pytest.warns(DeprecationWarning, match="now `tiny`"):
        assert open_engine("embedded").name == "tiny engine (tiny)"


@pytest.mark.parametrize("spec", ["", "sglang", "sglang:", "http://127.0.0.1:1", "tgi:http://127.0.0.1:1", "replay:"])
def test_a_text_that_names_none_is_refused_with_those_that_do(spec: str) -> None:
    with pytest.raises(EngineError, match="known are sglang:URL, vllm:URL"):
        open_engine(spec)


def test_what_an_engine_cannot_take_is_refused() -> None:
    with pytest.raises(EngineError, match="is not the address"):
        open_engine("sglang:127.0.0.1:30000")
    with pytest.raises(EngineError, match="routed_experts is given, which llamacpp does not take"):
        open_engine("llamacpp:http://127.0.0.1:1", routed_experts=True)
    with pytest.raises(EngineError, match="write replay:RUN#ROLLOUT"):
        open_engine("replay:somewhere")
    with pytest.raises(CheckpointError):
        open_engine("tiny:/nowhere")
    with pytest.raises(RunNotFound):
        open_engine("replay:/nowhere#r")
