"""Report what an engine really returns, as seen in its first reply."""

import msgspec

from rolltape.errors import EngineFault
from rolltape.gateway.engines.protocol import Engine, Generated, Generation
from rolltape.records.turn import Finish, LogprobKind

_KINDS = {
    None: "of unknown kind",
    LogprobKind.RAW: "raw",
    LogprobKind.AFTER_TEMPERATURE: "after temperature",
    LogprobKind.AFTER_TRUNCATION: "after truncation",
}


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """Which of the things that training needs an engine gave."""

    engine: str
    token_faithful: bool
    logprobs: bool
    missing_logprobs: int  # ids that came without one
    logprob_kind: LogprobKind | None
    stop_id_kept: bool | None  # None: this reply did not end on a stop id
    version: str | None
    side_arrays: tuple[str, ...]

    @property
    def line(self) -> str:
        """For the log."""
        if not self.token_faithful:
            return f"{self.engine}: text only, no ids and no logprobs; nothing of it can be trained"
        logprobs = f"logprobs {_KINDS[self.logprob_kind]}" if self.logprobs else "NO logprobs"
        if self.missing_logprobs:
            logprobs += f", MISSING for {self.missing_logprobs}"
        stop = {None: "the stop id not seen yet", True: "the stop id kept", False: "the stop id TRIMMED"}
        version = "no weight version" if self.version is None else f"weight version {self.version}"
        return ", ".join([f"{self.engine}: ids", logprobs, stop[self.stop_id_kept], version, *self.side_arrays])


def check(engine: Engine, wanted: Generation, generated: Generated) -> Given:
    """See what came; EngineFault where the parts of a reply do not belong together."""
    ids, logprobs = generated.ids, generated.logprobs
    where = f"{engine.name}, generation {wanted.id}"
    if logprobs is not None and len(logprobs) != len(ids):
        raise EngineFault(f"{where}: {len(ids)} sampled ids but {len(logprobs)} logprobs")
    if generated.segments and generated.segments[-1].stop != len(ids):
        raise EngineFault(f"{where}: {len(ids)} sampled ids but segments of {generated.segments[-1].stop}")
    stopped = generated.finish is Finish.STOP and engine.token_faithful
    return Given(
        engine=engine.name,
        token_faithful=engine.token_faithful,
        logprobs=logprobs is not None,
        missing_logprobs=0 if logprobs is None else int((logprobs != logprobs).sum()),
        logprob_kind=generated.logprob_kind,
        stop_id_kept=bool(len(ids) and int(ids[-1]) in wanted.stop_ids) if stopped else None,
        version=generated.last_version,
        side_arrays=tuple(generated.side_arrays),
    )
