"""One launch of each image whose result every right machine has to give, bit for bit: interpreters and GPUs alike.

Operands are small integers from a formula, so that every sum is exact in any order and only the last rounding is left,
which IEEE defines. What must come out is computed here, in 64-bit integers; nothing travels from one machine to
another, and who agrees with this agrees with everyone who does.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aotmm.kernels import BLOCK_SCALED
from aotmm.pack.schema import Kernel
from aotmm.problem import ACTIVATIONS, BLOCK_SCALE_K, DTYPES

Array = np.ndarray[Any, np.dtype[Any]]
# Largest operands, such that K may be hundreds: fp32 sums stay below 2^24, those of int8 below 2^31.
LARGEST = {"fp16": 15, "bf16": 15, "fp32": 15, "tf32": 15, "fp8e5": 4, "fp8e4": 4, "int8": 100}
LARGEST_FP16 = 60_000
SUMS: dict[str, Any] = {"fp32": np.float32, "int32": np.int32}
SLOPE = 0.5
BITS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch of one image, and what it leaves behind.

    Attributes:
        memory: what lies at each address, by the quantity that is the address.
        values: every other quantity that is not 0.
        programs: blocks.
        written: the quantity whose memory is written.
        want: that memory afterwards, what must not be written included.
        edge: (rows, columns) of each matrix beyond which whole tiles are written with whatever.
        within: addresses that lie in the memory of another: that quantity, and the bytes from its address on.
    """

    memory: dict[str, Array]
    values: dict[str, int]
    programs: int
    written: str
    want: Array
    edge: tuple[int, int] | None = None
    within: dict[str, tuple[str, int]] = field(default_factory=dict)

    def wrong(self, found: Array) -> int:
        """How many elements are not what they must be."""
        bits = BITS[self.want.itemsize]
        differ = found.view(bits) != self.want.view(bits)
        return int(differ.sum() if self.edge is None else differ[..., : self.edge[0], : self.edge[1]].sum())

    def parameters(self, kernel: Kernel, addresses: dict[str, int]) -> bytes:
        """The parameter block for memory at `addresses`. They and the values must keep the kernel's guards."""
        inner = {name: addresses[of] + bytes_ for name, (of, bytes_) in self.within.items()}
        values = self.values | addresses | inner
        for guard in kernel.guards:
            found = values.get(guard.value, 0)
            assert {
                "equals": found == guard.operand,
                "multiple_of": found % max(guard.operand, 1) == 0,
                "below": found < guard.operand,
                "at_least": found >= guard.operand,
            }[guard.relation], (kernel.name, guard, found)
        block = bytearray(kernel.parameters[-1].offset + kernel.parameters[-1].bytes)
        for item in kernel.parameters:
            data = values.get(item.value, 0).to_bytes(8, "little", signed=True)[: item.bytes]
            block[item.offset : item.offset + item.bytes] = data
        return bytes(block)


def launch_of(kernel: Kernel) -> Launch:
    """The launch for `kernel`: tiles with edges and more steps of K than the pipeline is deep."""
    makers = {
        "product": _product,
        "partial": _partial,
        "reduce": _reduce,
        "copy": _copy,
        "grouped_m": _grouped_m,
        "grouped_k": _grouped_k,
    }
    return makers[kernel.role](kernel)


def encode(values: Array, dtype: str) -> Array:
    """Integers, and halves of them, as `dtype` stores them, rounded to nearest even; fp8 must hold them exactly."""
    if dtype in ("fp16", "int8", "int32"):
        return values.astype({"fp16": np.float16, "int8": np.int8, "int32": np.int32}[dtype])
    if dtype == "fp8e5":  # the upper half of an fp16
        return (values.astype(np.float16).view(np.uint16) >> 8).astype(np.uint8)
    single = values.astype(np.float32)
    bits = single.view(np.uint32)
    if dtype == "fp8e4":  # the exponent's bias is less by 120, and three bits of the fraction are left
        return np.where(values == 0, 0, (bits >> 24 & 0x80) | ((bits & 0x7FFFFFFF) >> 20) - (120 << 3)).astype(np.uint8)
    if dtype != "bf16":
        return single
    rounded: Array = (bits + np.uint32(0x7FFF) + (bits >> 16 & np.uint32(1))) >> np.uint32(16)
    return rounded.astype(np.uint16)


def _integers(rows: int, cols: int, top: int, step: int) -> Array:
    """Integers from 0 to `top` without an obvious order."""
    i: Array = np.arange(rows, dtype=np.int64)[:, None]
    j: Array = np.arange(cols, dtype=np.int64)
    return np.asarray((i * 37 + j * step + (i * j) % 13 + (i ^ j)) % (top + 1))


