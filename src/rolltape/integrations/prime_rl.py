"""prime-rl: micro-batches for its trainer, with its own packer and sender, in place of its orchestrator.

    with LiveGroups("runs/exp1", collect=settings, engine="vllm:http://127.0.0.1:8000", version="0") as live:
        with PrimeRlFeed(live, "outputs", env_name="math", seq_len=8192, inference=["http://127.0.0.1:8000"]) as feed:
            for step in range(feed.step, 101):
                feed.send(live.request(next_tasks(), step=step).wait())
                feed.load_weights(step)  # that the trainer has after this step

prime-rl's trainer and inference servers run as usual. docs/how-to/train/prime-rl.md shows how.
"""

import json
import logging
import time
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Self
from urllib.error import URLError
from urllib.request import Request, urlopen

from rolltape.errors import GroupsError
from rolltape.export.formats.prime_rl import Temperatures, training_samples
from rolltape.groups import Group
from rolltape.integrations.background import BackgroundLoop
from rolltape.integrations.live import LiveGroups
from rolltape.records.sample import Sample
from rolltape.tape.rundir import write_whole

log = logging.getLogger("rolltape.integrations")

_LOOK_EVERY_S = 0.2  # how often to check whether the trainer has written weights
_LOADING_TIMEOUT_S = 1200.0  # of a large model from a shared file system


