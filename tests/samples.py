"""Manifests written by hand, for tests of the format that build nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from aotmm.pack.manifest import FILE_NAME, FORMAT, Manifest, Provenance, Span, code, file, read_head, room
from aotmm.pack.schema import WHOLE, Attribute, Config, Guard, Image, Kernel, Order, Parameter, TensorMap
from aotmm.problem import PRODUCT_QUANTITIES
from aotmm.target import EMULATED

_MAKEFILE = (Path(__file__).parents[1] / "Makefile").read_text()
SHIPPED = tuple(re.findall(r"^ARCHS := (.*)$", _MAKEFILE, re.MULTILINE)[0].split())  # whose packs the wheel has


def image(data: bytes, offset: int = 0) -> Image:
    """The entry of code with the bytes `data`."""
    return Image(offset, len(data), hashlib.sha256(data).hexdigest(), len(data), WHOLE)


def code_in(folder: Path) -> Callable[[Image], bytes]:
    """What cuts images and PTX out of the library of the pack in `folder`, which is read once."""
    head = read_head((folder / FILE_NAME).read_bytes(), FILE_NAME)
    library = (folder / head.library.path).read_bytes()
    return lambda entry: code(head, entry, library, str(folder))


def installed(monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes aotmm look installed with a build extra of two libraries; what a message has to say of them."""
    lines = ["click>=8.1", 'triton==3.9.0; extra == "build"', "jinja2>=3.1 ; extra == 'build'"]
    lines += ['tomli>=2; python_version < "3.11" and extra == "build"', 'pytest; extra == "test"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda _name: lines)
    return (
        "; in an environment without torch, whose CUDA builds pin another Triton: "
        "pip install triton==3.9.0 'jinja2>=3.1'"
    )


def kernel(name: str, *, ptx: bool = False) -> Kernel:
    """A kernel with something in every field."""
    box = TensorMap(
        "fp16", "K", "N", "batch", "stride_bn", "stride_bz", 64, 128, 3, guards=(Guard("stride_bk", "equals", 1),)
    )
    return Kernel(
        name=name,
        family="tile",
        role="product",
        config_name="tile_64x128x32_s3_w4",
        source="tests, by hand",
        symbol="tile",
        dtype_a="fp16",
        dtype_b="fp16",
        dtype_c="fp32",
        layout="nt",
        epilogue="bias_relu",
        fast_accum=True,
        order=Order("wgmma", 32, promoted=128),
        persistent=True,
        pdl=True,
        config=Config(64, 128, 32, 3, 4, 2, 16, 2, 2, 4),
        threads=128,
        shared_bytes=49_152,
        registers=168,
        spill_bytes=0,
        global_scratch_bytes=0,
        profile_scratch_bytes=0,
        vector_bytes=16,
        quantities=PRODUCT_QUANTITIES,
        parameters=(
            Parameter("a_ptr", "*fp16", "a_ptr", 0, 8),
            Parameter("M", "i32", "M", 8, 4),
            Parameter("b", "tensordesc", "b_ptr", 64, 128, box),
        ),
        guards=(Guard("a_ptr", "multiple_of", 16), Guard("a_extent", "below", 2**31)),
        attributes=(Attribute("cluster_dimension", (2, 4, 1)),),
        image=image(name.encode()),
        ptx=image(name.encode()) if ptx else None,
        key="0" * 64,
    )


def manifest(*kernels: Kernel, library: bytes = bytes(999)) -> Manifest:
    """A manifest of a pack for sm80, with the images one after the other."""
    end, placed = 0, []
    for item in kernels:
        first = dataclasses.replace(item.image, offset=end)
        end += room(first.bytes)
        second = None if item.ptx is None else dataclasses.replace(item.ptx, offset=end)
        end += 0 if second is None else room(second.bytes)
        placed.append(dataclasses.replace(item, image=first, ptx=second))
    return Manifest(
        format=FORMAT,
        arch="sm80",
        min_driver=12_000,
        host="x86_64-linux-gnu",
        provenance=Provenance(
            "0.1.0",
            "3.9.0",
            "ptxas 12.9.86",
            "ziglang",
            "tests",
            "0" * 64,
            tuning="",
            line_info=False,
            fp_fusion=True,
            status=EMULATED,
        ),
        library=file("libaotmm_sm80.so", library),
        images=Span(9, end),
        library_key="0" * 64,
        sources=(file("launcher.c", b"c"), file("launcher.h", b"h")),
        kernels=tuple(placed),
    )
