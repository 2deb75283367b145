"""GRPO's loss. What it leaves out is decided by the same object that the token export is given."""

from typing import Any

import torch
from torch import Tensor

from rolltape.integrations.torch import SampleBatch
from rolltape.tokens import PpoClip


def logprobs_of(model: Any, batch: SampleBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """The model's logprobs of the trained ids, each at its own place, and its entropy there; elsewhere 0."""
    # Padding is on the right, where causal attention never looks.
    hidden_bld = model.model(batch.ids_bl).last_hidden_state
    before_bl = batch.trained_bl[:, 1:]  # the places from which trained ids are predicted
    logits_nv = model.lm_head(hidden_bld[:, :-1][before_bl]) / temperature
    distribution_nv = torch.log_softmax(logits_nv, dim=-1)
    logprobs_n = distribution_nv.gather(-1, batch.ids_bl[:, 1:][before_bl][:, None])[:, 0]
    entropy_n = -(distribution_nv.exp() * distribution_nv).sum(-1).detach()
    empty_bl = torch.zeros(batch.ids_bl.shape)
    return empty_bl.masked_scatter(batch.trained_bl, logprobs_n), empty_bl.masked_scatter(batch.trained_bl, entropy_n)


def grpo_loss(clip: PpoClip, batch: SampleBatch, logprobs_bl: Tensor, rollouts: int) -> Tensor:
    """A mean over rollouts, whose samples share the weight of one, and in each a mean over its trained tokens."""
    inference_bl = batch.inference_logprobs_bl.nan_to_num(0.0)
    ratio_bl = (logprobs_bl - inference_bl).exp()
    columns = {
        "trainer_logprobs": logprobs_bl,
        "ratio": ratio_bl,
        "old_ratio": ratio_bl,
        "advantages": batch.spread(batch.advantages_b),
    }
    gain_bl = clip.pull(columns) * ~clip.dropped(columns).all
    return -(gain_bl * batch.token_weights_bl).sum() / rollouts
