"""The torch ops `torch.ops.aotmm.*`: register them by the native library and turn its errors into Python's."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

import aotmm
from aotmm.errors import ArtifactError, NoKernelError
from aotmm.problem import DTYPE_CODES, DTYPES, GROUPED, LEAKY_SLOPE, OUTPUTS
from aotmm.runtime import direct_call
from aotmm.runtime.views import grouped_shape, result_shape

if TYPE_CHECKING:
    from aotmm.runtime.launcher import Problem
    from aotmm.runtime.pack import Pack

_LIBRARY = Path(aotmm.__file__).parent / "native" / "libaotmm_torch.so"
_TYPE, _VALUE, _LAUNCHER, _RESOLVER, _TORCH = range(1, 6)
_OK, _FAILED = 0, 1
STREAM = b"aoti_torch_get_current_cuda_stream"
_GPU = "torch_hip" if torch.version.hip else "torch_cuda"  # torch's library for GPUs, if it has one
_OPTIONS = 10  # arguments after a and b in the schema of aotmm::mm
_ARGUMENTS = (
    "Tensor a, Tensor b, Tensor? bias=None, Tensor? scale_a=None, Tensor? scale_b=None, int activation=0, "
    f"float slope={LEAKY_SLOPE}, bool allow_tf32=False, bool fast_accum=False, "
    "bool batch_invariant=False, int library=0"
)
_SCHEMAS = (f"mm({_ARGUMENTS}, int out_dtype=-1) -> Tensor", f"mm.out({_ARGUMENTS}, *, Tensor(a!) out) -> Tensor(a!)")
_Resolver = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int)
_Find = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)

# Both spellings of every type: torch's, and the code that the ops take.
TORCH_DTYPES = {getattr(torch, row.torch): row.storage for row in DTYPES.values()}
_OUTPUTS = {getattr(torch, DTYPES[name].torch): name for name in (*OUTPUTS, "int32")}


class Ops:
    """The registered ops. There is one per process; `register` makes it."""

    def __init__(self, native: ctypes.CDLL, resolve: Callable[[int, int], list[int]]) -> None:
        """Use `resolve(library, device)`, called once for each, which returns launchers' addresses."""
        if not hasattr(native, "aotmm_torch_dry_run"):
            raise ArtifactError(f"{_LIBRARY} is of another version; in a checkout, `make artifacts` builds it")
        self._native = native
        self._native.aotmm_torch_bind.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
        self._native.aotmm_torch_connect.argtypes = [_Find, _Resolver]
        self._native.aotmm_torch_connect.restype = ctypes.c_char_p
        self.dry_run = ctypes.c_int.in_dll(native, "aotmm_torch_dry_run").value  # a library's number: see `problem`
        self._resolve = resolve
        self._callback = _Resolver(self._on_first_use)  # the native side keeps its address
        self._unresolved = threading.local()
        self.unsupported: set[tuple[int, int]] = set()  # (library, GPU) without a pack
        lacking = self._native.aotmm_torch_connect(find, self._callback)
        if lacking is None and serves_gpus() and find(STREAM) is None:
            lacking = STREAM
        if lacking is not None:
            raise ArtifactError(
                f"torch {torch.__version__} does not take aotmm's ops, for want of {lacking.decode()}; "
                "aotmm needs torch 2.10 or newer"
            )
        self._schemas = torch.library.Library("aotmm", "FRAGMENT")  # type: ignore[no-untyped-call]
        for schema in _SCHEMAS:
            # Operands keep their order in memory, but not meaningless strides: for those Inductor would name every
            # argument in the calls that it writes, which takes longer than the call.
            self._schemas.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))  # type: ignore[no-untyped-call]
        self.direct = direct_call.connect(native, torch_library)
        self.direct_call = self.direct.matmul

    def override(self, key: str, library: int, own_key: str, *, batch_invariant: bool) -> None:
        """Send torch's own mm, bmm and _int_mm of dispatch key `key` to library number `library`.

        Args:
            own_key: the dispatch key of Python's kernels, which multiply as torch does and raise its exceptions.

        Raises:
            ArtifactError: this torch does not allow it.
        """
        native = self._native.aotmm_torch_override
        native.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int, _Find, _Setting, ctypes.c_uint64]
        native.restype = ctypes.c_char_p
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.__members__[own_key]).raw_repr()  # noqa: SLF001
        _check_override(native(key.encode(), library, batch_invariant, find, _tf32, keys))

    def count(self, fate: int) -> None:
        """Count a product of the override by its fate, as native/override.c numbers them."""
        self._native.aotmm_torch_count(fate)

    def counts(self, fates: int) -> list[int]:
        """Return how many products of each of so many fates there were since the outermost override began."""
        self._native.aotmm_torch_counts.restype = ctypes.POINTER(ctypes.c_uint64)
        return list(self._native.aotmm_torch_counts()[:fates])

    def give_back(self) -> None:
        """Free the tensors of the product that a kernel of the own key failed to compute."""
        self._native.aotmm_torch_give_back()

    def restore(self) -> None:
        """Undo `override`. Raises ArtifactError."""
        self._native.aotmm_torch_restore.restype = ctypes.c_char_p
        _check_override(self._native.aotmm_torch_restore())

    def declined(self) -> bool:
        """Return whether the calling thread's last product was refused for its arguments, not by the driver."""
        return bool(self._native.aotmm_torch_declined())

    def problem(self) -> Problem:
        """Return the problem that the calling thread's last product of library `dry_run` would have launched."""
        from aotmm.runtime.launcher import CProblem, Problem  # only here: `load` should be quick

        self._native.aotmm_torch_problem.restype = ctypes.POINTER(CProblem)
        return Problem.from_c(self._native.aotmm_torch_problem().contents)

    def _on_first_use(self, library: int, device: int) -> int:
        try:
            self._bind(library, device)
        except BaseException as error:  # noqa: BLE001 - none can pass through C, `reraise` raises it
            self._unresolved.error = error
            if isinstance(error, NoKernelError):
                self.unsupported.add((library, device))
            return _FAILED
        return _OK

    def _bind(self, library: int, device: int) -> None:
        for rank, address in reversed(list(enumerate(self._resolve(library, device)))):
            if self._native.aotmm_torch_bind(library, device, rank, address):
                raise ArtifactError(
                    f"{_LIBRARY.name} does not take pack {rank} of library {library} for GPU {device}: it is of "
                    "another version, which building it again mends, or these are too many"
                )

    def reraise(
        self, cause: RuntimeError, tensors: dict[str, Any], packs_for: Callable[[int], Sequence[Pack]]
    ) -> NoReturn:
        """Raise the calling thread's last error, of which torch made the RuntimeError `cause`.

        Args:
            tensors: the arguments by name, for the message; "offs" or "rows" is among those of a grouped product.
            packs_for: returns the packs that may serve a GPU, in order.
        """
        from aotmm.runtime.c_interface import NO_KERNEL, error_of  # only here: `load` should be quick
        from aotmm.runtime.launcher import CTorchError

        for name, value in tensors.items():
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"{name} must be a tensor, found {type(value).__name__}") from None
        self._native.aotmm_torch_last_error.restype = ctypes.POINTER(CTorchError)
        failure = self._native.aotmm_torch_last_error().contents
        text = failure.error.text.decode(errors="replace")
        if not text or text not in str(cause):
            raise cause  # not ours
        found = ", ".join(f"{name} is {_describe(value)}" for name, value in tensors.items())
        if failure.kind == _TYPE:
            raise TypeError(f"{text}: {found}") from None
        if failure.kind == _VALUE:
            raise ValueError(f"{text}: {found}") from None
        if failure.kind == _RESOLVER:
            error = self._unresolved.error
            del self._unresolved.error
            raise error from None
        if failure.kind == _LAUNCHER:
            if failure.error.status == NO_KERNEL:
                _refuse_types(tensors, text, found, packs_for(tensors["a"].device.index))
            raise error_of(failure.error) from None
        if "allocate" in text:  # the same in Python raises torch's own error, mostly out of memory
            a, b, offs = tensors["a"], tensors["b"], tensors.get("offs", tensors.get("rows"))
            shape = result_shape(a, b) if offs is None else grouped_shape(a, b, offs)
            torch.empty(shape, dtype=default_output(a.dtype), device=a.device)
        raise cause


