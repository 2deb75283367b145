"""The weights: read once from the checkpoint that ships with Rolltape, and handed to the engine after each step."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from rolltape.integrations import LiveGroups
from rolltape.tiny import shipped_model


def load_model() -> Any:
    """The shipped model in float32, as the engine computes it."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    return AutoModelForCausalLM.from_pretrained(shipped_model(), dtype=torch.float32).train()


def hand_over(model: Any, live: LiveGroups, folder: Path, version: str) -> int:
    """Have the engine sample by the model's weights from now on, under a new version; how many replies went on so."""
    model.save_pretrained(folder)  # float32, or what is trained next would not be what was sampled
    return live.update_weights(folder, version)
