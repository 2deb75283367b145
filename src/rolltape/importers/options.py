"""What a user may say about a source that it does not say itself."""

import msgspec


class ImportOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Applies to all rollouts of an import. None: the source says it, or it is not known."""

    source: str | None = None  # where the tasks come from
    split: str | None = None
    step: int | None = None
    model: str | None = None
    tokenizer: str | None = None  # a folder or name with the text of the ids
    traces: str | None = None  # prime-rl: the verifiers traces that its token exports belong to
