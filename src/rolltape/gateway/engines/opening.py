"""Open an engine from the text that names it on a command line."""

import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from rolltape.errors import EngineError
from rolltape.gateway.engines import ENGINE_KINDS, ENGINE_SPELLINGS
from rolltape.gateway.engines.protocol import Engine
from rolltape.records.turn import LogprobKind
from rolltape.tiny import shipped_model


def parse_spec(spec: str) -> tuple[str, str]:
    """Parse a text such as `sglang:URL` into the kind of engine and its place; raises EngineError for unknown kinds."""
    kind, _, place = spec.partition(":")
    if kind == "embedded":
        warnings.warn("the engine `embedded` is now `tiny`", DeprecationWarning, stacklevel=3)
        kind = "tiny"
    if kind not in ENGINE_KINDS or (not place and "[" not in ENGINE_KINDS[kind].spelling):
        raise EngineError(f"{spec!r} names no engine; known are {ENGINE_SPELLINGS}")
    return kind, place


def open_engine(spec: str, **options: Any) -> Engine:
    """Open the engine that a text names; raises EngineError for an invalid text or option.

    The options are those of `open_engines`; for None the engine's default applies. No connection is made yet.
    """
    kind, place = parse_spec(spec)
    _, opener, takes = ENGINE_KINDS[kind]
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name not in takes:
            raise EngineError(f"{spec}: {name} is given, which {kind} does not take; it takes {', '.join(takes)}")
    module, _, name = opener.partition(":")
    return cast("Engine", getattr(import_module(f"rolltape.gateway.engines.{module}"), name)(place, **given))


def open_engines(
    specs: Sequence[str],
    *,
    api_key: str | None = None,
    model: str | None = None,
    logprob_kind: LogprobKind | None = None,
    routed_experts: bool = False,
    kept_ids: bool = False,
) -> list[Engine]:
    """Open engines that serve the same model. Engines at an address get the key, engines with that option the model.

    The other options apply to each engine, and are an error for an engine without them.
    """
    return [
        open_engine(
            spec,
            api_key=api_key if "://" in spec else None,
            model=model if "model" in ENGINE_KINDS[parse_spec(spec)[0]].options else None,
            logprob_kind=logprob_kind,
            routed_experts=routed_experts or None,
            kept_ids=kept_ids or None,
        )
        for spec in specs
    ]


def tiny_folder(specs: Sequence[str]) -> Path | None:
    """The folder of the first tiny engine, which has the model's tokenizer, or None without such an engine."""
    places = [place for kind, place in map(parse_spec, specs) if kind == "tiny"]
    return (Path(places[0]) if places[0] else shipped_model()) if places else None