def _poison(like: Array) -> Array:
    """Memory of the same form in which every bit is set."""
    memory = np.empty_like(like)
    memory.view(BITS[like.itemsize])[...] = 2 ** (8 * like.itemsize) - 1
    return memory


def _stored(values: Array, *, pad: int, transposed: bool = False) -> tuple[Array, tuple[int, int]]:
    """A matrix in memory, its lines `pad` poisoned elements apart, and its (row, column) strides."""
    values = values.T if transposed else values
    memory = _poison(np.empty((values.shape[0], values.shape[1] + pad), values.dtype))
    memory[:, : values.shape[1]] = values
    return memory, (1, memory.shape[1]) if transposed else (memory.shape[1], 1)


def _steps(kernel: Kernel) -> dict[str, int]:
    return {guard.value: guard.operand for guard in kernel.guards if guard.relation == "multiple_of"}


def _pad(kernel: Kernel) -> int:
    """Elements between lines: as many as keep alignment, where that is guarded."""
    return 16 if kernel.layout != "any" and "a_ptr" in _steps(kernel) else 3


def _operands(kernel: Kernel, m: int, n: int, k: int) -> tuple[Array, Array]:
    """Integer A and B; the columns of B, and so of C, have alternating signs."""
    top = LARGEST[kernel.dtype_a]
    if kernel.dtype_c == "fp16":
        top = min(top, int((LARGEST_FP16 / k) ** 0.5))
    return _integers(m, k, top, 101), _integers(k, n, top, 59) * (1 - 2 * (np.arange(n) % 2))


def _inputs(kernel: Kernel, a: Array, b: Array) -> tuple[dict[str, Array], dict[str, int]]:
    """The memory of A and B and the quantities that describe it."""
    layout = "tn" if kernel.layout == "any" else kernel.layout
    stored_a, (am, ak) = _stored(encode(a, kernel.dtype_a), pad=_pad(kernel), transposed=layout[0] == "t")
    stored_b, (bk, bn) = _stored(encode(b, kernel.dtype_b), pad=_pad(kernel), transposed=layout[1] == "t")
    values = {
        "M": a.shape[0],
        "N": b.shape[1],
        "K": a.shape[1],
        "batch": 1,
        "stride_am": am,
        "stride_ak": ak,
        "stride_bk": bk,
        "stride_bn": bn,
        "a_extent": (a.shape[0] - 1) * am + (a.shape[1] - 1) * ak,
        "b_extent": (b.shape[0] - 1) * bk + (b.shape[1] - 1) * bn,
        "a_reach": (a.shape[0] - 1) * am + (a.shape[1] - 1) * ak,
        "b_reach": (b.shape[0] - 1) * bk + (b.shape[1] - 1) * bn,
        "allow_tf32": int(kernel.dtype_a == "tf32"),
        "fast_accum": int(kernel.fast_accum),
        "split": 1,
        "group_m": 2,
    }
    return {"a_ptr": stored_a, "b_ptr": stored_b}, values


