"""Tiny broken packs, one per rule of docs/format.md: each is made from a whole one by one change.

Most changes are those of somebody who knows the format and puts all digests right again afterwards.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import os
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotmm.pack.decode import MAX_ITEMS
from aotmm.pack.manifest import FILE_NAME, FORMAT, KERNELS_NAME, MAX_FILE_BYTES, MAX_MANIFEST_BYTES, room
from aotmm.pack.schema import WHOLE, Image
from tests.build.packs import tiny_pack
from tests.samples import code_in

Harm = Callable[[Path], object]
LIBRARY = "libaotmm_sm80.so"
_NO_DIGEST = "0" * 64
_FORMAT = b'"format": %d' % FORMAT


@dataclass(frozen=True, slots=True)
class Attack:
    """A change of a whole sm80 pack, the words that name it, and whether a program that loads the pack refuses it.

    The code of kernels, which the library's digest covers, is for `aotmm verify` alone.
    """

    name: str
    harm: Harm
    words: str
    loading: bool = True


# ------------------------------------------------------------------------------------------------ how packs are changed
def entry(path: str, data: bytes) -> dict[str, object]:
    """The manifest's entry of a file."""
    return {"path": path, "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def image_entry(data: bytes, offset: int) -> dict[str, object]:
    """The manifest's entry of an image of which all is stored."""
    digest = hashlib.sha256(data).hexdigest()
    return {"offset": offset, "sha256": digest, "bytes": len(data), "stored": len(data), "base": WHOLE}


def seal(folder: Path, body: dict[str, Any]) -> None:
    """Writes `body` as manifest.json, with the digest that it ought to have."""
    blank = _text(body | {"digest": _NO_DIGEST})
    digest = hashlib.sha256(blank).hexdigest()
    (folder / FILE_NAME).write_bytes(
        blank.replace(f'"digest": "{_NO_DIGEST}"'.encode(), f'"digest": "{digest}"'.encode())
    )


def change_head(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes manifest.json, digest included."""
    body = json.loads((folder / FILE_NAME).read_bytes())
    change(body)
    seal(folder, body)


def change_kernels(folder: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """Changes kernels.json, and what manifest.json says of it. Parts that came before are no numbers meanwhile."""
    body = json.loads((folder / KERNELS_NAME).read_bytes())
    for name in ("parameters", "guards"):
        known: list[object] = []
        for kernel in body:
            known += [part for part in kernel[name] if not isinstance(part, int)]
            kernel[name] = [copy.deepcopy(known[part]) if isinstance(part, int) else part for part in kernel[name]]
    change(body)
    data = _text(body)
    (folder / KERNELS_NAME).write_bytes(data)
    change_head(folder, lambda head: head.update(kernels_file=entry(KERNELS_NAME, data)))


def change_image(folder: Path, change: Callable[[bytes], bytes], kind: str = "image") -> None:
    """Changes the first kernel's image or PTX, and what the manifest says of it and of the library.

    All images stand once more behind what the library held.
    """
    head = json.loads((folder / FILE_NAME).read_bytes())
    path, code = str(head["library"]["path"]), code_in(folder)
    library = (folder / path).read_bytes()
    block = bytearray()

    def put(body: list[dict[str, Any]]) -> None:
        for number, kernel in enumerate(body):
            for name in [name for name in ("image", "ptx") if kernel[name] is not None]:
                data = code(Image(**kernel[name]))
                if (number, name) == (0, kind):
                    data = change(data)
                kernel[name] = image_entry(data, len(block))
                block.extend(data.ljust(room(len(data)), b"\0"))

    change_kernels(folder, put)
    change_library(folder, path, library + block)
    change_head(folder, lambda head: head.update(images={"offset": len(library), "bytes": len(block)}))


def change_library(folder: Path, path: str, data: bytes) -> None:
    """Changes the library, and what manifest.json says of it."""
    (folder / path).write_bytes(data)
    change_head(folder, lambda head: head.update(library=entry(path, data)))


def wheel(path: Path, files: dict[str, bytes]) -> Path:
    """A wheel with `files` and nothing else."""
    record = "packs-1.dist-info/RECORD"
    lines = [f"{name},sha256={_urlsafe(data)},{len(data)}" for name, data in files.items()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in (files | {record: "\n".join([*lines, f"{record},,"]).encode()}).items():
            archive.writestr(name, data)
    return path


def _urlsafe(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def _text(body: object) -> bytes:
    return (json.dumps(body, sort_keys=True, indent=1) + "\n").encode()


def _bytes(name: str, change: Callable[[bytes], bytes]) -> Harm:
    """A change of one file that nobody hides."""

    def harm(folder: Path) -> None:
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return harm


def _head(change: Callable[[dict[str, Any]], object]) -> Harm:
    return lambda folder: change_head(folder, change)


def _kernels(change: Callable[[list[dict[str, Any]]], object]) -> Harm:
    return lambda folder: change_kernels(folder, change)


def _first(**fields: object) -> Harm:
    return _kernels(lambda body: body[0].update(fields))


def _image_bytes(change: Callable[[bytes], bytes], kind: str = "image") -> Harm:
    return lambda folder: change_image(folder, change, kind)


def _flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def _cut(data: bytes) -> bytes:
    return data[:-1]


def _extend(data: bytes) -> bytes:
    return data + b"\n"


def _gone(name: str) -> Harm:
    return lambda folder: (folder / name).unlink()


def _link(name: str) -> Harm:
    """A link to the very bytes that belong there."""

    def harm(folder: Path) -> None:
        path = folder / name
        path.rename(folder.parent / "elsewhere")
        path.symlink_to(folder.parent / "elsewhere")

    return harm


def _unended_text(folder: Path) -> None:
    """The library says something else behind the last kernel's PTX than zero bytes."""
    change_image(folder, lambda data: data)
    data = (folder / LIBRARY).read_bytes()
    change_library(folder, LIBRARY, data.rstrip(b"\0").ljust(len(data), b"!"))


def _pipe(folder: Path) -> None:
    (folder / LIBRARY).unlink()
    os.mkfifo(folder / LIBRARY)


def _folder_in_its_place(folder: Path) -> None:
    (folder / LIBRARY).unlink()
    (folder / LIBRARY).mkdir()


def _another_library(folder: Path) -> None:
    change_library(folder, LIBRARY, (tiny_pack("gfx90a") / "libaotmm_gfx90a.so").read_bytes())


def _no_library_at_all(folder: Path) -> None:
    change_library(folder, LIBRARY, b"\x7fELF, but no library")


def _kernel_less(body: list[dict[str, Any]]) -> None:
    del body[-1]


def _same_name(body: list[dict[str, Any]]) -> None:
    body[1]["name"] = body[0]["name"]


def _same_image(body: list[dict[str, Any]]) -> None:
    body[1]["image"] = body[0]["image"]


def _same_image_elsewhere(body: list[dict[str, Any]]) -> None:
    body[1]["image"] = body[0]["image"] | {"offset": body[0]["image"]["offset"] + 64}


def _behind_the_library(body: dict[str, Any]) -> None:
    body["images"]["offset"] = MAX_FILE_BYTES


def _a_byte_less(body: list[dict[str, Any]]) -> None:
    for key in ("bytes", "stored"):
        body[0]["image"][key] -= 1


def _made_of_no_image(body: list[dict[str, Any]]) -> None:
    body[0]["image"]["base"] = 32


def _edits_that_are_none(body: list[dict[str, Any]]) -> None:
    body[0]["image"]["base"] = body[1]["image"]["offset"]


def _twice_a_key(data: bytes) -> bytes:
    return data.replace(b'"arch":', b'"arch": "sm80",\n "arch":')


def _other_arch(data: bytes) -> bytes:
    """The same cubin for sm_81: the flags of its header."""
    return data[:48] + b"\x51" + data[49:]


def _debug_section(data: bytes) -> bytes:
    return data.replace(b".nv.rel.action", b".debug_lineXYZ")


def _two_kernels(data: bytes) -> bytes:
    """A weak function of the image made a global one, or a second entry."""
    return re.sub(rb"\.visible \.entry (\w+)\(", rb".visible .entry other() { ret; }\n.visible .entry \1(", data)


def _several(folder: Path) -> None:
    change_kernels(folder, lambda body: body[0].update(threads=-1, layout="xx", symbol=3))


def _several_files(folder: Path) -> None:
    for name in (LIBRARY, "launcher.c", "launcher.h"):
        (folder / name).write_bytes(b"")


# ---------------------------------------------------------------------------------------------------------------- table
ATTACKS = (
    # the bytes of manifest.json
    Attack("no manifest", _gone(FILE_NAME), f"has no {FILE_NAME}"),
    Attack("a cut manifest", _bytes(FILE_NAME, lambda data: data[:-9]), "not a manifest"),
    Attack("a longer manifest", _bytes(FILE_NAME, _extend), "the file was altered"),
    Attack(
        "a flipped manifest", _bytes(FILE_NAME, lambda data: data.replace(b"3.9.0", b"3.9.1")), "the file was altered"
    ),
    Attack(
        "a manifest with a wrong digest",
        _bytes(FILE_NAME, lambda data: re.sub(rb'"digest": "...', b'"digest": "000', data)),
        "the file was altered",
    ),
    Attack(
        "a manifest without a digest", lambda folder: seal(folder, {"format": FORMAT}), "unknown keys [], missing keys"
    ),
    Attack("a key twice", _bytes(FILE_NAME, _twice_a_key), "a key twice in"),
    Attack("no JSON", _bytes(FILE_NAME, lambda _data: b"\xff\xfe"), "not a manifest"),
    Attack("JSON that is too deep", _bytes(FILE_NAME, lambda _data: b"[" * 200_000), "not a manifest"),
    Attack(
        "a number that is none",
        _bytes(FILE_NAME, lambda data: data.replace(_FORMAT, b'"format": NaN')),
        "number NaN is not JSON",
    ),
    Attack(
        "a number with a point",
        _bytes(FILE_NAME, lambda data: data.replace(_FORMAT, _FORMAT + b".0")),
        "format: expected an integer from 0 to",
    ),
    Attack(
        "a number without end",
        _bytes(FILE_NAME, lambda data: data.replace(_FORMAT, _FORMAT + b"2" * 5000)),
        "not a manifest",
    ),
    Attack(
        "a manifest without end",
        _bytes(FILE_NAME, lambda data: data + b" " * MAX_MANIFEST_BYTES),
        f"a manifest has at most {MAX_MANIFEST_BYTES}",
    ),
    Attack("a manifest behind a link", _link(FILE_NAME), f"{FILE_NAME} is a link"),
    # what it says
    Attack(
        "a newer format",
        _head(lambda body: body.update(format=FORMAT + 1)),
        f"pack format {FORMAT + 1}, this version of aotmm reads {FORMAT}",
    ),
    Attack(
        "an older format",
        _head(lambda body: body.update(format=1)),
        f"pack format 1, this version of aotmm reads {FORMAT}",
    ),
    Attack("an unknown key", _head(lambda body: body.update(run="sh")), "unknown keys ['run'], missing keys []"),
    Attack("a missing key", _head(lambda body: body.pop("host")), "unknown keys [], missing keys ['host']"),
    Attack("an unknown arch", _head(lambda body: body.update(arch="sm99")), "found 'sm99'"),
    Attack(
        "a negative size",
        _head(lambda body: body["library"].update(bytes=-1)),
        f"library: bytes: expected an integer from 0 to {MAX_FILE_BYTES}, found -1",
    ),
    Attack(
        "a size above the cap",
        _head(lambda body: body["library"].update(bytes=MAX_FILE_BYTES + 1)),
        f"library: bytes: expected an integer from 0 to {MAX_FILE_BYTES}, found {MAX_FILE_BYTES + 1}",
    ),
    Attack(
        "a path out of the pack",
        _head(lambda body: body["library"].update(path="../sm90/x.so")),
        "'../sm90/x.so' is not a plain path inside the pack",
    ),
    Attack(
        "an absolute path",
        _head(lambda body: body["library"].update(path="/lib/x.so")),
        "'/lib/x.so' is not a plain path inside the pack",
    ),
    Attack(
        "a path with a NUL",
        _head(lambda body: body["library"].update(path="x\0.so")),
        "library: path: expected a printable text",
    ),
    Attack(
        "a path that looks like another",
        _head(lambda body: body["library"].update(path="\u2024\u2024/x")),
        "is not a plain path inside the pack",
    ),
    Attack(
        "the manifest as a file",
        _head(lambda body: body["library"].update(path=FILE_NAME)),
        f"2 files have the same path '{FILE_NAME}'",
    ),
    Attack(
        "two libraries of one path",
        _head(lambda body: body["sources"].append(body["library"])),
        f"2 files have the same path '{LIBRARY}'",
    ),
    Attack(
        "a digest that is none", _head(lambda body: body["library"].update(sha256="md5")), "sha256: expected a text"
    ),
    # the list of kernels
    Attack("no list of kernels", _gone(KERNELS_NAME), KERNELS_NAME),
    Attack("a flipped list of kernels", _bytes(KERNELS_NAME, _flip), f"{KERNELS_NAME} was altered"),
    Attack("a longer list of kernels", _bytes(KERNELS_NAME, _extend), f"{KERNELS_NAME} was altered"),
    Attack("two kernels of one name", _kernels(_same_name), "2 kernels have the same name"),
    Attack("an image that no kernel has", _kernels(_same_image), ", expected at"),
    Attack("an image at two places", _kernels(_same_image_elsewhere), ", expected at"),
    Attack("an image of part of an image", _kernels(_made_of_no_image), "at 32, where no whole image is"),
    Attack("images behind the library", _head(_behind_the_library), f"bytes from {MAX_FILE_BYTES} on, {LIBRARY} has"),
    Attack(
        "two files that differ in case",
        _head(lambda body: body["sources"][0].update(path=LIBRARY.upper())),
        "2 files have the same path",
    ),
    Attack(
        "a file below a file",
        _head(lambda body: body["sources"][0].update(path=f"{LIBRARY}/more")),
        "is a folder of others",
    ),
    Attack("a kernel with profile scratch", _first(profile_scratch_bytes=64), "needs 64 B of profile scratch"),
    Attack("a list without end", _first(guards=[{}] * (MAX_ITEMS + 1)), f"expected a list of at most {MAX_ITEMS}"),
    Attack("a quantity that no launch gives", _first(quantities=["Q"]), "declares other quantities than a "),
    Attack(
        "an undeclared quantity",
        _kernels(lambda body: body[0]["parameters"][0].update(value="Q")),
        "refers to 'Q', which it does not declare",
    ),
    Attack("a kernel less than the library has", _kernels(_kernel_less), "kernels"),
    Attack("several at once", _several, "threads: expected an integer from 0 to 9007199254740991, found -1"),
    # the library
    *(
        Attack(f"a library that was {name}", _bytes(LIBRARY, change), f"{LIBRARY} was altered")
        for name, change in (("cut", _cut), ("extended", _extend), ("flipped", _flip), ("emptied", lambda _data: b""))
    ),
    Attack("no library", _gone(LIBRARY), LIBRARY),
    Attack("a library behind a link", _link(LIBRARY), LIBRARY),
    Attack("a pipe for a library", _pipe, LIBRARY),
    Attack("a folder for a library", _folder_in_its_place, LIBRARY),
    Attack("a library for another arch", _another_library, ""),
    Attack("a library that is none", _no_library_at_all, ""),
    Attack(
        "a file that nobody lists",
        lambda folder: (folder / "more").write_text(""),
        f"{FILE_NAME} does not list more",
        loading=False,
    ),
    # images and PTX
    Attack(
        "images elsewhere", _head(lambda body: body["images"].update(offset=64)), "holds other code at", loading=False
    ),
    Attack("an image for edits", _kernels(_edits_that_are_none), "holds other code at byte", loading=False),
    Attack("an image of other bytes", _kernels(_a_byte_less), "holds other code at byte", loading=False),
    Attack("PTX that does not end", _unended_text, f"no zero byte follows it in {LIBRARY}", loading=False),
    Attack(
        "an image for another arch", _image_bytes(_other_arch), "arch 'sm81', the manifest has 'sm80'", loading=False
    ),
    Attack(
        "an image with source lines",
        _image_bytes(_debug_section),
        "debug ('.debug_lineXYZ',), the manifest has ()",
        loading=False,
    ),
    Attack("an image that is none", _image_bytes(lambda _data: b"MZ"), "no 64-bit ELF file", loading=False),
    Attack(
        "an image that was cut",
        _image_bytes(_cut),
        "it ends at byte",
        loading=False,
    ),
    Attack(
        "an image without its register count",
        _image_bytes(lambda data: data.replace(b"\4\x2f\x08\0", b"\4\x2e\x08\0")),
        "does not say what",
        loading=False,
    ),
    Attack("half an image", _image_bytes(lambda data: data[: len(data) // 2]), "bytes at", loading=False),
    Attack(
        "an image of no GPU",
        _image_bytes(lambda data: data[:18] + b"\x3e\0" + data[20:]),
        "machine 62 is neither CUDA",
        loading=False,
    ),
    Attack("PTX of two kernels", _image_bytes(_two_kernels, "ptx"), "one kernel; it has 2", loading=False),
    Attack(
        "PTX of a newer version",
        _image_bytes(lambda data: data.replace(b".version 8.0", b".version 8.8"), "ptx"),
        "ptx_version 88, the manifest has 80",
        loading=False,
    ),
    Attack(
        "PTX for a newer arch",
        _image_bytes(lambda data: data.replace(b".target sm_80", b".target sm_90"), "ptx"),
        "arch 'sm90', the manifest has 'sm80'",
        loading=False,
    ),
    Attack(
        "PTX with a path",
        _image_bytes(lambda data: data + b'\n.file 1 "/home/somebody/tile.py"\n', "ptx"),
        "debug ('.file',)",
        loading=False,
    ),
    Attack("PTX that is no text", _image_bytes(lambda _data: b"\xff", "ptx"), "no PTX", loading=False),
    *(
        Attack(f"a manifest with other {field}", _first(**{field: value}), f"{field} ", loading=False)
        for field, value in (
            ("symbol", "other"),
            ("registers", 1),
            ("spill_bytes", 8),
            ("threads", 32),
        )
    ),
    Attack(
        "a parameter that no kernel before has",
        _kernels(lambda body: body[0]["parameters"].insert(0, 99)),
        "parameters[0]: 99, and 0 parameters are before",
        loading=False,
    ),
    Attack(
        "a manifest with a parameter less",
        _kernels(lambda body: body[0]["parameters"].pop()),
        "parameters ((",
        loading=False,
    ),
    Attack(
        "a manifest with a parameter of another size",
        _kernels(lambda body: body[0]["parameters"][-1].update(bytes=4)),
        "parameters ((",
        loading=False,
    ),
    Attack(
        "more shared memory than there is", _first(shared_bytes=1 << 20), "B of shared memory, sm80 has", loading=False
    ),
)
