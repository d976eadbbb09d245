"""The pack's manifest: what is in a pack and everything a launch needs to know. Only this module reads or writes it.

It is two files: manifest.json, small and read when a pack is opened, and kernels.json, the list of kernels, read when
somebody asks for it. `docs/format.md` is the same contract in words. Reading is strict: files either are exactly this
or are refused.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
import types
import typing
from dataclasses import dataclass

from aotmm.errors import ArtifactError
from aotmm.problem import ATTRIBUTES, DTYPES, EPILOGUES, LAYOUTS, RELATIONS, ROLES, VALUES
from aotmm.target import TARGETS

if typing.TYPE_CHECKING:
    from aotmm.kernel import Kernel

FORMAT = 2
FILE_NAME = "manifest.json"
KERNELS_NAME = "kernels.json"
MAX_MANIFEST_BYTES = 8 << 20
MAX_FILE_BYTES = 64 << 20
_PLAIN_PATH = r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*"


@dataclass(frozen=True, slots=True)
class File:
    """One file of the pack: path relative to it ("/" between folders), sha256 in hex, size in bytes."""

    path: str
    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Provenance:
    """What made the pack. No times, paths or host names: equal inputs give equal bytes.

    `tuning` says where and when the times were measured that selection knows; "" if it has estimates only.
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


@dataclass(frozen=True, slots=True)
class Head:
    """manifest.json: a pack without its kernels, what opening it needs.

    `min_driver` is the lowest CUDA driver version that takes the images, as cuDriverGetVersion spells it; 0 for HIP.
    `library_key` is the digest of everything that the launcher library was linked from, `digest` the manifest's own,
    `kernels_file` the other half. `write` computes the last two.
    """

    format: int
    arch: str
    min_driver: int
    host: str
    provenance: Provenance
    library: File
    library_key: str
    sources: tuple[File, ...]
    kernels_file: File = File(KERNELS_NAME, "", 0)
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Manifest(Head):
    """A whole pack."""

    kernels: tuple[Kernel, ...] = ()


# Fields that hold one of a few words, and those.
_WORDS: dict[tuple[str, str], tuple[str, ...]] = {
    ("Head", "arch"): tuple(TARGETS),
    ("Kernel", "role"): ROLES,
    ("Kernel", "dtype_a"): tuple(DTYPES),
    ("Kernel", "dtype_b"): tuple(DTYPES),
    ("Kernel", "dtype_c"): tuple(DTYPES),
    ("Kernel", "layout"): (*LAYOUTS, "any"),
    ("Kernel", "epilogue"): EPILOGUES,
    ("Parameter", "value"): VALUES,
    ("TensorMap", "dtype"): tuple(DTYPES),
    ("TensorMap", "inner"): VALUES,
    ("TensorMap", "outer"): VALUES,
    ("TensorMap", "stride"): VALUES,
    ("Promise", "value"): VALUES,
    ("Promise", "relation"): RELATIONS,
    ("Attribute", "name"): tuple(ATTRIBUTES),
}
_NO_DIGEST = "0" * 64


def write(manifest: Manifest) -> dict[str, bytes]:
    """The canonical bytes of manifest.json and kernels.json, by file name.

    `digest` is the sha256 of manifest.json with zeros in its place.
    """
    kernels = _canonical([kernel_to(kernel) for kernel in manifest.kernels])
    entry = File(KERNELS_NAME, hashlib.sha256(kernels).hexdigest(), len(kernels))
    body = dataclasses.asdict(dataclasses.replace(manifest, kernels_file=entry, digest=_NO_DIGEST, kernels=()))
    del body["kernels"]
    blank = _canonical(body)
    head = blank.replace(_stated(_NO_DIGEST), _stated(hashlib.sha256(blank).hexdigest()))
    return {KERNELS_NAME: kernels, FILE_NAME: head}


