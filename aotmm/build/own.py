"""Step 1 for functions of a user's own, and how they are compiled: a Python file and its TOML -> variants.

The file is one for Triton's JIT, as it is. The TOML beside it says what a JIT sees at a call: types, values of
constexprs, hints, and the grid. docs/own-kernels.md is the guide.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aotmm.build.own_file import Found, kernel_in
from aotmm.errors import CompileError, SpecError
from aotmm.kernels import Specialisation
from aotmm.pack import grid
from aotmm.pack.schema import Argument, Guard, Option, OwnKernel
from aotmm.problem import AUTOTUNE, CONSTEXPR, FLOAT_TYPES, INTEGER_TYPES, MAX_QUANTITIES, NO_POINTER, POINTER_CODES
from aotmm.target import Target

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

entry = OwnKernel
_COMPILED = (CONSTEXPR, AUTOTUNE)
TRAILING = ("zero", "global_scratch")  # quantities that a launch adds to those of a call
_ALIGNMENT = 16  # Source: Triton, `BaseBackend.get_int_specialization`: what its JIT tells the compiler
_WARPS = 4  # of Triton's backends by default
_OPTIONS = ("num_warps", "num_stages", "maxnreg", "waves_per_eu", "matrix_instr_nonkdim", "kpack")
_KEYS = ("grid", "arguments", "options", "specialise")
_HINTS = ("multiple_of_16", "equal_to_1")
_AXES = 3  # of a grid


@dataclass(frozen=True, slots=True)
class OwnVariant:
    """The unit of building: one function of a file for one arch, types, constexprs, options and hints.

    Attributes:
        path: the file. function: the name in it.
        arguments: as in `OwnKernel`.
        aligned: arguments that are multiples of 16. ones: those that are 1.
        guards: what it is chosen by.
        chosen: options of the compiler.
        sources: Triton's digest of the function and of all that it uses.
    """

    target: Target
    path: str
    function: str
    name: str
    arguments: tuple[Argument, ...]
    aligned: tuple[str, ...]
    ones: tuple[str, ...]
    guards: tuple[Guard, ...]
    chosen: tuple[Option, ...]
    grid: tuple[str, ...]
    quantities: tuple[str, ...]
    sources: str

    @property
    def source(self) -> str:
        """Return the name of the file."""
        return Path(self.path).name

    @property
    def config_name(self) -> str:
        """Return its name, for errors."""
        return self.name

    @property
    def first_warps(self) -> int:
        """Return the warps of a block."""
        return next((option.value for option in self.chosen if option.name == "num_warps"), _WARPS)


# ------------------------------------------------------------------------------------ rules, as those of `products`


def options(variant: OwnVariant) -> dict[str, Any]:
    """Return the options of the compiler that the variant has."""
    return {option.name: option.value for option in variant.chosen}


def facts_of(variant: OwnVariant) -> dict[str, Any]:
    """Return the facts of a variant that its image depends on."""
    bare = variant.target._replace(gpus="", status="", executed_on="")
    return asdict(dataclasses.replace(variant, target=bare, path=variant.source))


def sources_of(variants: Iterable[OwnVariant]) -> list[str]:
    """Return the digests of the sources of `variants`."""
    return [variant.sources for variant in variants]


def specialise(variant: OwnVariant) -> Specialisation:
    """Return how the compiler must specialise the function.

    Raises:
        CompileError: the file is not the one that the variant was made of.
    """
    function = kernel_in(Path(variant.path), variant.function, variant.target).function
    if function.cache_key != variant.sources:
        raise CompileError(f"{variant.path} changed, or is another file on this machine, since the build began")
    types, constants = {}, {}
    for row in variant.arguments:
        if row.type in _COMPILED:
            constants[row.name] = json.loads(row.value)
        elif row.type == NO_POINTER:
            constants[row.name] = None
        elif row.name in variant.ones:
            constants[row.name] = 1
        else:
            types[row.name] = row.type
    return Specialisation(
        function=function,
        types=types,
        constants=constants,
        multiples=dict.fromkeys(variant.aligned, _ALIGNMENT),
        guards=variant.guards,
        quantities=variant.quantities,
    )


def said_of(variant: OwnVariant) -> dict[str, Any]:
    """Return the fields of a kernel's manifest entry that are known before it is compiled."""
    return {
        "name": variant.name,
        "source": variant.source,
        "function": variant.function,
        "arguments": variant.arguments,
        "options": variant.chosen,
        "grid": variant.grid,
    }


