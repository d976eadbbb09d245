"""What is read from the compiler's text: here the instruction that multiplies, which is part of a kernel's order."""

from __future__ import annotations

import pytest

from aotmm.build.parameters import instruction
from aotmm.errors import CompileError
from aotmm.pack.schema import Order
from aotmm.target import target


@pytest.mark.parametrize(
    ("arch", "text", "found"),
    [
        (
            "sm90",
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%f1}, %rd1, %rd2, 1, 1, 1, 0, 0;",
            ("wgmma", 16),
        ),
        ("sm90", "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e5m2 {%f1}, %rd1, %rd2, 1, 1, 1;", ("wgmma", 32)),
        ("sm80", "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 { %f1 }, { %r1 }, { %r2 }, { %f1 };", ("mma", 8)),
        ("sm100", "tcgen05.mma.cta_group::1.kind::f16 [ %r1 + 0 ], %rd1, %rd2, %r2, %p1;", ("tcgen05", 16)),
        ("sm80", "fma.rn.f32 %f1, %f2, %f3, %f1;", ("fma", 1)),
        ("gfx90a", "v_mfma_f32_16x16x16f16 a[0:3], v[0:1], v[2:3], a[0:3]", ("mfma", 16)),
        ("gfx90a", "v_mfma_f32_32x32x8bf16_1k a[0:15], v[0:1], v[2:3], a[0:15]", ("mfma", 8)),
        ("gfx90a", "v_mfma_f32_32x32x2f32 a[0:15], v0, v1, a[0:15]", ("mfma", 2)),
        ("gfx1100", "v_wmma_f32_16x16x16_f16 v[0:7], v[8:15], v[16:23], v[0:7]", ("wmma", 16)),
    ],
)
def test_instruction(arch: str, text: str, found: tuple[str, int]) -> None:
    """The instruction and the steps of K that it takes, in each compiler's spelling; twice the same is one."""
    assert instruction(target(arch), f"{text}\n{text}\n") == found


def test_two_instructions() -> None:
    """A kernel that adds up in two ways has no order."""
    text = "mma.sync.aligned.m16n8k16.row\nmma.sync.aligned.m16n8k8.row\n"
    with pytest.raises(CompileError, match=r"sm80: one kernel multiplies by \[\('mma', 8\), \('mma', 16\)\]"):
        instruction(target("sm80"), text)


def test_orders_are_told_apart() -> None:
    """Each part of an order is in its text, by which the launcher compares orders."""
    orders = [
        Order("mma", 16),
        Order("wgmma", 16),
        Order("wgmma", 32),
        Order("wgmma", 32, promoted=128),
        Order("wgmma", 32, promoted=64),
        Order("mfma", 16, packed=2),
        Order("mfma", 16),
        Order("wgmma", 8, rounded="load"),
        Order("wgmma", 8, rounded="kernel"),
        Order("exact"),
    ]
    assert len({str(order) for order in orders}) == len(orders)
    assert str(orders[3]) == "wgmma k32, promoted every 128"
