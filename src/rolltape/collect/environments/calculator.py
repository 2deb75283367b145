"""`calculator`: an example of a tool."""

import ast
import operator
from collections.abc import Callable
from typing import Annotated

import msgspec

_MAX_LENGTH = 200  # characters
_SIGNS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculator(expression: Annotated[str, msgspec.Meta(description="For example 12 * 7")]) -> str:
    """Evaluate an arithmetic expression."""
    if len(expression) > _MAX_LENGTH:
        raise ValueError(f"the expression has more than {_MAX_LENGTH} characters")
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    return str(int(value)) if value == int(value) else str(value)


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        return _SIGNS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("only numbers, + - * / and brackets are understood")
