"""The flags of `rolltape collect` for a Ray cluster."""

import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rolltape.cli.parameters import flag_of, given_flags, option
from rolltape.errors import CollectError, UsageError

if TYPE_CHECKING:
    from rolltape.collect.runners.ray import ClusterSettings, PlacedEngine

_option = partial(option, section="Cluster")
_SIZE = re.compile(r"(\d+)([kmgt]?)b?", re.IGNORECASE)
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


@dataclass(frozen=True)
class ClusterOptions:
    """Where attempts run, and the resources that they and engines use of a cluster."""

    runner: Annotated[
        Literal["local", "ray"], _option("--runner WHERE", "local, or ray to use the nodes of a Ray cluster.")
    ] = "local"
    ray_address: Annotated[str | None, _option("--ray-address ADDRESS", "Ray address (default: auto).")] = None
    publish: Annotated[
        str | None, _option("--publish URL", "Folder or fsspec URL that all nodes can write (default: RUN itself).")
    ] = None
    node_folder: Annotated[
        str | None,
        _option("--node-folder FOLDER", "Folder for journals on each node's disk (default: a temporary one)."),
    ] = None
    ray_working_dir: Annotated[
        Path | None, _option("--ray-working-dir FOLDER", "Folder with modules and programs to ship to the nodes.")
    ] = None
    ray_runtime_env: Annotated[
        str | None, _option("--ray-runtime-env JSON", "Ray's runtime_env for the nodes: JSON, or a file with it.")
    ] = None
    ray_cpus: Annotated[
        float | None, _option("--ray-cpus N", "CPUs that Ray reserves for each attempt (default: none).")
    ] = None
    ray_memory: Annotated[
        str | None, _option("--ray-memory SIZE", "Memory that Ray reserves for each attempt, such as 2g.")
    ] = None
    ray_engine: Annotated[
        str | None,
        _option(
            "--ray-engine KIND:COMMAND",
            "Start an engine on a node with GPUs instead of --engine: sglang:COMMAND or vllm:COMMAND, with {host} and "
            "{port} in it.",
        ),
    ] = None
    ray_engines: Annotated[int | None, _option("--ray-engines N", "Number of such engines (default: 1).", min=1)] = None
    ray_engine_gpus: Annotated[
        float | None, _option("--ray-engine-gpus N", "GPUs of each such engine (default: 1).", min=0)
    ] = None

    def settings(self) -> "ClusterSettings | None":
        """The cluster that the flags describe, or None if attempts run here."""
        from rolltape.collect.runners.ray import ClusterSettings

        if self.runner == "local":
            if given := given_flags({flag_of(name): value for name, value in vars(self).items() if name != "runner"}):
                raise UsageError(f"{given[0]} needs --runner ray")
            return None
        if self.ray_cpus is not None and not 0 <= self.ray_cpus < float("inf"):
            raise UsageError(f"--ray-cpus {self.ray_cpus:g}: give a number of CPUs")
        return ClusterSettings(
            address=self.ray_address or "auto",
            publish=self.publish,
            folder=self.node_folder,
            runtime_env=self._runtime_env(),
            cpus=self.ray_cpus or 0.0,
            memory=0 if self.ray_memory is None else _parse_size("--ray-memory", self.ray_memory),
            engine=self._engine(),
        )

    def _runtime_env(self) -> dict[str, Any] | None:
        env: dict[str, Any] = {}
        if self.ray_runtime_env is not None:
            env = _parse_object("--ray-runtime-env", self.ray_runtime_env)
        if self.ray_working_dir is not None:
            if not self.ray_working_dir.is_dir():
                raise UsageError(f"--ray-working-dir {self.ray_working_dir}: there is no such folder")
            if "working_dir" in env:
                raise UsageError("--ray-working-dir: --ray-runtime-env has a working_dir too; give one of them")
            env["working_dir"] = str(self.ray_working_dir.absolute())
        return env or None

    def _engine(self) -> "PlacedEngine | None":
        from rolltape.collect.runners.ray import PlacedEngine

        if self.ray_engine is None:
            of_engine = {"--ray-engines": self.ray_engines, "--ray-engine-gpus": self.ray_engine_gpus}
            if given := given_flags(of_engine):
                raise UsageError(f"{given[0]} needs --ray-engine")
            return None
        gpus = 1.0 if self.ray_engine_gpus is None else self.ray_engine_gpus
        try:
            return PlacedEngine.parse(self.ray_engine, copies=self.ray_engines or 1, gpus=gpus)
        except CollectError as error:
            raise UsageError(f"--ray-engine: {error}") from None


def _parse_size(flag: str, text: str) -> int:
    """Bytes, or a number with k, m, g or t."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or not int(found[1]):
        raise UsageError(f"{flag} {text}: give bytes, or a number with k, m, g or t, such as 2g")
    return int(found[1]) << _UNITS[found[2].lower()]


def _parse_object(flag: str, text: str) -> dict[str, Any]:
    try:
        if not text.lstrip().startswith("{"):
            text = Path(text).read_text()
        value = json.loads(text)
    except OSError as error:
        raise UsageError(f"{flag} {text}: cannot be read: {error.strerror}; give JSON, or a file with it") from None
    except ValueError as error:
        raise UsageError(f"{flag}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{flag}: a JSON {type(value).__name__}; give an object")
    return value
