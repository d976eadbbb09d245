"""`batch_invariant`: selection stays in one order for any rows, and kernels of one order give the same bits."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aotmm.errors import NoKernelError
from aotmm.pack.schema import Kernel, Order
from aotmm.problem import ACTIVATIONS, DTYPES, OUTPUTS, WORKSPACE_LIMIT, input_types
from aotmm.runtime.launcher import Launcher, Plan, Problem
from aotmm.runtime.pack import open_pack
from aotmm.runtime.tuning import CDevice
from aotmm.target import TARGETS, target
from tests.build.packs import default_pack, opened_pack, pack_of
from tests.config_sets import Value, config_set, tile
from tests.native.emulation import ARCHS, Case, Emulator, Product, missing, own_process
from tests.native.reference import slices_of
from tests.native.test_plans import changed_pack
from tests.samples import SHIPPED

PROBLEMS = 400
ROWS = (*range(1, 18), 31, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 4096, 8192, 100_000)
SIZES = (1, 8, 24, 64, 100, 128, 256, 1000, 4096, 16384)
LIMITS = (0, 2**20, WORKSPACE_LIMIT)
# By arch: the order of (types of A and B, type of C, scales or tf32 or fast sums). A change of one changes bits.
HALVES = ("fp16", "bf16")
ORDERS: dict[str, dict[tuple[str, str, str], str]] = {
    "sm80": {
        **{(name, out, ""): "mma k16" for name in (*HALVES, "fp8e5") for out in OUTPUTS},
        **{("fp32", out, ""): "fma k1" for out in OUTPUTS},
        **{("fp32", out, "relaxed"): "mma k8, rounded by the kernel" for out in OUTPUTS},
    },
    "gfx90a": {
        **{(name, out, ""): "mfma k16, packed 2" for name in HALVES for out in OUTPUTS},
        **{("fp8e5", out, ""): "mfma k16" for out in OUTPUTS},
        **{("fp32", out, ""): "mfma k2" for out in OUTPUTS},
    },
    "sm90": {
        **{(name, out, ""): "wgmma k16" for name in HALVES for out in OUTPUTS},
        **{("fp32", out, ""): "fma k1" for out in HALVES},
        ("fp32", "fp32", ""): "wgmma k16, promoted every 32",
        ("fp32", "fp32", "scaled"): "fma k1",
        ("fp32", "fp32", "relaxed"): "wgmma k8, rounded by the load",
        ("fp32", "fp16", "relaxed"): "wgmma k8, rounded by the kernel",
        ("fp32", "fp32", "relaxed scaled"): "wgmma k8, rounded by the kernel",
        ("fp8e4", "bf16", ""): "wgmma k32, promoted every 128",
        ("fp8e4", "fp16", "relaxed"): "wgmma k32",
        ("fp8e4", "fp32", ""): "wgmma k32, promoted every 32",
        ("fp8e4-fp8e5", "bf16", ""): "wgmma k32, promoted every 128",
        ("fp8e5", "fp16", "relaxed scaled"): "wgmma k32",
    },
}


def problem_of(m: int, n: int, k: int, layout: str = "nt", **changes: Any) -> Problem:
    """A dense product of fp16 at addresses that nothing is read from."""
    strides = ((k, 1) if layout[0] == "n" else (1, m), (n, 1) if layout[1] == "n" else (1, k), (n, 1))
    plain = Problem(m, n, k, *strides, "fp16", "fp16", "fp16", a_ptr=1 << 40, b_ptr=2 << 40, c_ptr=3 << 40)
    return replace(plain, **{"batch_invariant": True} | changes)


@functools.cache
def way(arch: str) -> Launcher:
    """The launcher of the default pack."""
    return opened_pack(arch).launcher


def device_of(arch: str, rng: np.random.Generator) -> CDevice:
    """A GPU of the arch, whole or a part of one."""
    name = b"NVIDIA H200" if rng.random() < 0.5 else b""
    return CDevice(int(rng.integers(8, 150)), target(arch).shared_bytes, 1980, 3352, 0, name)


def chosen(mm: Launcher, problem: Problem, device: CDevice, limit: int) -> Plan | None:
    """The plan, or None if no kernel of the order takes these operands in this workspace."""
    try:
        return mm.select(problem, device, limit)
    except NoKernelError as error:
        if "as batch_invariant asks" not in str(error):
            raise
        return None


@pytest.mark.parametrize("arch", SHIPPED)
def test_selection_stays_in_one_order(arch: str) -> None:
    """Order and slices depend on N, K, types, epilogue and whether B lies along K alone.

    They do not on rows, places, batch, device or workspace. A residual of one row comes as a vector.
    """
    rng, mm = np.random.default_rng(20261125), way(arch)
    sliced = unserved = 0
    for _ in range(PROBLEMS):
        a, b = input_types(str(rng.choice([name for name in TARGETS[arch].dtypes if name not in ("tf32", "int8")])))
        n, k = (int(rng.choice(SIZES)) for _ in range(2))
        out = str(rng.choice((DTYPES[a].output, *OUTPUTS)))
        fixed = {
            "dtype_a": a, "dtype_b": b, "dtype_c": out,
            "activation": str(rng.choice(list(ACTIVATIONS))) if rng.random() < 0.5 else "none",
            "bias_ptr": int(rng.choice((0, 4 << 40))),
            "scale_a_ptr": int(rng.choice((0, 0, 5 << 40))),
            "allow_tf32": bool(rng.random() < 0.5), "fast_accum": bool(rng.random() < 0.5),
        }  # fmt: skip
        of_b, residual = str(rng.choice(("n", "t"))), bool(rng.random() < 0.5)
        seen = set()
        for _ in range(12):
            m, batch, odd = int(rng.choice(ROWS)), int(rng.choice((1, 1, 1, 3, 64))), int(rng.choice((0, 0, 1, 2)))
            plain = problem_of(m, n, k, str(rng.choice(("n", "t"))) + of_b, **fixed)
            p = replace(
                plain,
                batch=batch,
                bias_strides=(0, n if residual and m > 1 else 0, 1),
                batch_strides=(m * k, k * n, m * n) if batch > 1 else (0, 0, 0),
                a_ptr=plain.a_ptr + odd * DTYPES[a].bytes,
                strides_a=(plain.strides_a[0] + odd, 1) if plain.strides_a[1] == 1 else plain.strides_a,
                b_ptr=plain.b_ptr + int(rng.choice((0, 0, DTYPES[b].bytes))),
            )
            limit = int(rng.choice(LIMITS))
            plan = chosen(mm, p, device_of(arch, rng), limit)
            if plan is None:
                assert limit < WORKSPACE_LIMIT or batch == 64, p  # then the members of a batch are multiplied alone
                unserved += 1
                continue
            kernel = mm.kernels[plan.kernel]
            seen.add((kernel.order, plan.split * kernel.config.slices))
            assert plan.split * kernel.config.slices in (1, slices_of(n, k, arch == "sm90" and of_b == "t")[0]), p
        assert len(seen) <= 1, (fixed, n, k, seen)
        sliced += any(slices > 1 for _, slices in seen)
    assert sliced > PROBLEMS // 20
    assert arch == "sm90" or unserved < 2 * PROBLEMS


@pytest.mark.parametrize("arch", SHIPPED)
def test_orders_are_those_that_were_promised(arch: str) -> None:
    """The order of each type is the stated one: another interval of promotion, or instruction, gives other bits."""
    mm, device = way(arch), CDevice(100, target(arch).shared_bytes, 1000, 1000, 0, b"")
    for (inputs, out, options), order in ORDERS[arch].items():
        a, b = input_types(inputs)
        relaxed = "relaxed" in options
        p = problem_of(100, 256, 512, dtype_a=a, dtype_b=b, dtype_c=out, allow_tf32=relaxed, fast_accum=relaxed)
        p = replace(p, scale_a_ptr=5 << 40 if "scaled" in options else 0)
        found = mm.kernels[mm.select(p, device).kernel].order
        assert str(found) == order, (inputs, out, options)


@pytest.mark.parametrize("arch", SHIPPED)
def test_slices(arch: str) -> None:
    """K is cut where it is long and much longer than N, in the stated numbers of slices, whatever M is."""
    mm, device = way(arch), CDevice(100, target(arch).shared_bytes, 1000, 1000, 0, b"")
    for n, k, split in (
        (256, 4096, 4), (257, 4096, 1), (16, 4095, 1), (16, 2048, 1), (512, 8192, 4), (1024, 16384, 8),
        (1025, 16384, 1), (8, 16384 + 512, 4), (8, 16384 + 128, 1), (4096, 14336, 1),
    ):  # fmt: skip
        assert slices_of(n, k, serial=False)[0] == split
        for layout, wanted in (("nn", split), ("nt", slices_of(n, k, serial=arch == "sm90")[0])):
            for m in (1, 100, 8192, 1_000_000):
                plan = mm.select(problem_of(m, n, k, layout), device)
                assert plan.split * mm.kernels[plan.kernel].config.slices == wanted, (m, n, k, layout)
                assert plan.workspace_bytes <= WORKSPACE_LIMIT


def test_slices_one_after_another() -> None:
    """Where few rows gain by slices, many rows get kernels that add theirs in registers, without a workspace."""
    mm, device = way("sm90"), CDevice(132, 232448, 1980, 4916, 0, b"NVIDIA H200")
    for n, k, slices, step in (
        (1536, 7168, 4, 128), (1536, 3072, 4, 128), (1536, 3071, 1, 0), (1544, 7168, 1, 0), (896, 4864, 4, 64),
        (896, 4992, 1, 0), (1024, 2048, 4, 128), (1028, 4096, 1, 0), (512, 1920, 1, 0), (768, 3072, 4, 128),
        (256, 16384, 8, 128), (256, 16384 + 256, 4, 64),
    ):  # fmt: skip
        assert slices_of(n, k, serial=True) == (slices, step)
        for m in (1, 16, 100, 700, 8192):
            p = problem_of(m, n, k, "nt")
            plan = mm.select(p, device)
            kernel = mm.kernels[plan.kernel]
            assert plan.split * kernel.config.slices == slices, (m, n, k)
            assert slices == 1 or kernel.config.block_k // kernel.config.cluster_k <= step
            assert slices != 4 or m < 700 or n < 512 or (kernel.config.serial_k, plan.workspace_bytes) == (4, 0)
            odd = mm.select(replace(p, a_ptr=p.a_ptr + 2), device)
            assert odd.split * mm.kernels[odd.kernel].config.slices == slices
            free = mm.select(replace(p, batch_invariant=False), device)
            assert mm.kernels[free.kernel].config.serial_k == 1
            for other in ({"bias_ptr": 4 << 40}, {"dtype_c": "fp32"}, {"activation": "gelu"}):
                whole = mm.select(replace(p, **other), device)
                wanted = slices_of(n, k, serial=False)[0]
                assert whole.split * mm.kernels[whole.kernel].config.slices == wanted, (m, n, k, other)


def test_slices_of_groups() -> None:
    """A grouped product has the slices of single products where a kernel adds them one after another."""
    mm, device = way("sm90"), CDevice(132, 232448, 1980, 4916, 0, b"NVIDIA H200")

    def grouped(n: int, k: int, **changes: Any) -> Problem:
        groups: dict[str, Any] = {"grouped": "M", "offsets_ptr": 5 << 40, "batch": 8, "batch_strides": (0, k * n, 0)}
        return problem_of(700, n, k, **groups | changes)

    for n, k, slices in ((1024, 4096, 4), (896, 4864, 4), (2048, 4096, 1), (64, 8192, 4)):
        found = mm.kernels[mm.select(grouped(n, k), device).kernel]
        assert (found.role, found.config.serial_k) == ("grouped_m", slices), (n, k)
    for none in (grouped(64, 16384), grouped(1024, 4096, a_ptr=(1 << 40) + 2)):  # 8 slices; not aligned
        with pytest.raises(NoKernelError, match="slices of K"):
            mm.select(none, device)


def test_without_the_flag_no_block_adds_slices() -> None:
    """A kernel of such slices is refused for products that do not ask for them, with and without the flag."""
    mm, device = way("sm90"), CDevice(132, 232448, 1980, 4916, 0, b"NVIDIA H200")
    p = problem_of(700, 1024, 4096, "nt")
    serial = mm.select(p, device).kernel
    free = replace(p, batch_invariant=False)
    assert mm.kernels[serial].config.serial_k == 4
    assert "slices of K one after another, for batch_invariant alone" in str(mm.check(free, device, serial).rejected)
    wider = problem_of(700, 2048, 4096, "nt")
    assert "K in slices" in str(mm.check(wider, device, serial).rejected)


def test_long_steps_give_no_slices() -> None:
    """Of a K of 36 times 128, four slices of steps of 256 would have other bounds than those of steps of 64."""
    halves = ("dtypes", ["fp16"]), ("layouts", ["nt"]), ("epilogues", ["none"])
    both = config_set(*(tile(32, 32, size, 2, 2, split=True) for size in (64, 256)), **dict(halves))
    mm, device = open_pack(pack_of("gfx90a", both)).launcher, CDevice(104, target("gfx90a").shared_bytes)
    found = {kernel.config.block_k: kernel for kernel in mm.kernels if kernel.config_name.endswith("_split")}
    assert {64, 256} <= found.keys()
    assert str(found[64].order) == str(found[256].order)
    number = mm.kernels.index(found[256])
    assert mm.check(problem_of(1, 288, 4608, batch_invariant=False), device, number).plan is not None
    for m in (1, 40, 500):
        problem = problem_of(m, 288, 4608)
        assert "adds up another way" in str(mm.check(problem, device, number).rejected)
        plan = mm.select(problem, device, WORKSPACE_LIMIT)
        assert plan.split == 4
        assert mm.kernels[plan.kernel].config.block_k <= 64


def test_exact_products_are_as_free_as_ever() -> None:
    """Sums of integers are the same in any order, so their plans are those without the flag."""
    mm, device = way("sm90"), CDevice(132, 232448, 1980, 4916, 0, b"NVIDIA H200")
    for m, n, k in ((16, 256, 8192), (1000, 1000, 1000), (1, 64, 65536)):
        p = problem_of(m, n, k, dtype_a="int8", dtype_b="int8", dtype_c="int32")
        assert mm.select(p, device) == mm.select(replace(p, batch_invariant=False), device)


def test_explained() -> None:
    """A kernel of another order is refused for that, and `run` takes no plan with it."""
    mm, device = way("sm90"), CDevice(132, 232448, 1980, 4916, 0, b"NVIDIA H200")
    selection = mm.explain(problem_of(64, 256, 8192), device)
    assert selection.chosen is not None
    assert selection.chosen.plan is not None
    assert mm.kernels[selection.chosen.plan.kernel].config.slices * selection.chosen.plan.split == 4
    words = {row.rejected for row in selection.evaluations if row.same_types and row.kernel.role == "product"}
    assert "adds up another way than batch_invariant asks for: wgmma k16, K as a whole" in words


# ------------------------------------------------------------------------------------------------------------- bits
def rows_of(whole: Case, product: Product) -> Case:
    """The product of the first rows of another's operands."""
    case = Case(product)
    for name, operand in case.operands.items():
        if name != "C":
            operand.view[...] = whole.operands[name].view[:, : operand.view.shape[1]]
    return case


