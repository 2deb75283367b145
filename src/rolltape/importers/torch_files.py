"""Files of `torch.save`, read without running what is pickled in them."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

from rolltape.errors import ImportFileError


def load_torch_file(path: Path) -> Any:
    """The value of a file, if it is made of numbers, texts, lists, dicts, tensors, and numpy arrays alone."""
    try:
        import torch
    except ImportError:
        raise ImportFileError(f"{path}: a file of torch; install it with pip install 'rolltape[torch]'") from None
    import numpy as np

    plain: list[Any] = [
        np.dtype,
        np.ndarray,
        *(type(np.dtype(name)) for name in ("f2", "f4", "f8", "i4", "i8", "u1", "?")),
    ]
    rebuilding = [np._core.multiarray._reconstruct, np._core.multiarray.scalar]  # type: ignore[attr-defined]
    try:
        with torch.serialization.safe_globals([*plain, *rebuilding]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        first = _first_line(error)
        raise ImportFileError(
            f"{path}: it holds Python objects, and reading them would run code of the file ({first}). "
            "Convert the file to JSON lines where you trust it"
        ) from None
    except FileNotFoundError:
        raise ImportFileError(f"{path}: there is no such file; check the path") from None
    except (EOFError, OSError, RuntimeError, zipfile.BadZipFile) as error:
        raise ImportFileError(f"{path}: no file that torch.save wrote: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "it is empty or cut short")
