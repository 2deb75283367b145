"""`ClusterSettings`: how a collection uses a Ray cluster."""

from typing import Any, NamedTuple

from rolltape.errors import CollectError

_PLACES = ("{host}", "{port}")


class PlacedEngine(NamedTuple):
    """An engine that the collection starts on nodes with GPUs, and ends when it ends.

    Example:

        PlacedEngine("vllm", "vllm serve /models/qwen3-8b --host {host} --port {port}", copies=2, gpus=4)
    """

    kind: str  # as in `--engine KIND:URL`
    command: str  # a line in a shell's quoting, with {host} and {port}
    copies: int = 1
    gpus: float = 1.0  # of each
    start_s: float = 900.0  # to find a node for it, and until it answers

    @classmethod
    def parse(cls, text: str, **fields: Any) -> "PlacedEngine":
        """Parse `sglang:COMMAND` or `vllm:COMMAND`; raises CollectError for anything else."""
        kind, colon, command = text.partition(":")
        if not colon or kind not in ("sglang", "vllm") or not command.strip() or "://" in command.partition(" ")[0]:
            raise CollectError(f"{text!r} starts no engine; give sglang:COMMAND or vllm:COMMAND")
        if missing := [place for place in _PLACES if place not in command]:
            raise CollectError(f"{text!r} has no {' and no '.join(missing)}, where the node's address is put in")
        return cls(kind, command, **fields)


class ClusterSettings(NamedTuple):
    """The address of the cluster, where its nodes write, and the resources of attempts and engines."""

    address: str = "auto"  # of Ray's head
    publish: str | None = None  # a path or URL that all nodes can access; None for the run's own folder
    folder: str | None = None  # for journals, on each node's own disk; None for its folder for temporary files
    # Ray's: `working_dir` ships a folder of modules, `pip` installs packages, and so on.
    runtime_env: dict[str, Any] | None = None
    cpus: float = 0.0  # that Ray reserves for each attempt
    memory: int = 0  # bytes that Ray reserves for each attempt
    engine: PlacedEngine | None = None  # None for the engines of the collection's settings
