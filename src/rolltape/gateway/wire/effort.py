"""How much a model shall think, as both OpenAI APIs ask for it."""

from rolltape.gateway.wire.fields import Fields


def read_effort(fields: Fields, name: str, unhonoured: list[str]) -> bool | None:
    """Whether to think at all. How long is the model's own affair, and that is added to what is unhonoured."""
    effort = fields.maybe_text(name)
    if effort is None:
        return None
    if effort != "none":
        unhonoured.append(f"{fields.at(name)} {ascii(effort)[:40]}: thinking is on, for as long as the model likes")
    return effort != "none"
