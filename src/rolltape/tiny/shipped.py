"""The folder of the model that ships with Rolltape."""

from pathlib import Path

from rolltape.errors import CheckpointError


def shipped_model() -> Path:
    """The checkpoint folder in this package; CheckpointError where the package was built without it."""
    folder = Path(__file__).parent / "models" / "tiny"
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: this installation has no model in it; give the folder of a Qwen3 checkpoint")
    return folder
