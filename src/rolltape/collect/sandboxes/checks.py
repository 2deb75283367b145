"""Runs commands and check functions on an agent's work, in a sandbox like the agent's, with a new home."""

import asyncio
import json
import os
import shlex
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import msgspec

from rolltape.collect.environments.protocol import CheckCommand, CommandEnd, Ended, Score
from rolltape.collect.functions import PREFIX
from rolltape.collect.sandboxes.protocol import ProgramEnd, ProgramJob, Sandbox, Sandboxes
from rolltape.collect.sandboxes.running import ATTEMPT_VARIABLE, Unconfined, read_end_of, run_program
from rolltape.collect.sandboxes.scripts import call_check, prepare_check
from rolltape.collect.sandboxes.visible import base_python
from rolltape.collect.sandboxes.workspace import Workspace, remove
from rolltape.errors import CollectError
from rolltape.records.jsonable import decode_numbers, encode_numbers

_PREPARE = (base_python(), "-I", "-S", "-X", "utf8", prepare_check.__file__)
_SHOWN = 500  # characters of an error
_OUTPUT_BYTES = 256 * 1024  # of the end of each of stdout and stderr
# Python's start-up hooks that an agent left have no effect.
_VARIABLES = {
    "PYTHONNOUSERSITE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "GIT_CONFIG_COUNT": "2",
    "GIT_CONFIG_KEY_0": "core.hooksPath",
    "GIT_CONFIG_VALUE_0": "/dev/null",
    "GIT_CONFIG_KEY_1": "core.fsmonitor",
    "GIT_CONFIG_VALUE_1": "false",
}


class _Ran(NamedTuple):
    """A script that has ended."""

    end: ProgramEnd
    first: str  # line that it printed
    rest: str  # the end of its other output
    errors: str  # the end of its stderr

    def to_end(self, stdout: str, set_aside: tuple[str, ...]) -> CommandEnd:
        return CommandEnd(
            exit_code=self.end.exit_code,
            signal=self.end.signal,
            timed_out=self.end.timed_out,
            stdout=stdout,
            stderr=self.errors,
            set_aside=set_aside,
        )

    @classmethod
    def read(cls, end: ProgramEnd, job: ProgramJob) -> "_Ran":
        with job.stdout.open("rb") as file:
            first = file.readline().decode("utf-8", "replace")
            file.seek(max(file.tell(), job.stdout.stat().st_size - _OUTPUT_BYTES))
            rest = file.read().decode("utf-8", "replace")
        return cls(end, first, rest, read_end_of(job.stderr, _OUTPUT_BYTES))


