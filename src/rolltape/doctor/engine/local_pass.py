"""A forward pass of a model folder on this machine, for the logprobs that an engine with the same weights must give."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rolltape.errors import CheckpointError
from rolltape.tiny import Sampling, TinyEngine

LARGEST_TINY = 256 * 2**20  # bytes of weights up to which numpy is used
LARGEST_FLOAT32 = 4 * 2**30  # bytes of weights up to which computation is in single precision
LARGEST = 20 * 2**30  # bytes of weights up to which they are loaded

Scores = npt.NDArray[np.float64]
Scorer = Callable[[Sequence[int], Sequence[int]], Awaitable[Scores]]  # prompt and reply → the reply's raw logprobs


def why_no_pass(folder: Path) -> str | None:
    """Why the folder's model cannot be run here, or None."""
    size = _weight_bytes(folder)
    if not size:
        return "the folder has no weights"
    if size > LARGEST:
        return f"the folder's weights have {size / 2**30:.0f} GiB, more than {LARGEST / 2**30:.0f}"
    if _is_tiny(folder, size) or (find_spec("torch") and find_spec("transformers")):
        return None
    return "torch and transformers are not installed"


@asynccontextmanager
async def local_scorer(folder: Path) -> AsyncIterator[Scorer]:
    """Load the model and yield a function that scores ids with it; raises CheckpointError if loading fails."""
    if _is_tiny(folder, _weight_bytes(folder)):
        async with TinyEngine(folder) as engine:

            async def score(prompt: Sequence[int], reply: Sequence[int]) -> Scores:
                scoring = Sampling(max_tokens=0, prompt_logprobs_from=len(prompt))
                scored = await engine.generate([*prompt, *reply], scoring)
                return np.array(scored.prompt_logprobs, dtype=np.float64)

            yield score
    else:
        yield _by_transformers(folder)


def _by_transformers(folder: Path) -> Scorer:
    import torch
    import transformers

    library: Any = transformers  # partly untyped
    library.utils.logging.disable_progress_bar()
    dtype = torch.float32 if _weight_bytes(folder) <= LARGEST_FLOAT32 else "auto"
    try:
        model = library.AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, local_files_only=True).eval()
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: transformers cannot load it: {error}") from None

    async def score(prompt: Sequence[int], reply: Sequence[int]) -> Scores:
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *reply]])).logits[0, len(prompt) - 1 : -1].float()
            rows = torch.log_softmax(logits, dim=-1)
        given: Scores = rows[torch.arange(len(reply)), torch.tensor(list(reply))].double().numpy()
        return given

    return score


def _is_tiny(folder: Path, size: int) -> bool:
    from rolltape.tiny.checkpoint import read_config

    if size > LARGEST_TINY:
        return False
    try:
        read_config(folder)
    except CheckpointError:
        return False
    return True


def _weight_bytes(folder: Path) -> int:
    files = [*folder.glob("*.safetensors")] or [*folder.glob("pytorch_model*.bin")]
    return sum(file.stat().st_size for file in files)
