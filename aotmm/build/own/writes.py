"""Which pointers a kernel writes through, read from Triton's first intermediate text (TTIR): its stores and atomics.

Doubt counts as a write: an operation that is not known to only read, a pointer that came from memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# Operations that write nothing. Their results stand for the same memory as their operands.
_DERIVING = re.compile(
    r"(arith|math|cf|scf)\.|tt\.(addptr|splat|broadcast|expand_dims|reshape|trans|bitcast|ptr_to_int|int_to_ptr|cat|join|"
    r"split|unsplat|make_tensor_descriptor|make_tensor_ptr|advance|return|assert|print)\b"
)
# Operations that read memory; their results are what lay there.
_READING = re.compile(r"tt\.(load|gather|descriptor_load|descriptor_gather)\b|\S*(global_to_local|prefetch)\b")
_PLACES = ("!tt.ptr<", "!tt.tensordesc<")  # types of operands that may say where to write
# To blocks that have values of their own, which are not followed.
_JUMPS = ("cf.br", "cf.cond_br", "scf.condition")
_VALUE = re.compile(r"%[\w$.-]+")
_FUNCTION = re.compile(r"\s*tt\.func public @[^(]*\((.*)\)")
_PARAMETER = re.compile(r"(%[\w$.-]+): (!tt\.(?:ptr|tensordesc)<)?")
_OPERATION = re.compile(r'(?:(%[^=]*?) = )?"?([a-z_]+\.[\w.]+)"?')
_CARRIED = re.compile(r"(%[\w$.-]+) = (%[\w$.-]+)")
_UNKNOWN = "?"

_Roots = frozenset[str]


def written(text: str, pointers: Sequence[str]) -> tuple[str, ...]:
    """Return those of `pointers`, the arguments that are pointers or descriptors in order, that the kernel writes.

    All of them if a write cannot be traced to one.
    """
    lines = text.splitlines()
    begin, parameters = _parameters(lines, pointers)
    carried: dict[str, _Roots] = {}
    found: set[str] = {_UNKNOWN} if parameters is None else set()
    before = None
    while parameters is not None and before != carried:  # what a loop hands on counts in its next turn too
        before = dict(carried)
        found = _pass(lines[begin:], parameters, carried)
    return tuple(name for name in pointers if name in found or _UNKNOWN in found)


def _parameters(lines: Sequence[str], pointers: Sequence[str]) -> tuple[int, dict[str, _Roots] | None]:
    """Return the line behind the function's head, and the roots of its parameters; None if they are other ones."""
    for number, line in enumerate(lines):
        if match := _FUNCTION.match(line):
            names = [name for name, kind in _PARAMETER.findall(match[1]) if kind]
            if len(names) == len(pointers):
                return number + 1, {name: frozenset([root]) for name, root in zip(names, pointers, strict=True)}
    return 0, None


def _pass(lines: Sequence[str], parameters: dict[str, _Roots], carried: dict[str, _Roots]) -> set[str]:
    """Return the roots of what is written; add to `carried` what loops and branches hand on, by their lines."""
    found: set[str] = set()
    scopes: list[dict[str, _Roots]] = [dict(parameters)]
    owners: list[str] = [""]  # the operation that a region belongs to

    def roots(names: Sequence[str]) -> _Roots:
        rows = (next((scope[name] for scope in reversed(scopes) if name in scope), frozenset()) for name in names)
        return frozenset().union(*rows)

    for number, line in enumerate(lines):
        code = line.partition(" loc(")[0].strip()
        match, key = _OPERATION.match(code), str(number)
        if code.startswith("}") and len(scopes) > 1:
            scopes.pop()
            closed = owners.pop()
            key = closed if code.endswith("{") else key  # another region of the same operation
        if match:
            operands = _VALUE.findall(code[match.end() :])
            operation, of = match[2], roots(operands)
            if operation == "scf.yield":
                carried[owners[-1]] = carried.get(owners[-1], frozenset()) | of
            elif of and operation in _JUMPS:
                found.add(_UNKNOWN)
            elif not _DERIVING.match(operation) and not _READING.match(operation):
                somewhere = bool(operands) and any(place in code for place in _PLACES)
                found |= of or ({_UNKNOWN} if somewhere else set())
            whole = frozenset() if _READING.match(operation) else of | carried.get(key, frozenset())
            scopes[-1] |= dict.fromkeys(_VALUE.findall(match[1] or ""), whole)
        if code.endswith("{"):
            handed = carried.get(key, frozenset())
            scopes.append({name: roots([start]) | handed for name, start in _CARRIED.findall(code)})
            owners.append(key)
    return found
