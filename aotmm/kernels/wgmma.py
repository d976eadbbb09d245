"""Hopper's matrix instruction with any number of columns.

A wgmma multiplies any multiple of 8 columns up to 256, but Gluon's tensors, and so its products, have a power of two
of them. Here the sums are a tensor of the next power of two, of which the instruction is given the first registers,
those of the columns that exist. Nothing reads the others, and the assembler finds that out.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from aotmm.kernels import LINE_BYTES

# Source: PTX ISA, "wgmma.mma_async" and "Matrix descriptor".
GROUP_LINES = 8  # after so many lines the swizzle begins anew
_STEP_BYTES = 32  # along K, of one instruction
_UNIT = 16  # bytes: of addresses and distances in descriptors
_DESCRIPTOR = (
    (1 << 62) | (GROUP_LINES * LINE_BYTES // _UNIT << 32) | (1 << 16)
)  # that swizzle, groups one after another
_PTX_TYPES = {"fp16": "f16", "bf16": "bf16", "fp8e4nv": "e4m3", "fp8e5": "e5m2"}


@gluon.constexpr_function
def products(registers: int, columns: int, x_type: Any, y_type: Any, x_k_major: bool) -> str:
    """PTX that adds to `registers` sums 64 rows of X times `columns` columns of Y over a line (128 bytes) of K.

    Operands: the sums as results, the sums, addresses of X and Y in shared memory, whether to add at all.
    """
    x_address, y_address, added = (f"${2 * registers + i}" for i in range(3))
    kinds = [_PTX_TYPES[str(kind)] for kind in (x_type, y_type)]
    of_16_bits = kinds[0] in ("f16", "bf16")
    depth = _STEP_BYTES // 2 if of_16_bits else _STEP_BYTES
    shape = f"m64n{columns}k{depth}.f32.{kinds[0]}.{kinds[1]}"
    # a step along K is within a line, or `depth` lines further
    x_step = (_STEP_BYTES if x_k_major else depth * LINE_BYTES) // _UNIT
    y_step = _STEP_BYTES // _UNIT
    sums = ", ".join(f"${i}" for i in range(columns // 2))  # 64 rows for 128 threads
    orders = f", {int(not x_k_major)}, 0" if of_16_bits else ""
    lines = [".reg .pred add;", ".reg .b64 x, y;", f"setp.ne.b32 add, {added}, 0;", "wgmma.fence.sync.aligned;"]
    for name, address in (("x", x_address), ("y", y_address)):
        lines += [
            f"cvt.u64.u32 {name}, {address};",
            f"bfe.u64 {name}, {name}, 4, 14;",
            f"or.b64 {name}, {name}, {_DESCRIPTOR};",
        ]
    for step in range(LINE_BYTES // _STEP_BYTES):
        if step:
            lines += [f"add.s64 x, x, {x_step};", f"add.s64 y, y, {y_step};"]
        adds = "1" if step else "add"
        lines.append(f"wgmma.mma_async.sync.aligned.{shape} {{{sums}}}, x, y, {adds}, 1, 1{orders};")
    return "\n".join(["{", *lines, "wgmma.commit_group.sync.aligned;", "}"])


@gluon.constexpr_function
def in_place(registers: int) -> str:
    """LLVM's constraints for the operands of `products`: results where the sums were."""
    return ",".join(["=f"] * registers + [str(i) for i in range(registers)] + ["r"] * 3)


@gluon.jit
def multiply_add(x, y, acc, add, COLUMNS: gl.constexpr, X_K_MAJOR: gl.constexpr):
    """Starts acc + x @ y, or x @ y if not `add`, for the first COLUMNS columns of `acc`.

    If acc has more, x has 64 rows, and lines of 128 bytes in shared memory: along K if X_K_MAJOR, else along its rows;
    y has such lines along K.
    """
    if acc.shape[1] == COLUMNS:
        return warpgroup_mma(x, y, acc, use_acc=add, is_async=True)
    else:
        REGISTERS: gl.constexpr = acc.shape[1] // 2
        TEXT: gl.constexpr = products(REGISTERS, COLUMNS, x.dtype, y.dtype, X_K_MAJOR)
        return gl.inline_asm(TEXT, in_place(REGISTERS), [acc, x, y, gl.to_tensor(add).to(gl.int32)], acc.type)