class WorkspaceChecks:
    """Runs checks in the working directory of an agent, after all its processes have ended."""

    def __init__(self, sandboxes: Sandboxes, sandbox: Sandbox, workspace: Workspace) -> None:
        """`sandbox` is the agent's own; `sandboxes` opened it."""
        self._for_functions = sandboxes.for_functions
        self._sandbox = sandbox
        self._workspace = workspace

    @property
    def folder(self) -> Path:
        """The working directory."""
        return self._workspace.work

    @property
    def is_confined(self) -> bool:
        """Whether check functions run in a sandbox."""
        return not isinstance(self._for_functions, Unconfined)

    async def run(self, command: CheckCommand) -> CommandEnd:
        """Run a command, as described for `Ended.run`."""
        if self._sandbox.has_image:
            return await self._run_in_image(command)
        if command.copies:
            raise CollectError(f"{', '.join(command.copies)}: files can be copied only into containers")
        order = _encode_order(command, command.words, command.stdin)
        programs = _split_words(command.words)
        ran = await self._run(self._sandbox, _PREPARE, order, command.timeout_s, command.env, programs=programs)
        return ran.to_end(ran.rest, _parse_set_aside(ran.first, ran.errors))

    @property
    def logs(self) -> Path | None:
        """The folder of this machine that a container sees as /logs, or None if the agent was in no container."""
        return self._workspace.root / "logs" if self._sandbox.has_image else None

    def clear_logs(self, name: str) -> None:
        """Empty a folder of /logs, also if the agent has put something else in its place."""
        assert self.logs is not None
        with suppress(FileNotFoundError):
            (self.logs / name).rename(Path(tempfile.mkdtemp(dir=self._workspace.root), name))
        (self.logs / name).mkdir()

    async def _run_in_image(self, command: CheckCommand) -> CommandEnd:
        """Run a command in the agent's container, which has stopped.

        A working directory of this machine is prepared from outside, where no process of the agent can interfere. If it
        is in the image, it gets the check's files, and is otherwise as the agent left it.
        """
        inside, copies = self._sandbox.folder_inside, dict(command.copies)
        set_aside: tuple[str, ...] = ()
        with tempfile.TemporaryDirectory(dir=self._workspace.root) as place:
            if inside is None:
                prepared = await _prepare_here(self._workspace.work, Path(place), command)
                if prepared.exit_code:
                    return prepared
                set_aside = prepared.set_aside
            else:
                for number, (name, text) in enumerate(command.files.items()):
                    Path(place, str(number)).write_text(text)
                    copies[f"{inside}/{name}"] = Path(place, str(number))
            stdin = command.stdin.encode()
            ran = await self._run(self._sandbox, command.words, stdin, command.timeout_s, command.env, copies=copies)
        return ran.to_end(ran.first + ran.rest, set_aside)

    async def call(self, function: str, entry: Mapping[str, Any], ended: Ended, *, timeout_s: float) -> Score:
        """Call a check function; raises CollectError if it fails. Without a score of its process, the reward is 0."""
        known = {name: getattr(ended, name) for name in ("stop_reason", "messages", "text", "exit_code")}
        # So that the sandbox loads the same module as this process, and not another with that name.
        top = sys.modules[function.removeprefix(PREFIX).partition(":")[0].partition(".")[0]]
        path = [os.path.abspath(one) for one in (*_search_path(top), *sys.path)]  # noqa: PTH100
        raw = encode_numbers({"function": function, "entry": entry, "ended": known, "path": path}, "the task")
        script = (sys.executable, "-s", "-P", "-X", "utf8", call_check.__file__)
        async with self._for_functions.open(self._workspace) as sandbox:
            ran = await self._run(sandbox, script, raw, timeout_s, {}, reads=_loaded_modules())
        try:
            answer = decode_numbers(ran.first.encode())
            error = answer.get("error")
            score = None if error is not None else msgspec.convert(answer["score"], Score)
        except (ValueError, KeyError, AttributeError):
            # The agent's code ran in that process, and has ended it or overwritten its answer.
            how = "did not end in time" if ran.end.timed_out else f"ended with {ran.end.exit_code or ran.end.signal}"
            why = f"it {how}, without a score: {ran.errors[-_SHOWN:]}"
            return Score(reward=0.0, reward_data={"check": function, "why": why})
        if score is not None:
            return score
        # The sandbox does not see modules that the collector could import but has not loaded so far.
        hint = '; show it with --sandbox-read, or give the check "sandbox": false'
        raise CollectError(f"{function} raised {error}{hint if 'no module' in str(error).lower() else ''}")

    async def _run(
        self,
        sandbox: Sandbox,
        command: Sequence[str],
        stdin: bytes,
        timeout_s: float,
        env: Mapping[str, str],
        **needs: Any,
    ) -> _Ran:
        """Run a program in a sandbox, with a new home. `needs` are more fields of its job."""
        workspace = await asyncio.to_thread(self._workspace.renewed)
        try:
            variables = {**_VARIABLES, **env, ATTEMPT_VARIABLE: workspace.root.name}
            job = ProgramJob.at(workspace.root, command, stdin, env=variables, is_agent=False, **needs)
            end = await run_program(sandbox, job, workspace, attempt=workspace.root.name, timeout_s=timeout_s)
            if end.error is not None or end.survivors:
                raise CollectError(f"the check could not run: {end.error or f'processes {end.survivors} do not end'}")
            return await asyncio.to_thread(_Ran.read, end, job)
        finally:
            await asyncio.to_thread(remove, workspace.root)


async def _prepare_here(work: Path, temporary: Path, command: CheckCommand) -> CommandEnd:
    """Prepare a working directory for a check, in its own process. Only the agent's files there can make it fail."""
    order, env = _encode_order(command, ["/bin/true"], ""), {"TMPDIR": str(temporary)}
    process = await asyncio.create_subprocess_exec(*_PREPARE, cwd=work, env=env, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    out, errors = (one.decode("utf-8", "replace") for one in await process.communicate(order))
    set_aside = _parse_set_aside(out, errors)
    end = ProgramEnd(exit_code=process.returncode)
    return _Ran(end, out, "", errors).to_end("", set_aside)


def _encode_order(command: CheckCommand, words: Sequence[str], stdin: str) -> bytes:
    """The input of `scripts.prepare_check`: what to prepare, and the command to run then."""
    fields = {"files": dict(command.files), "shipped": dict(command.shipped), "keep": list(command.keep)}
    return json.dumps({"command": list(words), "stdin": stdin, **fields}).encode()


def _parse_set_aside(line: str, errors: str) -> tuple[str, ...]:
    """The files that `scripts.prepare_check` has set aside, from its first line."""
    if not line.startswith("{"):
        raise CollectError(f"the check did not start: {errors[-_SHOWN:]}")
    return tuple(json.loads(line)["set_aside"])


def _split_words(command: Sequence[str]) -> tuple[str, ...]:
    """The words of a command; a line for a shell is split too."""
    words: list[str] = []
    for one in command:
        try:
            words += shlex.split(one)
        except ValueError:
            continue  # the shell will complain
    return tuple(words)


def _search_path(module: ModuleType) -> list[str]:
    file = getattr(module, "__file__", None)
    if file is None:
        return []
    return [str(Path(file).parent.parent if hasattr(module, "__path__") else Path(file).parent)]


def _loaded_modules() -> tuple[Path, ...]:
    """The files of loaded modules outside of this process's installation, such as the user's own."""
    tops = (sys.modules.get(name.partition(".")[0], module) for name, module in list(sys.modules.items()))
    files = {Path(file) for top in tops if (file := getattr(top, "__file__", None))}
    installed = {Path(os.path.realpath(one)) for one in (sys.prefix, sys.base_prefix)}
    own = (file for file in files if file.is_absolute() and not installed & set(Path(os.path.realpath(file)).parents))
    return tuple(sorted({file.parent if file.name == "__init__.py" else file for file in own if file.exists()}))