def result(emulator: Emulator, case: Case, plan: Plan) -> bytes:
    """The bits of C's first rows."""
    workspace = emulator.place(case, plan)
    emulator.launcher.run(plan, replace(case.problem, batch_invariant=False), 0, 0, workspace)
    assert emulator.driver.faults == []
    return case.operands["C"].view.tobytes()


def disagreements(folder: Path, product: Product, splits: tuple[int, ...] = (1,)) -> list[str]:
    """The orders whose kernels give several results for one product."""
    emulator, whole = Emulator(folder), Case(product)
    device = emulator.launcher.device(0)
    seen: dict[tuple[str, int], dict[bytes, list[str]]] = {}
    for number, kernel in enumerate(emulator.kernels):
        if kernel.role not in ("product", "partial"):
            continue
        case = rows_of(whole, product)
        plan = emulator.launcher.check(replace(case.problem, batch_invariant=False), device, number).plan
        for split in splits if plan else ():
            if (split > 1) == (kernel.role == "partial"):
                assert plan is not None
                which = Plan(number, split=split, copies=plan.copies, workspace_bytes=1 << 22)
                key = str(kernel.order), split
                seen.setdefault(key, {}).setdefault(result(emulator, case, which), []).append(kernel.name)
    assert seen
    return [f"{key}: {list(bits.values())}" for key, bits in seen.items() if len(bits) > 1]