def planned_of(variant: OwnVariant, plan: Specialisation) -> dict[str, Any]:
    """Return the fields of a kernel's manifest entry that follow from the specialisation."""
    return {
        "symbol": plan.function.__name__,
        "quantities": variant.quantities,
        "guards": variant.guards,
        "attributes": (),
    }


def read_of(_variant: OwnVariant, _plan: Specialisation, _text: str) -> dict[str, Any]:
    """Return no field: nothing of the compiler's text is in the entry."""
    return {}


def read_again(_variant: OwnVariant, _plan: Specialisation, _kernel: OwnKernel) -> dict[str, Any]:
    """Return no field, likewise."""
    return {}


def code_of(variant: OwnVariant) -> OwnVariant:
    """Return the variant that has the same image: itself."""
    return variant


def twin_of(_variant: OwnVariant) -> None:
    """Return None: no two variants differ in names of types alone, as far as is known."""


def unneeded_passes(_variant: OwnVariant, _plan: Specialisation) -> set[str]:
    """Return no pass: images are those of `triton.compile`."""
    return set()


# --------------------------------------------------------------------------------------------------- file -> variants


def variants(wanted: Iterable[str], target: Target) -> list[OwnVariant]:
    """Return the variants of functions for `target`, in the order of `wanted` ("FILE.py:NAME") and of their TOML.

    Raises:
        SpecError: a file, a function or a fact is missing, or facts contradict each other; or two files have functions
            of the same name.
    """
    found: dict[str, Path] = {}
    every: list[OwnVariant] = []
    for words in wanted:
        path, name = _place(words)
        if name in found:
            raise SpecError(f"two functions are called {name}: in {found[name]} and {path}; a pack has one of a name")
        found[name] = path
        every += _variants(path, name, target)
    return every


def describe(words: str, target: Target) -> str:
    """Return a TOML to start from for the function "FILE.py:NAME", as far as its Python tells. Raises SpecError."""
    path, name = _place(words)
    found = kernel_in(path, name, target)
    lines = [f"# {path.with_suffix('.toml').name}: what {path.name} is compiled for", f"[{name}]"]
    lines += ['# grid = ["cdiv(n, BLOCK)"]  # blocks along x, y, z, of its arguments; without it, launches say it', ""]
    lines.append(f"[{name}.arguments]  # a list gives variants")
    tuned = {key for config in found.configs for key in config}
    for param in found.function.params:
        if param.name in tuned:
            lines.append(f"# {param.name}: by @triton.autotune")
        elif param.name in found.heuristics:
            lines.append(f"# {param.name}: by @triton.heuristics")
        elif param.is_constexpr and param.has_default:
            lines.append(f"# {param.name} = {json.dumps(param.default)}  # its default")
        elif param.is_constexpr:
            lines.append(f"{param.name} = 128  # a constexpr")
        elif param.annotation_type:
            lines.append(f"# {param.name}: {param.annotation_type}, by its annotation")
        else:
            lines.append(f'{param.name} = "{_guess(param.name)}"')
    if not found.configs:
        lines += ["", f"[{name}.options]", f"num_warps = {_WARPS}"]
    return "\n".join(lines) + "\n"


def _guess(name: str) -> str:
    """Return the type that arguments of such a name often have."""
    if re.search(r"ptr|^[A-JLO-Z]$", name):
        return "*fp16"
    return "fp32" if re.search(r"^(eps|alpha|beta|p)$|scale", name) else "i32"