def _scaled(
    kernel: Kernel, a: Array, b: Array, memory: dict[str, Array], values: dict[str, int]
) -> tuple[Array, Array]:
    """A and B as they count: times their block scales, 1 or 2, if the kernel takes some."""
    if BLOCK_SCALED not in kernel.guards:
        return a, b
    (m, k), n = a.shape, b.shape[1]
    width = next((guard.operand for guard in kernel.guards if guard.value == "block_columns"), 1)
    blocks = -(-k // BLOCK_SCALE_K)
    of_a, of_b = _integers(m, blocks, 1, 3) + 1, _integers(blocks, -(-n // width), 1, 5) + 1
    memory |= {"block_scale_a_ptr": of_a.astype(np.float32), "block_scale_b_ptr": of_b.astype(np.float32)}
    values |= {
        "stride_block_am": blocks,
        "stride_block_ak": 1,
        "stride_block_bk": of_b.shape[1],
        "stride_block_bn": 1,
        "block_columns": width,
    }
    whole_b = of_b.repeat(BLOCK_SCALE_K, 0)[:k].repeat(width, 1)[:, :n]
    return a * of_a.repeat(BLOCK_SCALE_K, 1)[:, :k], b * whole_b


def _finished(kernel: Kernel, x: Array, memory: dict[str, Array], values: dict[str, int]) -> Array:
    """What the epilogue makes of the sums, if the kernel has one: a bias per column and a leaky_relu that is exact."""
    if kernel.epilogue == "none":
        return x
    bias = np.arange(x.shape[1], dtype=np.int64) % 17 - 8
    memory["bias_ptr"] = encode(bias, kernel.dtype_c)
    (slope,) = struct.unpack("<i", struct.pack("<f", SLOPE))
    activation = tuple(ACTIVATIONS).index("leaky_relu")
    values |= {"bias_rank": 1, "stride_bias_n": 1, "activation": activation, "slope": slope}
    x = x + bias
    return np.where(x >= 0, x, x * SLOPE)


def _into_c(kernel: Kernel, x: Array, memory: dict[str, Array], values: dict[str, int], *, pad: int) -> Array:
    """Gives C its memory; what that must hold afterwards."""
    want, (cm, cn) = _stored(encode(x, kernel.dtype_c), pad=pad)
    values |= {
        "stride_cm": cm,
        "stride_cn": cn,
        "c_span": x.shape[1],
        "c_extent": (x.shape[0] - 1) * cm + (x.shape[1] - 1) * cn,
    }
    memory["c_ptr"] = _poison(want)
    return want


def _tiles(kernel: Kernel, m: int, n: int) -> int:
    if kernel.config.block_m == 1:  # of a copy, over the ends of rows
        m, n = 1, m * n
    return -(-m // kernel.config.block_m) * -(-n // kernel.config.block_n)


def _sizes(kernel: Kernel) -> tuple[int, int, int]:
    """M, N and K of two tiles, the second with edges, and of more steps than the pipeline is deep."""
    step, config = _steps(kernel), kernel.config
    m, n = 2 * config.block_m - step.get("M", 1), 2 * config.block_n - step.get("N", 1)
    return m, n, -(-((config.num_stages + 1) * config.block_k + 1) // step.get("K", 1)) * step.get("K", 1)


def _product(kernel: Kernel) -> Launch:
    m, n, k = _sizes(kernel)
    a, b = _operands(kernel, m, n, k)
    memory, values = _inputs(kernel, a, b)
    a, b = _scaled(kernel, a, b, memory, values)
    x = _finished(kernel, a @ b, memory, values)
    want = _into_c(kernel, x, memory, values, pad=_pad(kernel))
    return Launch(memory, values, _tiles(kernel, m, n), "c_ptr", want)


def _ends(size: int, block: int) -> Array:
    """The ends of three groups, of which the second is empty, with an element behind the last."""
    first = block // 2 + 1
    return np.array([first, first, size - 1], np.int32)


def _grouped_m(kernel: Kernel) -> Launch:
    """Three groups of rows, each with a matrix of its own; there are more blocks than tiles."""
    m, n, k = _sizes(kernel)
    ends = _ends(m, kernel.config.block_m)
    a, b = _operands(kernel, m, n, k)
    members = b, b[::-1], np.roll(b, 1, axis=0)
    memory, values = _inputs(kernel, a, b)
    stored = np.stack([_inputs(kernel, a, each)[0]["b_ptr"] for each in members])
    scaled = [_scaled(kernel, a, each, memory, values) for each in members]
    if BLOCK_SCALED in kernel.guards:  # those of each group are a multiple of the first one's
        of_b = memory["block_scale_b_ptr"]
        memory["block_scale_b_ptr"] = np.stack([of_b * np.float32(number) for number in range(1, len(members) + 1)])
        values["stride_block_bz"] = of_b.size
        scaled = [(rows, each * number) for number, (rows, each) in enumerate(scaled, 1)]
    x = np.zeros((m, n), np.int64)
    for (rows, each), first, end in zip(scaled, [0, *ends], ends, strict=False):
        x[first:end] = rows[first:end] @ each
    want = _into_c(kernel, _finished(kernel, x, memory, values), memory, values, pad=_pad(kernel))
    want[ends[-1] :] = _poison(want[ends[-1] :])
    memory |= {"b_ptr": stored, "offsets_ptr": ends}
    values |= {"batch": len(ends), "stride_bz": stored[0].size}
    return Launch(memory, values, _tiles(kernel, m + len(ends) * kernel.config.block_m, n), "c_ptr", want)


def _grouped_k(kernel: Kernel) -> Launch:
    """Three groups of K, each with a C of its own."""
    m, n, k = _sizes(kernel)
    ends = _ends(k, kernel.config.block_k)
    a, b = _operands(kernel, m, n, k)
    memory, values = _inputs(kernel, a, b)
    parts = [a[:, first:end] @ b[first:end] for first, end in zip([0, *ends], ends, strict=False)]
    want = np.stack([_into_c(kernel, part, memory, values, pad=_pad(kernel)) for part in parts])
    memory |= {"c_ptr": _poison(want), "offsets_ptr": ends}
    values |= {"batch": len(ends), "stride_cz": want[0].size}
    return Launch(memory, values, len(ends) * _tiles(kernel, m, n), "c_ptr", want)


def _partial(kernel: Kernel) -> Launch:
    """A batch of two, which have the same B."""
    step, config, split, steps, batch = _steps(kernel), kernel.config, 3, 7, 2
    m, n = 2 * config.block_m - step.get("M", 1), 2 * config.block_n - step.get("N", 1)
    k = (steps - 1) * config.block_k + step.get("K", 1)
    first, b = _operands(kernel, m, n, k)
    members = first, first[::-1]
    memory, values = _inputs(kernel, first, b)
    stored = np.stack([_inputs(kernel, a, b)[0]["a_ptr"] for a in members])
    want = np.zeros((split, batch, 2 * config.block_m, 2 * config.block_n), SUMS[kernel.dtype_c])
    for part in range(split):
        ks = slice(*(number * steps // split * config.block_k for number in (part, part + 1)))
        for z, member in enumerate(members):
            a, scaled_b = _scaled(kernel, member, b, memory, values)
            want[part, z, :m, :n] = a[:, ks] @ scaled_b[ks]
    memory |= {"a_ptr": stored, "workspace_ptr": _poison(want)}
    values |= {"batch": batch, "stride_az": stored[0].size, "stride_bz": 0}
    values |= {"split": split, "workspace_stride_z": want[0, 0].size, "workspace_stride_m": want.shape[3]}
    return Launch(memory, values, split * batch * _tiles(kernel, m, n), "workspace_ptr", want, (m, n))


def _reduce(kernel: Kernel) -> Launch:
    """A batch of two."""
    aligned, config, split, batch = kernel.layout != "any", kernel.config, 3, 2
    m, n = 2 * config.block_m + 1, 2 * config.block_n + (8 if aligned else 3)
    sums = _poison(np.empty((split, batch, -(-m // 16) * 16, -(-n // 16) * 16), SUMS[kernel.dtype_a]))
    parts = np.stack([_integers(m, n, 2000, 7 * part + 3) - 1000 for part in range(split * batch)])
    parts = parts.reshape(split, batch, m, n)
    sums[:, :, :m, :n] = parts
    values = {
        "M": m,
        "N": n,
        "batch": batch,
        "split": split,
        "workspace_stride_z": sums[0, 0].size,
        "workspace_stride_m": sums.shape[3],
    }
    memory: dict[str, Array] = {"workspace_ptr": sums}
    finished = [_finished(kernel, x, memory, values) for x in parts.sum(axis=0)]
    want = np.stack([_into_c(kernel, x, memory, values, pad=24 if aligned else 3) for x in finished])
    memory["c_ptr"] = _poison(want)
    values["stride_cz"] = want[0].size
    return Launch(memory, values, batch * _tiles(kernel, m, n), "c_ptr", want)


def _copy(kernel: Kernel) -> Launch:
    """Two matrices, which are the first rows of one and the last."""
    size, config = DTYPES[kernel.dtype_a].bytes, kernel.config
    word = max((guard.operand for guard in kernel.guards if guard.relation == "multiple_of"), default=1)
    first, last, n = config.block_m + 3 * word, 5 * word, config.block_n + 5 * word
    m = first + last
    layout = "nt" if kernel.layout == "any" else kernel.layout
    bits = (_integers(m, n, 2**31, 65_599) * 40_503 & 2 ** (8 * size) - 1).astype(BITS[size])
    source, (am, ak) = _stored(bits, pad=3 * word, transposed=layout[0] == "t")
    want, (cm, cn) = _stored(bits, pad=5 * word, transposed=layout[1] == "t")
    strides = {"stride_sm": am, "stride_sn": ak, "stride_dm": cm, "stride_dn": cn}
    values = {"M": first, "N": n, "batch": 1, "other_M": last, "other_N": n, "other_batch": 1, **strides}
    values |= {f"other_{name}": stride for name, stride in strides.items()}
    return Launch(
        {"source_ptr": source, "dest_ptr": _poison(want)},
        values,
        _tiles(kernel, first, n) + _tiles(kernel, last, n),
        "dest_ptr",
        want,
        within={
            "other_source_ptr": ("source_ptr", first * am * size),
            "other_dest_ptr": ("dest_ptr", first * cm * size),
        },
    )
