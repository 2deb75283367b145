"""Live sources of samples inside a training job: one module per framework, on `LiveGroups`.

A trainer requests tasks and gets complete groups, with samples, rewards and advantages. The framework's own inference
engine is behind the gateway, so there is no second copy of the weights:

    from rolltape.integrations import FunctionEngine, LiveGroups

    async def sample(prompt_ids, wanted):           # the framework's own client
        output = await client.generate(prompt_ids, wanted.sampling.max_tokens, stop=wanted.stop_ids)
        return output.ids, output.logprobs, output.finish_reason

    settings = rolltape.CollectSettings(source="math", group_size=8, model="checkpoints/qwen3-8b")
    live = LiveGroups("runs/exp1", collect=settings, engine=FunctionEngine(sample, model="qwen3-8b"))
    for step, tasks in enumerate(batches):
        groups = live.request(tasks, step=step).wait()     # in an event loop: await live.request(…)
        train([sample for group in groups for sample in group.samples])
        for group in groups:
            group.done()
        with live.new_weights(str(step + 1)):              # in an event loop: async with
            load_weights()

The modules:

    live        LiveGroups, which collects or follows a run; all others use it
    prime_rl    micro-batches for prime-rl's trainer, in place of its orchestrator
    torch       batches for a training loop in PyTorch, and groups shared by ranks
    trl         a `rollout_func` for TRL's GRPOTrainer
    slime       rollout, evaluation and generate functions for slime
    skyrl       a generator for SkyRL's trainers
    tinker      Tinker's sampling client as the engine, and groups as its `Datum`s
    areal       a rollout workflow for AReaL
    verl        an agent loop manager for verl
    steps       positions by step, for trainers whose checkpoints cannot hold our state
"""

from rolltape.gateway.engines.function import FunctionEngine
from rolltape.integrations.live import LiveGroups
from rolltape.integrations.requested import RequestedGroups

__all__ = ["FunctionEngine", "LiveGroups", "RequestedGroups"]
