"""This module parses the extents of an array's shape, evaluates them, and solves them for a symbol.

An expression is made of names, integers, `+`, `*`, `/` (exact) and parentheses: `M`, `B * T`, `(H + 2 * G) * D`.
"""

import ast
from collections.abc import Mapping

__all__ = ["evaluate", "parse", "solve", "symbols"]

OPERATORS = (ast.Add, ast.Mult, ast.Div)


def parse(text: str) -> ast.expr:
    """Parse an expression. Raises ValueError for anything but names, integers, +, *, / and parentheses."""
    try:
        expression = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise ValueError(f"extent {text!r} is no expression") from None
    for node in ast.walk(expression):
        if isinstance(node, ast.BinOp):
            allowed = isinstance(node.op, OPERATORS)
        else:
            number = isinstance(node, ast.Constant) and type(node.value) is int
            allowed = number or isinstance(node, ast.Name | ast.expr_context | ast.operator)
        if not allowed:
            raise ValueError(f"extent {text!r} holds {type(node).__name__}; allowed: names, integers, +, *, /")
    return expression


def symbols(expression: ast.expr) -> tuple[str, ...]:
    """The different symbols of an expression, in order."""
    return tuple(dict.fromkeys(node.id for node in ast.walk(expression) if isinstance(node, ast.Name)))


def evaluate(expression: ast.expr, known: Mapping[str, int]) -> int | None:
    """The value of an expression; None if a symbol is unknown. A division with a remainder gives -1."""
    if isinstance(expression, ast.Name):
        return known.get(expression.id)
    if isinstance(expression, ast.Constant):
        return int(expression.value)  # type: ignore[arg-type]
    if not isinstance(expression, ast.BinOp):
        raise ValueError(f"{ast.unparse(expression)} is no extent")
    left, right = evaluate(expression.left, known), evaluate(expression.right, known)
    if left is None or right is None:
        return None
    if isinstance(expression.op, ast.Add):
        return left + right
    if isinstance(expression.op, ast.Mult):
        return left * right
    return left // right if right and left % right == 0 else -1


def solve(expression: ast.expr, value: int, known: Mapping[str, int]) -> dict[str, int] | None:
    """Solve an expression for its unknown symbol: {symbol: value}.

    Returns {} if more than one symbol is unknown, or if every value is a solution; None if no natural number is one.
    """
    if isinstance(expression, ast.Name):
        return {expression.id: value} if value >= 0 else None
    if not isinstance(expression, ast.BinOp):
        return {}
    left, right = evaluate(expression.left, known), evaluate(expression.right, known)
    if (left is None) == (right is None):
        return {}
    inner, other = (expression.left, right) if left is None else (expression.right, left)
    if other is None:
        return {}
    if isinstance(expression.op, ast.Add):
        return solve(inner, value - other, known)
    if isinstance(expression.op, ast.Mult):
        if other == 0:
            return {} if value == 0 else None
        return solve(inner, value // other, known) if value % other == 0 else None
    return solve(inner, value * other, known) if left is None else {}
