"""The columns that follow from others: ratios, mismatch and masks, in float32, written where they will be read."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rolltape.tokens.losses import LossSpec, Seen

MISMATCH_COLUMNS = ("log_ratio", "ratio", "mismatch_kl", "prob_delta")
MASK_COLUMNS = ("masked", "masked_high", "masked_low")


@torch.no_grad()
def derive(columns: Mapping[str, Tensor], loss: LossSpec | None) -> None:
    """Fill the derived ones among `columns`, flat tensors of one length on one device, from the rest of them.

    Each result goes straight into its place; on top of that there are a few values a token for a moment.
    """
    if "inference_logprobs" in columns:
        _compare(columns, columns["trainer_logprobs"], columns["inference_logprobs"])
    if loss is not None:
        _mask(columns, loss)


def _compare(columns: Mapping[str, Tensor], trainer: Tensor, inference: Tensor) -> None:
    log_ratio = torch.sub(trainer, inference, out=columns["log_ratio"])
    torch.exp(log_ratio, out=columns["ratio"])
    # exp(r) - r - 1, of which nothing would be left for a small r if the 1 were taken off last.
    torch.expm1(log_ratio, out=columns["mismatch_kl"]).sub_(log_ratio)
    torch.exp(trainer, out=columns["prob_delta"]).sub_(torch.exp(inference))


def _mask(columns: Mapping[str, Tensor], loss: LossSpec) -> None:
    old = columns.get("old_logprobs")
    ratio = columns.get("ratio")
    seen = Seen(
        trainer_logprobs=columns["trainer_logprobs"],
        ratio=ratio,
        old_ratio=ratio if old is None else torch.sub(columns["trainer_logprobs"], old).exp_(),
        prob_delta=columns.get("prob_delta"),
        advantages=columns.get("advantages"),
        reference_logprobs=columns.get("reference_logprobs"),
    )
    trained = columns["trained_mask"]
    dropped = loss.dropped(seen)
    torch.logical_and(trained, dropped.high, out=columns["masked_high"])
    torch.logical_and(trained, dropped.low, out=columns["masked_low"])
    pull = loss.pull(seen)
    if loss.weights in columns:
        pull *= columns[loss.weights]
    torch.logical_and(trained, dropped.all.logical_or_(pull == 0), out=columns["masked"])