def _place(words: str) -> tuple[Path, str]:
    file, colon, name = words.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        raise SpecError(f"--kernel {words!r}: expected FILE.py:NAME, the file and the function in it")
    return Path(file).resolve(), name


class _Facts:
    """The facts of a function: its table of the TOML, joined with its Python."""

    def __init__(self, path: Path, name: str, found: Found) -> None:
        self.where = path.with_suffix(".toml")
        self.name, self.found = name, found
        self.params = {param.name: param for param in found.function.params}
        table = _table(self.where, name, path)
        self._known(table, _KEYS, f"[{name}]")
        self.given = self._part(table, "arguments", tuple(self.params))
        self.given_options = self._part(table, "options", _OPTIONS)
        self.hints = table.get("specialise")
        expressions = table.get("grid", [])
        self.grid = tuple([expressions] if isinstance(expressions, str) else expressions)
        if not all(isinstance(each, str) for each in self.grid) or len(self.grid) > _AXES:
            raise self.error(f"grid = {expressions!r}: expected at most {_AXES} texts, the blocks along x, y and z")

    def error(self, words: str) -> SpecError:
        """Return the error of these facts, with its place."""
        return SpecError(f"{self.where}: {self.name}: {words}")

    def _known(self, table: dict[str, Any], keys: tuple[str, ...], place: str) -> None:
        for key in table:
            if key not in keys:
                raise self.error(f"{place} has {key!r}; it may have: {', '.join(keys)}")

    def _part(self, table: dict[str, Any], key: str, keys: tuple[str, ...]) -> dict[str, Any]:
        part = table.get(key, {})
        if not isinstance(part, dict):
            raise self.error(f"{key} = {part!r}: expected a table, [{self.name}.{key}]")
        self._known(part, keys, f"[{self.name}.{key}]")
        return part

    @functools.cached_property
    def types(self) -> dict[str, tuple[str, ...]]:
        """Return the types of each argument, those of a constexpr being ("constexpr",)."""
        return {name: self._types(name) for name in self.params}

    def _types(self, name: str) -> tuple[str, ...]:
        param = self.params[name]
        if param.is_constexpr:
            is_chosen = any(name in config for config in self.tuned) or self._is_derived(name)
            return (AUTOTUNE if is_chosen else CONSTEXPR,)
        found = self.given.get(self.like(name), self.params[self.like(name)].annotation_type or None)
        line = f'under [{self.name}.arguments], as {name} = "*fp16" or {name} = "i32"'
        if found is None:
            raise self.error(f"argument {name} has no type; add it {line}")
        chosen = tuple(found) if isinstance(found, list) else (found,)
        for each in chosen:
            if each not in (*POINTER_CODES, *INTEGER_TYPES, *FLOAT_TYPES):
                raise self.error(f"argument {name} has type {each!r}, which is not supported; write it {line}")
        pointers = [each in POINTER_CODES for each in chosen]
        if len(set(chosen)) != len(chosen) or not chosen or any(pointers) != all(pointers):
            raise self.error(f"argument {name} has types {list(chosen)}: expected different ones, all pointers or none")
        if len(chosen) > 1 and not all(pointers):
            raise self.error(f"argument {name} has types {list(chosen)}; a number has one: the widest that it needs")
        return chosen

    def _is_derived(self, name: str) -> bool:
        """Return whether @triton.heuristics computes a constexpr, and the TOML does not say its values instead."""
        return name in self.found.heuristics and name not in self.given

    def derived(self, types: dict[str, str], constants: dict[str, Any]) -> dict[str, Any]:
        """Return what @triton.heuristics computes for a variant: of constexprs, and of which pointers are None.

        Raises:
            SpecError: it asks for more, which only a launch would know.
        """
        known = {name: None if type_ == NO_POINTER else _Unknown(name) for name, type_ in types.items()} | constants
        found = {}
        for name, compute in self.found.heuristics.items():
            if not self._is_derived(name):
                continue
            try:
                found[name] = known[name] = compute(dict(known))
                json.dumps(found[name])
            except Exception as error:
                raise self.error(
                    f"@triton.heuristics computes {name} of what only a launch knows ({error}); say its values under "
                    f"[{self.name}.arguments], as {name} = [true, false], and name one in each call"
                ) from error
        return found

    def like(self, name: str) -> str:
        """Return the argument that says the types of `name`: itself, or the one that its TOML names instead."""
        other = self.given.get(name)
        return other if isinstance(other, str) and other in self.params else name

    @functools.cached_property
    def tuned(self) -> list[dict[str, Any]]:
        """Return what each config of @triton.autotune chooses: constexprs and options; [{}] without one."""
        configs = [dict(config) for config in self.found.configs]
        for config in configs:
            if config.pop("num_ctas", 1) != 1:
                raise self.error("num_ctas above 1, which aotmm does not launch yet")
            for key in config:
                if key not in self.params and key not in _OPTIONS:
                    raise self.error(f"@triton.autotune sets {key}, which is no argument and no option")
                if key in self.given or key in self.given_options:
                    raise self.error(f"{key} is set here and by @triton.autotune; take it out of {self.where.name}")
        return configs or [{}]

    @functools.cached_property
    def values(self) -> dict[str, tuple[Any, ...]]:
        """Return the values of each constexpr that @triton.autotune does not choose."""
        return {name: self._values(name) for name, types in self.types.items() if types == (CONSTEXPR,)}

    def _values(self, name: str) -> tuple[Any, ...]:
        param = self.params[name]
        if name in self.given:
            found = self.given[name]
            chosen = tuple(found) if isinstance(found, list) else (found,)
        elif param.has_default:
            chosen = (param.default,)
        else:
            line = f"under [{self.name}.arguments], as {name} = 128 or {name} = [128, 256]"
            raise self.error(f"constexpr {name} has no value; add its values {line}")
        if not chosen or not all(each is None or isinstance(each, bool | int | float | str) for each in chosen):
            raise self.error(f"constexpr {name} = {list(chosen)}: expected numbers, texts, true or false")
        return chosen

    def options(self) -> list[dict[str, int]]:
        """Return the options of the compiler, one set for each variant that they give."""
        lists = {key: tuple(v) if isinstance(v, list) else (v,) for key, v in self.given_options.items()}
        for key, row in lists.items():
            if not row or not all(type(each) is int and each >= 0 for each in row):
                raise self.error(f"option {key} = {list(row)}: expected integers")
        return [dict(zip(lists, row, strict=True)) for row in itertools.product(*lists.values())]

    def specialisations(self) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Return (multiples of 16, ones) of each specialisation; the last one has none, so that no launch is missed."""
        able = [name for name, types in self.types.items() if _is_pointer(types) or types[0] in _alignable()]
        free = [name for name in able if not self._is_plain(name)]
        rows = [{_HINTS[0]: free}] if self.hints is None else self.hints
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise self.error(f"specialise: expected tables, [[{self.name}.specialise]]")
        found = []
        for row in rows:
            self._known(row, _HINTS, f"[[{self.name}.specialise]]")
            aligned, ones = (tuple(row.get(key, ())) for key in _HINTS)
            for name in (*aligned, *ones):
                if name not in able or (name in ones and _is_pointer(self.types[name])):
                    raise self.error(f"specialise: {name!r} cannot have this hint; pointers and integers can: {able}")
                if name in aligned and name in ones:
                    raise self.error(f"specialise: {name!r} cannot be 1 and a multiple of 16")
            found.append((aligned, ones))
        return list(dict.fromkeys([*found, ((), ())]))

    def _is_plain(self, name: str) -> bool:
        """Return whether the file forbids to specialise an argument."""
        param = self.params[name]
        return bool(param.do_not_specialize or param.do_not_specialize_on_alignment)


class _Unknown:
    """An argument whose value only a launch knows; to ask whether it is None is all that can be asked of it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_: Any) -> Any:
        raise ValueError(f"the value of {self._name}")

    __bool__ = __int__ = __index__ = __float__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refuse
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __getattr__ = _refuse
    __hash__ = object.__hash__


