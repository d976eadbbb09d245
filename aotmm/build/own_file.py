"""A user's own Python file with kernels: importing it for a target without a GPU, and finding the function in it."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from aotmm.errors import SpecError
from aotmm.target import Target


class Found(NamedTuple):
    """A kernel in a file.

    Attributes:
        function: Triton's jit function.
        configs: the configs of @triton.autotune, in their order: values of constexprs and of the compiler's options.
        heuristics: functions of the arguments by name, by which @triton.heuristics computes constexprs, in their order.
    """

    function: Any
    configs: tuple[dict[str, Any], ...]
    heuristics: dict[str, Callable[[dict[str, Any]], Any]]


def kernel_in(path: Path, name: str, target: Target) -> Found:
    """Import `path`, once for each target, and return the kernel `name` in it.

    While it is imported, Triton's driver answers for `target`: no GPU is needed, and none is asked.

    Raises:
        SpecError: there is no such file, it cannot be imported, or has no such kernel.
    """
    found: Any = getattr(_imported(path, target), name, None)
    configs: list[dict[str, Any]] = []
    heuristics: dict[str, Callable[[dict[str, Any]], Any]] = {}
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import JITFunction

    while isinstance(found, Autotuner | Heuristics):
        if isinstance(found, Autotuner):
            configs += [config.all_kwargs() for config in found.configs]
        else:
            heuristics |= found.values
        found = found.fn
    if not isinstance(found, JITFunction):
        module = _imported(path, target)
        kernels = [key for key, value in vars(module).items() if hasattr(value, "arg_names")]
        raise SpecError(
            f"{path}: {name} is no kernel of it; those with @triton.jit are: {', '.join(kernels) or 'none'}"
        )
    return Found(found, tuple(configs), heuristics)


# Modules of users' own that were imported, and the target that they were imported for.
_mine: dict[str, Target] = {}


@functools.cache
def _imported(path: Path, target: Target) -> Any:
    """Return the module in `path`, imported for `target`; modules from its folder are not those of another target."""
    if not path.is_file():
        raise SpecError(f"{path} is not a file")
    from triton.runtime import driver

    root, own_module = _module_name(path)
    for known in [known for known, of in _mine.items() if of != target]:
        del _mine[known]
        sys.modules.pop(known, None)
    others, before = set(sys.modules), driver._active  # noqa: SLF001 - `active` would look for a GPU
    driver.set_active(_answers(target))
    sys.path.insert(0, str(root))
    try:
        return importlib.import_module(own_module) if "." in own_module else _script(path)
    except ModuleNotFoundError as error:
        raise SpecError(
            f"{path} imports {error.name}, which is not installed here; install it beside Triton in this environment"
            + (" (a CPU build of torch is enough)" if (error.name or "").partition(".")[0] == "torch" else "")
        ) from error
    except Exception as error:
        raise SpecError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(root))
        driver._active = before  # noqa: SLF001
        fresh = {key: getattr(sys.modules[key], "__file__", None) for key in set(sys.modules) - others}
        _mine.update({key: target for key, file in fresh.items() if file and Path(file).is_relative_to(root)})


def _module_name(path: Path) -> tuple[Path, str]:
    """Return the folder from which the module in `path` is imported, and its name with those of its packages."""
    parts, folder = [path.stem], path.parent
    while (folder / "__init__.py").is_file():
        parts, folder = [folder.name, *parts], folder.parent
    return folder, ".".join(parts)


def _script(path: Path) -> Any:
    """Import a file that is in no package, under a name that no other module has."""
    name = f"aotmm_own_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _answers(target: Target) -> Any:
    """Return a driver of Triton that answers for `target` as far as a file may ask, and has no device behind it."""
    from triton.backends.compiler import GPUTarget

    facts = {
        "multiprocessor_count": target.multiprocessors,
        "max_shared_mem": target.shared_bytes,
        "warpSize": target.warp_size,
        "max_num_regs": target.registers,
    }
    return SimpleNamespace(
        is_active=lambda: True,
        get_current_target=lambda: GPUTarget(target.backend, target.triton_arch, target.warp_size),
        get_current_device=lambda: 0,
        get_current_stream=lambda _device=None: 0,
        get_active_torch_device=_torch_device,
        get_benchmarker=lambda: _refuse_to_measure,
        utils=SimpleNamespace(get_device_properties=lambda _device: facts),
    )


def _torch_device() -> Any:
    import torch

    return torch.device("cuda", 0)


def _refuse_to_measure(*_arguments: Any, **_named: Any) -> Any:
    raise SpecError("a module measures while it is imported, which needs a GPU")
