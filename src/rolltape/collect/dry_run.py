"""`preview_attempts`: what an agent would get for the first tasks of a source. Nothing is run or recorded."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from rolltape.collect.agents import agent_named
from rolltape.collect.environments import is_of_other_project
from rolltape.collect.environments.protocol import Connection, check_episode
from rolltape.collect.functions import call_environment_from_thread, describe_error
from rolltape.collect.plan import RolloutIdentity, open_tasks
from rolltape.collect.runners.attempts import make_assignment
from rolltape.collect.runners.gateway import resolve_model
from rolltape.collect.settings import CollectSettings
from rolltape.collect.tasks import seed_of
from rolltape.errors import TaskError
from rolltape.gateway.wire import base_urls

# Placeholders for what only a running gateway knows.
_URL, _KEY, _MODEL, _ROLLOUT = "http://127.0.0.1:PORT", "SESSION-KEY", "MODEL", "ROLLOUT"


def preview_attempts(settings: CollectSettings, run: Path) -> Iterator[dict[str, Any]]:
    """The first attempt at each task within the limit, or at the first one: its task, and what the agent would get.

    Checks the tasks, the environment and the agent as a collection does. The address and the key are made up. So are
    the model, the id and the seed, unless the settings name the model.
    """
    if settings.limit is None and is_of_other_project(settings.source):
        settings = msgspec.structs.replace(settings, limit=1)  # the number of tasks may be infinite
    model = resolve_model(settings.model, settings.model_name, settings.engines)
    agent = agent_named(settings.agent, in_image=settings.has_images)
    connection = Connection(base_urls=base_urls(_URL, _KEY), key=_KEY, model=model.name or _MODEL)
    identity = RolloutIdentity(run.name, settings.step, connection.model, agent.name)
    tasks, environments = open_tasks(settings)
    with tasks as source:
        for task in islice(source, settings.limit or 1):
            environment = environments.of(task)
            rollout = _ROLLOUT if model.name is None else identity.rollout_id(task, 0)
            seed = 0 if model.name is None else seed_of(rollout)
            try:
                episode = check_episode(call_environment_from_thread(environment.name, environment.begin, task, seed))
                assignment = make_assignment(
                    settings,
                    task,
                    environment=environment.name,
                    episode=episode,
                    rollout=rollout,
                    connections=dict.fromkeys(episode.seats, connection),
                    seed=seed,
                    logs=run / "logs" / rollout,
                )
                given = agent.preview(assignment)
            except Exception as error:  # user code may raise anything
                why = describe_error(error)
                raise TaskError(f"{task.where}: environment {environment.name} could not begin: {why}") from error
            yield {
                "task": task.id,
                "where": task.where,
                "environment": environment.name,
                "agent": agent.name,
                "given": given,
            }