TYPES = {
    "sm80": ("fp16", "bf16", "tf32", "fp32", "fp8e5"),
    "gfx90a": ("fp16", "bf16", "fp32", "fp8e5"),
}
SMALL = Product(20, 72, 208, exact=False)


@pytest.mark.parametrize(("arch", "dtype"), [(arch, dtype) for arch in ARCHS for dtype in TYPES[arch]])
@own_process
def test_kernels_of_one_order_agree(arch: str, dtype: str) -> None:
    """Every kernel of the shipped pack that takes a product gives the bits of all others of its order."""
    if reason := missing(arch):
        pytest.skip(reason)
    out = DTYPES[dtype].output
    for layout, bias in (("nt", ""), ("nt", "cancelling"), ("nn", "cancelling")):  # which leaves rounding errors
        product = replace(SMALL, dtype=dtype, out=out, layout=layout, bias=bias)
        assert disagreements(default_pack(arch), product) == []


@pytest.mark.parametrize("arch", ARCHS)
@own_process
def test_bits_over_rows(arch: str) -> None:
    """Rows have the same bits in products of any number of rows, unaligned or not, whole or in slices."""
    if reason := missing(arch):
        pytest.skip(reason)
    emulator = Emulator(default_pack(arch))
    for dtype, n, k in (("fp16", 40, 200), ("bf16", 136, 136), ("fp16", 16, 4096)):
        whole = Product(67, n, k, dtype=dtype, out=dtype, exact=False, layout="nt", bias="vector")
        case, found = Case(whole), {}
        for rows in (67, 1, 33):
            for odd in (0, 1):
                part = rows_of(case, replace(whole, M=rows, offset=odd, padding=odd))
                problem = replace(part.problem, batch_invariant=True)
                plan = emulator.launcher.plan(problem, 0, WORKSPACE_LIMIT)
                assert plan.split == slices_of(n, k, serial=False)[0]
                emulator.launcher.run(plan, problem, 0, 0, emulator.place(part, plan))
                found[rows, odd] = part.operands["C"].view[0].copy()
        first = found[67, 0]
        assert all(first[: len(each)].tobytes() == each.tobytes() for each in found.values()), (dtype, n, k)


