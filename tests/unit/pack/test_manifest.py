"""The manifest: what is written is read back, and whatever else is refused with an ArtifactError that says why."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aotmm import problem
from aotmm.errors import ArtifactError
from aotmm.pack.manifest import (
    FILE_NAME,
    FORMAT,
    KERNELS_NAME,
    MAX_FILE_BYTES,
    MAX_MANIFEST_BYTES,
    Head,
    Manifest,
    files,
    kernel_from,
    kernel_to,
    read_head,
    read_kernels,
    write,
)
from aotmm.pack.schema import Config
from aotmm.target import TARGETS
from tests.samples import kernel, manifest

WHERE = "packs/sm80/manifest.json"
PACK = manifest(kernel("one", ptx=True), kernel("two"))
HEAD, KERNELS = write(PACK)[FILE_NAME], write(PACK)[KERNELS_NAME]
FUZZ = settings(deadline=None, derandomize=True, max_examples=200)
ARCHS, DTYPES, ATTRIBUTES = ", ".join(TARGETS), ", ".join(problem.DTYPES), ", ".join(problem.ATTRIBUTES)
NATURAL, SIZE = (f"expected an integer from 0 to {most}, found" for most in (2**53 - 1, MAX_FILE_BYTES))
DIGEST = "sha256: expected a text like [0-9a-f]{64}, found"
WRONG_PATHS = [
    "", ".", "..", "/etc/passwd", "../sm90/x", "images/../../x", "images//x", "images/", "./x", "images/./x",
    "a\\b", "a\0b", "C:x", "a b", "a\n", "\u2024\u2024/x", "\uff0e\uff0e/x", "caf\u00e9", "\ud800",
]  # fmt: skip

Change = Callable[[dict[str, Any]], object]


def sealed(body: dict[str, Any]) -> bytes:
    """A manifest.json with `body` and the digest that it ought to have."""
    blank, place = (
        json.dumps(body | {"digest": digest}, sort_keys=True, indent=1) + "\n" for digest in (64 * "0", "@")
    )
    return place.replace("@", hashlib.sha256(blank.encode()).hexdigest()).encode()


def changed_head(change: Change) -> bytes:
    """A manifest.json after `change`, which it does not show by its digest."""
    body = json.loads(HEAD)
    change(body)
    return sealed(body)


def changed_kernels(change: Change) -> bytes:
    """A kernels.json whose first kernel went through `change`."""
    body = json.loads(KERNELS)
    change(body[0])
    return json.dumps(body, sort_keys=True, indent=1).encode()


def read(head: bytes, kernels: bytes = KERNELS) -> Manifest:
    """Both files read, in order."""
    return read_kernels(read_head(head, WHERE), kernels, WHERE)


def refused(head: bytes, kernels: bytes = KERNELS) -> str:
    """The message with which one of both files is refused; it names the file."""
    with pytest.raises(ArtifactError) as caught:
        read(head, kernels)
    assert str(caught.value).startswith(WHERE)
    return str(caught.value)


# --------------------------------------------------------------------------------------------------- what is right
def test_round_trip() -> None:
    """What is written is read back, with the digests of both files filled in."""
    found = read(HEAD)
    assert dataclasses.replace(found, kernels_file=PACK.kernels_file, digest="") == PACK
    assert found.kernels_file == dataclasses.replace(
        PACK.kernels_file, sha256=hashlib.sha256(KERNELS).hexdigest(), bytes=len(KERNELS)
    )
    assert sealed(json.loads(HEAD)) == HEAD
    assert write(found) == write(PACK)


def test_zeros_that_are_not_the_digest() -> None:
    """A field that looks like the digest's place stays what it is."""
    zeros = dataclasses.replace(PACK, library_key=64 * "0")
    data = write(zeros)
    assert read(data[FILE_NAME], data[KERNELS_NAME]).library_key == 64 * "0"


def test_kernel_round_trip() -> None:
    """One kernel by itself survives the way to plain JSON values and back, with and without text."""
    for entry in PACK.kernels:
        assert kernel_from(json.loads(json.dumps(kernel_to(entry))), WHERE) == entry