def read_head(data: bytes, where: str) -> Head:
    """The manifest.json in `data`; `where` names it in errors.

    Raises:
        ArtifactError: too large, not strict JSON, another format version, a digest that does not match, unknown or
            missing keys, values of other types, or a file outside the pack.
    """
    body = _parse(data, where)
    if not isinstance(body, dict):
        raise ArtifactError(f"{where}: not a manifest: expected an object; build the pack again")
    if body.get("format") != FORMAT:
        raise ArtifactError(
            f"{where}: pack format {body.get('format')!r}, this version of aotmm reads {FORMAT}; "
            "install the aotmm that wrote the pack, or build the pack again"
        )
    stated = body.get("digest")
    if not isinstance(stated, str) or len(stated) != len(_NO_DIGEST) or not stated.isascii():
        raise ArtifactError(f"{where}: digest {stated!r} is not a sha256; build the pack again")
    found = hashlib.sha256(data.replace(_stated(stated), _stated(_NO_DIGEST))).hexdigest()
    if stated != found:
        raise ArtifactError(f"{where}: digest {stated}, its content has {found}; the file was altered")
    head: Head = _decode(Head, body, where)
    _check_files([head.library, head.kernels_file, *head.sources], where)
    return head


def read_kernels(head: Head, data: bytes, where: str) -> Manifest:
    """The whole manifest: `head` and the kernels.json in `data`, whose digest the caller compared with the head's.

    Raises:
        ArtifactError: as `read_head`, or two entries of one name.
    """
    from aotmm.kernel import Kernel  # not to open a pack: defining these types takes milliseconds

    kernels: tuple[Kernel, ...] = _decode(tuple[Kernel, ...], _parse(data, where), where)
    fields = {field.name: getattr(head, field.name) for field in dataclasses.fields(Head)}
    manifest = Manifest(**fields, kernels=kernels)
    _check_files(files(manifest), where)
    if len({kernel.name for kernel in kernels}) != len(kernels):
        raise ArtifactError(f"{where}: two kernels have the same name")
    return manifest


def files(manifest: Manifest) -> list[File]:
    """Every file of the pack but manifest.json itself."""
    images = [kernel.image for kernel in manifest.kernels]
    texts = [kernel.ptx for kernel in manifest.kernels if kernel.ptx is not None]
    return [manifest.library, manifest.kernels_file, *manifest.sources, *images, *texts]


def kernel_to(kernel: Kernel) -> object:
    """One kernel as plain JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(kernel)))


def kernel_from(body: object, where: str) -> Kernel:
    """The kernel in plain JSON values; raises ArtifactError as `read` does."""
    from aotmm.kernel import Kernel

    kernel: Kernel = _decode(Kernel, body, where)
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


def _check_files(entries: list[File], where: str) -> None:
    for entry in entries:
        if not re.fullmatch(_PLAIN_PATH, entry.path) or {".", ".."} & set(entry.path.split("/")):
            raise ArtifactError(f"{where}: file {entry.path!r} is not a plain path inside the pack")
        if entry.bytes > MAX_FILE_BYTES:
            raise ArtifactError(
                f"{where}: file {entry.path} has {entry.bytes} bytes, at most {MAX_FILE_BYTES} are read"
            )
    if len({entry.path for entry in entries}) != len(entries):
        raise ArtifactError(f"{where}: two files have the same path")


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


def _decode(wanted: typing.Any, value: object, where: str) -> typing.Any:
    """`value` as type `wanted` (a dataclass, tuple, optional, str, int or bool), or ArtifactError naming the spot."""
    if isinstance(wanted, type) and dataclasses.is_dataclass(wanted):
        if not isinstance(value, dict):
            raise ArtifactError(f"{where}: expected an object, found {type(value).__name__}")
        hints = _hints(wanted)
        if value.keys() != hints.keys():
            unknown, missing = sorted(value.keys() - hints.keys()), sorted(hints.keys() - value.keys())
            raise ArtifactError(f"{where}: unknown keys {unknown}, missing keys {missing}")
        for key in value:
            words = _WORDS.get((wanted.__name__, key))
            if words is not None and value[key] not in words:
                raise ArtifactError(f"{where}: {key} {value[key]!r} is unknown; known: {', '.join(words)}")
        return typing.cast("typing.Any", wanted)(
            **{key: _decode(hint, value[key], f"{where}: {key}") for key, hint in hints.items()}
        )
    if typing.get_origin(wanted) is tuple:
        inner = typing.get_args(wanted)
        if not isinstance(value, list) or (inner[-1] is not ... and len(value) != len(inner)):
            raise ArtifactError(f"{where}: expected a list, found {value!r}")
        return tuple(_decode(inner[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if isinstance(wanted, types.UnionType):
        return None if value is None else _decode(typing.get_args(wanted)[0], value, where)
    if type(value) is not wanted or (wanted is int and not 0 <= typing.cast("int", value) < 2**53):
        raise ArtifactError(f"{where}: expected {wanted.__name__}, found {value!r}")
    return value
