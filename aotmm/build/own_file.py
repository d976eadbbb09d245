"""A user's own Python file with kernels: importing it for a target without a GPU, and finding the function in it."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any, NamedTuple

from aotmm.errors import SpecError
from aotmm.target import Target


class Found(NamedTuple):
    """A kernel in a file.

    Attributes:
        function: Triton's jit function.
        configs: the configs of @triton.autotune, in their order: values of constexprs and of the compiler's options.
        heuristics: constexprs that @triton.heuristics computes at each launch of the JIT.
    """

    function: Any
    configs: tuple[dict[str, Any], ...]
    heuristics: tuple[str, ...]


def kernel_in(path: Path, name: str, target: Target) -> Found:
    """Import `path`, once for each target, and return the kernel `name` in it.

    While it is imported, Triton's driver answers for `target`: no GPU is needed, and none is asked.

    Raises:
        SpecError: there is no such file, it cannot be imported, or has no such kernel.
    """
    found: Any = getattr(_imported(path, target), name, None)
    configs, heuristics = [], []
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import JITFunction

    while isinstance(found, Autotuner | Heuristics):
        if isinstance(found, Autotuner):
            configs += [config.all_kwargs() for config in found.configs]
        else:
            heuristics += list(found.values)
        found = found.fn
    if not isinstance(found, JITFunction):
        module = _imported(path, target)
        kernels = [key for key, value in vars(module).items() if hasattr(value, "arg_names")]
        raise SpecError(
            f"{path}: {name} is no kernel of it; those with @triton.jit are: {', '.join(kernels) or 'none'}"
        )
    return Found(found, tuple(configs), tuple(heuristics))


@functools.cache
def _imported(path: Path, target: Target) -> Any:
    """Return the module in `path`, imported anew for `target`, with its folder on the path as for a script."""
    if not path.is_file():
        raise SpecError(f"{path} is not a file")
    from triton.runtime import driver

    name = f"aotmm_own_{target.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SpecError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    before = driver._active  # noqa: SLF001 - `active` would look for a GPU
    driver.set_active(_answers(target))
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        del sys.modules[name]
        raise SpecError(
            f"{path} imports {error.name}, which is not installed here; install it beside Triton in this environment"
            + (" (a CPU build of torch is enough)" if (error.name or "").partition(".")[0] == "torch" else "")
        ) from error
    except Exception as error:
        del sys.modules[name]
        raise SpecError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.parent))
        driver._active = before  # noqa: SLF001
    return module


def _answers(target: Target) -> Any:
    """Return a driver of Triton that answers for `target`, and has no device behind it."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    facts = {
        "multiprocessor_count": target.multiprocessors,
        "max_shared_mem": target.shared_bytes,
        "warpSize": target.warp_size,
        "max_num_regs": target.registers,
    }

    class Utils:
        """The part of a driver that loads images; here it knows the target's facts alone."""

        def get_device_properties(self, _device: Any) -> dict[str, int]:
            return facts

    class Answers(DriverBase):  # type: ignore[misc]
        """The driver of a machine with one GPU of the target, as far as a module may ask while it is imported."""

        def __init__(self) -> None:
            self.utils = Utils()

        @classmethod
        def is_active(cls) -> bool:
            return True

        def get_current_target(self) -> Any:
            return GPUTarget(target.backend, target.triton_arch, target.warp_size)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, _device: Any = None) -> int:
            return 0

        def get_active_torch_device(self) -> Any:
            import torch

            return torch.device("cuda", 0)

        def map_python_to_cpp_type(self, type_: str) -> str:
            raise NotImplementedError(type_)

        def get_benchmarker(self) -> Any:
            raise SpecError("a module measures while it is imported, which aotmm build cannot do without a GPU")

    return Answers()