def test_bytes_are_canonical() -> None:
    """Both files are ASCII with sorted keys, a key or a kernel per line; numbers are integers."""
    body = json.loads(HEAD, parse_float=pytest.fail)
    assert (json.dumps(body, sort_keys=True, indent=1) + "\n").encode("ascii") == HEAD
    first, *lines, last = KERNELS.decode("ascii").splitlines(keepends=True)
    assert (first, last) == ("[\n", "]\n")
    body = [json.loads(line.removesuffix(",\n"), parse_float=pytest.fail) for line in lines]
    assert body == json.loads(KERNELS)
    assert lines == [json.dumps(kernel, sort_keys=True) + end for kernel, end in zip(body, (",\n", "\n"), strict=True)]
    other = dataclasses.replace(PACK, provenance=dataclasses.replace(PACK.provenance, triton="\u00e9"))
    assert write(other)[FILE_NAME].isascii()


def test_files() -> None:
    """Every file of the pack is listed once, the kernels' list with them."""
    assert sorted(file.path for file in files(PACK)) == [
        KERNELS_NAME,
        "launcher.c",
        "launcher.h",
        "libaotmm_sm80.so",
    ]


def test_names_of_configs() -> None:
    """A config's short text has every number that differs from "not given"."""
    assert str(Config(64, 128, 32, 3, 4)) == "64x128x32_s3_w4"
    assert str(Config(64, 128, 32, 3, 4, 2, 16, 2)) == "64x128x32_s3_w4_e2_i16_p2"
    assert str(Config(128, 256, 64, 3, 8, cluster_m=2)) == "128x256x64_s3_w8_c2x1"
    assert str(Config(128, 256, 64, 3, 8, cluster_m=2, cluster_n=4)) == "128x256x64_s3_w8_c2x4"