def _refuse_types(tensors: dict[str, torch.Tensor], text: str, found: str, packs: Sequence[Pack]) -> NoReturn:
    """Raise an error that lists the packs' types; `text` is the launcher's reason, `found` the tensors.

    Raises:
        TypeError: they have no such pair. NoKernelError: they have it, but for other outputs or sizes.
    """
    a, b = tensors["a"], tensors["b"]
    grouped = "M" if "rows" in tensors else "none" if "offs" not in tensors else "K" if a.dim() == b.dim() else "M"
    kernels = [kernel for pack in packs for kernel in pack.manifest.kernels if kernel.role == GROUPED[grouped]]
    types = [(DTYPES[k.dtype_a].storage, DTYPES[k.dtype_b].storage) for k in kernels]
    mine = (TORCH_DTYPES[a.dtype], TORCH_DTYPES[b.dtype])
    if mine not in types:
        known = ", ".join(f"{x} x {y}" for x, y in sorted(set(types))) or "none"
        what = f"{mine[0]} x {mine[1]}" + " in groups" * (grouped != "none")
        raise TypeError(f"no kernel of pack {packs[0].arch} multiplies {what}: {found}; it has: {known}") from None
    writes = {(k.dtype_c, k.epilogue) for k, pair in zip(kernels, types, strict=True) if pair == mine}
    has = "; ".join(f"{mine[0]} x {mine[1]} -> {output}, epilogue {epilogue}" for output, epilogue in sorted(writes))
    raise NoKernelError(f"{text}: {found}; for these operands it has: {has}") from None


