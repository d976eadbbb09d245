"""Strict JSON, decoded into the type that declares a file's content. Anything else is refused, with all its problems.

A dataclass is an object with exactly its fields as keys, and a named tuple a list of its fields. Integers are from 0
and below 2^53, other numbers from 0 and finite, lists have at most `MAX_ITEMS` items. Metadata replaces these limits:

    Annotated[str, "[a-z]+"]                a text that the pattern matches as a whole
    Annotated[str, ("nn", "nt")]            one of these values
    Annotated[int, range(1, 9)]             an integer of this range
    Annotated[float, (-1.0, 1.0)]           a number from the first to the last
    Annotated[tuple[int, ...], range(9)]    a list of such a length
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterable

from aotmm.errors import ArtifactError

MAX_ITEMS = 4096
_MAX_PROBLEMS = 100  # that one error lists
_MAX_SHOWN = 200  # characters of a wrong value
Sha256 = typing.Annotated[str, "[0-9a-f]{64}"]
_T = typing.TypeVar("_T")
_Decoder = Callable[[typing.Any, str, list[str]], typing.Any]


def parse_json(data: bytes, where: str, what: str, max_bytes: int) -> object:
    """Return the values in the JSON `data`; `where` and `what` name the file and its kind in errors.

    Raises:
        ArtifactError: more than `max_bytes`, no JSON, a key twice in an object, or a number that is NaN or infinite.
    """
    if len(data) > max_bytes:
        raise ArtifactError(f"{where}: {len(data)} bytes, a {what} has at most {max_bytes}")
    try:
        body: object = json.loads(data, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{where}: not a {what}: {error}; make it again") from error
    return body


def check_format(body: object, wanted: int, where: str, what: str, remedy: str) -> None:
    """Raise an ArtifactError unless `body` is an object whose "format" is `wanted`."""
    if not isinstance(body, dict):
        raise ArtifactError(f"{where}: expected an object, found {_shown(body)}; {remedy}")
    if body.get("format") != wanted:
        found = _shown(body.get("format"))
        raise ArtifactError(f"{where}: {what} format {found}, this version of aotmm reads {wanted}; {remedy}")


def decode(wanted: type[_T], body: object, where: str) -> _T:
    """Return the JSON values `body` as type `wanted`; `where` names their file in errors.

    An object of the type that belongs in its place is taken as it is.

    Raises:
        ArtifactError: all unknown and missing keys, and all values of another type or beyond its limits.
    """
    problems: list[str] = []
    found = decode_part(wanted, body, where, problems)
    refuse(problems)
    return typing.cast("_T", found)


def decode_part(wanted: type[_T], body: object, where: str, problems: list[str]) -> _T | None:
    """Return what `decode` does, or add what is wrong to `problems`; then the result is of no use."""
    found: _T | None = _decoder(typing.cast("typing.Any", wanted))(body, where, problems)
    return found


def refuse(problems: list[str]) -> None:
    """Raise an ArtifactError of all `problems`, if there are any."""
    if problems:
        more = len(problems) - _MAX_PROBLEMS
        raise ArtifactError("\n".join(problems[:_MAX_PROBLEMS] + ([f"... and {more} more"] if more > 0 else [])))


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    body = dict(pairs)
    if len(body) != len(pairs):
        raise ValueError(f"a key twice in {[key for key, _ in pairs]}")
    return body


def _no_constant(text: str) -> object:
    raise ValueError(f"number {text} is not JSON")


def _shown(value: object) -> str:
    """Return `value` for an error, cut if it is long."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a deep {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


