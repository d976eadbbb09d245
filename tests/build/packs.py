"""The packs that tests look at: those of the checkout, and small ones that tests build themselves."""

from __future__ import annotations

import atexit
import dataclasses
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from aotmm.build import build, link, render
from aotmm.build.cache import Cache
from aotmm.build.compile import Compiled
from aotmm.build.products import kernel_sources
from aotmm.errors import ArtifactError
from aotmm.pack import manifest, table
from aotmm.pack.files import data_folder
from aotmm.pack.schema import Kernel
from aotmm.pack.table import Table
from aotmm.runtime.pack import Pack, open_pack
from aotmm.target import target
from tests.config_sets import Value, config_set, tile
from tests.samples import code_in

ROOT = Path(__file__).parents[2]

# Per backend one tile whose shared memory CUDA gives only when asked, and the generic kernel: compiled in seconds.
TINY = config_set(
    tile(64, 64, 64, 4, 4, backend="cuda"),
    tile(64, 64, 64, 2, 4, backend="hip"),
    dtypes=["fp16"],
    layouts=["nn"],
    epilogues=["none"],
)

# One tile as a product and as what gives sums of slices of K, and what helps both.
PLANS = config_set(
    tile(64, 64, 64, 2, 4),
    tile(64, 64, 64, 2, 4, split=True),
    dtypes=["fp16"],
    layouts=["nn", "nt"],
    epilogues=["none", "bias_relu"],
)

# A tile with block scales as a product and as what gives sums of slices of K; generic kernels with them come with it.
FP8 = ["fp8e5", "fp8e4"]
BLOCKS = config_set(
    tile(64, 64, 64, 2, 4, dtypes=FP8, outputs=["bf16"], epilogues=["none"], block_scales="any"),
    tile(64, 64, 64, 2, 4, dtypes=FP8, split=True, block_scales="any"),
    dtypes=FP8,
    layouts=["nt"],
    epilogues=["bias_relu"],
    outputs=["fp16", "bf16", "fp32"],
)

# One small tile of what sm89 alone multiplies natively, and what every set gets: a generic kernel of each type, copies.
GENERIC = config_set(
    tile(32, 32, 32, 2, 2, dtypes=["fp16", "fp8e5", "fp8e4", "fp8e4-fp8e5", "fp8e5-fp8e4"]),
    layouts=["nt"],
    epilogues=["bias_relu"],
)

# Blocks of a cluster along M and N, of one tile each, which every launch of one image may have.
SHAPES = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (4, 2), (2, 4))
HOPPER: dict[str, Value] = {"family": "cooperative", "archs": ["sm90"], "dtypes": ["fp16"]}
CLUSTERS = config_set(
    *(tile(64 * m, 64 * n, 64, 4, 4, cluster_m=m, cluster_n=n, **HOPPER) for m, n in SHAPES),
    dtypes=["fp16"],
    layouts=["nn"],
    epilogues=["none"],
)

# A tile whose clusters multiply slices of K.
SLICES = config_set(tile(64, 64, 256, 3, 4, cluster_k=4, **HOPPER), dtypes=["fp16"], layouts=["nn"], epilogues=["none"])


@functools.cache
def default_pack(arch: str) -> Path:
    """The default pack of `arch`: the checkout's if a build would leave it alone, else built once per session."""
    found = session_folder() / f"{arch}.default"
    with _alone():
        if not found.exists():  # sm90's takes seconds to check
            folder = data_folder("artifacts") / arch
            made = folder if _up_to_date(folder) else build((arch,), session_folder() / "default")[0].folder
            found.write_text(str(made))
    return Path(found.read_text())


@functools.cache
def opened_pack(arch: str) -> Pack:
    """The default pack of `arch`, opened once per process: reading the list of sm90's kernels takes a second."""
    return open_pack(default_pack(arch))


def tiny_pack(arch: str) -> Path:
    """A pack of one tile and the generic kernel, fp16 and row-major, built once per session, with its own cache."""
    return pack_of(arch, TINY, "tiny", Cache(session_folder() / "tiny" / ".cache"))


def plans_pack(arch: str) -> Path:
    """A pack of one tile that has plans of every kind, built once per session."""
    return pack_of(arch, PLANS, "plans")


@functools.cache
def pack_of(arch: str, configs: str, name: str = "", cache: Cache | None = None) -> Path:
    """A pack of the config set with that text, and of that name, built once per session.

    Kernels that the default packs have too, and those that another part of the tests has compiled, come from the
    checkout's cache if none is given.
    """
    path = session_folder() / f"{name or hashlib.sha256(configs.encode()).hexdigest()[:12]}.toml"
    with _alone():
        path.write_text(configs)
        return build((arch,), path.with_suffix(""), configs=str(path), cache=cache or _compiled())[0].folder


