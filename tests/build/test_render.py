"""The generated C: its tables say what the manifest says, and its header serves C and C++."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_uint16, c_uint32, c_uint64, c_void_p
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jinja2 import UndefinedError

from aotmm.build import render
from aotmm.errors import ArtifactError
from aotmm.kernel import Kernel
from aotmm.problem import ABI, ACTIVATIONS, ATTRIBUTES, DTYPE_CODES, DTYPES, EPILOGUES, RELATIONS, VALUES
from aotmm.runtime import launcher
from aotmm.runtime.pack import open_pack
from aotmm.target import TARGETS, target
from tests.build.packs import default_pack
from tests.samples import kernel


class CParameter(Structure):
    """aotmm_parameter."""

    _fields_ = (("value", c_uint16), ("bytes", c_uint16), ("offset", c_uint32))


class CPromise(Structure):
    """aotmm_promise."""

    _fields_ = (("value", c_uint16), ("relation", c_uint16), ("operand", c_int64))


class CAttribute(Structure):
    """aotmm_attribute."""

    _fields_ = (("id", c_int32), ("value", c_uint32 * 3))


class CKernel(Structure):
    """aotmm_kernel."""

    _fields_ = (
        ("name", c_char_p),
        ("symbol", c_char_p),
        ("image", c_void_p),
        ("ptx", c_void_p),
        ("image_bytes", c_uint64),
        ("ptx_bytes", c_uint64),
        *((name, c_int32) for name in ("dtype_a", "dtype_b", "dtype_c", "epilogue")),
        *((name, c_uint32) for name in ("block_m", "block_n", "block_k", "threads", "num_ctas", "shared_bytes")),
        *((name, c_uint32) for name in ("vector_bytes", "mac_cost")),
        *((f"{name}_count", c_uint32) for name in ("parameter", "promise", "attribute")),
        ("parameters", POINTER(CParameter)),
        ("promises", POINTER(CPromise)),
        ("attributes", POINTER(CAttribute)),
    )


def expected(entry: Kernel) -> dict[str, Any]:
    """What the C table has to say of a kernel."""
    same = ("block_m", "block_n", "block_k")
    return {
        "name": entry.name.encode(),
        "symbol": entry.symbol.encode(),
        "image_bytes": entry.image.bytes,
        "ptx_bytes": entry.ptx.bytes if entry.ptx else 0,
        "dtype_a": DTYPE_CODES.index(entry.dtype_a),
        "dtype_b": DTYPE_CODES.index(entry.dtype_b),
        "dtype_c": DTYPE_CODES.index(entry.dtype_c),
        "epilogue": EPILOGUES.index(entry.epilogue),
        **{name: getattr(entry.config, name) for name in same},
        "threads": entry.threads,
        "num_ctas": entry.num_ctas,
        "shared_bytes": entry.shared_bytes,
        "vector_bytes": entry.vector_bytes,
        # fp8 sums that are moved to fp32 on the way cost an addition more
        "mac_cost": DTYPES[entry.dtype_a].mac_cost + (entry.dtype_a[:3] == "fp8" and not entry.fast_accum),
        "parameters": [(VALUES.index(p.value), p.bytes, p.offset) for p in entry.parameters],
        "promises": [(VALUES.index(p.value), RELATIONS.index(p.relation), p.operand) for p in entry.promises],
        "attributes": [(ATTRIBUTES[a.name], a.value) for a in entry.attributes],
    }


def found(entry: CKernel) -> dict[str, Any]:
    """What the C table says of a kernel."""
    tables = {"parameters": "parameter_count", "promises": "promise_count", "attributes": "attribute_count"}
    plain = {name for name, *_ in CKernel._fields_} - {"image", "ptx", *tables, *tables.values()}
    return {name: getattr(entry, name) for name in plain} | {
        table: [
            tuple(tuple(value) if isinstance(value, ctypes.Array) else value for value in fields)
            for fields in (
                tuple(
                    getattr(getattr(entry, table)[number], name) for name, *_ in getattr(entry, table)._type_._fields_
                )
                for number in range(getattr(entry, count))
            )
        ]
        for table, count in tables.items()
    }


@pytest.mark.parametrize("arch", TARGETS)
def test_tables_say_what_the_manifest_says(arch: str) -> None:
    """Every kernel of the library's table equals its manifest entry, down to the bytes of image and text."""
    folder = default_pack(arch)
    pack = open_pack(folder)
    table = ctypes.cast(pack.launcher._c.kernels, POINTER(CKernel))
    for number, entry in enumerate(pack.manifest.kernels):
        row = table[number]
        assert found(row) == expected(entry)
        assert ctypes.string_at(row.image, row.image_bytes) == (folder / entry.image.path).read_bytes()
        assert row.image % 64 == 0
        if entry.ptx is None:
            assert not row.ptx
        else:
            assert ctypes.string_at(row.ptx) == (folder / entry.ptx.path).read_bytes()  # up to its closing 0


