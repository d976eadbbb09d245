"""One kernel of a pack: an entry of kernels.json, with everything that a launch needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from aotmm.pack.decode import Sha256
from aotmm.problem import ATTRIBUTES, DTYPES, EPILOGUES, LAYOUTS, LEFT_OUT, MAX_SIZES, RELATIONS, ROLES
from aotmm.target import Target

Dtype = Annotated[str, tuple(DTYPES)]
LICENSE = r"[A-Za-z0-9 ().+:/-]{0,200}"  # an SPDX expression


@dataclass(frozen=True, slots=True)
class Guard:
    """A condition that the kernel was compiled for: `value` `relation` `operand`, e.g. stride_am multiple_of 8."""

    value: str
    relation: Annotated[str, RELATIONS]
    operand: Annotated[int, range(1 - 2**53, 2**53)]


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A CUDA tensor map of a batch of matrices, or of one, in global memory: 128 bytes that a launch encodes.

    Attributes:
        dtype: element type (`problem.DTYPES`).
        inner, outer, batch: the quantities of its sizes; neighbours along `inner` are neighbours in memory.
        stride, batch_stride: the quantities of the distances between neighbours along `outer` and `batch`, in elements.
            If the latter is 0, the map has one matrix, which is all of them.
        box_inner, box_outer: elements of one transfer.
        swizzle: of a box in shared memory: 0 for none; 1, 2, 3 within 32, 64, 128 bytes.
        guards: conditions of its use; if one does not hold, the kernel gets 128 zero bytes.
        rank: its dimensions: 3, or 2 for a kernel that knows of one matrix only.
        fits: a box has no more lines than the matrix, rounded up to 8: TMA takes longer to fill lines past its end with
            zeros than to copy lines.
    """

    dtype: Dtype
    inner: str
    outer: str
    batch: str
    stride: str
    batch_stride: str
    box_inner: int
    box_outer: int
    swizzle: int
    guards: tuple[Guard, ...] = ()
    rank: Annotated[int, range(2, 4)] = 3
    fits: bool = False


@dataclass(frozen=True, slots=True)
class Parameter:
    """One kernel parameter, in order: its quantity and its place in the parameter block.

    `type` is Triton's ("*fp16", "i32", "i64"). Offset and bytes come from the compiler's text. With a `tensor_map` the
    parameter is that map of the matrix at address `value`.
    """

    name: str
    type: str
    value: str
    offset: int
    bytes: int
    tensor_map: TensorMap | None = None


WHOLE = -1  # no offset: the base of code of which all is stored


@dataclass(frozen=True, slots=True)
class Image:
    """Code of a kernel: its place among the images in the pack's library, its size in bytes, and its sha256 in hex.

    Offsets count from the first byte of the block of images. They mean nothing until a library is linked.

    Attributes:
        stored: bytes at its place: all of the code, or edits that make it of other code (`pack.edits`).
        base: offset of that other code, which is stored as it is; WHOLE if all of the code is stored.
    """

    offset: int
    bytes: int
    sha256: Sha256
    stored: int
    base: Annotated[int, range(WHOLE, 2**53)]

    @property
    def whole(self) -> bool:
        """Return whether all of the code is stored."""
        return self.base == WHOLE


@dataclass(frozen=True, slots=True)
class Attribute:
    """A launch attribute (`problem.ATTRIBUTES`) and its three numbers; unused ones are 0."""

    name: Annotated[str, tuple(ATTRIBUTES)]
    value: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Config:
    """The tile of one program, or of the blocks of a cluster together, and the compiler's options for it.

    A cluster has cluster_m x cluster_n blocks side by side, or cluster_k blocks, each of which multiplies a slice of K
    and a part of block_k. A block multiplies serial_k slices one after another. Zeros mean "not given".
    """

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_warps: int
    waves_per_eu: int = 0
    matrix_instr_nonkdim: int = 0
    kpack: int = 1
    cluster_m: int = 1
    cluster_n: int = 1
    cluster_k: int = 1
    serial_k: int = 1

    def __str__(self) -> str:
        text = f"{self.block_m}x{self.block_n}x{self.block_k}_s{self.num_stages}_w{self.num_warps}"
        if self.waves_per_eu:
            text += f"_e{self.waves_per_eu}"
        if self.matrix_instr_nonkdim:
            text += f"_i{self.matrix_instr_nonkdim}"
        if self.num_ctas > 1:
            text += f"_c{self.cluster_m}x{self.cluster_n}" + (f"x{self.cluster_k}" if self.cluster_k > 1 else "")
        if self.serial_k > 1:
            text += f"_k{self.serial_k}"
        return text + (f"_p{self.kpack}" if self.kpack != 1 else "")

    @property
    def num_ctas(self) -> int:
        """Return the blocks of a cluster."""
        return self.cluster_m * self.cluster_n * self.cluster_k

    @property
    def slices(self) -> int:
        """Return the slices of K whose sums a cluster or a block adds."""
        return self.cluster_k * self.serial_k


