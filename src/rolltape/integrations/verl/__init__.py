"""verl: an agent loop manager that runs agents through the gateway, in front of verl's own servers.

    python -m verl.trainer.main_ppo ... \\
        actor_rollout_ref.rollout.agent.agent_loop_manager_class=rolltape.integrations.verl.RolltapeManager \\
        +rolltape.run=runs/exp1 +rolltape.agent=chat

`rolltape` in verl's config has the run, and the fields of `CollectSettings`. docs/how-to/train/verl.md has an example.
"""

try:
    import verl as _verl  # noqa: F401
except ModuleNotFoundError as missing:
    if missing.name != "verl":
        raise  # verl is installed, and something it needs is missing
    raise ImportError(
        "rolltape.integrations.verl runs inside verl's trainer, and verl is not installed here; pip install verl, with "
        "the engine that its documentation names (verl[vllm] or verl[sglang])"
    ) from missing

from rolltape.integrations.verl.engine import client_engine
from rolltape.integrations.verl.manager import RolltapeManager
from rolltape.integrations.verl.rows import data_proto, loop_output, prompt_task, recorded_advantages

__all__ = ["RolltapeManager", "client_engine", "data_proto", "loop_output", "prompt_task", "recorded_advantages"]
