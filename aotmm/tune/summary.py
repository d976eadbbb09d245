"""Results of a tuning, as text for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from aotmm.tune.regret import MOST_MEAN, MOST_WORST, Choice, Regret
from aotmm.tune.session import Measurement, Quality

TARGETS = (1.03, 1.15)  # mean and worst regret of selection on unseen shapes, at most
_SHOWN = 10  # choices of the largest regret


def text(measured: Measurement | None, quality: Quality) -> Iterator[str]:
    """Yield lines: the measurement, if any; errors of the models, regret of selection, configs to prune."""
    if measured is not None:
        yield from _measured_text(measured)
    yield from _regret_text("models alone, shapes they were fitted to", quality.models)
    yield from _regret_text("held-out shapes", quality.held_out)
    yield f"targets on held-out shapes: mean {TARGETS[0]}, worst {TARGETS[1]}"
    yield f"could be left out one after the other, mean regret up to {MOST_MEAN}, worst up to {MOST_WORST}:"
    for pruned in quality.pruned:
        yield f"  {pruned.config_name} ({pruned.element_bytes} bytes): mean {pruned.mean:.4f}, worst {pruned.worst:.3f}"


def body(measured: Measurement | None, quality: Quality) -> dict[str, Any]:
    """Return the same for JSON."""
    found: dict[str, Any] = {}
    if measured is not None:
        found = {
            "measured": len(measured.samples),
            "total": measured.total,
            "device": measured.environment.device,
            "left_out": measured.left_out,
        }
    return found | {
        "models": [{**asdict(row.model), "samples": row.samples, "error": row.error} for row in quality.fitted],
        "regret": {
            "models": _regret_body(quality.models),
            "held_out": _regret_body(quality.held_out),
        },
        "spared": [row._asdict() for row in quality.pruned],
    }


def _measured_text(measured: Measurement) -> Iterator[str]:
    samples = sum(map(len, measured.samples.values()))
    device = measured.environment.device
    yield f"{len(measured.samples)} of {measured.total} shapes measured on {device}, {samples} samples"
    if not measured.complete:
        yield "the time ran out; the same command again goes on from here"
    for name, why in measured.left_out.items():
        yield f"left out {name}: {why}"


def _regret_body(regret: Regret) -> dict[str, Any]:
    return {
        "mean": regret.mean,
        "worst": regret.worst,
        "shapes": len(regret.choices),
        "unmeasured": regret.unmeasured,
        "choices": [_choice_text(choice) for choice in regret.worst_choices(_SHOWN)],
    }


def _regret_text(title: str, regret: Regret) -> Iterator[str]:
    unknown = f", {regret.unmeasured} choices that were not measured" * bool(regret.unmeasured)
    yield f"regret, {title}: mean {regret.mean:.4f}, worst {regret.worst:.3f}, {len(regret.choices)} shapes{unknown}"
    for choice in regret.worst_choices(_SHOWN):
        yield f"  {_choice_text(choice)}"


def _choice_text(choice: Choice) -> str:
    shape, best = choice.shape, choice.best
    what = f"{shape.M}x{shape.N}x{shape.K} {shape.layout} of {shape.element_bytes} bytes" + " fast" * shape.fast_accum
    regret = "not measured" if choice.regret is None else f"{choice.regret:.3f}"
    how = f" split {best.split}" * (best.split > 1) + " pdl" * best.pdl
    return f"{regret}  {what}: {choice.chosen}, best {best.config_name}{how} {best.ns / 1000:.2f} us"
