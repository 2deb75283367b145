"""Claude Code, headless and quiet. docs/agents-claude-code.md says what each setting is for."""

from rolltape.collect.agents.command import program_at
from rolltape.collect.agents.program import Launch, ProgramAgent, as_prompt
from rolltape.collect.agents.protocol import Assignment, Connection
from rolltape.collect.environments.protocol import Opening

_QUIET = {
    "IS_SANDBOX": "1",  # or it refuses to skip permissions as root
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
}
# By which it finds its own model and those of its helpers.
_MODELS = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)


def claude_code_agent(program: str = "claude") -> ProgramAgent:
    """The agent `claude-code`, by its path or from PATH."""
    path = program_at(program)

    def launch(assignment: Assignment, connection: Connection, opening: Opening) -> Launch:
        command = [path, "-p", "--model", connection.model, "--dangerously-skip-permissions"]
        if assignment.allowed_tools is not None:
            # With permissions skipped only --tools keeps others away; --allowedTools says it to its own checks.
            names = ",".join(assignment.allowed_tools)
            command += ["--tools", names, "--allowedTools", names]
        if assignment.denied_tools:
            command += ["--disallowedTools", ",".join(assignment.denied_tools)]
        env = {"ANTHROPIC_BASE_URL": connection.anthropic_base_url, "ANTHROPIC_API_KEY": connection.key}
        env |= _QUIET | dict.fromkeys(_MODELS, connection.model)
        return Launch(command, env, as_prompt(opening.messages))

    return ProgramAgent("claude-code", launch)
