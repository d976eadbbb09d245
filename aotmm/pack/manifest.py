"""The pack's manifest: its content and everything that a launch needs. Only this module reads or writes it.

It is two files. manifest.json is small and read when a pack is opened. kernels.json, the list of kernels, is read when
it is needed. `docs/format.md` is the same contract in words. Reading is strict: any other content is refused.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import json
import re
import types
import typing
from dataclasses import dataclass

from aotmm.errors import ArtifactError
from aotmm.problem import ATTRIBUTES, DTYPES, EPILOGUES, LAYOUTS, QUANTITIES, RELATIONS, ROLES
from aotmm.target import STATUSES, TARGETS

if typing.TYPE_CHECKING:
    from aotmm.pack.schema import Image, Kernel

FORMAT = 4
FILE_NAME = "manifest.json"
KERNELS_NAME = "kernels.json"
MAX_ITEMS = 4096  # of any list, and so of kernels
# Room for as many kernels as the default packs have, at 7 KiB of list and 95 KiB of library per kernel.
MAX_MANIFEST_BYTES = 32 << 20
MAX_FILE_BYTES = 512 << 20
IMAGE_ALIGNMENT = 64  # of an image in the block of all, in bytes
MAX_VIOLATIONS = 100  # that one error lists
_MAX_SHOWN = 200  # characters of a wrong value
_SHA256 = r"[0-9a-f]{64}"
_PLAIN_PATH = r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*"


@dataclass(frozen=True, slots=True)
class File:
    """One file of the pack: path relative to it ("/" between folders), sha256 in hex, size in bytes."""

    path: str
    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a file: its first byte and its size in bytes."""

    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Provenance:
    """Origin of the pack. No times, paths or host names: equal inputs give equal bytes.

    `tuning` names the GPU, driver and date of the times that selection knows; "" if it has estimates only. `status`
    is that of the arch (`target.STATUSES`) in this version of aotmm.
    """

    aotmm: str
    triton: str
    assembler: str
    c_compiler: str
    config_set: str
    kernel_sources: str
    tuning: str
    line_info: bool
    fp_fusion: bool
    status: str


@dataclass(frozen=True, slots=True)
class Head:
    """manifest.json: a pack without its kernels, enough to open it.

    `min_driver` is the lowest CUDA driver version that takes the images, as cuDriverGetVersion spells it; 0 for HIP.
    `library_key` is the digest of everything that the launcher library was linked from. `images` is the part of the
    library that holds the code of all kernels. `write` computes `digest`, the manifest's own, and `kernels_file`, the
    other half.
    """

    format: int
    arch: str
    min_driver: int
    host: str
    provenance: Provenance
    library: File
    images: Span
    library_key: str
    sources: tuple[File, ...]
    kernels_file: File = File(KERNELS_NAME, "", 0)
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Manifest(Head):
    """A whole pack."""

    kernels: tuple[Kernel, ...] = ()


# Fields that hold one of a few words, and these words.
_WORDS: dict[tuple[str, str], tuple[str, ...]] = {
    ("Head", "arch"): tuple(TARGETS),
    ("Provenance", "status"): STATUSES,
    ("Kernel", "role"): ROLES,
    ("Kernel", "dtype_a"): tuple(DTYPES),
    ("Kernel", "dtype_b"): tuple(DTYPES),
    ("Kernel", "dtype_c"): tuple(DTYPES),
    ("Kernel", "layout"): (*LAYOUTS, "any"),
    ("Kernel", "epilogue"): EPILOGUES,
    ("TensorMap", "dtype"): tuple(DTYPES),
    ("Guard", "relation"): RELATIONS,
    ("Attribute", "name"): tuple(ATTRIBUTES),
}
_NO_DIGEST = "0" * 64


