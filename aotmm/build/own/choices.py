"""Step 1 for functions of a user's own: the facts of a Python file and its TOML -> variants."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotmm.build.own.facts import DESCRIPTOR_TYPE, MAPPED, WARPS, Facts, has_maps, place_of, text_of
from aotmm.build.own.file import kernel_in, notes_of
from aotmm.errors import SpecError
from aotmm.pack import grid
from aotmm.pack.schema import Argument, Guard, Option
from aotmm.problem import (
    AUTOTUNE,
    CONSTEXPR,
    DESCRIPTOR,
    DTYPES,
    INTEGER_TYPES,
    MAX_QUANTITIES,
    NO_POINTER,
    OPTIONS,
    POINTER_CODES,
)
from aotmm.target import Target

COMPILED = (CONSTEXPR, AUTOTUNE)  # types of arguments that no launch passes
ALIGNMENT = 16  # Source: Triton, `BaseBackend.get_int_specialization`: what its JIT tells the compiler
TRAILING = ("zero", "global_scratch")  # quantities that a launch adds to those of a call
_LONGEST_STRIDE = 2**40  # bytes. Source: CUDA driver API, cuTensorMapEncodeTiled


@dataclass(frozen=True, slots=True)
class OwnVariant:
    """The unit of building: one function of a file for one arch, types, constexprs, options and hints.

    Attributes:
        path: the file. function: the name in it.
        arguments: as in `OwnKernel`.
        aligned: arguments that are multiples of 16. ones: those that are 1.
        guards: what it is chosen by.
        chosen: options of the compiler.
        not_run: what a JIT does before launches and a pack does not, as in `OwnKernel.left_out`.
        case: its name without what a config of @triton.autotune chose; "" if the function has no such config.
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
    sizes: tuple[str, ...]
    license: str
    quantities: tuple[str, ...]
    not_run: tuple[str, ...]
    case: str
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
        return next((option.value for option in self.chosen if option.name == "num_warps"), WARPS)


def variants(wanted: Iterable[str], target: Target) -> list[OwnVariant]:
    """Return the variants of functions for `target`, in the order of `wanted` ("FILE.py:NAME") and of their TOML.

    Raises:
        SpecError: a file, a function or a fact is missing, or facts contradict each other; or two files have functions
            of the same name.
    """
    found: dict[str, Path] = {}
    every: list[OwnVariant] = []
    for words in wanted:
        path, name = place_of(words)
        if found.get(name) == path:
            raise SpecError(f"--kernel {words} is given twice")
        if name in found:
            raise SpecError(f"two functions are called {name}: in {found[name]} and {path}; a pack has one of a name")
        found[name] = path
        every += _variants(path, name, target)
    return every


def notes(wanted: Iterable[str], target: Target) -> list[str]:
    """Return what authors should know of functions ("FILE.py:NAME"): what of their files a pack does not do.

    Raises:
        SpecError: as `variants`.
    """
    found: dict[str, None] = {}
    for words in wanted:
        path, name = place_of(words)
        facts = Facts(path, name, kernel_in(path, name, target), target)
        found |= dict.fromkeys([*notes_of(path, target), *facts.notes()])
    return list(found)


@dataclass(frozen=True, slots=True)
class _Choice:
    """One combination of types, constexprs and options; `not_run` as of a variant."""

    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int]
    not_run: tuple[str, ...]


def _choices(facts: Facts) -> Iterator[_Choice]:
    """Yield every combination, in the order of the file: types, constexprs, configs of @triton.autotune, options."""
    values = facts.values
    leading = [name for name in facts.types if facts.like(name) == name]
    for row in itertools.product(*(facts.types[name] for name in leading)):
        of_leading = dict(zip(leading, row, strict=True))
        types = {name: of_leading[facts.like(name)] for name in facts.types}
        for row_ in itertools.product(*values.values()):
            constants = dict(zip(values, row_, strict=True))
            if not facts.is_possible(types, constants):
                continue
            early = facts.derived(types, constants, early=True)
            constants |= {key: value for key, value in early.items() if key in facts.params}
            configs, not_run = facts.tuned_for(types, constants)
            for tuned in configs:
                whole = constants | facts.defaults(tuned) | tuned
                kept = {key: value for key, value in whole.items() if key in facts.params}
                computed = facts.derived(types, kept)
                # A JIT passes these to its compiler too, where the function has a constexpr of that name.
                chosen = {key: int(value) for key, value in (tuned | computed).items() if key in OPTIONS}
                kept |= {key: value for key, value in computed.items() if key in facts.params}
                facts.check_conditions(types, kept)
                resolved = {name: facts.resolved(type_, kept) for name, type_ in types.items()}
                yield from (_Choice(resolved, kept, chosen | options_, not_run) for options_ in facts.options())


def _variants(path: Path, name: str, target: Target) -> Iterator[OwnVariant]:
    found = kernel_in(path, name, target)
    facts = Facts(path, name, found, target)
    choices = list(_choices(facts))
    if not choices:
        raise facts.error("no variant is left: no types of its pointers keep what its constexprs hold for (`when`)")
    codes = _codes(facts, choices)
    quantities = _quantities(facts, codes)
    tuned = {key for config in facts.tuned for key in config}
    tuned |= set(facts.computed) if tuned else set()  # which follow from what a config chose
    names: set[str] = set()
    for choice in choices:
        arguments = tuple(
            Argument(key, type_, text_of(choice.constants[key]) if type_ in COMPILED else "")
            for key, type_ in choice.types.items()
        )
        for number, (aligned, ones) in enumerate(rows := facts.specialisations()):
            kept = tuple(key for key in aligned if choice.types[key] != NO_POINTER)
            guards = (
                *_guards(choice, codes, kept, ones, target),
                *facts.conditions_of(choice.types, choice.constants),
            )
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
                sizes=facts.sizes,
                license=facts.license,
                quantities=quantities,
                not_run=choice.not_run,
                case=_label(name, choice, [each for each in codes if each not in tuned], kind) if tuned else "",
                sources=found.function.cache_key,
            )
            _check_grid(facts, variant)
            yield variant


