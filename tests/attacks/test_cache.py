"""Attacks by those who can write to a cache, an earlier pack or a worker: nothing of theirs gets into a pack."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from aotmm.build import build
from aotmm.build.cache import Cache
from aotmm.build.compile import Compiled
from aotmm.build.gate import mismatches
from aotmm.build.variants import config_set, variants
from aotmm.errors import CompileError
from aotmm.kernels import Variant
from aotmm.pack import manifest
from aotmm.pack.manifest import kernel_to
from aotmm.pack.schema import Guard, Kernel
from aotmm.runtime.pack import open_pack
from aotmm.target import target
from tests.build.packs import content, tiny_pack
from tests.samples import image

ARCHS = ("sm80", "sm90", "gfx90a")
EVIL = '*/ int aotmm_evil = 1; __asm__(".incbin \\"/etc/passwd\\""); /*'
ALTERED: dict[str, Callable[[Kernel], dict[str, Any]]] = {
    "name": lambda _: {"name": EVIL},
    "family": lambda _: {"family": "os.path"},
    "role": lambda _: {"role": "reduce"},
    "config_name": lambda _: {"config_name": EVIL},
    "source": lambda _: {"source": "elsewhere"},
    "symbol": lambda _: {"symbol": EVIL},
    "dtype": lambda _: {"dtype_c": "bf16"},
    "layout": lambda _: {"layout": "tt"},
    "epilogue": lambda _: {"epilogue": "full"},
    "config": lambda kernel: {"config": replace(kernel.config, block_m=16)},
    "persistent": lambda kernel: {"persistent": not kernel.persistent},
    "pdl": lambda kernel: {"pdl": not kernel.pdl},
    "no threads": lambda _: {"threads": 0},
    "clusters": lambda kernel: {"config": replace(kernel.config, cluster_n=2)},
    "registers": lambda kernel: {"registers": kernel.registers + 1},
    "spilled bytes": lambda kernel: {"spill_bytes": kernel.spill_bytes + 8},
    "profile scratch": lambda _: {"profile_scratch_bytes": 8},
    "vectors": lambda _: {"vector_bytes": 2},
    "fewer guards": lambda kernel: {"guards": kernel.guards[1:]},
    "weaker guard": lambda kernel: {"guards": (Guard("M", "below", 2**40), *kernel.guards[1:])},
    "attributes": lambda _: {"attributes": ()} | {"attributes": ({"name": "cooperative", "value": (1, 0, 0)},)},
    "parameter's name": lambda kernel: {"parameters": (replace(kernel.parameters[0], name=f"\n{EVIL}"),)},
    "fewer parameters": lambda kernel: {"parameters": kernel.parameters[:-1]},
    "no parameters": lambda _: {"parameters": ()},
    "parameter's value": lambda kernel: {
        "parameters": (replace(kernel.parameters[0], value="c_ptr"), *kernel.parameters[1:])
    },
    "parameters' offsets": lambda kernel: {
        "parameters": tuple(replace(row, offset=row.offset + 8) for row in kernel.parameters)
    },
    "one parameter's offset": lambda kernel: {
        "parameters": (*kernel.parameters[:-1], replace(kernel.parameters[-1], offset=0))
    },
    "digest": lambda kernel: {"image": replace(kernel.image, sha256="0" * 64)},
    "size": lambda kernel: {"image": replace(kernel.image, bytes=kernel.image.bytes - 1)},
    "text of no kernel": lambda kernel: {"ptx": image(b"") if kernel.ptx is None else None},
    "key": lambda _: {"key": "f" * 64},
}


def recalled(folder: Path, _variant: Variant, key: str) -> Compiled:
    """What the cache in `folder` has."""
    found = Cache(folder).get(key)
    assert found is not None
    return found


def wrong(folder: Path, _variant: Variant, _key: str) -> Compiled:
    """The first of what the cache in `folder` has, whatever is asked for."""
    return recalled(folder, _variant, min(path.name for path in folder.iterdir()))


def configs() -> str:
    """The path of the config set of the small packs."""
    return str(tiny_pack("sm80").parents[1] / "tiny.toml")


def known(arch: str) -> list[tuple[Variant, Compiled]]:
    """The variants of a small pack of `arch`, with what was compiled."""
    folder = tiny_pack(arch)
    by_name = {kernel.name: kernel.key for kernel in open_pack(folder).manifest.kernels}
    wanted = variants(config_set(configs()), target(arch))
    return [(variant, recalled(folder.parent / ".cache", variant, by_name[variant.name])) for variant in wanted]


def reseal(entry: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Alters what a cache entry holds, and gives it the digest that it has then."""
    stored = json.loads(entry.read_bytes().partition(b"\n")[2])
    change(stored)
    body = json.dumps(stored).encode()
    entry.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)


@pytest.mark.parametrize("arch", ARCHS)
def test_what_was_compiled_passes(arch: str) -> None:
    """The gate lets every kernel through that the compiler gave for its variant."""
    for variant, compiled in known(arch):
        assert mismatches(variant, compiled.kernel.key, compiled) == []


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ALTERED)
def test_every_altered_field_is_refused(arch: str, name: str) -> None:
    """An entry that says anything else than its variant, or its image, or its specialisation, does not pass."""
    for variant, compiled in known(arch):
        kernel = replace(compiled.kernel, **ALTERED[name](compiled.kernel))
        if kernel != compiled.kernel:
            assert mismatches(variant, compiled.kernel.key, replace(compiled, kernel=kernel)), variant.name


