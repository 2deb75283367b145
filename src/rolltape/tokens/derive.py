"""Computes the columns that follow from others (ratios, mismatch, masks), directly into their buffers."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rolltape.tokens.losses import Columns, LossSpec

MISMATCH_COLUMNS = ("log_ratio", "ratio", "mismatch_kl", "prob_delta")
MASK_COLUMNS = ("masked", "masked_high", "masked_low")


@torch.no_grad()
def derive_columns(
    columns: Mapping[str, Tensor], losses: Sequence[LossSpec] | None, precision: Mapping[str, torch.dtype]
) -> None:
    """Fill the derived columns in `columns` from the others. All are flat tensors on one device.

    Ratios and mismatch are computed in float32. Masks are computed in the precision in which the trainer gave the
    columns, since a rounded value may fall on the other side of a threshold. `precision` names the columns that it gave
    in half precision. In addition, this needs memory for a few values per token for a short time.
    """
    if "each_advantage" in columns:
        _spread(columns["each_advantage"], columns["lengths"], columns["advantages"])
    if "inference_logprobs" in columns:
        _compare(columns, columns["trainer_logprobs"], columns["inference_logprobs"])
        if "ce_weights" in columns and "rl_weights" in columns:
            _forget_what_the_policy_did_not_sample(columns)
    if losses is not None:
        _mask(columns, _as_given(columns, precision), losses)


def _spread(each: Tensor, lengths: Tensor, out: Tensor) -> None:
    """Give each token its sequence's value. Lengths that do not add up cannot cause an access out of bounds."""
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


def _forget_what_the_policy_did_not_sample(columns: Columns) -> None:
    """Set the comparison to NaN at tokens that train by cross-entropy alone: they are another model's or the prompt's.

    The inference logprob that a trainer has for them is only a placeholder.
    """
    alone = (columns["ce_weights"] != 0).logical_and_(columns["rl_weights"] == 0)
    if "ref_kl_weights" in columns:
        alone.logical_and_(columns["ref_kl_weights"] == 0)
    for name in MISMATCH_COLUMNS:
        columns[name].masked_fill_(alone, torch.nan)


def _as_given(columns: Columns, precision: Mapping[str, torch.dtype]) -> Columns:
    """The columns as the trainer's loss reads them, with ratios computed in that precision."""
    inputs = {**columns, **{name: columns[name].to(dtype) for name, dtype in precision.items()}}
    trainer = inputs["trainer_logprobs"]
    if precision and "inference_logprobs" in inputs:
        inference = inputs["inference_logprobs"]
        inputs["ratio"] = torch.sub(trainer, inference).exp_()
        inputs["prob_delta"] = torch.sub(trainer.exp(), inference.exp())
    if "old_logprobs" in inputs:
        inputs["old_ratio"] = torch.sub(trainer, inputs["old_logprobs"]).exp_()
    elif "ratio" in inputs:
        inputs["old_ratio"] = inputs["ratio"]
    return inputs


def _mask(columns: Columns, inputs: Columns, losses: Sequence[LossSpec]) -> None:
    """Mark the trained tokens that get no gradient from any loss, and the side on which they were dropped."""
    masked, high, low = (columns[name] for name in MASK_COLUMNS)
    masked.copy_(columns["trained_mask"])
    high.zero_()
    low.zero_()
    for loss in losses:
        dropped = loss.dropped(inputs)
        idle = torch.logical_or(dropped.all, loss.pull(inputs) == 0)
        if loss.weights in columns:
            trains = columns[loss.weights] != 0
            high.logical_or_(dropped.high.logical_and(trains))
            low.logical_or_(dropped.low.logical_and(trains))
            idle.logical_or_(trains.logical_not_())
        else:
            high.logical_or_(dropped.high)
            low.logical_or_(dropped.low)
        masked.logical_and_(idle)
    high.logical_and_(masked)
    low.logical_and_(masked)
