"""How fast a trainer's token records are checked against the tape."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import rolltape
from benchmarks.figures import Figure, main
from rolltape.samples.check.records import CHECKED_COLUMNS
from rolltape.samples.check.step import check_step
from rolltape.tokens import list_steps, score_sample, write_tokens
from rolltape.tokens.files import describe_files, read_step

GROUPS = 64
ATTEMPTS = 8
TURNS = 4
PROMPT = 500  # new prompt tokens of a turn
REPLY = 500


def figures() -> Iterator[Figure]:
    """Records and tokens a second, over rollouts of several turns."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        _record(run)
        records = _score(run)
        (step,) = list_steps(run)
        tape = rolltape.read(run)
        tape.index()
        began_s, cpu_began_s = time.perf_counter(), time.process_time()
        check = check_step(tape, 0, read_step(step, columns=CHECKED_COLUMNS), files=describe_files(step, [step]))
        took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_began_s
    assert check.records == records
    assert not check.findings, check.findings[0]
    note = f"{records} records of {check.tokens / records:.0f} tokens in {took_s:.2f} s"
    yield Figure("check against the tape", records / took_s, "records a second", note=note)
    yield Figure("check against the tape, of CPU", records / cpu_s, "records a second", note=f"{cpu_s:.2f} s of CPU")


def _record(run: Path) -> None:
    random = np.random.default_rng(0)
    with rolltape.open(run, name="check") as tape:
        for group in range(GROUPS):
            for attempt in range(ATTEMPTS):
                with tape.rollout(task_id=f"task-{group}", step=0, attempt=attempt) as rollout:
                    session, ids = rollout.session(), random.integers(1, 1000, PROMPT)
                    for number in range(TURNS):
                        turn = session.record_turn(
                            prompt_messages=[{"role": "user", "content": "go"}] * (number + 1),
                            prompt_ids=ids,
                            sampled_ids=random.integers(1, 1000, REPLY),
                            logprobs=-random.random(REPLY, np.float32),
                            finish="length",
                            weight_version="1",
                        )
                        ids = np.concatenate([turn.tokens.to_numpy(), random.integers(1, 1000, PROMPT)])
                    rollout.finish(reward=float(random.random()))


def _score(run: Path) -> int:
    """Write the records of all samples; how many there are."""
    tape = rolltape.read(run)
    groups = dict.fromkeys(row.group for row in tape.index())
    made = (
        score_sample(sample, np.nan_to_num(sample.logprobs))
        for group in groups
        for sample in rolltape.samples_of_group(list(tape.rollouts(group=group)))
    )
    return write_tokens(run, 0, made)


if __name__ == "__main__":
    main({"token_check": figures})