def write(manifest: Manifest) -> dict[str, bytes]:
    """Return the canonical bytes of manifest.json and kernels.json, by file name.

    `digest` is the sha256 of manifest.json with zeros in its place.
    """
    kernels = _canonical([kernel_to(kernel) for kernel in manifest.kernels])
    entry = file(KERNELS_NAME, kernels)
    body = dataclasses.asdict(dataclasses.replace(manifest, kernels_file=entry, digest=_NO_DIGEST, kernels=()))
    del body["kernels"]
    blank = _canonical(body)
    head = blank.replace(_stated(_NO_DIGEST), _stated(hashlib.sha256(blank).hexdigest()))
    return {KERNELS_NAME: kernels, FILE_NAME: head}


def read_head(data: bytes, where: str) -> Head:
    """Return the manifest.json in `data`; `where` names it in errors.

    Raises:
        ArtifactError: too large, not strict JSON, another format version, or a digest that does not match; else all of
            these: unknown or missing keys, values of other types, lists that are too long, files outside the pack, too
            large, or in each other's way.
    """
    body = _parse(data, where)
    if not isinstance(body, dict):
        raise ArtifactError(f"{where}: not a manifest: expected an object; build the pack again")
    if body.get("format") != FORMAT:
        raise ArtifactError(
            f"{where}: pack format {_shown(body.get('format'))}, this version of aotmm reads {FORMAT}; "
            "install the aotmm that wrote the pack, or build the pack again"
        )
    stated = body.get("digest")
    if not isinstance(stated, str) or not re.fullmatch(_SHA256, stated):
        raise ArtifactError(f"{where}: digest {_shown(stated)} is not a sha256; build the pack again")
    found = hashlib.sha256(data.replace(_stated(stated), _stated(_NO_DIGEST))).hexdigest()
    if stated != found:
        raise ArtifactError(f"{where}: digest {stated}, its content has {found}; the file was altered")
    problems: list[str] = []
    head: Head = _decode(Head, body, where, problems)
    if not problems:
        _check_files([head.library, head.kernels_file, *head.sources], where, problems)
    _raise(problems)
    return head


def read_kernels(head: Head, data: bytes, where: str) -> Manifest:
    """Return the whole manifest: `head` and the kernels.json in `data`, whose digest the caller has compared.

    Raises:
        ArtifactError: as `read_head`, or two entries of one name, or a kernel that needs more than a launch gives.
    """
    from aotmm.pack.schema import Kernel  # not to open a pack: defining these types takes milliseconds

    problems: list[str] = []
    kernels: tuple[Kernel, ...] = _decode(tuple[Kernel, ...], _parse(data, where), where, problems)
    _raise(problems)
    fields = {field.name: getattr(head, field.name) for field in dataclasses.fields(Head)}
    manifest = Manifest(**fields, kernels=kernels)
    _check_images(manifest, where, problems)
    for name, count in collections.Counter(kernel.name for kernel in kernels).items():
        if count > 1:
            problems.append(f"{where}: {count} kernels have the same name {name!r}")
    for kernel in kernels:
        if kernel.profile_scratch_bytes:
            words = f"needs {kernel.profile_scratch_bytes} B of profile scratch, which no launch has"
            problems.append(f"{where}: {kernel.name} {words}; build it without a profiler's instructions")
        _check_quantities(kernel, where, problems)
    _raise(problems)
    return manifest


def _check_quantities(kernel: Kernel, where: str, problems: list[str]) -> None:
    """Add to `problems` quantities that a launch of the kernel's role does not give, or that it does not declare."""
    if kernel.quantities != QUANTITIES[kernel.role]:
        problems.append(f"{where}: {kernel.name} declares other quantities than a {kernel.role} of this version has")
    maps = [row.tensor_map for row in kernel.parameters if row.tensor_map is not None]
    used = [row.value for row in kernel.parameters]
    used += [guard.value for guards in (kernel.guards, *(row.guards for row in maps)) for guard in guards]
    used += [name for row in maps for name in (row.inner, row.outer, row.stride)]
    unknown = [_shown(name) for name in dict.fromkeys(used) if name not in kernel.quantities]
    if unknown:
        problems.append(f"{where}: {kernel.name} refers to {', '.join(unknown)}, which it does not declare")


