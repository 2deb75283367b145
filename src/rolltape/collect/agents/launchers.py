"""The agents that are programs: `claude-code`, `codex` and `command:PROGRAM ARGUMENT…`, and how each is started.

A program is given by its path, or found on PATH.
"""

import json
import shlex
from pathlib import Path
from typing import Any

import msgspec

from rolltape.collect.agents.program import ProgramAgent, ProgramLaunch, find_program, render_prompt
from rolltape.collect.agents.protocol import INPUT_VERSION, Assignment
from rolltape.collect.environments.protocol import Connection, Message, Opening
from rolltape.collect.environments.task_fields import without_answers
from rolltape.errors import AgentError
from rolltape.gateway.wire import client_variables, named_urls
from rolltape.records.jsonable import encode_json


class CommandInput(msgspec.Struct, frozen=True, kw_only=True):
    """What a program reads on stdin, as a JSON object that also has a base URL for each SDK (`openai_base_url`, …)."""

    version: int = INPUT_VERSION
    rollout: str  # its id
    prompt: str  # the messages as one text
    messages: list[Message]  # in chat form
    task: dict[str, Any]  # the entry of the source, without the fields for scoring
    key: str  # of the session
    model: str
    seed: int  # the same whenever this attempt runs
    max_turns: int
    timeout_s: float
    allowed_tools: tuple[str, ...] | None  # None for all
    denied_tools: tuple[str, ...]


_CLAUDE_VARIABLES = {
    "IS_SANDBOX": "1",  # otherwise Claude Code refuses to skip permissions as root
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
}
# Variables that name the model of Claude Code itself and those of its helpers.
_CLAUDE_MODELS = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)
# JSON strings are valid in TOML.
_CODEX_CONFIG = """\
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
_CODEX_OPTIONS = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")


def claude_code_agent(program: str = "claude", *, in_image: bool = False) -> ProgramAgent:
    """Claude Code without its user interface. docs/how-to/agents/claude-code.md has more."""
    path = find_program(program, in_image=in_image)

    def launch(assignment: Assignment, connection: Connection, opening: Opening) -> ProgramLaunch:
        command = [path, "-p", "--model", connection.model, "--dangerously-skip-permissions"]
        if assignment.allowed_tools is not None:
            # If permissions are skipped, only --tools excludes other tools; --allowedTools is for its own checks.
            names = ",".join(assignment.allowed_tools)
            command += ["--tools", names, "--allowedTools", names]
        if assignment.denied_tools:
            command += ["--disallowedTools", ",".join(assignment.denied_tools)]
        env = {"ANTHROPIC_BASE_URL": connection.anthropic_base_url, "ANTHROPIC_API_KEY": connection.key}
        env |= _CLAUDE_VARIABLES | dict.fromkeys(_CLAUDE_MODELS, connection.model)
        return ProgramLaunch(command, env, render_prompt(opening.messages))

    return ProgramAgent("claude-code", launch)


def codex_agent(program: str = "codex", *, in_image: bool = False) -> ProgramAgent:
    """Codex without its user interface. The gateway enforces the lists of tools.

    docs/how-to/agents/codex.md has more.
    """
    path = find_program(program, in_image=in_image)

    def launch(assignment: Assignment, connection: Connection, opening: Opening) -> ProgramLaunch:
        config = _CODEX_CONFIG.format(model=json.dumps(connection.model), url=json.dumps(connection.openai_base_url))
        return ProgramLaunch(
            command=[path, "exec", *_CODEX_OPTIONS, "-"],
            env={"OPENAI_API_KEY": connection.key},
            stdin=render_prompt(opening.messages),
            home_files={".codex/config.toml": config},
        )

    return ProgramAgent("codex", launch)


def command_agent(text: str, *, in_image: bool = False) -> ProgramAgent:
    """Any program with arguments, in a shell's quoting. No shell runs it.

    It gets the address of the gateway in variables, and the task as a JSON object on stdin. The task lacks the fields
    for scoring, since commands of the model can read stdin too.
    """
    command = parse_command(text, in_image=in_image)

    def launch(assignment: Assignment, connection: Connection, opening: Opening) -> ProgramLaunch:
        given = CommandInput(
            version=assignment.version,
            rollout=assignment.rollout,
            prompt=render_prompt(opening.messages),
            messages=opening.messages,
            task=without_answers(assignment.task),
            key=connection.key,
            model=connection.model,
            seed=assignment.seed,
            max_turns=assignment.max_turns,
            timeout_s=assignment.timeout_s,
            allowed_tools=assignment.allowed_tools,
            denied_tools=assignment.denied_tools,
        )
        fields = {**msgspec.structs.asdict(given), **named_urls(connection.base_urls)}
        env = {
            **client_variables(connection.base_urls, connection.key, connection.model),
            "ROLLTAPE_MODEL": connection.model,
            "ROLLTAPE_SEED": str(assignment.seed),
        }
        stdin = encode_json(fields, f"rollout {assignment.rollout}: the task")[0].decode()
        return ProgramLaunch(command, env, stdin)

    return ProgramAgent(f"command:{text}", launch)


def parse_command(text: str, *, in_image: bool = False) -> list[str]:
    """The words of a command. Words that name files here are made absolute, since it runs in a folder of its own."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise AgentError(f"agent command:{text}: {error}; quote it as for a shell") from None
    if not words:
        raise AgentError("agent command: names no program; write command:PROGRAM ARGUMENT…")
    arguments = (str(Path(word).absolute()) if Path(word).is_file() else word for word in words[1:])
    return [find_program(words[0], in_image=in_image), *arguments]
