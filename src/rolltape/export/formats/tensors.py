"""numpy → torch, which is imported only where a format is made of tensors."""

from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from rolltape.errors import ExportError

if TYPE_CHECKING:
    import torch


def as_tensors(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, "torch.Tensor"]:
    """The same columns as tensors that share their memory."""
    torch = torch_module()
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def torch_module() -> ModuleType:
    """torch, if it is installed."""
    try:
        import torch
    except ImportError:
        raise ExportError(
            "this format is made of tensors, and torch is not installed; pip install 'rolltape[torch]'"
        ) from None
    return torch
