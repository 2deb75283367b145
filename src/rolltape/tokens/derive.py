"""Compute the columns that follow from others (ratios, mismatch, masks), in float32, straight into their buffers."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rolltape.tokens.losses import LossSpec

MISMATCH_COLUMNS = ("log_ratio", "ratio", "mismatch_kl", "prob_delta")
MASK_COLUMNS = ("masked", "masked_high", "masked_low")


@torch.no_grad()
def derive_columns(columns: Mapping[str, Tensor], loss: LossSpec | None) -> None:
    """Fill the derived ones among `columns` from the others; all are flat tensors on one device.

    On top of the columns this takes memory for a few values per token, for a moment.
    """
    if "each_advantage" in columns:
        _spread(columns["each_advantage"], columns["lengths"], columns["advantages"])
    if "inference_logprobs" in columns:
        _compare(columns, columns["trainer_logprobs"], columns["inference_logprobs"])
    if loss is not None:
        _mask(columns, loss)


def _spread(each: Tensor, lengths: Tensor, out: Tensor) -> None:
    """Give each token its sequence's value; lengths that do not add up cannot lead out of bounds."""
    tokens = torch.arange(len(out), dtype=torch.int32, device=out.device)
    ends = lengths.cumsum(0, dtype=torch.int32)
    owner = torch.searchsorted(ends, tokens, right=True, out_int32=True).clamp_(max=len(ends) - 1)
    torch.index_select(each, 0, owner, out=out)


def _compare(columns: Mapping[str, Tensor], trainer: Tensor, inference: Tensor) -> None:
    log_ratio = torch.sub(trainer, inference, out=columns["log_ratio"])
    torch.exp(log_ratio, out=columns["ratio"])
    # exp(r) - r - 1 as expm1(r) - r: for a small r, subtracting 1 last would cancel every digit.
    torch.expm1(log_ratio, out=columns["mismatch_kl"]).sub_(log_ratio)
    torch.exp(trainer, out=columns["prob_delta"]).sub_(torch.exp(inference))


def _mask(columns: Mapping[str, Tensor], loss: LossSpec) -> None:
    inputs = dict(columns)
    if "old_logprobs" in columns:
        inputs["old_ratio"] = torch.sub(columns["trainer_logprobs"], columns["old_logprobs"]).exp_()
    elif "ratio" in columns:
        inputs["old_ratio"] = columns["ratio"]
    trained = columns["trained_mask"]
    dropped = loss.dropped(inputs)
    torch.logical_and(trained, dropped.high, out=columns["masked_high"])
    torch.logical_and(trained, dropped.low, out=columns["masked_low"])
    pull = loss.pull(inputs)
    if loss.weights in columns:
        pull *= columns[loss.weights]
    torch.logical_and(trained, dropped.all.logical_or_(pull == 0), out=columns["masked"])
