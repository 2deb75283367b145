"""Which marker a test carries for what it needs, found in its imports, so that `--fast` can leave it out unimported."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

# Imported by a test, by a helper below tests/ that it imports, or inside the test itself.
_MARKERS = {
    "agent_installs": "agents",
    "agent_runs": "agents",
    "npm_packages": "npm",
    "browser": "browser",
    "playwright": "browser",
    "podman": "containers",
    "ray": "ray",
    "torch": "torch",
    "transformers": "torch",
    "safetensors": "torch",
    "tensordict": "torch",
    "tinker": "torch",
    "trl": "torch",
    "verl": "torch",
    "xgrammar": "torch",
    "rolltape.tokens.derive": "torch",
    "rolltape.tokens.exporter": "torch",
    "rolltape.tokens.snapshot": "torch",
    "rolltape.tokens.micro_batch": "torch",
    "rolltape.collect.runners.ray": "ray",
    "training.model": "torch",
    "training.train": "torch",
}
NOT_FAST = frozenset({*_MARKERS.values(), "slow"})


@cache
def module_markers(path: Path) -> frozenset[str]:
    """The markers of everything that a file imports when it is imported."""
    body = ast.parse(path.read_bytes()).body
    return _markers_of(node for node in body if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@cache
def _function_markers(path: Path) -> dict[str, frozenset[str]]:
    """The markers of what each function of a file imports itself."""
    body = ast.parse(path.read_bytes()).body
    functions = (node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {function.name: _markers_of([function]) for function in functions}


def item_markers(item: pytest.Item) -> frozenset[str]:
    """The markers of a test, by its module, itself, and the fixtures that it uses."""
    functions = _function_markers(item.path)
    named = {getattr(item, "originalname", item.name), *getattr(item, "fixturenames", ())}
    return module_markers(item.path).union(*(functions[name] for name in named if name in functions))


def _markers_of(nodes: Iterator[ast.stmt] | list[ast.stmt]) -> frozenset[str]:
    found: set[str] = set()
    for module in {module for node in nodes for module in _imported(node)}:
        found |= {marker for name, marker in _MARKERS.items() if module == name or module.startswith(f"{name}.")}
        helper = TESTS / (module.replace(".", "/") + ".py")
        if helper.is_file():
            found |= module_markers(helper)
    return frozenset(found)


def _imported(node: ast.stmt) -> Iterator[str]:
    """The modules that a statement imports, but for those that only type checkers import."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    for one in ast.walk(node):
        if isinstance(one, ast.Import):
            yield from (alias.name for alias in one.names)
        elif isinstance(one, ast.ImportFrom) and one.module is not None:
            yield one.module
            yield from (f"{one.module}.{alias.name}" for alias in one.names)
        elif isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr == "importorskip":
            yield from (ast.literal_eval(argument) for argument in one.args[:1])
