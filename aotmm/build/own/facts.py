"""The facts of a function of a user's own: what its Python and the TOML beside it say.

The file is one for Triton's JIT, as it is. The TOML beside it says what a JIT sees at a call: types, values of
constexprs, hints, and the grid. docs/own-kernels.md is the guide.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from aotmm.build.own.file import Found
from aotmm.errors import SpecError
from aotmm.kernels import MOST_BLOCKS
from aotmm.pack.schema import LICENSE, Guard
from aotmm.problem import (
    AUTOTUNE,
    CONSTEXPR,
    DESCRIPTOR,
    DTYPES,
    FLOAT_TYPES,
    INTEGER_TYPES,
    MAX_SIZES,
    NO_POINTER,
    OPTIONS,
    POINTER_CODES,
    RELATIONS,
    TENSOR_MAP_TYPES,
    in_toml,
)
from aotmm.target import Target

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

WARPS = 4  # of Triton's backends by default
DESCRIPTOR_TYPE = re.compile(rf"{DESCRIPTOR}(\w+)\[([^,\]]+),([^,\]]+)\]>")
MAPPED = {row.triton: name for name, row in DTYPES.items() if name in TENSOR_MAP_TYPES and name != "tf32"}
_KEYS = ("grid", "arguments", "options", "specialise", "license")
_LICENSE_LINE = re.compile(rf"^#\s*SPDX-License-Identifier:\s*({LICENSE}?)\s*$", re.MULTILINE)
_HINTS = ("multiple_of_16", "equal_to_1")
_AXES = 3  # of a grid
_CONDITION = re.compile(r"(\w+) +(\w+) +(-?\w+(?: *\* *\w+)*)")
_NONE = re.compile(r"(\w+) is( not)? None")
_FIRST_WITH_MAPS = 90  # of NVIDIA's archs
_DTYPE = "tl."  # begins the text of a constexpr that is a type of Triton's


def annotation_of(param: Any) -> str:
    """Return the type that the file annotates an argument with, as the TOML has it; "" for none."""
    type_ = str(param.annotation_type or "").replace("*k", "*")
    return "i1" if type_ == "u1" else type_  # a bool


def place_of(words: str) -> tuple[Path, str]:
    """Return the file and the name in "FILE.py:NAME". Raises SpecError."""
    file, colon, name = words.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        raise SpecError(f"--kernel {words!r}: expected FILE.py:NAME, the file and the function in it")
    return Path(file).resolve(), name


class Facts:
    """The facts of a function: its table of the TOML, joined with its Python."""

    def __init__(self, path: Path, name: str, found: Found, target: Target) -> None:
        self.where = path.with_suffix(".toml")
        self.name, self.found, self.target = name, found, target
        self.params = {param.name: param for param in found.function.params}
        table = _table(self.where, name, path)
        self._known(table, _KEYS, f"[{name}]")
        self.given = self._part(table, "arguments", tuple(self.params))
        self.given_options = self._part(table, "options", OPTIONS)
        self.hints = table.get("specialise")
        with tokenize.open(path) as file:
            lines = _LICENSE_LINE.findall(file.read())
        self.license = table.get("license", "".join(lines[:1]))
        if not isinstance(self.license, str) or not re.fullmatch(LICENSE, self.license):
            raise self.error(f'license = {self.license!r}: expected the name of one, as license = "Apache-2.0"')
        expressions = table.get("grid", [])
        rows = [expressions] if isinstance(expressions, str) else expressions
        self.grid = tuple(rows) if isinstance(rows, list) else (rows,)
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
            tuned = any(name in config for config in self.tuned)
            is_chosen = tuned or name in self.computed or name in self.conditions
            return (AUTOTUNE if is_chosen else CONSTEXPR,)
        annotated = annotation_of(self.params[self.like(name)])
        found = self.given.get(self.like(name), annotated or None)
        line = f'under [{self.name}.arguments], as {name} = "*fp16" or {name} = "i32"'
        if found is None:
            raise self.error(f"argument {name} has no type; add it {line}")
        chosen = tuple(found) if isinstance(found, list) else (found,)
        for each in chosen:
            if isinstance(each, list | dict):
                raise self.error(f"argument {name} is a tuple, {each!r}: make its elements arguments of their own")
            if each not in (*POINTER_CODES, *INTEGER_TYPES, *FLOAT_TYPES):
                if chosen == (each,) and str(each).startswith("tensordesc"):
                    self._check_descriptor(name, each)
                    return chosen
                raise self.error(
                    f"argument {name} has type {each!r}, which is not supported; write it {line}. {_types_are()}"
                )
        if annotated and chosen != (annotated,):
            raise self.error(
                f"argument {name} has type {found!r}, but {self.found.function.__name__} annotates it as {annotated}, "
                f"which a JIT takes; take it out of {self.where.name}"
            )
        pointers = [each in POINTER_CODES for each in chosen]
        if len(set(chosen)) != len(chosen) or not chosen or any(pointers) != all(pointers):
            why = "; a number that may be None is not supported" if NO_POINTER in chosen else ""
            raise self.error(
                f"argument {name} has types {list(chosen)}: expected different ones, all pointers or none{why}"
            )
        if len(chosen) > 1 and not all(pointers):
            raise self.error(f"argument {name} has types {list(chosen)}; a number has one: the widest that it needs")
        return chosen

    def _check_descriptor(self, name: str, type_: str) -> None:
        match = DESCRIPTOR_TYPE.fullmatch(type_)
        if match is None:
            raise self.error(
                f"argument {name} has type {type_!r}: expected a descriptor of two dimensions, as "
                '"tensordesc<fp16[64, 32]>" '
                f"or with constexprs as its block"
            )
        if match[1] not in MAPPED:
            raise self.error(f"argument {name}: descriptors are of {', '.join(MAPPED)}, not of {match[1]}")
        for side in match.groups()[1:]:
            if not side.strip().isdecimal() and side.strip() not in self.params:
                raise self.error(f"argument {name}: {side.strip()} is no constexpr and no number")

    def resolved(self, type_: str, constants: dict[str, Any]) -> str:
        """Return a type with the numbers of its constexprs: those of a descriptor's block."""
        match = DESCRIPTOR_TYPE.fullmatch(type_)
        if match is None:
            return type_
        sides = [side.strip() for side in match.groups()[1:]]
        numbers = [side if side.isdecimal() else str(constants[side]) for side in sides]
        return f"tensordesc<{match[1]}[{','.join(numbers)}]>"

    @functools.cached_property
    def computed(self) -> tuple[str, ...]:
        """Return the constexprs and options of @triton.heuristics, but those whose values the TOML says instead."""
        for name in self.found.heuristics:
            if name not in self.params and name not in OPTIONS:
                raise self.error(f"@triton.heuristics sets {name}, which is no argument and no option")
        return tuple(name for name in self.found.heuristics if name not in (*self.given, *self.given_options))

    def derived(self, types: dict[str, str], constants: dict[str, Any], *, early: bool = False) -> dict[str, Any]:
        """Return what @triton.heuristics computes for a variant: of constexprs, and of which pointers are None.

        Before a config of @triton.autotune is chosen (`early`), some of it may not be known yet, and is left out.

        Raises:
            SpecError: it asks for more, which only a launch would know.
        """
        known = self._known_of(types, constants)
        found = {}
        for name in self.computed:
            compute = self.found.heuristics[name]
            try:
                found[name] = known[name] = plain(compute(dict(known)))
                text_of(found[name])
            except Exception as error:
                if early:
                    continue
                raise self.error(
                    f"@triton.heuristics computes {name} of what only a launch knows ({error}); "
                    + self._instead(name, getattr(error, "argument", ""), types)
                ) from error
        self._check_options({name: found[name] for name in found if name not in self.params})
        return found

    def _instead(self, name: str, asked: str, types: dict[str, str]) -> str:
        """Return how the TOML says what @triton.heuristics computes of argument `asked`."""
        if name not in self.params:
            return f"say its values under [{self.name}.options], as {name} = [4, 8], and name one in each call"
        words = f"say its values under [{self.name}.arguments], as {name} = [true, false] or {name} = [64, 128], and "
        words += "name one in each call"
        if types.get(asked) in INTEGER_TYPES:
            words += f', or with what they hold for, as {name} = [{{value = ..., when = "{asked} multiple_of ..."}}, '
            words += "{value = ...}]"
        return words

    def check_conditions(self, types: dict[str, str], constants: dict[str, Any]) -> None:
        """Refuse values that hold for what @triton.heuristics computes others for. Some sizes are tried.

        Raises:
            SpecError: with sizes that show it.
        """
        guards = self.conditions_of(types, constants)
        sizes = {name: _sizes_of(name, guards) for name in dict.fromkeys(guard.value for guard in guards)}
        for name in self.conditions:
            if name not in self.found.heuristics or not self.conditions[name][text_of(constants[name])]:
                continue
            for row in itertools.product(*sizes.values()):
                call = dict(zip(sizes, row, strict=True))
                try:
                    right = text_of(plain(self.found.heuristics[name](self._known_of(types, constants) | call)))
                except Exception:  # noqa: BLE001, S112 - it asks for more than the conditions say
                    continue
                if right != text_of(constants[name]):
                    words = ", ".join(f"{key} = {value}" for key, value in call.items())
                    raise self.error(
                        f"{name} = {in_toml(text_of(constants[name]))} would be launched with {words}, for which "
                        f"@triton.heuristics computes {in_toml(right)}; its conditions ask for too little"
                    )

    def like(self, name: str) -> str:
        """Return the argument that says the types of `name`: itself, or the one that its TOML names instead."""
        other = self.given.get(name)
        if self.params[name].is_constexpr or not isinstance(other, str):
            return name
        return other if other in self.params else name

    @functools.cached_property
    def tuned(self) -> list[dict[str, Any]]:
        """Return what each config of @triton.autotune chooses: constexprs and options; [{}] without one."""
        return self._checked(self.found.configs) or [{}]

    def _checked(self, configs: Iterable[Any]) -> list[dict[str, Any]]:
        """Return what configs of @triton.autotune choose. Raises SpecError if that cannot be chosen."""
        found: list[dict[str, Any]] = []
        for config in map(_chosen_by, configs):
            if config in found:  # a JIT would time it twice
                continue
            found.append(config)
            for key in config:
                if key not in self.params and key not in OPTIONS:
                    raise self.error(f"@triton.autotune sets {key}, which is no argument and no option")
                if key in self.given or key in self.given_options:
                    raise self.error(f"{key} is set here and by @triton.autotune; take it out of {self.where.name}")
                if key in self.params:
                    self._text(key, config[key])
            self._check_options(config)
        return found

    def defaults(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the defaults of constexprs that other configs of @triton.autotune set and this one does not.

        Raises:
            SpecError: one has no default.
        """
        names = [name for name in dict.fromkeys(itertools.chain(*self.tuned)) if name in self.params]
        lacking = [self.params[name] for name in names if name not in config]
        for param in lacking:
            if not param.has_default:
                raise self.error(f"a config of @triton.autotune, {config}, does not set {param.name}, others do")
        return {param.name: plain(param.default) for param in lacking}

    def tuned_for(
        self, types: dict[str, str], constants: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
        """Return the configs that the file's pruning leaves of `tuned`; all, if it asks for what only a launch knows.

        Return too which of their functions a JIT would run before a launch, as `OwnVariant.not_run`.

        Raises:
            SpecError: it leaves none.
        """
        configs, unknown = self._pruned(types, constants)
        if not configs:
            values = ", ".join(f"{name} = {value!r}" for name, value in constants.items())
            raise self.error(f"the pruning of @triton.autotune leaves no config for {values}; take these values out")
        return configs, ("pre_hook",) * self._has_hooks + ("early_config_prune",) * bool(unknown)

    @property
    def _has_hooks(self) -> bool:
        return any(config.pre_hook is not None for config in self.found.configs)

    def _pruned(self, types: dict[str, str], constants: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
        """Return the configs that are kept, and why nothing could be pruned, or ""."""
        if self.found.prune is None:
            return self.tuned, ""
        known = self._known_of(types, constants)
        try:
            kept = list(self.found.prune(list(self.found.configs), known, **constants))
        except _AskedError as error:
            return self.tuned, str(error)
        except Exception as error:  # noqa: BLE001 - of another author's function
            return self.tuned, f"{type(error).__name__}: {error}"
        return self._checked(kept), ""

    def _known_of(self, types: dict[str, str], constants: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call as far as they are known: constexprs, and None."""
        return {name: None if type_ == NO_POINTER else Unknown(name) for name, type_ in types.items()} | constants

    def notes(self) -> list[str]:
        """Return what of @triton.autotune a pack does not do."""
        found = []
        types = {name: types[0] for name, types in self.types.items()}
        _, unknown = self._pruned(types, {name: row[0] for name, row in self.values.items()})
        if unknown:
            found.append(f"its configs are not pruned, which needs a launch ({unknown})")
        both = [name for name in self.given if name in OPTIONS and name not in self.given_options]
        found += [f"{name} is a constexpr here; what the compiler takes is set under [options]" for name in both]
        if self._has_hooks:
            found.append("a pre_hook of its configs is not run before launches")
        return [f"{self.name}: {words}" for words in found]

    @property
    def sizes(self) -> tuple[str, ...]:
        """Return the integer arguments in the key of @triton.autotune; types and constexprs choose variants anyway."""
        found = tuple(name for name in self.found.key if self.types.get(name, ("",))[0] in INTEGER_TYPES)
        if len(found) > MAX_SIZES:
            raise self.error(f"@triton.autotune has {len(found)} integers in its key, at most {MAX_SIZES} are possible")
        return found

    @functools.cached_property
    def values(self) -> dict[str, tuple[Any, ...]]:
        """Return the values of each constexpr that @triton.autotune does not choose."""
        return {
            name: self._values(name)
            for name, types in self.types.items()
            if types == (CONSTEXPR,) or name in self.conditions
        }

    def _values(self, name: str) -> tuple[Any, ...]:
        param = self.params[name]
        if name in self.given:
            chosen = tuple(value_of(row.get("value") if isinstance(row, dict) else row) for row in self._rows(name))
        elif param.has_default:
            chosen = (plain(param.default),)
        else:
            line = f"under [{self.name}.arguments], as {name} = 128 or {name} = [128, 256]"
            raise self.error(f"constexpr {name} has no value; add its values {line}")
        if not chosen or not all(
            each is None or isinstance(each, bool | int | float | str) or _is_dtype(each) for each in chosen
        ):
            raise self.error(f'constexpr {name} = {list(chosen)}: expected numbers, texts, true, false or "None"')
        texts = [in_toml(self._text(name, each)) for each in chosen]
        if len(set(texts)) < len(texts):
            raise self.error(
                f"constexpr {name} = [{', '.join(texts)}] has a value twice; each gives a variant, and tuples as "
                "constexprs are not supported"
            )
        return chosen

    def _text(self, name: str, value: Any) -> str:
        """Return a constexpr's value as the manifest has it. Raises SpecError if that has no such value."""
        try:
            return text_of(value)
        except TypeError as error:
            raise self.error(f"constexpr {name} = {value!r}: {error}") from error

    def _rows(self, name: str) -> list[Any]:
        """Return the values that the TOML lists of a constexpr; one alone needs no list."""
        found = self.given.get(name, [])
        return found if isinstance(found, list) else [found]

    @functools.cached_property
    def conditions(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """Return by constexpr that launches choose, and by its values' texts, what each value holds for."""
        found: dict[str, dict[str, tuple[str, ...]]] = {}
        for name in self.params:
            rows = self._rows(name)
            if not self.params[name].is_constexpr or not any(isinstance(row, dict) for row in rows):
                continue
            found[name] = {}
            for row in rows:
                if not isinstance(row, dict) or not {"value"} <= set(row) <= {"value", "when"}:
                    raise self.error(f'constexpr {name}: {row!r}: expected {{value = ..., when = "n multiple_of 16"}}')
                when = row.get("when", [])
                found[name][text_of(value_of(row["value"]))] = tuple(when) if isinstance(when, list) else (when,)
        return found

    def is_possible(self, types: dict[str, str], constants: dict[str, Any]) -> bool:
        """Return whether the pointers that are None are those that the values of constexprs hold for."""
        return all(
            (types[match[1]] == NO_POINTER) is not bool(match[2])
            for name, rows in self.conditions.items()
            for words in rows[text_of(constants[name])]
            if (match := self._about_none(words))
        )

    def _about_none(self, words: Any) -> re.Match[str] | None:
        """Return the match of a condition of a pointer, "POINTER is None" or "POINTER is not None"."""
        match = _NONE.fullmatch(words) if isinstance(words, str) else None
        return match if match and NO_POINTER in self.types.get(match[1], ()) else None

    def conditions_of(self, types: dict[str, str], constants: dict[str, Any]) -> list[Guard]:
        """Return the guards of the values that a launch chooses constexprs by."""
        return [
            self._condition(words, types, constants)
            for name, rows in self.conditions.items()
            for words in rows[text_of(constants[name])]
            if not self._about_none(words)  # types are chosen by that already
        ]

    def _condition(self, words: Any, types: dict[str, str], constants: dict[str, Any]) -> Guard:
        """Return the guard that is written as "ARGUMENT RELATION NUMBER", the number being one or a constexpr's."""
        match = _CONDITION.fullmatch(words) if isinstance(words, str) else None
        if match and types.get(match[1]) in INTEGER_TYPES and match[2] in RELATIONS:
            numbers = [constants.get(each.strip(), each.strip()) for each in match[3].split("*")]
            if all(type(each) is int or re.fullmatch(r"-?\d+", str(each)) for each in numbers):
                guard = Guard(match[1], match[2], math.prod(map(int, numbers)))
                if guard.relation != "multiple_of" or (guard.operand > 0 and guard.operand & (guard.operand - 1) == 0):
                    return guard
        raise self.error(
            f"when = {words!r}: expected an integer argument, one of {', '.join(RELATIONS)}, and a number, a constexpr "
            'or a product of these, which is a power of two for multiple_of; or "POINTER is None" or "POINTER is not '
            'None" of a pointer with "None" among its types'
        )

    def options(self) -> list[dict[str, int]]:
        """Return the options of the compiler, one set for each variant that they give."""
        lists = {key: tuple(v) if isinstance(v, list) else (v,) for key, v in self.given_options.items()}
        for key, row in lists.items():
            if not row or not all(isinstance(each, int) and each >= 0 for each in row):
                raise self.error(f"option {key} = {list(row)}: expected integers")
        found = [
            {key: int(each) for key, each in zip(lists, row, strict=True)} for row in itertools.product(*lists.values())
        ]
        for chosen in found:
            self._check_options(chosen)
        return found

    def _check_options(self, chosen: dict[str, Any]) -> None:
        """Refuse options that no launch of the target has. Raises SpecError."""
        blocks = chosen.get("num_ctas", 1)
        if not 1 <= blocks <= MOST_BLOCKS or blocks & (blocks - 1):
            raise self.error(f"num_ctas = {blocks}: expected 1, 2, 4 or {MOST_BLOCKS}, the blocks of a cluster")
        for key in ("launch_pdl", "launch_cooperative_grid"):
            if chosen.get(key, 0) not in (0, 1):
                raise self.error(f"option {key} = {chosen[key]}: expected true or false")
        if chosen.get("launch_cooperative_grid") and self.target.backend == "hip":
            raise self.error(f"launch_cooperative_grid, which launches on {self.target.name} do not have; take it out")

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
            lists = [row.get(key, []) for key in _HINTS]
            if not all(isinstance(each, list) for each in lists):
                raise self.error(f"specialise: {row!r}: expected lists of arguments")
            aligned, ones = map(tuple, lists)
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


def _types_are() -> str:
    """Return the spellings of types, for errors."""
    pointers = ", ".join(POINTER_CODES[1:])
    numbers = ", ".join((*INTEGER_TYPES, *FLOAT_TYPES))
    return f'Pointers are {pointers}, or "None"; numbers {numbers}; a descriptor, alone, "tensordesc<fp16[64, 32]>"'


def _sizes_of(name: str, guards: list[Guard]) -> list[int]:
    """Return some sizes that keep all guards of an argument: the least ones, some larger, none that is 0."""
    mine = [guard for guard in guards if guard.value == name]
    step = max([guard.operand for guard in mine if guard.relation == "multiple_of"], default=1)
    least = max([1, *(guard.operand for guard in mine if guard.relation == "at_least")])
    begin = -(-least // step) * step
    tried = [begin + step * number for number in (0, 1, 2, 4, 6, 10, 30)]
    tried = [guard.operand for guard in mine if guard.relation == "equals"] or tried
    below = min([guard.operand for guard in mine if guard.relation == "below"], default=2**31)
    return [size for size in tried if least <= size < below and size % step == 0]


def has_maps(target: Target) -> bool:
    """Return whether Triton lowers descriptors of host code to tensor maps."""
    return target.backend == "cuda" and int(target.triton_arch) >= _FIRST_WITH_MAPS


def _chosen_by(config: Any) -> dict[str, Any]:
    """Return the constexprs and options that a config of @triton.autotune sets."""
    return {key: plain(value) for key, value in config.all_kwargs().items()}


def plain(value: Any) -> Any:
    """Return the value in a constexpr of Triton's."""
    return getattr(value, "value", value)


def _is_dtype(value: Any) -> bool:
    from triton.language import dtype

    return isinstance(value, dtype)


def value_of(value: Any) -> Any:
    """Return a constexpr of a TOML as Triton has it: "tl.float16" is a type, and "None" is None."""
    return None if value == NO_POINTER else _typed(value)


def value_in(text: str) -> Any:
    """Return the constexpr that `text_of` gave `text` for."""
    return _typed(json.loads(text))


def _typed(value: Any) -> Any:
    """Return the type that a text like "tl.float16" names, or the value itself."""
    import triton.language

    if isinstance(value, str) and value.startswith(_DTYPE):
        found = getattr(triton.language, value.removeprefix(_DTYPE), None)
        return found if _is_dtype(found) else value
    return value


def text_of(value: Any) -> str:
    """Return a constexpr as the manifest has it: JSON, with types by their names in Triton.

    Raises:
        TypeError: JSON has no such value, or it is a text that names a type.
    """
    import triton.language

    if _is_dtype(_typed(value)):
        if isinstance(value, str):
            raise TypeError(f"the text {value!r} would be read as a type")
        value = _DTYPE + next(name for name, each in vars(triton.language).items() if each is value)
    return json.dumps(value)


class _AskedError(ValueError):
    """A function of the file asks for the value of an argument."""

    def __init__(self, argument: str) -> None:
        super().__init__(f"the value of {argument}")
        self.argument = argument


class Unknown:
    """An argument whose value only a launch knows; to ask whether it is None is all that can be asked of it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_: Any) -> Any:
        raise _AskedError(self._name)

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