def _is_pointer(types: tuple[str, ...]) -> bool:
    return types[0] in POINTER_CODES


def _alignable() -> set[str]:
    return set(INTEGER_TYPES) - {"i1"}


def _table(where: Path, name: str, path: Path) -> dict[str, Any]:
    """Return the table of a function in the TOML beside its file. Raises SpecError."""
    advice = f"start from what this prints: aotmm build --kernel {path.name}:{name} --describe"
    try:
        whole = tomllib.loads(where.read_text())
    except FileNotFoundError as error:
        raise SpecError(f"{where} is missing: the types, constexprs and grid of {name}; {advice}") from error
    except OSError as error:
        raise SpecError(f"{where} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{where}: not a TOML file: {error}") from error
    table = whole.get(name)
    if not isinstance(table, dict):
        raise SpecError(f"{where}: has no table [{name}]; {advice}")
    return table


@dataclass(frozen=True, slots=True)
class _Choice:
    """One combination of types, constexprs and options."""

    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int]


def _choices(facts: _Facts) -> Iterator[_Choice]:
    """Yield every combination, in the order of the file: types, constexprs, configs of @triton.autotune, options."""
    values = facts.values
    leading = [name for name in facts.types if facts.like(name) == name]
    for row in itertools.product(*(facts.types[name] for name in leading)):
        of_leading = dict(zip(leading, row, strict=True))
        types = {name: of_leading[facts.like(name)] for name in facts.types}
        for constants in itertools.product(*values.values()):
            for tuned in facts.tuned:
                for options_ in facts.options():
                    whole = dict(zip(values, constants, strict=True)) | tuned
                    chosen = {key: whole[key] for key in whole if key not in facts.params} | options_
                    kept = {key: value for key, value in whole.items() if key in facts.params}
                    kept |= facts.derived(types, kept)
                    yield _Choice(types, kept, chosen)