def files(manifest: Manifest) -> list[File]:
    """Return every file of the pack but manifest.json itself."""
    return [manifest.library, manifest.kernels_file, *manifest.sources]


def room(size: int) -> int:
    """Return the bytes that an image of `size` bytes takes among others: one zero at least follows it."""
    return size + IMAGE_ALIGNMENT - size % IMAGE_ALIGNMENT


def code(head: Head, image: Image, library: bytes, where: str) -> bytes:
    """Return the bytes of `image` in `library`, the content of the library of `head`; `where` names it in errors.

    Raises:
        ArtifactError: the library does not hold them there.
    """
    begin = head.images.offset + image.offset
    found = library[begin : begin + image.bytes]
    if hashlib.sha256(found).hexdigest() != image.sha256:
        raise ArtifactError(
            f"{where}: {head.library.path} holds other code at byte {begin} than {head.kernels_file.path} says; "
            "build the pack again"
        )
    return found


def file(path: str, data: bytes) -> File:
    """Return the entry of a file with content `data`."""
    return File(path, hashlib.sha256(data).hexdigest(), len(data))


def altered(file: File, data: bytes) -> str | None:
    """Return how `data` differs from `file`, None if it does not; one byte more than `file` has is enough."""
    return mismatch(file, len(data), hashlib.sha256(data).hexdigest())


def mismatch(file: File, size: int, sha256: str) -> str | None:
    """Return how content of `size` bytes with that digest differs from `file`; None if it does not."""
    if (size, sha256) == (file.bytes, file.sha256):
        return None
    found = f"{size} bytes" if size <= file.bytes else "more bytes"
    return (
        f"{file.path} was altered: sha256 {sha256[:12]}... ({found}), the manifest says {file.sha256[:12]}... "
        f"({file.bytes} bytes)"
    )