# --------------------------------------------------------------------------------------------------- what is wrong
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a manifest: "),
        (b"\xff", "not a manifest: "),
        (b"null", "expected an object, found None; install the aotmm"),
        (b"[]", "expected an object, found []; install the aotmm"),
        (b"{" * 10, "not a manifest: "),
        (b"[" * 200_000, "not a manifest: "),
        (b'{"a": ' * 200_000, "not a manifest: "),
        (b'{"format": 1, "format": 1}', "a key twice in ['format', 'format']"),
        (b'{"format": NaN}', "number NaN is not JSON"),
        (b'{"format": -Infinity}', "number -Infinity is not JSON"),
        (b'{"format": 1.0}', "pack format 1.0, this version"),
        (b'{"format": 1e2}', "pack format 100.0, this version"),
        (b'{"format": ' + b"1" * 5000 + b"}", "not a manifest: "),
        (b"{}", "pack format None, this version of aotmm reads 15"),
        (b'{"format": 16}', "pack format 16, this version of aotmm reads 15; install the aotmm that wrote the pack"),
        (b'{"format": "1"}', "pack format '1', this version"),
        (b'{"format": [1]}', "pack format [1], this version"),
        (b'{"format": 15}', "unknown keys [], missing keys ['arch', 'digest'"),
        (b'{"format": 15, "digest": 3}', "digest: expected a text like [0-9a-f]{64}, found 3"),
        (b'{"format": 15, "digest": ""}', "digest: expected a text like [0-9a-f]{64}, found ''"),
        (b'{"format": 15, "digest": "' + b"\\ud800" * 64 + b'"}', "digest: expected a text like [0-9a-f]{64}, found"),
        (
            b" " * (MAX_MANIFEST_BYTES + 1),
            f"{MAX_MANIFEST_BYTES + 1} bytes, a manifest has at most {MAX_MANIFEST_BYTES}",
        ),
    ],
    ids=range(22),
)
def test_what_is_no_manifest(data: bytes, words: str) -> None:
    """Strict JSON, a known format version and a digest come before anything else; the message says what is wrong."""
    assert words in refused(data)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: body.update(format=True), "pack format True, this version"),
        (lambda body: body.update(more=1), "unknown keys ['more'], missing keys []"),
        (lambda body: body.pop("host"), "unknown keys [], missing keys ['host']"),
        (lambda body: body.update(host=3), "host: expected a printable text, found 3"),
        (lambda body: body.update(host=None), "host: expected a printable text, found None"),
        (lambda body: body["provenance"].update(config_set="\x1b]0;mine\x07"), "config_set: expected a printable text"),
        (lambda body: body["provenance"].update(config_set="\ud800"), "config_set: expected a printable text, found"),
        (lambda body: body.update(arch="sm99"), f"arch: expected one of {ARCHS}, found 'sm99'"),
        (lambda body: body.update(arch=["sm80"]), f"arch: expected one of {ARCHS}, found ['sm80']"),
        (lambda body: body.update(sources={}), "sources: expected a list of at most 4096, found {}"),
        (lambda body: body.update(provenance=[]), "provenance: expected an object, found []"),
        (lambda body: body["provenance"].pop("triton"), "provenance: unknown keys [], missing keys ['triton']"),
        (lambda body: body["provenance"].update(line_info=0), "provenance: line_info: expected true or false, found 0"),
        (lambda body: body["library"].update(bytes=-1), f"library: bytes: {SIZE} -1"),
        (lambda body: body["library"].update(bytes=2**53), f"library: bytes: {SIZE} {2**53}"),
        (lambda body: body["library"].update(bytes=True), f"library: bytes: {SIZE} True"),
        (lambda body: body["library"].update(bytes="3"), f"library: bytes: {SIZE} '3'"),
        (lambda body: body["library"].update(bytes=MAX_FILE_BYTES + 1), f"library: bytes: {SIZE} {MAX_FILE_BYTES + 1}"),
        (lambda body: body["sources"][1].update(sha256=None), f"sources[1]: {DIGEST} None"),
        (lambda body: body["sources"].append(body["sources"][0]), "2 files have the same path"),
        (lambda body: body["kernels_file"].update(path="launcher.c"), "2 files have the same path"),
    ],
)
def test_wrong_head(change: Change, words: str) -> None:
    """A manifest.json with a right digest is still refused for anything that does not belong there."""
    assert words in refused(changed_head(change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: body.update(more=1), "[0]: unknown keys ['more'], missing keys []"),
        (lambda body: body.pop("key"), "[0]: unknown keys [], missing keys ['key']"),
        (lambda body: body.update(threads=-1), f"[0]: threads: {NATURAL} -1"),
        (lambda body: body.update(ptx={}), "[0]: ptx: unknown keys []"),
        (lambda body: body.update(image=None), "[0]: image: expected an object, found None"),
        (lambda body: body.update(name="two"), "2 kernels have the same name 'two'"),
        (lambda body: body.update(dtype_a="fp64"), f"[0]: dtype_a: expected one of {DTYPES}, found 'fp64'"),
        (lambda body: body.update(dtype_b=16), f"[0]: dtype_b: expected one of {DTYPES}, found 16"),
        (lambda body: body.update(dtype_c="fp64"), f"[0]: dtype_c: expected one of {DTYPES}, found 'fp64'"),
        (lambda body: body.update(layout="xx"), "[0]: layout: expected one of nn, nt, tn, tt, any, found 'xx'"),
        (lambda body: body.update(epilogue="gelu"), "expected one of none, bias, bias_relu, full, found 'gelu'"),
        (lambda body: body.update(fast_accum=1), "[0]: fast_accum: expected true or false, found 1"),
        (lambda body: body["config"].update(block_m="64"), f"[0]: config: block_m: {NATURAL} '64'"),
        (
            lambda body: body["parameters"][1].update(value="Q"),
            "one refers to 'Q', which it does not declare",
        ),
        (lambda body: body["guards"][0].update(value="Q"), "one refers to 'Q', which it does not declare"),
        (
            lambda body: body["parameters"][2]["tensor_map"]["guards"][0].update(value="Q"),
            "one refers to 'Q', which it does not declare",
        ),
        (lambda body: body["parameters"][2]["tensor_map"].update(inner="Q"), "one refers to 'Q', which it does not"),
        (lambda body: body["quantities"].pop(), "one declares other quantities than a product of this version has"),
        (
            lambda body: body["guards"][0].update(relation="above"),
            "expected one of equals, multiple_of, below, at_least, found 'above'",
        ),
        (lambda body: body["attributes"][0].update(name="fast"), f"name: expected one of {ATTRIBUTES}, found 'fast'"),
        (
            lambda body: body["attributes"][0].update(value=[1, 1]),
            "attributes[0]: value: expected a list of 3, found [1, 1]",
        ),
        (lambda body: body["attributes"][0].update(value=[1, 1, -1]), f"value[2]: {NATURAL} -1"),
        (lambda body: body["image"].update(sha256="md5"), f"[0]: image: {DIGEST} 'md5'"),
        (lambda body: body["image"].update(offset=64), "the image of one is at 64, expected at 0"),
        (lambda body: body["image"].update(stored=64), "the PTX of one is at 64, expected at 128"),
        (lambda body: body["ptx"].update(stored=10**6), "the image of two is at 128, expected at 1000128"),
        (lambda body: body["image"].update(bytes=64), "the image of one has 64 bytes, and 3 are stored"),
        (lambda body: body["image"].update(base=32), "the image of one is made of what begins at 32, where no whole"),
        (lambda body: body["image"].update(base=0), "the image of one is made of what begins at 0, where no whole"),
    ],
)
def test_wrong_kernel(change: Change, words: str) -> None:
    """A kernels.json is refused for anything that does not belong there, with the kernel and the field."""
    assert words in refused(HEAD, changed_kernels(change))


