"""Servers of the Model Context Protocol as tools: each attempt has a process or a connection of its own.

The model sees errors that it causes, such as wrong arguments, and errors that a tool reports. If a server cannot be
reached, dies or violates the protocol, the attempt is broken.
"""

import asyncio
import logging
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from typing import Annotated, Any, TextIO

import msgspec

from rolltape.collect.environments.held import HeldOpen
from rolltape.collect.functions import describe_error
from rolltape.errors import MissingExtra, TaskError, ToolServerError
from rolltape.extras import import_extra
from rolltape.records.jsonable import decode_json, encode_json, shown

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_MAX_TOOLS = 512
_MAX_PAGES = 100
_MAX_DESCRIPTION_BYTES = 1_000_000  # of all tools of a server together, with their schemas
_MAX_RESULT = 1_000_000  # characters; no context holds more
_SHOWN_STDERR = 500  # bytes, the end
_INVALID_PARAMS = -32602
# Runs a program that the kernel kills when this process dies, since it may not notice that its stdin is closed.
_DIES_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
# The package logs a traceback for each line that is not a message; without a handler Python prints it to stderr.
logging.getLogger("mcp").addHandler(logging.NullHandler())


class McpServerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server as a task names it: a program that communicates over stdin and stdout, or an address."""

    command: str | list[str] | None = None  # words, or a line in a shell's quoting; no shell runs it
    url: str | None = None  # of a streamable HTTP endpoint
    env: dict[str, str] = {}  # variables of the program, added to PATH, HOME and the like
    pass_env: list[str] = []  # variables of the collector that the program gets
    headers_env: dict[str, str] = {}  # for a URL: headers, by the variable that holds the value
    tools: list[str] | None = None  # offer only these
    prefix: str = ""  # before the names of its tools
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0  # of one call
    start_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0  # until its tools are listed

    @property
    def label(self) -> str:
        """Its name in messages."""
        return self.url or shlex.join(self.words)

    @property
    def words(self) -> list[str]:
        """The words of its command."""
        return shlex.split(self.command) if isinstance(self.command, str) else list(self.command or ())


class McpTool(msgspec.Struct, frozen=True):
    """A tool that a server offers."""

    name: str
    description: str
    parameters: dict[str, Any]  # a JSON schema
    server: "McpServer"
    own_name: str


def check_server(spec: McpServerSpec) -> None:
    """Raise TaskError for a server that cannot be started as described."""
    if (spec.command is None) == (spec.url is None):
        raise TaskError('its mcp: a server has either "command" or "url"')
    try:
        # Imported here, since it takes a second, which would block the event loop when the first server starts.
        import_extra("mcp.client.streamable_http", "mcp")
    except MissingExtra as error:
        raise TaskError(f"its mcp: {error}") from None
    if spec.url is not None:
        if not spec.url.startswith(("http://", "https://")):
            raise TaskError(f"its mcp: {shown(spec.url)} is not a URL; write http://… or https://…")
        if spec.env or spec.pass_env:
            raise TaskError("its mcp: env and pass_env are for a command; a URL takes headers_env")
    else:
        try:
            words = spec.words
        except ValueError as error:
            raise TaskError(f"its mcp: {shown(spec.command)}: {error}; quote it as for a shell") from None
        if not words or shutil.which(words[0]) is None:
            raise TaskError(
                f"its mcp: there is no program {shown(words[0] if words else '')}; install it, or give its path"
            )
        if spec.headers_env:
            raise TaskError("its mcp: headers_env is for a URL; a command takes env and pass_env")
    for name in (*spec.pass_env, *spec.headers_env.values()):
        if name not in os.environ:
            raise TaskError(f"its mcp: the variable {name} is not set; set it, or leave it out")


class McpServer:
    """One attempt's connection to a server."""

    def __init__(self, spec: McpServerSpec) -> None:
        self._spec = spec
        self._stderr: TextIO | None = None
        self._held: HeldOpen[Any] | None = None
        self._unreadable: Exception | None = None  # the last unreadable line since the last call began

    async def open(self) -> list[McpTool]:
        """Start the server, and return its tools; raises ToolServerError."""
        self._held = HeldOpen(self._client())
        try:
            async with asyncio.timeout(self._spec.start_timeout_s):
                client = await self._held.open()
                return self._parse_tools(await self._list_tools(client))
        except TimeoutError:
            late = f"it did not start in {self._spec.start_timeout_s:g} s"
            raise self._fault(late if self._unreadable is None else describe_error(self._unreadable)) from None
        except ToolServerError:
            raise
        except Exception as error:
            raise self._fault(describe_error(error)) from error

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool, and return the text of its answer.

        Raises ValueError for arguments that it refuses, RuntimeError for an error that it reports or a time-out, and
        ToolServerError if the server has gone or breaks the protocol.
        """
        from mcp import MCPError

        assert self._held is not None
        self._unreadable = None
        try:
            async with asyncio.timeout(self._spec.timeout_s):
                result = await self._held.while_open(self._held.given.call_tool(name, arguments))
        except TimeoutError:
            if self._unreadable is not None:
                raise self._fault(describe_error(self._unreadable)) from None
            raise RuntimeError(f"{name} had not answered after {self._spec.timeout_s:g} s") from None
        except MCPError as error:
            if error.code == _INVALID_PARAMS:
                raise ValueError(error.message) from None
            raise self._fault(describe_error(error)) from error
        except Exception as error:
            raise self._fault(describe_error(error)) from error
        text = _render(result)
        if result.is_error:
            raise RuntimeError(text or "the tool reported an error")
        return text

    async def close(self) -> None:
        """End the process or the connection."""
        if self._held is not None:
            await self._held.close()
        if self._stderr is not None:
            self._stderr.close()

    async def _on_message(self, message: object) -> None:
        # A line that is not a message may be a program's ordinary output. It is reported only if an answer is missing.
        if isinstance(message, Exception):
            self._unreadable = message

    def _client(self) -> Any:
        from mcp import Client, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        spec = self._spec
        if spec.url is None:
            words = spec.words
            if sys.platform == "linux":
                words = [sys.executable, "-I", "-S", "-c", _DIES_WITH_PARENT, *words]
            program, *arguments = words
            env = {**{name: os.environ[name] for name in spec.pass_env}, **spec.env}
            self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - `close` closes it
            parameters = StdioServerParameters(
                command=program, args=arguments, env=env, encoding_error_handler="replace"
            )
            return Client(stdio_client(parameters, self._stderr), message_handler=self._on_message)
        if not spec.headers_env:
            return Client(spec.url)
        import httpx2

        headers = {header: os.environ[name] for header, name in spec.headers_env.items()}
        return Client(streamable_http_client(spec.url, http_client=httpx2.AsyncClient(headers=headers)))

    async def _list_tools(self, client: Any) -> list[Any]:
        assert self._held is not None
        tools: list[Any] = []
        cursor = None
        for _ in range(_MAX_PAGES):
            page = await self._held.while_open(client.list_tools(cursor=cursor))
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None or len(tools) > _MAX_TOOLS:
                break
        else:
            raise self._fault(f"its list of tools has more than {_MAX_PAGES} pages")
        if len(tools) > _MAX_TOOLS:
            raise self._fault(f"it has more than {_MAX_TOOLS} tools")
        return tools

    def _parse_tools(self, listed: Sequence[Any]) -> list[McpTool]:
        spec = self._spec
        missing = sorted(set(spec.tools or ()) - {tool.name for tool in listed})
        if missing:
            raise self._fault(f"it has no tool {missing[0]!r}")
        chosen = [tool for tool in listed if spec.tools is None or tool.name in spec.tools]
        tools = []
        size = 0
        for tool in chosen:
            name = f"{spec.prefix}{tool.name}"
            if not _NAME.fullmatch(name):
                raise self._fault(
                    f"it has a tool named {shown(name)}; a model can only call names of letters, digits and _.-"
                )
            # As in the record: invalid Unicode is replaced.
            raw = encode_json([tool.description or name, tool.input_schema], f"the tool {name}")[0]
            size += len(raw)
            if size > _MAX_DESCRIPTION_BYTES:
                raise self._fault(f"its tools are described in more than {_MAX_DESCRIPTION_BYTES:,} bytes")
            description, parameters = decode_json(raw)
            tools.append(McpTool(name, description, parameters, self, tool.name))
        return tools

    def _fault(self, why: str) -> ToolServerError:
        printed = "" if self._stderr is None else _read_end(self._stderr)
        return ToolServerError(f"MCP server {self._spec.label}: {why}{f' (it printed: {printed})' if printed else ''}")


def _render(result: Any) -> str:
    """The parts of a result as one text. Other parts than text are named by their kind."""
    parts = [part.text if part.type == "text" else f"[{_describe_part(part)}]" for part in result.content]
    if not parts and result.structured_content is not None:
        parts = [encode_json(result.structured_content, "a result")[0].decode()]
    text = "\n".join(parts)
    more = len(text) - _MAX_RESULT
    return text if more <= 0 else f"{text[:_MAX_RESULT]}\n[{more:,} more characters]"


def _describe_part(part: Any) -> str:
    kind = getattr(part, "mime_type", None) or getattr(getattr(part, "resource", None), "mime_type", None)
    where = getattr(part, "uri", None) or getattr(getattr(part, "resource", None), "uri", None)
    return " ".join(str(one) for one in (part.type, kind, where) if one)


def _read_end(file: TextIO) -> str:
    end = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), _SHOWN_STDERR, max(end - _SHOWN_STDERR, 0)).decode("utf-8", "replace").strip()