def kernel_to(kernel: Kernel) -> object:
    """Return one kernel as plain JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(kernel)))


def kernel_from(body: object, where: str) -> Kernel:
    """Return the kernel in plain JSON values; raises ArtifactError as `read_kernels`."""
    from aotmm.pack.schema import Kernel

    problems: list[str] = []
    kernel: Kernel = _decode(Kernel, body, where, problems)
    _raise(problems)
    return kernel


def _canonical(body: object) -> bytes:
    return (json.dumps(body, sort_keys=True, indent=1, ensure_ascii=True, allow_nan=False) + "\n").encode()


def _stated(digest: str) -> bytes:
    return f'"digest": "{digest}"'.encode()


def _parse(data: bytes, where: str) -> object:
    if len(data) > MAX_MANIFEST_BYTES:
        raise ArtifactError(f"{where}: {len(data)} bytes, a manifest has at most {MAX_MANIFEST_BYTES}")
    try:
        body: object = json.loads(
            data, object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_float=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{where}: not a manifest: {error}; build the pack again") from error
    return body


def _check_files(entries: list[File], where: str, problems: list[str]) -> None:
    """Add the faults of the files of a pack, taken together, to `problems`."""
    for entry in entries:
        if not re.fullmatch(_PLAIN_PATH, entry.path) or {".", ".."} & set(entry.path.split("/")):
            problems.append(f"{where}: file {entry.path!r} is not a plain path inside the pack")
        if not re.fullmatch(_SHA256, entry.sha256):
            problems.append(f"{where}: file {entry.path}: {entry.sha256!r} is not a sha256")
        if entry.bytes > MAX_FILE_BYTES:
            problems.append(f"{where}: file {entry.path} has {entry.bytes} bytes, at most {MAX_FILE_BYTES} are read")
    counts = collections.Counter(entry.path.lower() for entry in [*entries, File(FILE_NAME, "", 0)])
    problems += [f"{where}: {count} files have the same path {path!r}" for path, count in counts.items() if count > 1]
    folders = {path[: match.start()] for path in counts for match in re.finditer("/", path)}
    problems += [f"{where}: file {path!r} is a folder of others" for path in sorted(folders & counts.keys())]


def _check_images(manifest: Manifest, where: str, problems: list[str]) -> None:
    """Add to `problems` if images do not lie one after the other, from the first byte of their block to its last."""
    end = 0
    for kernel in manifest.kernels:
        for kind, image in (("image", kernel.image), ("PTX", kernel.ptx)):
            if image is None:
                continue
            if not re.fullmatch(_SHA256, image.sha256):
                problems.append(f"{where}: the {kind} of {kernel.name}: {image.sha256!r} is not a sha256")
            if image.offset != end:
                problems.append(f"{where}: the {kind} of {kernel.name} is at {image.offset}, expected at {end}")
            end = image.offset + room(image.bytes)
    images, library = manifest.images, manifest.library
    if end != images.bytes:
        problems.append(f"{where}: the kernels' images end at {end}, their block has {images.bytes} bytes")
    if images.offset + images.bytes > library.bytes:
        problems.append(
            f"{where}: the block of images has {images.bytes} bytes from {images.offset} on, {library.path} has "
            f"{library.bytes} bytes"
        )


def _raise(problems: list[str]) -> None:
    """Raise an ArtifactError of all `problems`, if there are any."""
    if problems:
        more = len(problems) - MAX_VIOLATIONS
        raise ArtifactError("\n".join(problems[:MAX_VIOLATIONS] + ([f"... and {more} more"] if more > 0 else [])))


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    body = dict(pairs)
    if len(body) != len(pairs):
        raise ValueError(f"a key twice in {[key for key, _ in pairs]}")
    return body


def _no_constant(text: str) -> object:
    raise ValueError(f"number {text} is not an integer")


@functools.cache
def _hints(wanted: type) -> dict[str, typing.Any]:
    return typing.get_type_hints(wanted)


def _decode(wanted: typing.Any, value: object, where: str, problems: list[str]) -> typing.Any:
    """Return `value` as type `wanted` (a dataclass, tuple, optional, str, int or bool).

    Values that do not fit are added to `problems` with their place; then the result is of no use.
    """
    if type(value) is wanted and (wanted is not int or 0 <= typing.cast("int", value) < 2**53):
        return value  # most values
    if isinstance(wanted, type) and dataclasses.is_dataclass(wanted):
        return _decode_object(wanted, value, where, problems)
    if typing.get_origin(wanted) is tuple:
        inner = typing.get_args(wanted)
        if not isinstance(value, list) or (inner[-1] is not ... and len(value) != len(inner)):
            problems.append(f"{where}: expected a list, found {_shown(value)}")
        elif len(value) > MAX_ITEMS:
            problems.append(f"{where}: a list of {len(value)}, at most {MAX_ITEMS} are read")
        else:
            return tuple(_decode(inner[0], item, f"{where}[{index}]", problems) for index, item in enumerate(value))
    elif isinstance(wanted, types.UnionType):
        return None if value is None else _decode(typing.get_args(wanted)[0], value, where, problems)
    else:
        problems.append(f"{where}: expected {wanted.__name__}, found {_shown(value)}")
    return None


def _decode_object(wanted: type, value: object, where: str, problems: list[str]) -> typing.Any:
    """Return a dataclass as `_decode` does."""
    if not isinstance(value, dict):
        problems.append(f"{where}: expected an object, found {type(value).__name__}")
        return None
    hints = _hints(wanted)
    if value.keys() != hints.keys():
        unknown, missing = sorted(value.keys() - hints.keys()), sorted(hints.keys() - value.keys())
        problems.append(f"{where}: unknown keys {_shown(unknown)}, missing keys {missing}")
    fields = {}
    for key in [key for key in hints if key in value]:
        words = _WORDS.get((wanted.__name__, key))
        if words is not None and value[key] not in words:
            problems.append(f"{where}: {key} {_shown(value[key])} is unknown; known: {', '.join(words)}")
        else:
            fields[key] = _decode(hints[key], value[key], f"{where}: {key}", problems)
    return None if problems else wanted(**fields)


def _shown(value: object) -> str:
    """Return `value` for an error, cut if it is long."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
