"""Inference engines, one file or folder each, and their names on a command line."""

from typing import NamedTuple


class EngineKind(NamedTuple):
    """An engine that a command line can name. Its module is imported only when the engine is opened."""

    spelling: str  # as a user types it, with optional parts in brackets
    opener: str  # `module:name` below this package, called with the place and the options
    options: tuple[str, ...] = ()


ENGINE_KINDS: dict[str, EngineKind] = {
    "sglang": EngineKind(
        "sglang:URL", "sglang.engine:SglangEngine", ("api_key", "logprob_kind", "routed_experts", "kept_ids")
    ),
    "vllm": EngineKind("vllm:URL", "vllm:VllmEngine", ("api_key", "model", "logprob_kind")),
    "llamacpp": EngineKind("llamacpp:URL", "llamacpp:LlamaCppEngine", ("api_key",)),
    "openai": EngineKind("openai:URL", "openai_text:OpenAITextEngine", ("api_key", "model")),
    "tiny": EngineKind("tiny[:FOLDER]", "inprocess:open_tiny", ("logprob_kind",)),
    "replay": EngineKind("replay:RUN#ROLLOUT", "replay:open_replay"),
}

ENGINE_SPELLINGS = ", ".join(kind.spelling for kind in ENGINE_KINDS.values())
