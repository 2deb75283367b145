"""The agent `codex`: Codex without its user interface. docs/agents-codex.md explains each setting."""

import json

from rolltape.collect.agents.program import ProgramAgent, ProgramLaunch, find_program, render_prompt
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
    """The agent for a program, given by its path or found on PATH. The gateway enforces the lists of tools."""
    path = find_program(program)

    def launch(assignment: Assignment, connection: Connection, opening: Opening) -> ProgramLaunch:
        config = _CONFIG.format(model=json.dumps(connection.model), url=json.dumps(connection.openai_base_url))
        return ProgramLaunch(
            command=[path, "exec", *_OPTIONS, "-"],
            env={"OPENAI_API_KEY": connection.key},
            stdin=render_prompt(opening.messages),
            home_files={".codex/config.toml": config},
        )

    return ProgramAgent("codex", launch)