@functools.cache
def _decoder(wanted: typing.Any) -> _Decoder:
    """Return the function of (value, where, problems) that returns `value` as type `wanted`.

    What does not fit is added to `problems` with its place; then the result is of no use.
    """
    wanted, limit = typing.get_args(wanted) if hasattr(wanted, "__metadata__") else (wanted, None)
    items = typing.get_args(wanted)
    if isinstance(wanted, types.UnionType):
        return lambda value, *rest: None if value is None else _decoder(items[0])(value, *rest)
    if dataclasses.is_dataclass(wanted):
        return _object(wanted, {name: _decoder(hint) for name, hint in _hints(wanted)})
    if hasattr(wanted, "_fields"):
        return _row(wanted._make, {f": {name}": _decoder(hint) for name, hint in _hints(wanted)})
    if not items:
        return _scalar(wanted, limit)
    if items[-1] is ...:
        return _list(_decoder(items[0]), limit or range(MAX_ITEMS + 1))
    return _row(tuple, {f"[{index}]": _decoder(item) for index, item in enumerate(items)})


def _hints(wanted: typing.Any) -> Iterable[tuple[str, typing.Any]]:
    return typing.get_type_hints(wanted, include_extras=True).items()


def _object(wanted: typing.Any, fields: dict[str, _Decoder]) -> _Decoder:
    def build(value: typing.Any, where: str, problems: list[str]) -> object:
        if isinstance(value, wanted):
            return value
        if value.keys() != fields.keys():
            unknown, missing = sorted(value.keys() - fields.keys()), sorted(fields.keys() - value.keys())
            problems.append(f"{where}: unknown keys {_shown(unknown)}, missing keys {missing}")
        found = {key: fields[key](value[key], f"{where}: {key}", problems) for key in fields if key in value}
        return None if problems else wanted(**found)

    return _checked("an object", lambda value: isinstance(value, (dict, wanted)), build)


def _list(item: _Decoder, lengths: range) -> _Decoder:
    return _checked(
        f"a list of {'at most ' if len(lengths) > 1 else ''}{lengths[-1]}",
        lambda value: isinstance(value, list) and len(value) in lengths,
        lambda value, where, problems: tuple([item(each, f"{where}[{n}]", problems) for n, each in enumerate(value)]),
    )


def _row(wanted: Callable[[list[object]], object], items: dict[str, _Decoder]) -> _Decoder:
    """Return the decoder of a list that has all of `items`, by their places in it."""
    pairs = list(items.items())
    return _checked(
        f"a list of {len(items)}",
        lambda value: isinstance(value, list) and len(value) == len(items),
        lambda value, where, problems: wanted(
            [item(each, where + place, problems) for (place, item), each in zip(pairs, value, strict=True)]
        ),
    )


def _scalar(wanted: type, limit: typing.Any) -> _Decoder:
    if wanted is float and limit is not None:
        low, high = limit
        return _checked(
            f"a number from {low} to {high}", lambda value: type(value) in {int, float} and low <= value <= high
        )
    if wanted is float:
        return _checked("a number from 0", lambda value: type(value) in {int, float} and 0 <= value < math.inf)
    if isinstance(limit, str):
        return _checked(f"a text like {limit}", lambda value: type(value) is str and re.fullmatch(limit, value))
    if wanted is int and limit is None:
        limit = range(2**53)
    if isinstance(limit, range):
        text = f"an integer from {limit[0]} to {limit[-1]}"
        return _checked(text, lambda value: type(value) is int and value in limit)
    if limit is not None:
        return _checked(f"one of {', '.join(map(str, limit))}", lambda value: type(value) is wanted and value in limit)
    text = {str: "a printable text", bool: "true or false"}[wanted]  # texts are read on terminals
    return _checked(text, lambda value: type(value) is wanted and str(value).isprintable())


def _checked(text: str, fits: Callable[[typing.Any], object], build: _Decoder | None = None) -> _Decoder:
    """Return the decoder of values that fit, in words `text`; `build` decodes their parts."""

    def decoded(value: object, where: str, problems: list[str]) -> object:
        if fits(value):
            return value if build is None else build(value, where, problems)
        problems.append(f"{where}: expected {text}, found {_shown(value)}")
        return None

    return decoded