_lock = threading.Lock()
_ops: Ops | None = None


def register(resolve: Callable[[int, int], list[int]]) -> Ops:
    """Return the process's ops, registered at the first call.

    Raises:
        ArtifactError: the native library is missing, this torch does not take it, or another copy of aotmm is loaded.
    """
    global _ops  # noqa: PLW0603 - torch's registry is one per process too
    with _lock:
        if _ops is None:
            _refuse_another_copy()
            try:
                native = ctypes.CDLL(str(_LIBRARY))
            except OSError as error:
                raise ArtifactError(
                    f"{_LIBRARY} cannot be loaded: {error}; in a checkout, `make artifacts` builds it"
                ) from error
            _ops = Ops(native, resolve)
            torch.library.register_fake("aotmm::mm", _fake_mm)
            torch.library.register_fake("aotmm::mm.out", _fake_mm_out)
        return _ops


def _refuse_another_copy() -> None:
    """Raise ArtifactError if torch has the ops already: a process can register them only once."""
    if not hasattr(torch.ops.aotmm, "mm"):
        return
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    others = sorted({line.split(maxsplit=5)[-1] for line in maps if _LIBRARY.name in line})
    raise ArtifactError(
        f"another copy of aotmm is in use in this process, which torch allows one: {', '.join(others)}; this one is "
        f"aotmm {aotmm.__version__} in {_LIBRARY.parent.parent}; leave one of them on sys.path"
    )


def registered() -> Ops:
    """Return the process's ops, which `register` made."""
    if _ops is None:
        raise RuntimeError("no library was loaded yet")
    return _ops


def output_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return `dtype` if kernels write it. Raises TypeError if none does."""
    if dtype not in _OUTPUTS:
        raise TypeError(f"unknown out_dtype {dtype}; known: {', '.join(str(known) for known in _OUTPUTS)}")
    return dtype


def output_code(dtype: torch.dtype) -> int:
    """Return the op's number for a result of `dtype`. Raises TypeError as `output_dtype`."""
    return DTYPE_CODES.index(_OUTPUTS[output_dtype(dtype)])


def default_output(dtype: torch.dtype) -> torch.dtype:
    """Return the result's dtype for operands of `dtype`. Raises TypeError for one without kernels."""
    if dtype not in TORCH_DTYPES:
        known = ", ".join(str(known) for known in TORCH_DTYPES)
        raise TypeError(f"aotmm has no kernels for {dtype}; known: {known}")
    output: torch.dtype = getattr(torch, DTYPES[DTYPES[TORCH_DTYPES[dtype]].output].torch)
    return output


def result_dtype(dtype: torch.dtype, code: int) -> torch.dtype:
    """Return the result's dtype for operands of `dtype` and the op's number `code`, -1 for the default."""
    if code < 0:
        return default_output(dtype)
    result: torch.dtype = getattr(torch, DTYPES[DTYPE_CODES[code]].torch)
    return result


def tf32_allowed() -> bool:
    """Return torch's setting, however it was made: the older getters raise once the newer one was used."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def _fake_mm(  # the op's schema: torch calls it by position
    a: torch.Tensor,
    b: torch.Tensor,
    *options: Any,
    out_dtype: int = -1,
) -> torch.Tensor:
    code = options[-1] if len(options) == _OPTIONS else out_dtype
    return a.new_empty(result_shape(a, b), dtype=result_dtype(a.dtype, code))


def _fake_mm_out(*operands: object, out: torch.Tensor, **options: object) -> torch.Tensor:  # noqa: ARG001
    return out


@functools.cache
def torch_library(part: str) -> ctypes.CDLL | None:
    """Return one of torch's own libraries, which are already loaded; None if this torch has none of that name."""
    name = f"lib{part}.so"
    for path in (name, str(Path(torch.__file__).parent / "lib" / name)):
        try:
            return ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            continue
    return None


def serves_gpus() -> bool:
    """Return whether this torch is built for GPUs; there need not be one."""
    return torch_library(_GPU) is not None


def _address(name: bytes) -> int | None:
    """Return the address of one of torch's C functions; None if this torch does not have it."""
    for part in ("torch_cpu", _GPU):
        found = getattr(torch_library(part), name.decode(), None)
        if found is not None:
            return ctypes.cast(found, ctypes.c_void_p).value
    return None


def _check_override(lacking: bytes | None) -> None:
    if lacking is not None:
        raise ArtifactError(f"torch {torch.__version__} does not let aotmm override it: {lacking.decode()}")


_Setting = ctypes.CFUNCTYPE(ctypes.c_int)
_tf32 = _Setting(tf32_allowed)
find = _Find(_address)  # for the native side; never collected


def _describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
