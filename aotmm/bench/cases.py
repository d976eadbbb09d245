"""The measured cases: products of each sweep, and the providers that multiply them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from aotmm.timing.problems import Case, Shape, Shapes


@dataclass(frozen=True, slots=True)
class Comparison:
    """The cases of one sweep's shapes: every dtype with every variant, by every provider."""

    dtypes: tuple[str, ...]
    providers: tuple[str, ...]
    variants: tuple[dict[str, str | bool], ...] = ({},)


_BOTH = ("fp16", "bf16")
_PLAIN = Comparison(_BOTH, ("aotmm", "aotmm_plain", "torch"))
_SQUARES = Comparison(_BOTH, ("aotmm", "aotmm_plain", "torch", "tutorial", "cutlass"))
COMPARISONS = {
    "squares256": _SQUARES,
    "squares128": _SQUARES,
    "llm": _PLAIN,
    "tall_skinny": _PLAIN,
    "big_k": _PLAIN,
    "ragged": _PLAIN,
    "unaligned": _PLAIN,
    "fp8": Comparison(("fp8e4",), ("aotmm", "aotmm_plain", "scaled_mm"), ({"fast_accum": False}, {"fast_accum": True})),
    "epilogue": Comparison(
        _BOTH, ("aotmm", "aotmm_plain", "unfused", "addmm"), ({"activation": "relu"}, {"activation": "gelu"})
    ),
}


@dataclass(slots=True)
class Work:
    """A case with the sweeps that it belongs to and the providers that multiply it."""

    case: Case
    sweeps: tuple[str, ...]
    providers: tuple[str, ...]


def work(
    shapes: Shapes, sweeps: Sequence[str], *, dtypes: Sequence[str] = (), providers: Sequence[str] = (), every: int = 1
) -> list[Work]:
    """Return the cases of `sweeps`, each once, although sweeps share shapes.

    Args:
        dtypes, providers: only these; all of a sweep's if empty.
        every: take one shape in `every` of each sweep.

    Raises:
        SpecError: there is no sweep of that name.
    """
    found: dict[Case, Work] = {}
    for name in sweeps:
        comparison = COMPARISONS[shapes.sweep(name).name]
        multipliers = tuple(x for x in comparison.providers if not providers or x in providers)
        for case in _cases(comparison, shapes.sweep(name).shapes[::every], dtypes):
            known = found.setdefault(case, Work(case, (), ()))
            known.sweeps = (*known.sweeps, name)
            known.providers = tuple(dict.fromkeys((*known.providers, *multipliers)))
    return list(found.values())


def _cases(comparison: Comparison, shapes: Sequence[Shape], dtypes: Sequence[str]) -> Iterator[Case]:
    for dtype in comparison.dtypes:
        if not dtypes or dtype in dtypes:
            for shape in shapes:
                for variant in comparison.variants:
                    yield Case(shape, dtype, **variant)  # type: ignore[arg-type]
