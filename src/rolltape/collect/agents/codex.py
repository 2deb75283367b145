"""Codex, headless and quiet. docs/agents-codex.md says what each setting is for."""

import json

from rolltape.collect.agents.command import program_at
from rolltape.collect.agents.program import Launch, ProgramAgent, as_prompt
from rolltape.collect.agents.protocol import Assignment, Connection
from rolltape.collect.environments.protocol import Opening

# TOML takes the strings of JSON.
_CONFIG = """\
model = {model}
model_provider = "rolltape"
check_for_update_on_startup = false
web_search = "disabled"
[model_providers.rolltape]
name = "rolltape"
base_url = {url}
env_key = "OPENAI_API_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 5
[analytics]
enabled = false
[otel]
exporter = "none"
metrics_exporter = "none"
[features]
plugins = false
apps = false
remote_plugin = false
"""
_OPTIONS = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")


def codex_agent(program: str = "codex") -> ProgramAgent:
    """The agent `codex`, by its path or from PATH. It has no lists of tools: the gateway enforces them."""
    path = program_at(program)

    def launch(assignment: Assignment, connection: Connection, opening: Opening) -> Launch:
        config = _CONFIG.format(model=json.dumps(connection.model), url=json.dumps(connection.openai_base_url))
        return Launch(
            command=[path, "exec", *_OPTIONS, "-"],
            env={"OPENAI_API_KEY": connection.key},
            stdin=as_prompt(opening.messages),
            prepared={".codex/config.toml": config},
        )

    return ProgramAgent("codex", launch)