def _variants(path: Path, name: str, target: Target) -> Iterator[OwnVariant]:
    found = kernel_in(path, name, target)
    facts = _Facts(path, name, found)
    choices = list(_choices(facts))
    codes = _codes(facts, choices)
    quantities = _quantities(facts, codes)
    names: set[str] = set()
    for choice in choices:
        arguments = tuple(
            Argument(key, type_, json.dumps(choice.constants[key]) if type_ in _COMPILED else "")
            for key, type_ in choice.types.items()
        )
        for number, (aligned, ones) in enumerate(rows := facts.specialisations()):
            kept = tuple(key for key in aligned if choice.types[key] != NO_POINTER)
            guards = tuple(_guards(choice, codes, kept, ones))
            kind = "generic" if number == len(rows) - 1 else f"special{number or ''}"
            label = _label(name, choice, codes, kind)
            if label in names:
                raise facts.error(f"two variants are called {label}; values of its constexprs look alike")
            names.add(label)
            variant = OwnVariant(
                target=target,
                path=str(path),
                function=name,
                name=label,
                arguments=arguments,
                aligned=kept,
                ones=ones,
                guards=guards,
                chosen=tuple(Option(*item) for item in choice.options.items()),
                grid=facts.grid,
                quantities=quantities,
                sources=found.function.cache_key,
            )
            _check_grid(facts, variant)
            yield variant


_Codes = dict[str, dict[str, int]]
"""By quantity that variants are chosen by: the number of each value, which is its JSON text."""


