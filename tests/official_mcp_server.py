"""A server of the Model Context Protocol, made with the official package: over stdio, or over HTTP on a given port."""

import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def refuse(why: str) -> str:
    """Report an error."""
    raise ValueError(why)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
