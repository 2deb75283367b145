"""The agent `claude-code`: Claude Code without its user interface. docs/agents-claude-code.md explains each setting."""

from rolltape.collect.agents.program import ProgramAgent, ProgramLaunch, find_program, render_prompt
from rolltape.collect.agents.protocol import Assignment, Connection
from rolltape.collect.environments.protocol import Opening

_VARIABLES = {
    "IS_SANDBOX": "1",  # without it, it refuses to skip permissions as root
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
}
# Name its own model and those of its helpers.
_MODELS = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)


def claude_code_agent(program: str = "claude") -> ProgramAgent:
    """The agent for a program, given by its path or found on PATH."""
    path = find_program(program)

    def launch(assignment: Assignment, connection: Connection, opening: Opening) -> ProgramLaunch:
        command = [path, "-p", "--model", connection.model, "--dangerously-skip-permissions"]
        if assignment.allowed_tools is not None:
            # With permissions skipped only --tools keeps other tools away; --allowedTools is for its own checks.
            names = ",".join(assignment.allowed_tools)
            command += ["--tools", names, "--allowedTools", names]
        if assignment.denied_tools:
            command += ["--disallowedTools", ",".join(assignment.denied_tools)]
        env = {"ANTHROPIC_BASE_URL": connection.anthropic_base_url, "ANTHROPIC_API_KEY": connection.key}
        env |= _VARIABLES | dict.fromkeys(_MODELS, connection.model)
        return ProgramLaunch(command, env, render_prompt(opening.messages))

    return ProgramAgent("claude-code", launch)