@pytest.mark.parametrize(
    "data", [b"{}", b"null", b"3", b"[3]", b"[[]]", b'[{"name": 1, "name": 1}]', b"[NaN]", b"[0.5]"]
)
def test_what_is_no_list_of_kernels(data: bytes) -> None:
    """A kernels.json that is not a strict list of objects is refused."""
    assert refused(HEAD, data)


@pytest.mark.parametrize("path", WRONG_PATHS, ids=range(len(WRONG_PATHS)))
def test_paths_stay_inside_the_pack(path: str) -> None:
    """A file outside the pack, or with a name that could be mistaken, is refused in both files."""
    words = f"file {path!r} is not a plain path inside the pack" if path.isprintable() else "expected a printable text"
    assert words in refused(changed_head(lambda body: body["library"].update(path=path)))
    assert words in refused(changed_head(lambda body: body["sources"][0].update(path=path)))
    assert words in refused(changed_head(lambda body: body["kernels_file"].update(path=path)))


def test_values_as_deep_as_json_can_be() -> None:
    """A value that was read just so is shown in an error, or that it is deep, though Python cannot print it."""
    for depth in range(sys.getrecursionlimit() - 120, sys.getrecursionlimit()):
        value = b"[" * depth + b"]" * depth
        refused(HEAD, b'[{"parameters": [{"tensor_map": {"dtype": ' + value + b"}}]}]")


def test_altered_but_well_formed() -> None:
    """A change of one value is seen by the digest."""
    altered = HEAD.replace(b"ptxas 12.9.86", b"ptxas 12.9.87")
    assert altered != HEAD
    assert "the file was altered" in refused(altered)
    assert "the file was altered" in refused(HEAD.replace(b"\n", b"\r\n"))
    assert "the file was altered" in refused(HEAD + b" ")


def test_truncated() -> None:
    """A manifest.json that was cut anywhere is refused; so is a list of kernels."""
    for size in range(0, len(HEAD), 97):
        refused(HEAD[:size])
    for size in range(0, len(KERNELS) - 2, 97):
        refused(HEAD, KERNELS[:size])


@FUZZ
@given(flips=st.lists(st.tuples(st.integers(0, len(HEAD) - 1), st.integers(1, 255)), min_size=1, max_size=4))
def test_flipped_bytes_of_the_head(flips: list[tuple[int, int]]) -> None:
    """No alteration of manifest.json is accepted, and none raises anything else."""
    data = bytearray(HEAD)
    for place, bits in flips:
        data[place] ^= bits
    if data != HEAD:
        refused(bytes(data))


