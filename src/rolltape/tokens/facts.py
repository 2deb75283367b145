"""What a trainer says of each sequence of a micro-batch, in words and numbers rather than tensors."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from rolltape.errors import MisalignedError

_FACTS = {
    "sample_ids": "sample",
    "rollout_ids": "rollout",
    "groups": "group",
    "env_names": "env",
    "weight_versions": "versions",
}


def has_gaps(rewards: object) -> bool:
    """Whether some of the rewards are None, of which no tensor can be made."""
    return isinstance(rewards, list | tuple) and any(reward is None for reward in rewards)


def facts_of(batch: Mapping[str, Any], sequences: int, tokens: int, where: str) -> dict[str, tuple[Any, ...]]:
    """What is said of each sequence, copied; `env` may be said of each token."""
    given = {name: tuple(_listed(batch[name])) for name in _FACTS if batch.get(name) is not None}
    if has_gaps(batch.get("rewards")):
        given["rewards"] = tuple(batch["rewards"])
    for name, values in given.items():
        if len(values) != sequences and (name != "env_names" or len(values) != tokens):
            told = ", ".join(f"{other} {len(held)}" for other, held in given.items())
            raise MisalignedError(f"{where}: there are {sequences} sequences, but {told}; give one entry for each")
    facts: dict[str, tuple[Any, ...]] = {}
    for name, values in given.items():
        if name == "rewards":
            facts["reward"] = tuple(None if reward is None else float(reward) for reward in values)
        elif name == "weight_versions":
            facts["versions"] = tuple(map(_versions, values))
        elif len(values) == sequences:
            facts[_FACTS[name]] = tuple(map(_text, values))
        else:
            facts[_FACTS[name]] = values  # a name for each token, too many to look at here
    return facts


def _listed(values: Any) -> Any:
    """Tensors and arrays as lists or numbers, whose text is that of what is in them."""
    return values.tolist() if isinstance(values, Tensor | np.ndarray) else values


def _text(value: object) -> str | None:
    # What is no valid Unicode could be written nowhere.
    return None if value is None else str(_listed(value)).encode("utf-8", "replace").decode()


def _versions(value: Any) -> tuple[str, ...]:
    many = _listed(value)
    if not isinstance(many, Iterable) or isinstance(many, str | bytes):
        many = (many,)
    return tuple(dict.fromkeys(version for version in map(_text, many) if version is not None))