def generic_pack(arch: str) -> Path:
    """A pack of the generic kernels of every type, of copies and of a few tiles, built once per session."""
    return pack_of(arch, GENERIC, "generic")


def clusters_pack() -> Path:
    """A pack for sm90 of one tile in clusters of every shape, built once per session."""
    return pack_of("sm90", CLUSTERS, "clusters")


def slices_pack() -> Path:
    """A pack for sm90 with one tile whose clusters multiply slices of K, built once per session."""
    return pack_of("sm90", SLICES, "slices")


@functools.cache
def other_host(machine: str, arch: str) -> Path:
    """A folder with the default pack of `arch` for processor `machine`, and what serves torch there, built once."""
    folder, cache = session_folder() / machine, Cache(default_pack(arch).parent / ".cache")
    with _alone():
        build((arch,), folder, machine=machine, cache=cache)
    return folder


# In examples/own.
OWN = (
    *("add.py:add_kernel", "softmax.py:softmax_kernel", "layer_norm.py:layer_norm_kernel", "matmul.py:matmul_kernel"),
    *("attention.py:attention_kernel", "descriptors.py:descriptor_matmul_kernel", "descriptors.py:double_kernel"),
)


@functools.cache
def own_pack(arch: str) -> Path:
    """A pack of the functions in examples/own, built once per session."""
    places = tuple(str(ROOT / "examples" / "own" / words) for words in OWN)
    with _alone():
        return build((arch,), session_folder() / "own", kernels=places, cache=_compiled())[0].folder


def relinked(pack: Path, folder: Path, kernels: Iterable[Kernel], tables: Sequence[Table] = ()) -> Path:
    """Write `folder`: the pack in `pack` with other entries of its kernels, and `tables`, in manifest and launcher."""
    whole, code, row = open_pack(pack).manifest, code_in(pack), target(pack.name)
    compiled = [Compiled(k, code(k.image), None if k.ptx is None else code(k.ptx)) for k in kernels]
    placed, images = render.arranged(compiled)
    library, begin = link.link_launcher(row, folder, render.texts(row, placed, tables), images, link.compiler()[0])
    entry = dataclasses.replace(
        whole,
        kernels=placed,
        images=manifest.Span(begin, len(images)),
        library=manifest.file(library.name, library.read_bytes()),
    )
    for name, data in manifest.write(entry).items():
        (folder / name).write_bytes(data)
    return folder


def checkout(folder: Path) -> Path:
    """A copy of the sources in `folder` that a test may change and build from."""
    ignored = shutil.ignore_patterns("__pycache__", ".torch-*")
    for name in ("aotmm", "templates"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    return folder


def run_python(
    program: str, *arguments: str | Path, root: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A process that runs the text `program` in the sources of `root`, with `environment` beside this process's own."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    settings = os.environ | {"PYTHONPATH": str(root)} | environment
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, env=settings)


def content(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` by its path relative to it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _up_to_date(folder: Path) -> bool:
    try:
        pack = open_pack(folder)
        whole = pack.manifest
        pack.launcher  # noqa: B018 - reads and checks the library
    except ArtifactError:
        return False
    row = target(pack.arch)
    texts = render.texts(row, whole.kernels, table.shipped(row.name))
    images = (folder / whole.library.path).read_bytes()[whole.images.offset :][: whole.images.bytes]
    key = link.library_key(row, texts, images, link.compiler()[1])
    return (whole.provenance.kernel_sources, whole.library_key) == (kernel_sources(), key)


_GIVEN: list[Path] = []


def share_folder(folder: Path) -> None:
    """Keeps this process's packs in `folder`, where the process of the tests that it works for has its own."""
    _GIVEN.append(folder)


@functools.cache
def session_folder() -> Path:
    """The folder of this session's packs."""
    if _GIVEN:
        return _GIVEN[0]
    folder = Path(tempfile.mkdtemp(prefix="aotmm-packs-"))
    atexit.register(shutil.rmtree, folder)
    return folder


@contextmanager
def _alone() -> Iterator[None]:
    """Lets one process of the session build at a time: the next finds what this one built."""
    with (session_folder() / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _compiled() -> Cache:
    """The checkout's cache, in which `make artifacts` left the kernels of the default packs."""
    return Cache(data_folder("artifacts") / ".cache")