@FUZZ
@given(flips=st.lists(st.tuples(st.integers(0, len(KERNELS) - 1), st.integers(1, 255)), min_size=1, max_size=4))
def test_flipped_bytes_of_the_kernels(flips: list[tuple[int, int]]) -> None:
    """An altered kernels.json, which the head's digest would refuse, raises at most an ArtifactError when parsed."""
    data = bytearray(KERNELS)
    for place, bits in flips:
        data[place] ^= bits
    try:
        read(HEAD, bytes(data))
    except ArtifactError as error:
        assert str(error).startswith(WHERE)  # noqa: PT017 - it need not be raised


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@FUZZ
@given(key=st.sampled_from([field.name for field in dataclasses.fields(Head)]), value=VALUES)
def test_any_value_in_any_field(key: str, value: object) -> None:
    """Whatever JSON value stands in a field of the head, only an ArtifactError can come of it."""
    body = json.loads(HEAD) | {key: value}
    try:
        read(sealed(body) if key != "digest" else json.dumps(body).encode())
    except ArtifactError as error:
        assert str(error).startswith(WHERE)  # noqa: PT017 - it need not be raised


def test_images_fill_their_block() -> None:
    """A list of kernels that ends before the block of images, or a block behind the library, is refused."""
    one = json.dumps(json.loads(KERNELS)[:1], sort_keys=True, indent=1).encode()
    assert "the kernels' images end at 128, their block has 192 bytes" in refused(HEAD, one)
    longer = refused(changed_head(lambda body: body["images"].update(offset=900)))
    assert "192 bytes from 900 on, libaotmm_sm80.so has 999 bytes" in longer


def test_kernels_may_share_an_image() -> None:
    """Kernels of one image have the same entry of it, first in its place; a second place for it is refused."""
    first, second = PACK.kernels
    shared = dataclasses.replace(second, image=first.image)
    pack = dataclasses.replace(PACK, kernels=(first, shared), images=dataclasses.replace(PACK.images, bytes=128))
    data = write(pack)
    assert read(data[FILE_NAME], data[KERNELS_NAME]).kernels == (first, shared)
    for place, words in (
        (32, "image of two is at 32, expected at 64"),
        (128, "images end at 192, their block has 128"),
    ):
        moved = dataclasses.replace(shared, image=dataclasses.replace(first.image, offset=place))
        data = write(dataclasses.replace(pack, kernels=(first, moved)))
        assert words in refused(data[FILE_NAME], data[KERNELS_NAME])


def test_a_part_is_written_once() -> None:
    """A parameter or guard that came before is its number. One that none has is refused, and so is another value."""
    first, second = json.loads(KERNELS)
    for name in ("parameters", "guards"):
        assert first[name] == kernel_to(PACK.kernels[0])[name]
        assert second[name] == list(range(len(first[name])))
        for wrong, words in (
            (len(first[name]), f"[1]: {name}[0]: {len(first[name])}, and {len(first[name])} {name} are before"),
            (-1, f"[1]: {name}[0]: -1, and {len(first[name])} {name} are before"),
            (True, f"[1]: {name}[0]: expected an object, found True"),
        ):
            altered = second | {name: [wrong, *second[name][1:]]}
            assert words in refused(HEAD, json.dumps([first, altered]).encode())


def test_format_number() -> None:
    """The format version is the one that docs/format.md describes, and the newest in CHANGELOG.md."""
    root = Path(__file__).parents[3]
    assert FORMAT == 15
    described = re.findall(r"^\| `format` \| (\d+)\. ", (root / "docs" / "format.md").read_text(), re.MULTILINE)
    assert described == [str(FORMAT)]
    stated = re.search(r"Pack format (\d+), C interface of the launcher (\d+)", (root / "CHANGELOG.md").read_text())
    assert stated is not None
    assert stated.groups() == (str(FORMAT), str(problem.ABI))
