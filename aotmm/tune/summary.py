"""Results of a tuning, as text for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from aotmm.tune.regret import Choice, Regret
from aotmm.tune.session import Measurement, Quality

TARGETS = (1.02, 1.06, 1.20)  # mean, 95 % quantile and worst regret of selection on unseen shapes, at most
_SHOWN = 10  # choices of the largest regret


def text(measured: Measurement | None, quality: Quality) -> Iterator[str]:
    """Yield lines: the measurement, if any, and the regret of selection."""
    if measured is not None:
        yield from _measured_text(measured)
    yield from _regret_text("models alone, shapes they were fitted to", quality.models)
    yield from _regret_text("held-out shapes", quality.held_out)
    for kind, regret in quality.held_out.by_kind().items():
        yield f"  {kind}: {_figures_text(regret)}"
    yield f"targets on held-out shapes: mean {TARGETS[0]:.2f}, 95 % quantile {TARGETS[1]:.2f}, worst {TARGETS[2]:.2f}"


def body(measured: Measurement | None, quality: Quality) -> dict[str, Any]:
    """Return the same for JSON."""
    found: dict[str, Any] = {}
    if measured is not None:
        found = {
            "measured": len(measured.samples),
            "total": measured.total,
            "device": measured.environment.device,
            "seed": measured.environment.seed,
            "left_out": measured.left_out,
        }
    return found | {
        "regret": {
            "models": _regret_body(quality.models),
            "held_out": _regret_body(quality.held_out),
        },
    }


def _measured_text(measured: Measurement) -> Iterator[str]:
    samples = sum(map(len, measured.samples.values()))
    device = measured.environment.device
    yield f"{len(measured.samples)} of {measured.total} shapes measured on {device}, {samples} samples"
    if measured.environment.seed is not None:
        yield f"seed of the random ones: {measured.environment.seed}"
    if not measured.complete:
        yield "the time ran out; the same command again goes on from here"
    for name, why in measured.left_out.items():
        yield f"left out {name}: {why}"


def _regret_body(regret: Regret) -> dict[str, Any]:
    return {
        **_figures_body(regret),
        "kinds": {kind: _figures_body(each) for kind, each in regret.by_kind().items()},
        "choices": [_choice_text(choice) for choice in regret.worst_choices(_SHOWN)],
    }


def _figures_body(regret: Regret) -> dict[str, float]:
    return {
        "mean": regret.mean,
        "quantile_95": regret.quantile,
        "worst": regret.worst,
        "shapes": len(regret.choices),
        "unmeasured": regret.unmeasured,
    }


def _figures_text(regret: Regret) -> str:
    unknown = f", {regret.unmeasured} choices without a time" * bool(regret.unmeasured)
    figures = f"mean {regret.mean:.4f}, 95 % quantile {regret.quantile:.3f}, worst {regret.worst:.3f}"
    return f"{figures}, {len(regret.choices)} shapes{unknown}"


def _regret_text(title: str, regret: Regret) -> Iterator[str]:
    yield f"regret, {title}: {_figures_text(regret)}"
    for choice in regret.worst_choices(_SHOWN):
        yield f"  {_choice_text(choice)}"


def _choice_text(choice: Choice) -> str:
    shape, best = choice.shape, choice.best
    what = (
        f"{shape.batch} of " * (shape.batch > 1)
        + f"{shape.M}x{shape.N}x{shape.K} {shape.layout} of {shape.element_bytes} bytes"
        + f" {shape.kind}" * (shape.kind != "plain")
    )
    what += f", A +{shape.offset_a} B +{shape.offset_b} bytes" * bool(shape.offset_a or shape.offset_b)
    regret = "not measured" if choice.regret is None else f"{choice.regret:.3f}"
    how = f" split {best.split}" * (best.split > 1) + " pdl" * best.pdl
    return f"{regret}  {what}: {choice.chosen}, best {best.config_name}{how} {best.ns / 1000:.2f} us"
