"""Kernels of others: files of liger-kernel and fla-core, unmodified, compiled by aotmm and by Triton.

`python -m tests.build.corpus` compiles every kernel of corpus.toml for sm80, sm90 and gfx90a, and prints how many of
those that Triton compiles aotmm compiles, too. It fetches the packages into an environment of their own.

`python -m tests.build.corpus --keep FOLDER --arch sm90` builds packs of them instead, which `tests/gpu/corpus.py`
launches on a machine that has neither the packages nor Triton.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import tomllib

from aotmm.build import build, gate, link, own
from aotmm.build import compile as compiling
from aotmm.build.environment import isolate
from aotmm.build.own import OwnVariant
from aotmm.build.own.describe import describe
from aotmm.build.own.file import Found, kernel_in
from aotmm.errors import AotmmError
from aotmm.target import Target, target

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_suffix(".toml")
ENVIRONMENTS = ROOT / "build"
ARCHS = ("sm80", "sm90", "gfx90a")


@dataclass(frozen=True)
class Outcome:
    """One kernel for one arch: what failed in aotmm and in Triton, "" if nothing; whether both gave the same image."""

    kernel: str
    arch: str
    aotmm: str
    triton: str
    equal: bool
    seconds: float


def environment() -> Path:
    """Return the Python of an environment with the packages, torch and the Triton of this one. Raises RuntimeError."""
    listed = tomllib.loads(LIST.read_text())
    return environment_of("corpus", listed["needed"], listed["packages"] | {"triton": version("triton")})


def environment_of(name: str, needed: Sequence[str], exact: dict[str, str]) -> Path:
    """Return the Python of an environment with `needed`, and on top of that `exact` versions alone; make it if needed.

    Raises:
        RuntimeError: they cannot be fetched; the message has pip's words.
    """
    folder = ENVIRONMENTS / name
    stamp, python = folder / "stamp.json", folder / "bin" / "python"
    text = json.dumps([list(needed), exact])
    if stamp.is_file() and stamp.read_text() == text:
        return python
    _run(sys.executable, "-m", "venv", "--clear", str(folder))
    pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    _run(*pip, *needed)
    _run(*pip, "--no-deps", *(f"{package}=={number}" for package, number in exact.items()))
    stamp.write_text(text)
    return python


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def kernels() -> list[str]:
    """Return every kernel as "FILE.py:NAME", in the order of the list."""
    listed = tomllib.loads(LIST.read_text())
    return [
        f"{path}:{name}" for package in listed["files"].values() for path, names in package.items() for name in names
    ]


def outcomes(python: Path, wanted: Sequence[tuple[str, str]]) -> Iterator[Outcome]:
    """Compile (kernel, arch) pairs in the environment of `python`, and yield what came of each."""
    with _inside(python, "--pairs", json.dumps(wanted)) as running:
        for line in running.stdout or ():
            yield Outcome(**json.loads(line))
    if running.returncode:
        raise RuntimeError(f"compiling ended with status {running.returncode}")


def keep(python: Path, folder: Path, arch: str) -> list[Path]:
    """Build packs of every kernel in the environment of `python`, and return their folders below `folder`.

    Names are unique in a pack, so there are several: the second kernel of a name is in the second pack. Of each kernel
    they have the variants that `outcomes` compares: the first one and the generic one.
    """
    packs: list[list[str]] = []
    for kernel in kernels():
        name = kernel.rpartition(":")[2]
        pack = next((pack for pack in packs if all(name != other.rpartition(":")[2] for other in pack)), None)
        if pack is None:
            packs.append(pack := [])
        pack.append(kernel)
    folders = [folder.resolve() / str(number) for number in range(len(packs))]
    for place, wanted in zip(folders, packs, strict=True):
        with _inside(python, "--pack", json.dumps([str(place), arch, wanted])) as running:
            pass
        if running.returncode:
            raise RuntimeError(f"building {place} ended with status {running.returncode}")
    return folders


def _inside(python: Path, *options: str) -> subprocess.Popen[str]:
    """Start this module in the environment of `python`, which links by the C compiler of this one."""
    settings = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "CC": shlex.join(link.compiler()[0])}
    command = [str(python), "-m", "tests.build.corpus", *options]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | settings, stdout=subprocess.PIPE, text=True)


# ------------------------------------------------------------------------------------------- inside the environment
def _facts(path: Path, name: str, row: Target) -> dict[str, Any]:
    """Return the types and constexprs of a kernel: those that --describe asks for, by the list."""
    listed = tomllib.loads(LIST.read_text())
    place = str(path.relative_to(_packages()))
    usual: dict[str, Any] = listed["arguments"][place.partition("/")[0]]
    special: dict[str, Any] = listed["special"].get(place, {}).get(name, {})
    text = describe(f"{path}:{name}", row)
    asked = [*tomllib.loads(text)[name]["arguments"], *re.findall(r"^# (\w+) = \.\.\.", text, re.MULTILINE)]
    return {key: usual[key] for key in asked if key in usual} | special


def _packages() -> Path:
    return Path(import_module("liger_kernel").__path__[0]).parent


def _outcome(pair: tuple[str, str]) -> Outcome:
    """Compile one kernel by both."""
    warnings.simplefilter("ignore")
    (place, _, name), row, begin = pair[0].rpartition(":"), target(pair[1]), time.monotonic()
    path = _packages() / place
    image, theirs, wrong, refused = b"", b"", "", ""
    try:
        facts = _facts(path, name, row)
        path.with_suffix(".toml").write_text(_toml(name, facts))
        image = _by_aotmm(path, name, row)
    except AotmmError as error:
        wrong = str(error)
    try:
        theirs = _by_triton(path, name, row, facts)
    except Exception as error:  # noqa: BLE001 - the compiler raises many kinds
        refused = f"{type(error).__name__}: {error}"
    return Outcome(*pair, wrong, refused, image == theirs, time.monotonic() - begin)


def _toml(name: str, facts: dict[str, Any]) -> str:
    return "\n".join([f"[{name}.arguments]", *(f"{key} = {json.dumps(value)}" for key, value in facts.items()), ""])


def _by_aotmm(path: Path, name: str, row: Target) -> bytes:
    """Compile the first variant and the generic one, and return the image of the first. Raises AotmmError."""
    found = own.variants([f"{path}:{name}"], row)
    first, *_, last = found
    results = {variant.name: compiling.compile_variant(variant, "0" * 64) for variant in (first, last)}
    for variant in (first, last):
        if wrong := gate.mismatches(variant, "0" * 64, results[variant.name]):
            raise AotmmError(f"{variant.name}: {wrong}")
    return results[first.name].image


def _by_triton(path: Path, name: str, row: Target, facts: dict[str, Any]) -> bytes:
    """Compile the same signature by `triton.compile` alone, and return the image."""
    import triton.language
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as triton_compile

    compiling.prepare()
    found = kernel_in(path, name, row)
    values: dict[str, Any] = {}
    types: dict[str, str] = {}
    for param in found.function.params:
        fact: Any = facts.get(param.name, param.annotation_type or None)
        if param.is_constexpr and param.name in facts:
            is_type = isinstance(fact, str) and fact.startswith("tl.")
            values[param.name] = getattr(triton.language, fact[3:]) if is_type else fact
        elif param.is_constexpr and param.has_default:
            values.setdefault(param.name, _plain(param.default))
        elif not param.is_constexpr and fact == "None":
            values[param.name] = None
        elif not param.is_constexpr:
            types[param.name] = fact
    if found.configs:
        values = {
            key: _plain(value) for key, value in _first_config(found, types, values).all_kwargs().items()
        } | values
    for key, compute in found.heuristics.items():
        if key not in facts:
            values[key] = compute({**dict.fromkeys(types, object()), **values})
    names = found.function.arg_names
    aligned = [param for param in found.function.params if types.get(param.name, "fp32") not in ("fp32", "fp64", "i1")]
    hints = {(names.index(param.name),): [["tt.divisibility", 16]] for param in aligned if not param.do_not_specialize}
    source = ASTSource(
        fn=found.function,
        signature={key: types.get(key, "constexpr") for key in names},
        constexprs={key: value for key, value in values.items() if key in names},
        attrs=hints,
    )
    options = {key: value for key, value in values.items() if key not in names}
    options |= {} if row.ptx_version is None else {"ptx_version": row.ptx_version}
    made = triton_compile(source, target=GPUTarget(row.backend, row.triton_arch, row.warp_size), options=options)
    image: bytes = made.asm[row.image]
    return image


def _first_config(found: Found, types: dict[str, str], values: dict[str, Any]) -> Any:
    """Return the first config of @triton.autotune that its own pruning keeps, if that can be told without a launch."""
    kept = list(found.configs)
    if found.prune is not None:
        known = {**dict.fromkeys(types, object()), **values}
        for key, compute in found.heuristics.items():
            with suppress(KeyError):  # of a config
                known.setdefault(key, compute(dict(known)))
        with suppress(Exception):
            kept = found.prune(kept, known, **{key: value for key, value in known.items() if key not in types})
    return kept[0]


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


def _work(pairs: Sequence[tuple[str, str]]) -> None:
    """Print an Outcome in JSON for each pair."""
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), isolate) as pool:
        for outcome in pool.map(_outcome, pairs):
            print(json.dumps(asdict(outcome)), flush=True)  # noqa: T201 - a command


def _pack(folder: str, arch: str, wanted: Sequence[str]) -> None:
    """Build a pack of kernels, of whose variants the first and the last one are kept."""
    warnings.simplefilter("ignore")
    texts: dict[Path, str] = {}
    for place, _, name in (kernel.rpartition(":") for kernel in wanted):
        path = _packages() / place
        texts[path] = texts.get(path, "") + _toml(name, _facts(path, name, target(arch)))
    for path, text in texts.items():
        path.with_suffix(".toml").write_text(text)
    every = own.variants

    def few(places: Sequence[str], row: Target) -> list[OwnVariant]:
        found: dict[str, list[OwnVariant]] = {}
        for variant in every(places, row):
            found.setdefault(variant.function, []).append(variant)
        return [variant for first, *_, last in found.values() for variant in (first, last)]

    vars(own)["variants"] = few
    build((arch,), Path(folder), kernels=tuple(f"{_packages()}/{kernel}" for kernel in wanted), progress=_tell)


def _tell(arch: str, done: int, total: int) -> None:
    print(f"{arch}: {done} of {total}", file=sys.stderr)  # noqa: T201 - a command


def summary(found: Sequence[Outcome]) -> str:
    """Return for each arch how many of the kernels that Triton compiles aotmm compiles, and what it does not."""
    lines = []
    for arch in dict.fromkeys(row.arch for row in found):
        of = [row for row in found if row.arch == arch]
        able = [row for row in of if not row.triton]
        served = [row for row in able if not row.aotmm]
        equal = sum(row.equal for row in served)
        lines.append(
            f"{arch}: Triton compiles {len(able)} of {len(of)}, aotmm {len(served)} of those "
            f"({100 * len(served) / max(1, len(able)):.1f} %), {equal} images are equal"
        )
        lines += [f"  {row.kernel}: {row.aotmm}" for row in able if row.aotmm]
        lines += [f"  {row.kernel}: another image" for row in served if not row.equal]
    return "\n".join(lines)


def main() -> None:
    """Compile what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--pack", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--arch", action="append", choices=ARCHS)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="build packs there instead, for each --arch")
    options = parser.parse_args()
    if options.pairs is not None:
        _work([(kernel, arch) for kernel, arch in options.pairs])
        return
    if options.pack is not None:
        _pack(*options.pack)
        return
    if options.keep is not None:
        for arch in options.arch or ARCHS:
            print(*keep(environment(), options.keep, arch), sep="\n")  # noqa: T201 - a command
        return
    found = []
    for outcome in outcomes(environment(), [(kernel, arch) for arch in options.arch or ARCHS for kernel in kernels()]):
        found.append(outcome)
        print(f"{outcome.arch} {outcome.kernel} {outcome.seconds:.1f} s", file=sys.stderr)  # noqa: T201 - a command
    print(summary(found))  # noqa: T201 - a command


if __name__ == "__main__":
    main()
