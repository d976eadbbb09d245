"""A user's own Python file with kernels: importing it for a target without a GPU, and finding the function in it."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from aotmm.build.environment import isolated
from aotmm.errors import SpecError
from aotmm.target import Target

# Functions of torch.cuda that tell of the GPU of the machine that builds.
_OF_GPUS = frozenset(
    (
        "current_device",
        "device_count",
        "get_device_capability",
        "get_device_name",
        "get_device_properties",
        "is_available",
    )
)


class Found(NamedTuple):
    """A kernel in a file.

    Attributes:
        function: Triton's jit function.
        configs: the configs of @triton.autotune (Triton's objects), in their order.
        key: arguments that @triton.autotune goes by.
        prune: what @triton.autotune drops some of them by, of the configs, the arguments, and constexprs by name.
        heuristics: functions of the arguments by name, by which @triton.heuristics computes constexprs, in their order.
    """

    function: Any
    configs: tuple[Any, ...]
    key: tuple[str, ...]
    prune: Callable[..., Any] | None
    heuristics: dict[str, Callable[[dict[str, Any]], Any]]


def kernel_in(path: Path, name: str, target: Target) -> Found:
    """Import `path`, once for each target, and return the kernel `name` in it.

    While it is imported, Triton's driver answers for `target`: no GPU is needed, and none is asked.

    Raises:
        SpecError: there is no such file, it cannot be imported, or has no such kernel.
    """
    imported = _imported(path, target)
    module = imported.module
    _use((target, _module_name(path)[0]))
    found: Any = getattr(module, name, None)
    if found is None and imported.failure:
        raise SpecError(f"{path} cannot be imported: {imported.failure}")
    configs: list[Any] = []
    key: list[str] = []
    prune = None
    heuristics: dict[str, Callable[[dict[str, Any]], Any]] = {}
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import JITFunction

    while not isinstance(found, JITFunction) and hasattr(found, "fn"):  # decorators in any order, also a package's own
        if isinstance(found, Autotuner):
            configs += found.configs
            key += found.keys
            prune = found.early_config_prune
        elif _has_configs(found):  # a package's own autotuner, most often a copy of Triton's of its day
            configs += found.configs
            key += _key_of(found)
            prune = _without_constexprs(getattr(found, "early_config_prune", None))
        elif isinstance(found, Heuristics):
            heuristics |= found.values
        found = found.fn
    if not isinstance(found, JITFunction):
        kernels = [key for key, value in vars(module).items() if hasattr(value, "arg_names")]
        raise SpecError(
            f"{path}: {name} is no kernel of it; those with @triton.jit are: {', '.join(kernels) or 'none'}"
        )
    return Found(found, tuple(configs), tuple(key), prune, heuristics)


def _has_configs(found: Any) -> bool:
    """Return whether a decorator that is not Triton's has configs of Triton's autotuner."""
    from triton.runtime.autotuner import Config

    configs = getattr(found, "configs", None)
    return isinstance(configs, list) and bool(configs) and all(isinstance(each, Config) for each in configs)


def _key_of(found: Any) -> list[str]:
    """Return the names of the arguments that a package's own autotuner goes by, of which some know the places alone."""
    names = [name for name in getattr(found, "keys", ()) if isinstance(name, str)]
    arguments = getattr(found, "arg_names", ())
    places = [place for place in getattr(found, "key_idx", ()) if isinstance(place, int) and place < len(arguments)]
    return names or [arguments[place] for place in places]


def _without_constexprs(prune: Any) -> Callable[..., Any] | None:
    """Return the pruning of a package's own autotuner in the form of Triton's, which also passes constexprs by name."""
    return (lambda configs, known, **_: prune(configs, known)) if callable(prune) else None


def notes_of(path: Path, target: Target) -> tuple[str, ...]:
    """Return what an author should know of the import of `path` for `target`: that it asked torch for a GPU."""
    imported, found = _imported(path, target), []
    if imported.asked:
        first, *others = imported.asked
        more = f", and {len(others)} other places ask it too" if others else ""
        found.append(
            f"{first}{more}: torch knows nothing of {target.name}; what follows from its answer may be wrong there"
        )
    if imported.failure:
        found.append(f"{path} was imported up to where it failed: {imported.failure}; kernels see nothing behind that")
    return tuple(found)


class _Imported(NamedTuple):
    """A module.

    Attributes:
        asked: the places where it and what it imports asked torch for a GPU.
        failure: the words of the exception that ended a script's import, as at a launch in it; "" for none.
    """

    module: Any
    asked: tuple[str, ...]
    failure: str


_SCRIPT = "aotmm_own_"  # begins the names of modules that are in no package
_Place = tuple[Target, Path]
# Modules of users' own by their names, by the target that they were imported for and the folder that they came from.
_mine: dict[_Place, dict[str, Any]] = {}


@functools.cache
def _imported(path: Path, target: Target) -> _Imported:
    """Return the module in `path`, imported for `target`; its folder's modules are of no other target and folder.

    A file that torch refuses, because it knows no GPU here, is imported as on a machine without one. It sees no
    variables of the environment that compilers do not see, because what a pack has must not depend on them.
    """
    if not path.is_file():
        raise SpecError(f"{path} is not a file")
    root, own_module = _module_name(path)
    _use((target, root))
    try:
        with isolated(), _asking_torch() as asked:
            return _Imported(_module(path, target, _answers(target)), tuple(asked), "")
    except ModuleNotFoundError as error:
        raise _missing(path, error) from error
    except (Exception, SystemExit) as error:  # noqa: BLE001 - of another author's file, which may exit
        first, failure = error, f"{type(error).__name__}: {error}{_place_of(error)}"
    begun = None if "." in own_module else sys.modules.get(_SCRIPT + path.stem)
    if asked and (module := _without_gpu(path, target)) is not None:
        return _Imported(module, tuple(asked), "")
    if begun is not None and _wants_gpu(first):
        return _Imported(begun, tuple(asked), failure)
    others = [other.name for other, folder in _mine if other != target and folder == root]
    words = f"{path} cannot be imported: {failure}"
    if asked:
        words += "; torch knows no GPU here: docs/own-kernels.md shows a file that answers for it (The file)"
    if others:
        words += f"; it was imported for {others[0]} before; if it does what can be done once, build one arch at a time"
    raise SpecError(words) from first


def _without_gpu(path: Path, target: Target) -> Any:
    """Return the module in `path`, imported as on a machine without a GPU; None if it cannot be."""
    _use(None)
    _mine.pop((target, _module_name(path)[0]), None)
    try:
        with isolated():
            return _module(path, target, _NoGpu())
    except (Exception, SystemExit):  # noqa: BLE001 - the first failure tells more
        return None


def _wants_gpu(error: BaseException) -> bool:
    """Return whether torch or Triton refused something: a launch, or a tensor on a GPU."""
    (*_, last) = traceback.extract_tb(error.__traceback__)
    return last.filename.startswith(_inside())


def _inside() -> tuple[str, ...]:
    """Return the folders of torch, Triton and this project."""
    modules = (sys.modules.get(name) for name in ("torch", "triton", "aotmm"))
    return tuple(str(Path(module.__file__).parent) for module in modules if module and module.__file__)


def _missing(path: Path, error: ModuleNotFoundError) -> SpecError:
    """Return the error of a module that is not there."""
    name = (error.name or "").partition(".")[0]
    if name == "triton" != error.name:
        version = importlib.metadata.version("triton")
        return SpecError(
            f"{path} imports {error.name}, which Triton {version} does not have; build with the Triton it is for"
        )
    above = next((folder for folder in path.parents if folder.name == name), None)
    if above is not None:
        remedy = f"that is a folder above the file: put {above.parent} on PYTHONPATH"
    else:
        remedy = "install it beside Triton in this environment"
        remedy += " (a CPU build of torch is enough)" if name == "torch" else ""
    return SpecError(f"{path} imports {error.name}, which is not installed here; {remedy}")


def _place_of(error: BaseException) -> str:
    """Return the last line outside of torch, Triton and this project at which an import failed, as " (FILE:LINE)"."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [row for row in frames if Path(row.filename).is_file() and not row.filename.startswith(_inside())]
    return f" ({places[-1].filename}:{places[-1].lineno})" if places else ""


def _module(path: Path, target: Target, active: Any) -> Any:
    """Import the module in `path` while Triton's active driver is `active`."""
    from triton.runtime import driver

    root, own_module = _module_name(path)
    others, before = set(sys.modules), driver._active  # noqa: SLF001 - `active` would look for a GPU
    driver.set_active(active)
    sys.path.insert(0, str(root))
    try:
        return importlib.import_module(own_module) if "." in own_module else _script(path)
    finally:
        sys.path.remove(str(root))
        driver._active = before  # noqa: SLF001
        fresh = {name.partition(".")[0] for name in set(sys.modules) - others}
        wanted = {own_module.partition(".")[0]} if "." in own_module else {n for n in fresh if _is_in(root, n)}
        mine = {name: each for name, each in sys.modules.items() if name.partition(".")[0] in wanted & fresh}
        _mine.setdefault((target, root), {}).update(mine)


def _is_in(folder: Path, name: str) -> bool:
    """Return whether the top-level module `name` was imported from `folder`."""
    module = sys.modules.get(name)
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return any(Path(place).parent in (folder, folder / name) for place in places if place)


def _use(place: _Place | None) -> None:
    """Let users' own modules be those of one target and folder: others of the same names are imported again."""
    for other in _mine.values():
        for name in other:
            sys.modules.pop(name, None)
    sys.modules.update(_mine.get(place, {}) if place else {})


@contextmanager
def _asking_torch() -> Iterator[dict[str, None]]:
    """Yield the places outside of torch that ask it about GPUs meanwhile, as "FILE:LINE asks torch.cuda.FUNCTION"."""
    found: dict[str, None] = {}
    inside = f"{os.sep}torch{os.sep}cuda{os.sep}__init__.py"

    def watch(frame: Any, event: str, _argument: Any) -> None:
        code, caller = frame.f_code, frame.f_back
        is_asked = event == "call" and code.co_name in _OF_GPUS and code.co_filename.endswith(inside)
        if is_asked and caller is not None and f"{os.sep}torch{os.sep}" not in caller.f_code.co_filename:
            found[f"{caller.f_code.co_filename}:{caller.f_lineno} asks torch.cuda.{code.co_name}"] = None

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield found
    finally:
        sys.setprofile(before)


def _module_name(path: Path) -> tuple[Path, str]:
    """Return the folder from which the module in `path` is imported, and its name with those of its packages."""
    parts, folder = [path.stem], path.parent
    while (folder / "__init__.py").is_file():
        parts, folder = [folder.name, *parts], folder.parent
    return folder, ".".join(parts)


def _script(path: Path) -> Any:
    """Import a file that is in no package, under a name that no other module has."""
    name = _SCRIPT + path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where Triton looks for its functions' globals
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


class _NoGpu:
    """A driver of Triton on a machine without a GPU: it answers nothing."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no GPU to tell {name}")


def _torch_device() -> Any:
    import torch

    return torch.device("cuda", 0)


def _refuse_to_measure(*_arguments: Any, **_named: Any) -> Any:
    raise SpecError("a module measures while it is imported, which needs a GPU")