def relabelled(kernel: Kernel) -> Kernel:
    """The kernel with the order of another."""
    return replace(kernel, order=Order("mfma", 16)) if kernel.role == "product" else kernel


_TILE: dict[str, Value] = {"backend": "hip", "outputs": ["fp32"], "matrix_instr_nonkdim": 16}
CONFIGS = config_set(
    tile(32, 32, 64, 2, 2, kpack=2, **_TILE),
    tile(32, 32, 64, 2, 2, kpack=1, **_TILE),
    dtypes=["fp16"],
    layouts=["nt"],
    epilogues=["none"],
)


@own_process
def test_a_wrong_order_is_noticed(tmp_path: Path) -> None:
    """A kernel that is labelled with an order which is not its own disagrees with others of that order."""
    pack = pack_of("gfx90a", CONFIGS)
    product = Product(20, 72, 512, exact=False, layout="nt", out="fp32")
    assert disagreements(pack, product) == []
    assert disagreements(changed_pack(pack, tmp_path, relabelled), product) != []


@own_process
def test_another_number_of_slices_is_noticed() -> None:
    """A product in one slice more has other bits; so the number is part of the promise."""
    emulator = Emulator(default_pack("gfx90a"))
    case = Case(Product(20, 72, 2048, exact=False, layout="nt"))
    device, bits = emulator.launcher.device(0), set()
    for number, kernel in enumerate(emulator.kernels):
        if kernel.role == "partial" and emulator.launcher.check(case.problem, device, number).plan is not None:
            for split in (4, 5):
                bits.add((split, result(emulator, case, Plan(number, split=split, workspace_bytes=1 << 22))))
    assert len({each for split, each in bits if split == 4}) == 1
    assert len({each for split, each in bits if split == 5}) >= 1
    assert not {each for split, each in bits if split == 4} & {each for split, each in bits if split == 5}


@own_process
def test_plans_are_remembered_apart() -> None:
    """The plan for the same product with the flag is another, in any turn; and `run` refuses the one without."""
    emulator = Emulator(default_pack("gfx90a"), execute=False)
    kept = problem_of(8, 16, 8192)
    free = replace(kept, batch_invariant=False)

    def plan(problem: Problem) -> Plan:
        return emulator.launcher.plan(problem, 0, WORKSPACE_LIMIT)

    assert [plan(p).split for p in (kept, free, kept, free)] == [4, plan(free).split] * 2
    assert plan(free).split != 4
    with pytest.raises(NoKernelError, match="do not fit"):
        emulator.launcher.run(plan(free), kept, 0, 0, 1 << 20)