def test_attributes_in_the_table() -> None:
    """Launch attributes get the driver's ids."""
    assert ATTRIBUTES == {"cooperative": 2, "cluster_dimension": 4, "programmatic_stream_serialization": 6}
    text = render.source(target("sm80"), (kernel("one"),))
    assert "attributes_0[] = {\n    {4, {1, 1, 1}},\n    {0},\n};" in text


def test_same_bytes_each_time() -> None:
    """Rendering is a function of its arguments, and names no path, time or machine."""
    kernels = (kernel("one", ptx=True), kernel("two"))
    assert render.source(target("sm80"), kernels) == render.source(target("sm80"), kernels)
    assert str(Path.cwd()) not in render.source(target("sm80"), kernels) + render.header()


def test_missing_value_is_an_error() -> None:
    """A template never prints a value that is not there."""
    incomplete: Any = SimpleNamespace(
        name="one", dtype_a="fp16", fast_accum=False, image=SimpleNamespace(sha256="0"), ptx=None
    )
    with pytest.raises(UndefinedError):
        render.source(target("sm80"), (incomplete,))


def test_abi_is_the_runtimes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is rendered, what a pack's library says of itself and what the runtime accepts have the same ABI number."""
    assert f"#define AOTMM_ABI {ABI}\n" in render.header()
    mm = open_pack(default_pack("sm80")).launcher
    assert (mm._c.abi, mm._c.problem_bytes) == (ABI, ctypes.sizeof(launcher.CProblem))
    monkeypatch.setattr(launcher, "ABI", ABI + 1)
    with pytest.raises(ArtifactError, match=rf"has \(ABI, problem bytes\) \({ABI}, .*build the pack again"):
        launcher.Launcher(mm._library, "sm80", lambda: ())


PROGRAM = """
#include "launcher.h"
_Static_assert(AOTMM_VALUE_COUNT == %d, "values");
_Static_assert(AOTMM_DTYPE_COUNT == %d, "dtypes");
_Static_assert(AOTMM_ACTIVATION_COUNT == %d, "activations");
_Static_assert(sizeof(aotmm_problem) == %d, "aotmm_problem");
_Static_assert(sizeof(aotmm_device) == %d, "aotmm_device");
_Static_assert(sizeof(aotmm_error) == %d, "aotmm_error");
_Static_assert(sizeof(aotmm_kernel) == %d, "aotmm_kernel");
_Static_assert(sizeof(aotmm_verdict) == %d, "aotmm_verdict");
_Static_assert(sizeof(aotmm_launcher) == %d, "aotmm_launcher");
const aotmm_launcher *(*entry)(void) = aotmm_launcher_sm90;
"""


@pytest.mark.parametrize("language", ["c11", "c++17"])
def test_header_serves_c_and_cpp(tmp_path: Path, language: str) -> None:
    """The header compiles by itself, pedantically, as C and as C++, with the sizes that Python assumes."""
    sizes = (launcher.CProblem, launcher.CDevice, launcher.CError, CKernel, launcher._CVerdict, launcher._CLauncher)
    text = PROGRAM % (len(VALUES), len(DTYPES), len(ACTIVATIONS), *map(ctypes.sizeof, sizes))
    for kind, names in (("", DTYPES), ("ACTIVATION_", ACTIVATIONS), ("EPILOGUE_", EPILOGUES), ("VALUE_", VALUES)):
        for number, name in enumerate(names):
            text += f'_Static_assert(AOTMM_{kind}{name.upper()} == {number}, "{name}");\n'
    least = ", ".join(str(EPILOGUES.index(name)) for name in ACTIVATIONS.values())
    assert f"#define AOTMM_ACTIVATION_EPILOGUES {{{least}}}\n" in render.header()
    source = tmp_path / {"c11": "program.c", "c++17": "program.cc"}[language]
    source.write_text(text if language == "c11" else text.replace("_Static_assert", "static_assert"))
    (tmp_path / "launcher.h").write_text(render.header())
    compiler = [sys.executable, "-m", "ziglang", "cc" if language == "c11" else "c++"]
    flags = [f"-std={language}", "-pedantic-errors", "-Wall", "-Wextra", "-Werror", "-c"]
    done = subprocess.run([*compiler, *flags, source], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