# Kinds of products whose times differ: relaxed ones may be less exact, which is fp8 with fast sums or fp32 rounded to
# tf32; block_scaled ones are fp8 with block scales; all others are plain.
KINDS = ("plain", "relaxed", "block_scaled")
INSTRUCTIONS = ("none", "exact", "unknown", "fma", "mma", "wgmma", "tcgen05", "mfma", "wmma")


@dataclass(frozen=True, slots=True)
class Order:
    """The order class of a product or partial: kernels of equal types and order add up in the same way.

    Attributes:
        instruction: what multiplies; "exact" if all orders give the same bits (integers), "unknown" for a family of a
            user's own, "none" for kernels that multiply nothing.
        k: products that one instruction adds at once.
        packed: instructions that share the steps of K that a thread loads at once (`Config.kpack`).
        promoted: products after which the sums of Hopper's tensor cores, of fp8 or of split fp32, move to fp32; 0 if
            they do not.
        rounded: who rounds fp32 to tf32: the "kernel", or the tensor map ("load").
    """

    instruction: Annotated[str, INSTRUCTIONS]
    k: Annotated[int, range(1025)] = 0
    packed: Annotated[int, range(3)] = 1
    promoted: Annotated[int, range(1025)] = 0
    rounded: Annotated[str, ("", "kernel", "load")] = ""

    def __str__(self) -> str:
        words = [self.instruction if self.k == 0 else f"{self.instruction} k{self.k}"]
        if self.packed != 1:
            words.append(f"packed {self.packed}")
        if self.promoted:
            words.append(f"promoted every {self.promoted}")
        if self.rounded:
            words.append(f"rounded by the {self.rounded}")
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class AnyKernel:
    """What every compiled kernel has: all that its launch needs.

    Attributes:
        name: label, unique in the pack; nothing is parsed from it.
        source: where its configuration was published, or the file that it comes from.
        symbol: entry point in the image.
        threads: threads per block.
        shared_bytes: dynamic shared memory per block, in bytes.
        registers: per thread (VGPRs on AMD).
        spill_bytes: per thread; on CUDA the stack frame, which these kernels use for nothing else.
        global_scratch_bytes, profile_scratch_bytes: per block, behind the two trailing pointers; 0 means null. The
            latter is always 0.
        quantities: names of the values that a launch gives it, in their order; parameters, guards and tensor maps
            refer to them.
        image: the binary. ptx: the same kernel as text, where the arch ships one; a zero byte follows it.
        key: digest of everything the binary depends on.
    """

    name: str
    source: str
    symbol: Annotated[str, r"[A-Za-z_.$][\w.$]*"]
    threads: int
    shared_bytes: int
    registers: int
    spill_bytes: int
    global_scratch_bytes: int
    profile_scratch_bytes: int
    quantities: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    guards: tuple[Guard, ...]
    attributes: tuple[Attribute, ...]
    image: Image
    ptx: Image | None
    key: str

    @property
    def demanded_ctas(self) -> int:
        """Return the blocks of a cluster that the image demands; 1 if a launch says how large clusters are."""
        return 1