@pytest.mark.parametrize("arch", ARCHS)
def test_every_other_image_is_refused(arch: str) -> None:
    """The image of another variant, or arch, or none, does not pass under the right name, with its own right digest."""
    every = {other: known(other) for other in ARCHS}
    for variant, compiled in every[arch]:
        others = [
            theirs.image
            for other, rows in every.items()
            for _, theirs in rows
            if (other, theirs.kernel.symbol) != (arch, compiled.kernel.symbol)
        ]
        for data in (*others, b"", b"\x7fELF", compiled.image[:-1], compiled.image + b"\0"):
            kernel = replace(compiled.kernel, image=image(data))
            assert mismatches(variant, compiled.kernel.key, replace(compiled, kernel=kernel, image=data))
        for other, theirs in every[arch]:
            if other != variant:
                mine = replace(theirs, kernel=replace(theirs.kernel, key=compiled.kernel.key))
                assert mismatches(variant, compiled.kernel.key, mine)


def test_text_of_another_kernel_is_refused() -> None:
    """PTX, which other GPUs compile, has to be of the same arch, entry point and parameters as the image."""
    variant, compiled = known("sm80")[0]
    assert compiled.ptx is not None
    for old, new in ((b".target sm_80", b".target sm_90"), (b".entry", b".func"), (b".u64", b".u32")):
        ptx = compiled.ptx.replace(old, new)
        assert ptx != compiled.ptx
        kernel = replace(compiled.kernel, ptx=image(ptx))
        assert mismatches(variant, kernel.key, replace(compiled, kernel=kernel, ptx=ptx))


def test_a_poisoned_cache(tmp_path: Path) -> None:
    """A build over poisoned entries writes nothing outside its pack, gives the right pack, and mends the cache."""
    clean, out = tiny_pack("sm80").parent / ".cache", tmp_path / "a" / "out"
    shutil.copytree(clean, out / ".cache")
    kernels = open_pack(tiny_pack("sm80")).manifest.kernels
    keys = [kernel.key for kernel in sorted(kernels, key=lambda kernel: -len(kernel.guards))]
    (foreign, *_) = [compiled for variant, compiled in known("sm90") if variant.family == "tile"]
    harms: list[Callable[[dict[str, Any]], object]] = [
        lambda stored: stored["kernel"].update(guards=[]),
        lambda stored: stored["kernel"]["image"].update(path="../../victim"),
        lambda stored: stored["kernel"]["image"].update(path=str(tmp_path / "victim")),
        lambda stored: stored["kernel"]["image"].update(sha256="0" * 64),
        lambda stored: stored["kernel"].update(name=EVIL),
        lambda stored: stored.update(
            image=base64.b64encode(foreign.image).decode(), kernel=kernel_to(replace(foreign.kernel, key="?"))
        ),
    ]
    assert len(keys) >= len(harms)
    for key, harm in zip(keys, harms, strict=False):
        reseal(out / ".cache" / key, harm)
    (report,) = build(("sm80",), out, configs=configs(), compiler=partial(recalled, clean), jobs=1)
    assert report.compiled == len(harms)
    assert not [path for path in tmp_path.rglob("*") if path.name == "victim"]
    assert content(out / "sm80") == content(tiny_pack("sm80"))
    mended = content(out / ".cache")
    assert mended == {key: (clean / key).read_bytes() for key in mended}


def test_a_poisoned_pack(tmp_path: Path) -> None:
    """Kernels of an earlier pack that guard less than their variants are not taken over."""
    clean, out = tiny_pack("sm80").parent / ".cache", tmp_path / "out"
    shutil.copytree(tiny_pack("sm80"), out / "sm80")
    whole = open_pack(out / "sm80").manifest
    *others, last = whole.kernels
    assert last.guards
    for name, data in manifest.write(replace(whole, kernels=(*others, replace(last, guards=())))).items():
        (out / "sm80" / name).write_bytes(data)
    (report,) = build(("sm80",), out, configs=configs(), compiler=partial(recalled, clean), jobs=1)
    assert (report.compiled, report.linked) == (1, True)
    assert content(out / "sm80") == content(tiny_pack("sm80"))


def test_a_compiler_that_gives_another_kernel(tmp_path: Path) -> None:
    """What a compiler process, here or on a cluster, gives instead of what it was asked for ends the build."""
    clean = tiny_pack("sm80").parent / ".cache"
    with pytest.raises(CompileError, match=r"sm80: a compiler gave for \S+ what cannot be it: its "):
        build(("sm80",), tmp_path, configs=configs(), compiler=partial(wrong, clean))
    assert content(tmp_path / ".cache").items() <= content(clean).items()
    assert not (tmp_path / "sm80").exists()


@pytest.mark.parametrize("kind", ["pipe", "link", "deep"])
def test_entries_that_are_no_files(tmp_path: Path, kind: str) -> None:
    """A pipe, a link to another file and JSON that is too deep for a parser are absent; none is waited for."""
    cache, key = Cache(tmp_path / "cache"), "0" * 64
    (_, compiled), *_ = known("sm80")
    cache.put(key, replace(compiled, kernel=replace(compiled.kernel, key=key)))
    assert cache.get(key) is not None
    entry = tmp_path / "cache" / key
    if kind == "deep":
        body = b"[" * 100_000 + b"]" * 100_000
        entry.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    else:
        entry.rename(tmp_path / "elsewhere")
        os.mkfifo(entry) if kind == "pipe" else entry.symlink_to(tmp_path / "elsewhere")
    assert cache.get(key) is None
