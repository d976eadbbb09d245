"""Expressions of a grid: integers, integer arguments, constexprs, sizes of descriptors, + - * //, cdiv, min and max.

They are a part of Python's and mean the same there; `cdiv` is Triton's. Every operation is one of int64 in C
(`aotmm/native/own.h`), where a division by 0 or an overflow is an error of the launch.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

from aotmm.errors import SpecError

_OPERATORS: dict[type[ast.operator], str] = {ast.Add: "add", ast.Sub: "subtract", ast.Mult: "multiply"}
_OPERATORS[ast.FloorDiv] = "floor_div"
_FUNCTIONS = {"cdiv": "ceil_div_of", "min": "least", "max": "most"}
_PAIR = 2
_KNOWN = "integers, arguments, constexprs, shape[N] of descriptors, + - * //, cdiv(a, b), min(a, b) and max(a, b)"


def in_c(expression: str, values: Mapping[str, str]) -> str:
    """Return `expression` as one of C; `values` has the C text of each name.

    Raises:
        SpecError: it is none, or has a name that `values` lacks.
    """

    def value(name: str) -> str:
        if name not in values:
            known = ", ".join(values) or "none"
            raise SpecError(f"grid {expression!r}: {name} is no integer argument or constexpr; those are: {known}")
        return values[name]

    return _walk(_parsed(expression), expression, value)


def _parsed(expression: str) -> ast.expr:
    try:
        return ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SpecError(f"grid {expression!r} is no expression of {_KNOWN}: {error}") from error


def _walk(node: ast.expr, expression: str, value_of: Callable[[str], str]) -> str:
    if isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value < 2**53:
        return f"{node.value}ll"
    if isinstance(node, ast.Name):
        return value_of(node.id)
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
        return value_of(ast.unparse(node))
    operation, operands = "", []
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        operation, operands = _OPERATORS[type(node.op)], [node.left, node.right]
    elif isinstance(node, ast.Call) and not node.keywords and len(node.args) == _PAIR:
        function = node.func  # a file's own spelling may be triton.cdiv
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        operation, operands = _FUNCTIONS.get(name, ""), node.args
    if not operation:
        raise SpecError(f"grid {expression!r}: {ast.unparse(node)!r} is not one of {_KNOWN}")
    return f"{operation}({', '.join(_walk(each, expression, value_of) for each in operands)}, failed)"
