"""What `--model` says: the folder of a model's tokenizer, or a model's name, and what engines make of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rolltape.errors import CollectError
from rolltape.gateway.engines.opening import embedded_folder, parts_of
from rolltape.tiny.shipped import shipped_model

_EMBEDDED, _TEXT_ONLY = "embedded", "openai"  # kinds of engines
_TOKENIZER = "tokenizer.json"


class Model(NamedTuple):
    """Which model is asked."""

    folder: Path  # with a tokenizer and a chat template
    name: str | None  # in the record; None: as the engine calls it
    asked: str | None  # of engines that serve several; None: the one that they serve
    engines: tuple[str, ...]


def model_of(model: str | None, name: str | None, engines: Sequence[str]) -> Model:
    """What is meant by a model and its name in the record beside these engines; CollectError if that is nothing.

    Engines that give text alone take any name: their prompts are counted with the shipped model's tokenizer.
    """
    kinds = [parts_of(engine)[0] for engine in engines]
    text_only = all(kind == _TEXT_ONLY for kind in kinds)
    if model is None and text_only:
        model = name
    if model is None:
        return _engines_own(name, engines)
    if Path(model).exists():
        return Model(Path(model), name, None, tuple(_run_from(model, engine) for engine in engines))
    if _EMBEDDED in kinds:
        raise CollectError(f"--model {model}: there is no such folder, and the embedded engine runs a folder's model")
    folder = _cached(model) or (shipped_model() if text_only else None)
    if folder is None:
        raise CollectError(
            f"--model {model}: there is no such folder, and no tokenizer of that name in the Hugging Face cache; give "
            f"the folder with the {_TOKENIZER} of what {engines[0]} serves, and --served-model-name for its name"
        )
    return Model(folder, name or model, model, tuple(engines))


def _engines_own(name: str | None, engines: Sequence[str]) -> Model:
    folder = embedded_folder(engines)
    if folder is not None:
        return Model(folder, name, None, tuple(engines))
    raise CollectError(
        f"--engine {engines[0]}: nobody says which model that is; give --model: a folder with the {_TOKENIZER} of what "
        f"it serves, or with {_TEXT_ONLY}:URL any name"
    )


def _run_from(folder: str, engine: str) -> str:
    return f"{_EMBEDDED}:{folder}" if engine == _EMBEDDED else engine


def _cached(name: str) -> Path | None:
    """The folder of a model on the hub of which a tokenizer was loaded before; nothing is asked of the hub."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, _TOKENIZER)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None
