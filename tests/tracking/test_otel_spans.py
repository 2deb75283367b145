"""OpenTelemetry: what a collector receives over a socket of a rollout, and what happens when it refuses."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

import rolltape
from commands import Cli
from otlp_receiver import Receiver, attributes, otlp_receiver
from rolltape.records import rollout
from rolltape.records.trace import Trace, TraceStep
from rolltape.tracking import ShownStep, otel_sink, show_batch, show_step
from rolltape.tracking.traces import trace_text
from tracked import record_steps


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with otlp_receiver() as receiver:
        yield receiver


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return record_steps(tmp_path / "exp", steps=1, attempts=1)


def lines(spans: list[Span]) -> list[str]:
    """Each span in a line, under its parent."""
    names = {span.span_id: span.name for span in spans}
    return [f"{names.get(span.parent_span_id, '')} > {span.name}" for span in spans]


def test_a_rollout_is_an_agent_with_chats_and_their_tools_under_it(receiver: Receiver, run: Path) -> None:
    with otel_sink(receiver.url, name="exp") as sink:
        show_step(sink, rolltape.read(run), step=0)
    assert sink.delivery.complete
    assert [path for path, _, _ in receiver.requests] == ["/v1/traces"]
    assert lines(receiver.spans) == [
        " > invoke_agent chat",
        "invoke_agent chat > chat tiny",
        "chat tiny > execute_tool bash",
        "invoke_agent chat > chat tiny",
        "invoke_agent chat > chat tiny",
        " > step 0 train",
    ]
    root, chat, tool, *_, step = receiver.spans
    assert len({span.trace_id for span in receiver.spans[:-1]}) == 1
    assert (chat.kind, tool.kind) == (Span.SPAN_KIND_CLIENT, Span.SPAN_KIND_INTERNAL)
    assert [link.span_id for link in step.links] == [root.span_id]
    times = [((span.start_time_unix_nano, span.end_time_unix_nano)) for span in (root, chat, tool)]
    begin = 1_700_000_000_000_000_000
    assert [(start - begin, end - begin) for start, end in times] == [
        (0, 4_000_000_000),
        (0, 1_500_000_000),
        (1_500_000_000, 2_000_000_000),
    ]


def test_attributes_have_the_names_of_the_conventions(receiver: Receiver, run: Path) -> None:
    with otel_sink(receiver.url, name="exp") as sink:
        show_step(sink, rolltape.read(run), step=0, view_url="http://127.0.0.1:8500")
    root, chat, tool = map(attributes, receiver.spans[:3])
    assert root["gen_ai.operation.name"] == "invoke_agent"
    assert root["gen_ai.agent.name"] == "chat"
    assert root["gen_ai.conversation.id"] == f"{root['rolltape.rollout']}.0"
    assert root["rolltape.page"] == f"http://127.0.0.1:8500/exp/rollout/{root['rolltape.rollout']}?try=0"
    assert {name: value for name, value in chat.items() if name.startswith("gen_ai.") and "messages" not in name} == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "rolltape",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 3,
    }
    assert json.loads(chat["gen_ai.input.messages"]) == [
        {"role": "user", "parts": [{"type": "text", "content": "How many lines has parser.py?"}]}
    ]
    (reply,) = json.loads(chat["gen_ai.output.messages"])
    assert (reply["role"], reply["finish_reason"]) == ("assistant", "stop")
    assert reply["parts"] == [
        {"type": "text", "content": "I will count them."},
        {"type": "tool_call", "id": "call-0", "name": "bash", "arguments": '{"command": "wc -l"}'},
    ]
    assert tool == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "bash",
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": "call-0",
        "gen_ai.tool.call.arguments": '{"command":"wc -l"}',
        "gen_ai.tool.call.result": '"212 parser.py"',
    }
    evaluations = [(event.name, attributes(event)) for event in receiver.spans[0].events]
    assert evaluations == [
        ("gen_ai.evaluation.result", {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": 0.0}),
        ("gen_ai.evaluation.result", {"gen_ai.evaluation.name": "right", "gen_ai.evaluation.score.value": 0.0}),
    ]


def test_resource_names_the_service_and_the_run_and_headers_are_those_of_the_environment(
    receiver: Receiver, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer abc")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "trainer")
    with otel_sink(f"{receiver.url}/v1/traces", name="exp") as sink:
        show_step(sink, rolltape.read(run), step=0)
    ((path, headers, request),) = receiver.requests
    resource = attributes(request.resource_spans[0].resource)
    assert (path, headers["authorization"]) == ("/v1/traces", "Bearer abc")
    assert (resource["service.name"], resource["rolltape.run"]) == ("trainer", "exp")


def test_failed_turns_and_rollouts_are_errors_and_wrong_times_do_no_harm(receiver: Receiver) -> None:
    step = TraceStep(index=0, prompt={"seed": 2**80}, error="engine gone", started_at=1e300, ended_at=-1.0)
    trace = Trace(
        run="exp",
        rollout="r",
        try_index=0,
        group="g",
        step=0,
        attempt=0,
        status=rollout.Status.FAILED,
        reason="no engine",
        steps=(step,),
    )
    with otel_sink(receiver.url, name="exp") as sink:
        sink.put(ShownStep(split="train", step=0, traces=(trace,)))
    assert sink.delivery.complete
    root, turn = receiver.spans
    assert (root.status.code, root.status.message) == (Status.STATUS_CODE_ERROR, "no engine")
    assert (turn.status.code, turn.status.message) == (Status.STATUS_CODE_ERROR, "engine gone")
    assert 0 < root.start_time_unix_nano <= turn.start_time_unix_nano <= turn.end_time_unix_nano


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_the_thinking_of_a_reply_is_shown_under_either_of_its_names(receiver: Receiver, name: str) -> None:
    reply = {"role": "assistant", name: "one and one", "content": "2"}
    trace = Trace(
        run="exp",
        rollout="r",
        try_index=0,
        group="g",
        step=0,
        attempt=0,
        status=rollout.Status.FINISHED,
        steps=(TraceStep(index=0, policy_response=reply),),
    )
    with otel_sink(receiver.url, name="exp") as sink:
        sink.put(ShownStep(split="train", step=0, traces=(trace,)))
    (sent,) = json.loads(attributes(receiver.spans[1])["gen_ai.output.messages"])
    assert sent["parts"] == [{"type": "reasoning", "content": "one and one"}, {"type": "text", "content": "2"}]
    assert trace_text(trace) == "assistant: one and one\n2"


def test_a_message_in_parts_has_the_parts_of_the_conventions(receiver: Receiver) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    prompt = {"role": "user", "content": [{"type": "text", "text": "what is it?"}, image]}
    trace = Trace(
        run="exp",
        rollout="r",
        try_index=0,
        group="g",
        step=0,
        attempt=0,
        status=rollout.Status.FINISHED,
        steps=(TraceStep(index=0, prompt=[prompt], policy_response={"role": "assistant", "content": "a dot"}),),
    )
    with otel_sink(receiver.url, name="exp") as sink:
        sink.put(ShownStep(split="train", step=0, traces=(trace,)))
    (sent,) = json.loads(attributes(receiver.spans[1])["gen_ai.input.messages"])
    assert sent["parts"] == [{"type": "text", "content": "what is it?"}, image]


def test_batch_without_times_or_names_is_sent(receiver: Receiver) -> None:
    batch = {"input_ids": np.array([[1, 2, 3]]), "loss_mask": np.array([[0, 1, 0]]), "rewards": np.array([0.5])}
    with otel_sink(receiver.url, name="exp") as sink:
        show_batch(sink, batch, lambda ids: " ".join(map(str, ids)), split="train", step=2)
    assert lines(receiver.spans) == [
        " > invoke_agent",
        "invoke_agent > chat",
        "invoke_agent > step 1",
        " > step 2 train",
    ]


def test_step_that_a_collector_refuses_is_an_error_and_is_sent_by_the_next_push(
    receiver: Receiver, run: Path, cli: Cli
) -> None:
    receiver.refusal = 400
    refused = cli("push", run, "--to", f"otel:{receiver.url}")
    assert refused.code == 4
    assert f"{receiver.url}/v1/traces: step 0 of test was not taken" in refused.err
    receiver.refusal = None
    assert "2 steps and 2 traces pushed" in cli("push", run, "--to", f"otel:{receiver.url}").out


def test_what_is_sent_again_has_the_ids_that_it_had(receiver: Receiver, run: Path, cli: Cli) -> None:
    cli("push", run, "--to", f"otel:{receiver.url}")
    first = [(span.trace_id, span.span_id, span.name) for span in receiver.spans]
    (run / "cache" / "sent-by-otlp.jsonl").unlink()
    receiver.requests.clear()
    cli("push", run, "--to", f"otel:{receiver.url}")
    assert [(span.trace_id, span.span_id, span.name) for span in receiver.spans] == first
    receiver.requests.clear()
    cli("push", run, "--to", f"otel:{receiver.url}", "--name", "other")
    assert not {span.trace_id for span in receiver.spans} & {trace for trace, _, _ in first}


def test_address_that_is_none_is_refused(run: Path, cli: Cli) -> None:
    refused = cli("push", run, "--to", "otel:collector:4318")
    assert (refused.code, refused.err.startswith("rolltape: otel: 'collector:4318' is not an address")) == (4, True)
