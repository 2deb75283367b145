"""A recorded run."""

from pathlib import Path

import pytest

import rolltape

USER = {"role": "user", "content": "fix it"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two attempts at a task: one whose reply comes back changed after it, and one that ends at once."""
    path = tmp_path / "exp"
    with rolltape.open(path) as tape:
        with tape.rollout(task_id="t", step=1, attempt=0) as rollout:
            session = rollout.session()
            session.record_turn(
                prompt_messages=[USER],
                prompt_ids=[1, 2],
                sampled_ids=[10, 11, 12],
                logprobs=[-0.5, None, -0.25],
                reply={"role": "assistant", "content": "done  so"},
                finish="stop",
                weight_version="7",
                side_arrays={"experts": [[1], [2], [3]]},
            )
            session.record_turn(
                prompt_messages=[
                    USER,
                    {"role": "assistant", "content": "done so"},
                    {"role": "user", "content": "\x1b[31mand?\u202e"},
                ],
                prompt_ids=[1, 2, 10, 12, 3, 4],
                sampled_ids=[20],
                logprobs=[-1.0],
                reply={"role": "assistant", "content": "yes"},
                finish="length",
                weight_version="8",
            )
            rollout.finish(reward=1.0, reward_terms={"a": float("nan")})
        with tape.rollout(task_id="t", step=1, attempt=1) as rollout:
            rollout.session().record_turn(
                prompt_messages=[USER],
                prompt_ids=[1, 2],
                sampled_ids=[30],
                logprobs=[-1.0],
                reply={"role": "assistant", "content": "no"},
                finish="stop",
                weight_version="8",
            )
            rollout.finish(reward=0.0)
    return path


@pytest.fixture
def rollout_id(run: Path) -> str:
    return rolltape.read(run).index()[0].head.id
