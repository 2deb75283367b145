"""The gateway of a collection's agents: the model that `--model` means, and its engines."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rolltape.collect.settings import CollectSettings
from rolltape.errors import CollectError
from rolltape.gateway.engines.opening import open_engines, parse_spec, tiny_folder
from rolltape.gateway.engines.pool import EnginePool
from rolltape.gateway.engines.protocol import Engine
from rolltape.gateway.gateway import Gateway
from rolltape.gateway.settings import GatewaySettings, Patience
from rolltape.tape.recording.tape import Tape

_TINY, _TEXT_ONLY = "tiny", "openai"  # kinds of engines
_TOKENIZER = "tokenizer.json"


class ResolvedModel(NamedTuple):
    """The model of a collection."""

    folder: Path | None  # with a tokenizer and a chat template; None if the engines take messages
    name: str | None  # in the record; None for the engine's name
    requested: str | None  # of engines that serve several; None for the one that they serve
    engines: tuple[str, ...]


def make_gateway(
    settings: CollectSettings, tape: Tape, engines: Sequence[Engine] = (), *, keep_admin_key: bool = False
) -> Gateway:
    """Make a gateway by the settings of a collection. Passed `engines` replace those of the settings.

    With `keep_admin_key` a trainer in another process finds the gateway by the run.
    """
    if engines:
        folder = None if settings.model is None else Path(settings.model)
        model = ResolvedModel(folder, settings.model_name, None, ())
    else:
        model = resolve_model(settings.model, settings.model_name, settings.engines)
        engines = _open(settings, model)
    gateway_settings = GatewaySettings(
        host=settings.host,
        public_url=settings.public_url,
        admin_key=settings.admin_key,
        keep_admin_key=keep_admin_key,
        model_name=model.name,
        renderer=settings.renderer,
        thinking_retention=settings.thinking_retention,
        constrain=settings.constrain,
        patience=Patience(retry_s=settings.engine_retry_s),
        engine_limit=settings.engine_limit,
    )
    return Gateway(engine=list(engines), tape=tape, model=model.folder, settings=gateway_settings)


async def check_engines(settings: CollectSettings) -> None:
    """Raise EngineUnreachable if no engine of the settings answers. Engines in this process always do."""
    model = resolve_model(settings.model, settings.model_name, settings.engines)
    if all("://" in engine for engine in model.engines):
        pool = EnginePool(_open(settings, model))
        try:
            await pool.first_facts()
        finally:
            await pool.close()


def _open(settings: CollectSettings, model: ResolvedModel) -> list[Engine]:
    return open_engines(
        model.engines,
        api_key=settings.engine_key,
        model=model.requested,
        logprob_kind=settings.logprob_kind,
        routed_experts=settings.routed_experts,
        kept_ids=settings.kept_ids,
    )


def resolve_model(model: str | None, name: str | None, engines: Sequence[str]) -> ResolvedModel:
    """Find the model that `model` (a folder or a name) means for these engines; raises CollectError if there is none.

    Engines that return only text take any name, and need no tokenizer.
    """
    kinds = [parse_spec(engine)[0] for engine in engines]
    text_only = all(kind == _TEXT_ONLY for kind in kinds)
    if model is None and text_only:
        model = name
    if model is None:
        return _resolve_tiny(name, engines)
    if Path(model).exists():
        own = tuple(f"{_TINY}:{model}" if engine == _TINY else engine for engine in engines)
        return ResolvedModel(Path(model), name, None, own)
    if _TINY in kinds:
        raise CollectError(
            f"--model {model}: there is no such folder, and the tiny engine runs a folder's model; check the path"
        )
    folder = None if text_only else _find_cached(model)
    if folder is None and not text_only:
        raise CollectError(
            f"--model {model}: there is no such folder, and no tokenizer of that name in the Hugging Face cache; give "
            f"the folder with the {_TOKENIZER} of what {engines[0]} serves, and --served-model-name for its name"
        )
    return ResolvedModel(folder, name or model, model, tuple(engines))


def _resolve_tiny(name: str | None, engines: Sequence[str]) -> ResolvedModel:
    folder = tiny_folder(engines)
    if folder is not None:
        return ResolvedModel(folder, name, None, tuple(engines))
    raise CollectError(
        f"--engine {engines[0]}: the model is not known; give --model: a folder with the {_TOKENIZER} of what "
        f"it serves, or with {_TEXT_ONLY}:URL any name"
    )


def _find_cached(name: str) -> Path | None:
    """The folder in the Hugging Face cache with a model's tokenizer. It makes no request to the hub."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, _TOKENIZER)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None