@dataclass(frozen=True, slots=True)
class Kernel(AnyKernel):
    """One compiled kernel of products: its part of a product, beside what every kernel has.

    Attributes:
        family: module of `aotmm/kernels` that it comes from.
        role: one of `problem.ROLES`, which says its quantities (`problem.QUANTITIES`).
        config_name: determines its time, with types and epilogue; tuning tables refer to it.
        dtype_a, dtype_b, dtype_c: element types of A, B and C (`problem.DTYPES`).
        layout: memory order of A and B that it was specialised for; "any" for a kernel without such a guard.
        epilogue: one of `problem.EPILOGUES`.
        fast_accum: fp8 sums stay in the tensor cores' own precision.
        order: how it adds up (docs/numerics.md, "The same bits in every batch").
        persistent: blocks take one tile after another, so that a grid needs no more blocks than fit the device.
        pdl: waits for the previous kernel before its first access to memory, so that a launch may let it start
            early.
        vector_bytes: width of the global accesses that the guards allow; 1 without a guard on contiguity.
    """

    family: str
    role: Annotated[str, ROLES]
    config_name: str
    dtype_a: Dtype
    dtype_b: Dtype
    dtype_c: Dtype
    layout: Annotated[str, (*LAYOUTS, "any")]
    epilogue: Annotated[str, EPILOGUES]
    fast_accum: bool
    order: Order
    persistent: bool
    pdl: bool
    config: Config
    vector_bytes: int

    @property
    def num_ctas(self) -> int:
        """Return the blocks of a cluster."""
        return self.config.num_ctas

    @property
    def relaxed(self) -> bool:
        """Return whether it is less exact than its types allow: fp32 rounded to tf32, or `fast_accum`."""
        return self.dtype_a == "tf32" or self.fast_accum

    @property
    def kind(self) -> str:
        """Return its kind, one of `KINDS`."""
        return kind_of(relaxed=self.relaxed, block_scaled=self.block_scaled)

    @property
    def types(self) -> tuple[int, str]:
        """Return the bytes of an element of A and the kind, on which the times of a config depend."""
        return DTYPES[self.dtype_a].bytes, self.kind

    @property
    def block_scaled(self) -> bool:
        """Return whether it is for products with block scales."""
        return any((guard.value, guard.relation) == ("block_scale_a_ptr", "at_least") for guard in self.guards)


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a function: its name, its type, and its value if it is compiled in.

    `type` is Triton's ("*fp16", "i32"), or "constexpr", or "autotune" for a constexpr that a caller need not say.
    `value` is the JSON text of a constexpr, "" for an argument that a launch passes.
    """

    name: str
    type: str
    value: str


@dataclass(frozen=True, slots=True)
class Option:
    """An option of the compiler that the function's file or its author chose, as num_warps."""

    name: str
    value: int


@dataclass(frozen=True, slots=True)
class OwnKernel(AnyKernel):
    """One compiled variant of a function of a user's own, beside what every kernel has.

    Attributes:
        function: name of the function. Of its variants, which are in order, the first whose guards hold is launched.
        arguments: those of the function, in order; all variants have the same names.
        options: those of the compiler.
        grid: expressions of the blocks along x, y and z, of integer arguments and constexprs (`aotmm.pack.grid`); the
            last ones may be missing and are 1, none at all means that the caller says the grid.
        license: of its source, as the author states it; "" if that does not.
        writes: arguments through which it may write: for torch's op.
        sizes: integer arguments that measured choices among variants go by: those that @triton.autotune names as key.
        left_out: what its source calls and the image lacks, or a JIT does before launches (`problem.LEFT_OUT`).
    """

    function: str
    arguments: tuple[Argument, ...]
    options: tuple[Option, ...]
    grid: Annotated[tuple[str, ...], range(4)]
    license: Annotated[str, LICENSE]
    writes: tuple[str, ...]
    sizes: Annotated[tuple[str, ...], range(MAX_SIZES + 1)]
    left_out: tuple[Annotated[str, LEFT_OUT], ...] = ()

    @property
    def demanded_ctas(self) -> int:
        """Return the blocks of a cluster, which Triton's compiler fixes."""
        return next((option.value for option in self.options if option.name == "num_ctas"), 1)


def kind_of(*, relaxed: bool, block_scaled: bool) -> str:
    """Return the kind of a product or kernel, one of `KINDS`."""
    return "block_scaled" if block_scaled else "relaxed" if relaxed else "plain"


def occupancy(kernel: Kernel, target: Target) -> int:
    """Return the number of blocks of `kernel` that one multiprocessor of `target` holds at once, at least 1.

    Source of the formula: CUDA programming guide, "Hardware multithreading"; CUDA reserves 1 KB of shared
    memory for each block.
    """
    warps = kernel.threads // target.warp_size
    per_warp = -(-max(kernel.registers, 1) * target.warp_size // target.granule) * target.granule
    by_registers = target.registers // target.simds // per_warp * target.simds
    system = 1024 if target.backend == "cuda" else 0
    by_shared = (target.shared_bytes + system) // max(kernel.shared_bytes + system, 1)
    return max(1, min(by_registers // warps, target.threads // kernel.threads, by_shared))
