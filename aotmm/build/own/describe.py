"""A TOML to start from for a function of a user's own: what its Python says, and guesses where it says nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from aotmm.build.own.facts import WARPS, Unknown, annotation_of, place_of, plain, text_of
from aotmm.build.own.file import Found, kernel_in
from aotmm.problem import NO_POINTER, in_toml
from aotmm.target import Target

# Names of constexprs that are true or false.
_FLAG = re.compile(r"^(HAS|IS|USE|EVEN|INCLUDE|ENABLE|PADDED|RETURN)(_|$)|CAUSAL", re.IGNORECASE)
_SIZE = re.compile(r"BLOCK|SIZE|TILE|GROUP|DIM|HEAD|^[A-Z]$", re.IGNORECASE)
_STRIDE = re.compile(r'(\w*stride\w*) = "i32"')
_POINTED = ("load", "store", "make_block_ptr", "make_tensor_descriptor")  # and atomic operations
_OF_DESCRIPTORS = ("load", "store", "gather", "scatter")


def describe(words: str, target: Target) -> str:
    """Return a TOML to start from for the function "FILE.py:NAME". Raises SpecError as `file.kernel_in`."""
    path, name = place_of(words)
    found = kernel_in(path, name, target)
    lines = [f"# {path.with_suffix('.toml').name}: what {path.name} is compiled for. Types and values are guesses."]
    lines += [f"[{name}]", '# grid = ["cdiv(n, BLOCK)"]  # blocks along x, y, z; without it, launches say it']
    arguments = [*_arguments(found)]
    lines += ["", f"[{name}.arguments]  # a list gives variants", *arguments]
    if strides := [match[1] for line in arguments if (match := _STRIDE.match(line))]:
        lines += [
            "",
            f"# [[{name}.specialise]]  # a stride that is 1 is no multiple of 16: say which are, as calls have them",
            f"# equal_to_1 = []  # of {', '.join(strides)}",
            "# multiple_of_16 = []  # of all other integers and pointers",
        ]
    if not found.configs and "num_warps" not in found.heuristics:
        lines += ["", f"[{name}.options]", f"num_warps = {WARPS}"]
    return "\n".join(lines) + "\n"


def _arguments(found: Found) -> Iterator[str]:
    """Yield a line for each argument."""
    tuned = {key for config in found.configs for key in config.all_kwargs()}
    pointers, descriptors = _used(found.function)
    for param in found.function.params:
        name = param.name
        if name in tuned:
            yield f"# {name}: by @triton.autotune"
        elif name in found.heuristics:
            yield _computed(found, name)
        elif param.is_constexpr and param.has_default:
            yield _default(name, plain(param.default))
        elif param.is_constexpr:
            yield _constexpr(name)
        elif param.annotation_type:
            yield f"# {name}: {annotation_of(param)}, by its annotation"
        elif name in descriptors:
            yield f'{name} = "tensordesc<fp16[64, 64]>"  # of the block that the caller\'s descriptor has'
        elif name in pointers or "ptr" in name.lower():
            yield f'{name} = "*fp16"'
        else:
            yield f'{name} = "{_number(name)}"'


def _computed(found: Found, name: str) -> str:
    """Return a line for what @triton.heuristics computes; a launch has to say what only a launch knows."""
    params, asked = found.function.params, ""
    try:
        found.heuristics[name]({param.name: Unknown(param.name) for param in params})
    except Exception as error:  # noqa: BLE001 - of another author's function
        asked = getattr(error, "argument", "")
    if asked in [param.name for param in params if not param.is_constexpr]:
        values = f'[{{value = ..., when = "{asked} multiple_of ..."}}, {{value = ...}}]'
        return f"# {name} = {values}  # @triton.heuristics asks for {asked}, which only a launch knows"
    return f"# {name}: by @triton.heuristics"


def _default(name: str, default: Any) -> str:
    """Return a comment with the default of a constexpr, as a TOML would have it."""
    try:
        text = text_of(default)
    except TypeError:
        return f"# {name}: {default!r} by default, which a pack cannot have"
    if default == NO_POINTER:
        return f"# {name}: the text {text} by default, which means None in a TOML"
    return f"# {name} = {in_toml(text)}  # its default"


def _constexpr(name: str) -> str:
    if _FLAG.search(name):
        return f"{name} = true  # a constexpr: or false, or both as [true, false]"
    if _SIZE.search(name):
        return f"{name} = 128  # a constexpr"
    return f"# {name} = ...  # a constexpr: say its value, or a list of them"


def _number(name: str) -> str:
    """Return the type that numbers of such a name often have."""
    return "fp32" if "stride" not in name and re.search(r"^(eps|alpha|beta|p)$|_p$|scale", name) else "i32"


def _used(function: Any, above: tuple[Any, ...] = ()) -> tuple[set[str], set[str]]:
    """Return the names that a function, or one that it calls, loads and stores through: pointers and descriptors."""
    pointers, descriptors, assigned = set[str](), set[str](), []
    names = set(function.arg_names)
    for node in ast.walk(function.parse()):
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            assigned += [(target.id, _bases(node.value)) for target in targets if isinstance(target, ast.Name)]
        if not isinstance(node, ast.Call):
            continue
        callee = _callee(function, node.func)
        if callee is not None and callee not in above:
            for inside, found in zip(_used(callee, (*above, function)), (pointers, descriptors), strict=True):
                given = [
                    *zip(callee.arg_names, node.args, strict=False),
                    *((row.arg, row.value) for row in node.keywords),
                ]
                found |= {base for name, value in given if name in inside for base in _bases(value)}
        elif isinstance(node.func, ast.Attribute):
            if node.func.attr in _OF_DESCRIPTORS and (own := _bases(node.func.value) & names):
                descriptors |= own
            elif node.args and (node.func.attr in _POINTED or node.func.attr.startswith("atomic_")):
                pointers |= _bases(node.args[0])
    before: set[str] = set()
    while before != pointers:  # a pointer comes from what was assigned to it
        before = set(pointers)
        pointers |= {base for name, bases in assigned if name in pointers for base in bases}
    return pointers, descriptors


def _callee(function: Any, called: ast.expr) -> Any:
    """Return the jit function that `called` names in another one; None if it is none."""
    from triton.runtime.jit import JITFunction

    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
        found = getattr(function.fn.__globals__.get(called.value.id), called.attr, None)
    else:
        found = function.fn.__globals__.get(called.id) if isinstance(called, ast.Name) else None
    return found if isinstance(found, JITFunction) else None


def _bases(expression: ast.expr) -> set[str]:
    """Return the names that offsets may be added to."""
    while isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Add | ast.Sub):
        expression = expression.left
    if isinstance(expression, ast.IfExp):
        return _bases(expression.body) | _bases(expression.orelse)
    if isinstance(expression, ast.Call) and isinstance(expression.func, ast.Attribute):  # pointer.to(...)
        expression = expression.func.value
    return {expression.id} if isinstance(expression, ast.Name) else set()