class PrimeRlFeed:
    """Sends groups to prime-rl's trainer, a step at a time, and its weights to the inference servers.

    Steps count from 1, as in prime-rl. The weights after step n are version n; version 0 is the start.

    Each step saves which groups were sent, in `rolltape/step_N.json` of the output folder. Start with `resume_step=N`
    if the trainer continues from its checkpoint N: `live.request` then gives later groups again, from the tape. Threads
    may not share it.
    """

    def __init__(
        self,
        live: LiveGroups,
        output_dir: str | PathLike[str],
        *,
        env_name: str,
        seq_len: int,
        train_workers: int = 1,
        pad_to_multiple_of: int = 1,
        temperature: Temperatures | None = None,
        transport: Any | None = None,
        inference: Sequence[str] = (),
        resume_step: int | None = None,
    ) -> None:
        """Prepare the sender; nothing is sent yet.

        Arguments:
            live: The source of groups. It is started, and stays open.
            output_dir: `output_dir` of prime-rl's trainer.
            env_name: The name under which prime-rl shows its metrics.
            seq_len: `model.seq_len` of the trainer. A sample that is longer is left out, as a whole.
            train_workers: The trainer's data-parallel ranks.
            pad_to_multiple_of: The multiple that the trainer's context parallelism or precision needs.
            temperature: For turns that recorded none.
            transport: prime-rl's transport configuration, if it is not the file system.
            inference: The addresses of prime-rl's inference servers, for `load_weights`.
            resume_step: The trainer's checkpoint to continue from.
        """
        self._prime_rl = _load_prime_rl()
        self._live = live.start()
        self._output_dir = Path(output_dir)
        self._env_name = env_name
        self._seq_len = seq_len
        self._train_workers = train_workers
        self._pad_to_multiple_of = pad_to_multiple_of
        self._temperature = temperature
        self._inference = [address.rstrip("/") for address in inference]
        self.step = 1 if resume_step is None else resume_step + 1  # the next step to send
        if resume_step:
            live.load_state_dict(self._load_state(resume_step))
        self._background = BackgroundLoop("rolltape-prime-rl")
        self._sender = self._background.submit(self._open_sender(transport)).result()

    async def _open_sender(self, transport: Any | None) -> Any:
        # In the event loop in which it sends, because its sockets belong to that loop.
        given = self._prime_rl.FileSystemTransportConfig() if transport is None else transport
        return self._prime_rl.setup_micro_batch_sender(self._output_dir, self._train_workers, self.step, given)

    def send(self, groups: Iterable[Group]) -> int:
        """Send a step's groups to the trainer, and mark them as done. Return how many samples were sent.

        If it is 0, no group has anything to train. Then nothing was sent, and the trainer still waits for this step.
        """
        given = list(groups)
        samples = [sample for group in given for sample in group.samples]
        fitting = [sample for sample in samples if len(sample.ids) <= self._seq_len]
        if len(fitting) < len(samples):
            self._warn_of_long([sample for sample in samples if len(sample.ids) > self._seq_len])
        rows = training_samples(fitting, env_name=self._env_name, temperature=self._temperature)
        if rows:
            grid = self._prime_rl.prepare_batch(
                [self._training_sample(row) for row in rows],
                self._seq_len,
                self._train_workers,
                self._prime_rl.build_bin_cost(None),
                self._pad_to_multiple_of,
            )
            self._background.submit(self._sender.send(grid)).result()
        for group in given:
            group.done()
        if rows:
            self._save_state()
            self.step += 1
        return len(rows)

    def _training_sample(self, row: dict[str, Any]) -> Any:
        experts = row.get("routed_experts")
        made = {} if experts is None else {"routed_experts": self._prime_rl.RoutedExperts(**experts)}
        return self._prime_rl.TrainingSample(**{**row, **made})

    def _warn_of_long(self, samples: Sequence[Sample]) -> None:
        trained = sum(int(sample.trained_mask.sum()) for sample in samples)
        log.warning(
            "step %d: %d samples with %d trained tokens are longer than seq_len %d, so that prime-rl would cut them; "
            "they are left out: limit what an agent may do, or raise seq_len",
            self.step,
            len(samples),
            trained,
            self._seq_len,
        )

    def _state_file(self, step: int) -> Path:
        return self._output_dir / "rolltape" / f"step_{step}.json"

    def _load_state(self, step: int) -> dict[str, Any]:
        path = self._state_file(step)
        try:
            state: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise GroupsError(
                f"{path}: what was sent up to step {step} cannot be read: {error}; give a resume_step that was sent to "
                "this output_dir"
            ) from None
        return state

    def _save_state(self) -> None:
        path = self._state_file(self.step)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(self._live.state_dict()).encode())

    def load_weights(self, version: int, timeout_s: float = 3600.0) -> None:
        """Wait until the trainer has written a version of its weights, and make the inference servers load it.

        Replies in flight are interrupted, and continue under the new version.
        """
        folder = self._output_dir / "broadcasts" / f"step_{version}"
        deadline = time.monotonic() + timeout_s
        while not (folder / "STABLE").exists():
            if time.monotonic() >= deadline:
                raise GroupsError(f"{folder}: prime-rl's trainer wrote no weights within {timeout_s:g} s; see its log")
            time.sleep(_LOOK_EVERY_S)
        with self._live.new_weights(str(version)):
            for address in self._inference:
                _post(f"{address}/update_weights", {"weight_dir": folder.as_posix()})

    def close(self) -> None:
        """End the sender. The trainer is not notified."""
        self._sender.close()
        self._background.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _post(url: str, body: dict[str, Any]) -> None:
    request = Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urlopen(request, timeout=_LOADING_TIMEOUT_S):
            pass
    except (URLError, TimeoutError) as error:
        raise GroupsError(f"{url}: {error}; give the addresses of prime-rl's inference servers") from None


def _load_prime_rl() -> Any:
    """The parts of prime-rl that are used here, by name."""
    try:
        from prime_rl.configs.shared import FileSystemTransportConfig
        from prime_rl.trainer.batch import build_bin_cost, prepare_batch
        from prime_rl.transports.rollouts import RoutedExperts, TrainingSample, setup_micro_batch_sender
    except ImportError as error:
        raise ImportError(
            f"rolltape.integrations.prime_rl needs prime-rl 0.8 in this environment: {error}; install rolltape into "
            "prime-rl's own, with `uv pip install rolltape`"
        ) from error
    from types import SimpleNamespace

    return SimpleNamespace(
        FileSystemTransportConfig=FileSystemTransportConfig,
        RoutedExperts=RoutedExperts,
        TrainingSample=TrainingSample,
        build_bin_cost=build_bin_cost,
        prepare_batch=prepare_batch,
        setup_micro_batch_sender=setup_micro_batch_sender,
    )