def _codes(facts: _Facts, choices: list[_Choice]) -> _Codes:
    """Return the choices that a call makes: several types of a pointer, several values of a constexpr or an option.

    Natural numbers stand for themselves, all other values for their places in the order of the file.
    """
    codes: _Codes = {}
    for name, types in facts.types.items():
        if len(types) > 1:
            codes[f"{name}.type"] = {json.dumps(each): POINTER_CODES.index(each) for each in types}
        elif types[0] in _COMPILED:
            codes[name] = _numbered([choice.constants[name] for choice in choices])
    for name in dict.fromkeys(key for choice in choices for key in choice.options):
        codes[name] = _numbered([choice.options[name] for choice in choices if name in choice.options])
    return {name: row for name, row in codes.items() if len(row) > 1}


def _numbered(values: list[Any]) -> dict[str, int]:
    texts = list(dict.fromkeys(map(json.dumps, values)))
    natural = all(type(value) in {int, bool} and value >= 0 for value in values)
    return {text: int(json.loads(text)) if natural else number for number, text in enumerate(texts)}


def _quantities(facts: _Facts, codes: _Codes) -> tuple[str, ...]:
    """Return the quantities of a function: arguments that are passed, and what its variants are chosen by."""
    found: list[str] = []
    for name, types in facts.types.items():
        if types[0] not in _COMPILED or name in codes:
            found.append(name)
        if f"{name}.type" in codes:
            found.append(f"{name}.type")
    found += [name for name in codes if name not in found]
    found += TRAILING
    if len({name.replace(".", "__") for name in found}) < len(found):
        raise facts.error(f"two of its values have one name: {', '.join(found)}; rename an argument")
    if len(found) > MAX_QUANTITIES:
        raise facts.error(f"a launch would have {len(found)} values, {MAX_QUANTITIES} are possible; list fewer types")
    return tuple(found)


def _guards(choice: _Choice, codes: _Codes, aligned: tuple[str, ...], ones: tuple[str, ...]) -> Iterator[Guard]:
    """Yield the guards of a variant: first what was chosen, then ranges of integers, then hints."""
    for name, row in codes.items():
        argument = name.removesuffix(".type")
        value = choice.types[argument] if argument != name else {**choice.constants, **choice.options}.get(name)
        text = json.dumps(value)
        if text in row:
            yield Guard(name, "equals", row[text])
    for name, type_ in choice.types.items():
        bounds = INTEGER_TYPES.get(type_)
        if bounds is not None and name not in ones:
            yield Guard(name, "at_least", bounds[0])
            yield Guard(name, "below", bounds[1])
        if type_ == NO_POINTER:
            yield Guard(name, "equals", 0)
    yield from (Guard(name, "equals", 1) for name in ones)
    yield from (Guard(name, "multiple_of", _ALIGNMENT) for name in aligned)


def _label(function: str, choice: _Choice, codes: _Codes, kind: str) -> str:
    """Return a label of what distinguishes a variant."""
    parts = [function]
    for name in codes:
        argument = name.removesuffix(".type")
        if argument != name:
            parts.append(choice.types[argument].lstrip("*"))
        elif name in choice.constants or name in choice.options:
            parts.append(f"{name}{({**choice.constants, **choice.options})[name]}")
    return re.sub(r"[^A-Za-z0-9_.]", "_", "_".join([*parts, kind]))


def _check_grid(facts: _Facts, variant: OwnVariant) -> None:
    """Refuse a grid of other names than integers. Raises SpecError."""
    known = grid_values(variant.arguments, variant.quantities)
    for expression in variant.grid:
        try:
            grid.in_c(expression, known)
        except SpecError as error:
            raise facts.error(str(error)) from error


def grid_values(arguments: tuple[Argument, ...], quantities: tuple[str, ...]) -> dict[str, str]:
    """Return what the names of a grid are in C: places in `values`, and the numbers that constexprs are."""
    found = {}
    for row in arguments:
        if row.type in INTEGER_TYPES:
            found[row.name] = f"values[{quantities.index(row.name)}]"
        elif row.type in _COMPILED and type(value := json.loads(row.value)) is int:
            found[row.name] = f"{value}ll"
    return found
