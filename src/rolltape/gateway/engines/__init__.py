"""Inference engines, one file or folder each, and how each is named on a command line."""

from typing import NamedTuple


class EngineKind(NamedTuple):
    """An engine that a command line can name. It is imported when it is opened, so that its name costs nothing."""

    spelling: str  # as a user types it; what is in brackets may be left out
    opener: str  # what is called with the place, and with those of the options that are given: `module:name` below here
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
