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
# Operations that write where their first operand says, and nowhere else; their results are what lay there.
_WRITING = re.compile(r"tt\.(store|atomic_rmw|atomic_cas|descriptor_store)\b")
_PLACES = ("!tt.ptr<", "!tt.tensordesc<")  # types of operands that may say where to write
# To blocks that have values of their own, which are not followed.
_JUMPS = ("cf.br", "cf.cond_br", "scf.condition")
_VALUE = re.compile(r"%[\w$.-]+(?:#\d+)?")
_RESULTS = re.compile(r"(%[\w$.-]+)(?::(\d+))?")
_FUNCTION = re.compile(r"\s*tt\.func public @[^(]*\((.*)\)")
_PARAMETER = re.compile(r"(%[\w$.-]+): (!tt\.(?:ptr|tensordesc)<)?")
_OPERATION = re.compile(r'(?:(%[^=]*?) = )?"?([a-z_]+\.[\w.]+)"?')
_CARRIED = re.compile(r"(%[\w$.-]+) = (%[\w$.-]+(?:#\d+)?)")
_UNKNOWN = "?"

_Roots = frozenset[str]
_NONE: _Roots = frozenset()


def written(text: str, pointers: Sequence[str]) -> tuple[str, ...]:
    """Return those of `pointers`, the arguments that are pointers or descriptors in order, that the kernel writes.

    All of them if a write cannot be traced to one.
    """
    lines = text.splitlines()
    begin, parameters = _parameters(lines, pointers)
    carried: dict[str, list[_Roots]] = {}
    found: set[str] = {_UNKNOWN} if parameters is None else set()
    before = None
    while parameters is not None and before != carried:  # what a loop hands on counts in its next turn too
        before = {line: list(roots) for line, roots in carried.items()}
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


def _pass(lines: Sequence[str], parameters: dict[str, _Roots], carried: dict[str, list[_Roots]]) -> set[str]:
    """Return the roots of what is written; add to `carried` what loops and branches hand on, by their lines."""
    found: set[str] = set()
    scopes: list[dict[str, _Roots]] = [dict(parameters)]
    owners: list[str] = [""]  # the operation that a region belongs to

    def roots(names: Sequence[str]) -> list[_Roots]:
        return [next((scope[name] for scope in reversed(scopes) if name in scope), _NONE) for name in names]

    for number, line in enumerate(lines):
        code = line.partition(" loc(")[0].strip()
        match, key = _OPERATION.match(code), str(number)
        if code.startswith("}") and len(scopes) > 1:
            scopes.pop()
            closed = owners.pop()
            key = closed if code.endswith("{") else key  # another region of the same operation
        handed = carried.get(key, [])
        begun = _CARRIED.findall(code.partition(" iter_args(")[2] or code) if code.endswith("{") else []
        inside = _by_place(roots([start for _, start in begun]), handed[: len(begun)])
        if match:
            operands = roots(_VALUE.findall(code[match.end() :]))
            if match[2] == "scf.yield":
                carried[owners[-1]] = _by_place(carried.get(owners[-1], []), operands)
            found |= _writes(match[2], operands, handed, code)
            names = _results(match[1] or "")
            scopes[-1] |= zip(names, _held(match[2], len(names), operands, handed, inside), strict=True)
        if code.endswith("{"):
            scopes.append({name: each for (name, _), each in zip(begun, inside, strict=True)})
            owners.append(key)
    return found


def _writes(operation: str, operands: list[_Roots], handed: list[_Roots], code: str) -> _Roots:
    """Return the roots of what an operation writes."""
    every = _NONE.union(*operands, *handed)
    if operation in _JUMPS:
        return frozenset([_UNKNOWN]) if every else _NONE
    if _DERIVING.match(operation) or _READING.match(operation):
        return _NONE
    where = operands[0] if operands and _WRITING.match(operation) else every
    somewhere = bool(operands) and any(place in code for place in _PLACES)
    return where or (frozenset([_UNKNOWN]) if somewhere else _NONE)


def _held(
    operation: str, count: int, operands: list[_Roots], handed: list[_Roots], inside: list[_Roots]
) -> list[_Roots]:
    """Return the roots of an operation's results; `inside` has those of the values that its region begins with.

    Loops and branches hand on by place: the accumulator of a product holds no pointer that is carried beside it.
    """
    if _READING.match(operation) or _WRITING.match(operation):
        found = []
    elif operation in ("scf.for", "scf.if"):
        found = inside if operation == "scf.for" else handed
    else:
        found = [_NONE.union(*operands, *handed)] * count
    return _by_place(found[:count], [_NONE] * count)


def _by_place(some: Sequence[_Roots], others: Sequence[_Roots]) -> list[_Roots]:
    """Return the unions of two rows of roots, of which one may be longer."""
    longest = max(len(some), len(others))
    rows = ([*row, *[_NONE] * (longest - len(row))] for row in (some, others))
    return [one | other for one, other in zip(*rows, strict=True)]


def _results(text: str) -> list[str]:
    """Return the names by which an operation's results are used: %a, or %a#0, %a#1 of "%a:2"."""
    return [
        name
        for value, count in _RESULTS.findall(text)
        for name in ([f"{value}#{place}" for place in range(int(count))] if count else [value])
    ]