_Codes = dict[str, dict[str, int]]
"""By quantity that variants are chosen by: the number of each value, which is its JSON text."""


def _codes(facts: Facts, choices: list[_Choice]) -> _Codes:
    """Return the choices that a call makes: several types of a pointer, several values of a constexpr or an option.

    Natural numbers stand for themselves, all other values for their places in the order of the file.
    """
    codes: _Codes = {}
    for name, types in facts.types.items():
        if len(types) > 1:
            codes[f"{name}.type"] = {json.dumps(each): POINTER_CODES.index(each) for each in types}
        elif types[0] in COMPILED:
            codes[name] = _numbered([choice.constants[name] for choice in choices])
    for name in dict.fromkeys(key for choice in choices for key in choice.options if key not in facts.types):
        codes[name] = _numbered([choice.options.get(name) for choice in choices])
    return {name: row for name, row in codes.items() if len(row) > 1}


def _numbered(values: list[Any]) -> dict[str, int]:
    texts = list(dict.fromkeys(map(text_of, values)))
    natural = all(type(value) in {int, bool} and value >= 0 for value in values)
    return {text: int(json.loads(text)) if natural else number for number, text in enumerate(texts)}


def _quantities(facts: Facts, codes: _Codes) -> tuple[str, ...]:
    """Return the quantities of a function: arguments that are passed, and what its variants are chosen by."""
    found: list[str] = []
    for name, types in facts.types.items():
        if types[0] not in COMPILED or name in codes:
            found.append(name)
        if DESCRIPTOR_TYPE.fullmatch(types[0]):
            found += [f"{name}.{part}" for part in ("size0", "size1", "stride0", "stride1")]
        if f"{name}.type" in codes:
            found.append(f"{name}.type")
    found += [name for name in codes if name not in found]
    found += TRAILING
    if any(len({name.replace(".", gap) for name in found}) < len(found) for gap in ("_", "__")):  # as C names them
        raise facts.error(f"two of its values have one name: {', '.join(found)}; rename an argument")
    if len(found) > MAX_QUANTITIES:
        raise facts.error(f"a launch would have {len(found)} values, {MAX_QUANTITIES} are possible; list fewer types")
    return tuple(found)


def _guards(
    choice: _Choice, codes: _Codes, aligned: tuple[str, ...], ones: tuple[str, ...], target: Target
) -> Iterator[Guard]:
    """Yield the guards of a variant: first what was chosen, then ranges of integers, then hints."""
    for name, row in codes.items():
        argument = name.removesuffix(".type")
        value = choice.types[argument] if argument != name else {**choice.options, **choice.constants}.get(name)
        text = text_of(value)
        if text in row:
            yield Guard(name, "equals", row[text])
    for name, type_ in choice.types.items():
        bounds = INTEGER_TYPES.get(type_)
        if bounds is not None and name not in ones:
            yield Guard(name, "at_least", bounds[0])
            yield Guard(name, "below", bounds[1])
        if type_ == NO_POINTER:
            yield Guard(name, "equals", 0)
        if match := DESCRIPTOR_TYPE.fullmatch(type_):
            yield from _guards_of_descriptor(name, DTYPES[MAPPED[match[1]]].bytes, mapped=has_maps(target))
    yield from (Guard(name, "equals", 1) for name in ones)
    yield from (Guard(name, "multiple_of", ALIGNMENT) for name in aligned)


def _guards_of_descriptor(name: str, element_bytes: int, *, mapped: bool) -> Iterator[Guard]:
    """Yield what a descriptor has to be: rows without gaps in them, and what the driver asks of a tensor map."""
    yield Guard(f"{name}.stride1", "equals", 1)
    for size in (f"{name}.size0", f"{name}.size1"):
        yield Guard(size, "at_least", 1 if mapped else 0)
        yield Guard(size, "below", 2**31)
    if mapped:
        yield Guard(name, "multiple_of", ALIGNMENT)
        yield Guard(f"{name}.stride0", "multiple_of", ALIGNMENT // element_bytes)
        yield Guard(f"{name}.stride0", "at_least", 0)
        yield Guard(f"{name}.stride0", "below", _LONGEST_STRIDE // element_bytes)


def _label(function: str, choice: _Choice, codes: Iterable[str], kind: str) -> str:
    """Return a label of what distinguishes a variant, by the choices in `codes`."""
    parts = [function]
    for name in codes:
        argument = name.removesuffix(".type")
        if argument != name:
            parts.append(choice.types[argument].lstrip("*"))
        else:
            parts.append(f"{name}{({**choice.options, **choice.constants}).get(name)}")
    return re.sub(r"[^A-Za-z0-9_.]", "_", "_".join([*parts, kind]))


def _check_grid(facts: Facts, variant: OwnVariant) -> None:
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
        elif row.type.startswith(DESCRIPTOR):
            for n in (0, 1):
                found[f"{row.name}.shape[{n}]"] = f"values[{quantities.index(f'{row.name}.size{n}')}]"
        elif row.type in COMPILED and type(value := json.loads(row.value)) is int:
            found[row.name] = f"{value}ll"
    return found
