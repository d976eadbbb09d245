"""The pack's manifest: its content and everything that a launch needs. Only this module reads or writes it.

It is two files. manifest.json is small and read when a pack is opened. kernels.json, the list of kernels, is read when
it is needed. `docs/format.md` is the same contract in words. Reading is strict: any other content is refused.
"""

# Annotations are values here, not text: to evaluate them when a pack is opened would take half a millisecond.
import collections
import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from aotmm.errors import ArtifactError
from aotmm.pack.decode import MAX_ITEMS, Sha256, check_format, decode, decode_part, parse_json, refuse
from aotmm.problem import MAX_QUANTITIES, QUANTITIES
from aotmm.target import STATUSES, TARGETS

if TYPE_CHECKING:
    from aotmm.pack.schema import AnyKernel, Image, Kernel, OwnKernel

FORMAT = 15
_MAX_SHOWN = 40  # characters of a wrong name
FILE_NAME = "manifest.json"
KERNELS_NAME = "kernels.json"
# Room for several times the kernels of the default packs, at 3 KiB of list and 95 KiB of library for each.
MAX_MANIFEST_BYTES = 48 << 20
MAX_FILE_BYTES = 512 << 20
IMAGE_ALIGNMENT = 64  # of an image in the block of all, in bytes
_NO_DIGEST = "0" * 64
_PARTS = "parameters", "guards"  # of kernels, most of which others have too
_PLAIN_PATH = r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*"


@dataclass(frozen=True, slots=True)
class File:
    """One file of the pack: path relative to it ("/" between folders), sha256 in hex, size in bytes."""

    path: str
    sha256: Sha256
    bytes: Annotated[int, range(MAX_FILE_BYTES + 1)]


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
    status: Annotated[str, STATUSES]


@dataclass(frozen=True, slots=True)
class Head:
    """manifest.json: a pack without its kernels, enough to open it.

    `min_driver` is the lowest CUDA driver version that takes the images, as cuDriverGetVersion spells it; 0 for HIP.
    `library_key` is the digest of everything that the launcher library was linked from. `images` is the part of the
    library that holds the code of all kernels. `functions` are those of a user's own that the pack launches; a pack of
    products has none. `write` computes `digest`, the manifest's own, and `kernels_file`, the
    other half.
    """

    format: int
    arch: Annotated[str, tuple(TARGETS)]
    min_driver: int
    host: str
    provenance: Provenance
    library: File
    images: Span
    library_key: str
    sources: tuple[File, ...]
    functions: tuple[str, ...] = ()
    kernels_file: File = File(KERNELS_NAME, "", 0)
    digest: Sha256 = ""


@dataclass(frozen=True, slots=True)
class Manifest(Head):
    """A whole pack: of `kernels` of products, or of `own` kernels of functions, by their numbers in its library."""

    kernels: "tuple[Kernel, ...]" = ()
    own: "tuple[OwnKernel, ...]" = ()

    @property
    def every(self) -> "tuple[AnyKernel, ...]":
        """Return the pack's kernels, of whichever kind."""
        return (*self.kernels, *self.own)


def write(manifest: Manifest) -> dict[str, bytes]:
    """Return the canonical bytes of manifest.json and kernels.json, by file name.

    `digest` is the sha256 of manifest.json with zeros in its place.
    """
    # A line for each: indented, the list would be larger by a quarter, most of it spaces.
    kernels = ("[\n" + ",\n".join(map(_json, _each_part_once(manifest.every))) + "\n]\n").encode()
    entry = file(KERNELS_NAME, kernels)
    body = dataclasses.asdict(dataclasses.replace(manifest, kernels_file=entry, digest=_NO_DIGEST, kernels=(), own=()))
    del body["kernels"], body["own"]
    blank = (_json(body, indent=1) + "\n").encode()
    head = blank.replace(_stated(_NO_DIGEST), _stated(hashlib.sha256(blank).hexdigest()))
    return {KERNELS_NAME: kernels, FILE_NAME: head}


def _each_part_once(kernels: "Iterable[AnyKernel]") -> "Iterator[dict[str, Any]]":
    """Yield the entries of kernels.json. A parameter or guard that came before is its number among all such."""
    numbers: dict[str, dict[str, int]] = {name: {} for name in _PARTS}
    for kernel in kernels:
        entry = kernel_to(kernel)
        for name, known in numbers.items():
            entry[name] = [_once(part, known) for part in entry[name]]
        yield entry


def _once(part: object, known: dict[str, int]) -> object:
    """Return `part`, or its number if it is known; then it is."""
    text, number = _json(part), len(known)
    found = known.setdefault(text, number)
    return part if found == number else found


def _take_parts(body: object, where: str) -> None:
    """Replace the parameters and guards of all entries, and the numbers of earlier ones, by what they are.

    Raises:
        ArtifactError: as `decode`, or a number that no earlier one has.
    """
    from aotmm.pack.schema import Guard, Parameter

    problems: list[str] = []
    for name, wanted in zip(_PARTS, (Parameter, Guard), strict=True):
        known: list[Parameter | Guard | None] = []
        for number, entry in enumerate(body if isinstance(body, list) else ()):
            parts = entry.get(name) if isinstance(entry, dict) else None
            if not isinstance(parts, list) or len(parts) > MAX_ITEMS:
                continue  # `decode` says what is wrong with it
            for i, part in enumerate(parts):
                if type(part) is not int:
                    known.append(decode_part(wanted, part, f"{where}[{number}]: {name}[{i}]", problems))
                    parts[i] = known[-1]
                elif 0 <= part < len(known):
                    parts[i] = known[part]
                else:
                    problems.append(f"{where}[{number}]: {name}[{i}]: {part}, and {len(known)} {name} are before")
    refuse(problems)


def read_head(data: bytes, where: str) -> Head:
    """Return the manifest.json in `data`; `where` names it in errors.

    Raises:
        ArtifactError: too large, not strict JSON, another format version, or a digest that does not match; else all of
            these: unknown or missing keys, values of other types, lists that are too long, files outside the pack, too
            large, or in each other's way.
    """
    body = parse_json(data, where, "manifest", MAX_MANIFEST_BYTES)
    check_format(body, FORMAT, where, "pack", "install the aotmm that wrote the pack, or build the pack again")
    head = decode(Head, body, where)
    found = hashlib.sha256(data.replace(_stated(head.digest), _stated(_NO_DIGEST))).hexdigest()
    if head.digest != found:
        raise ArtifactError(f"{where}: digest {head.digest}, its content has {found}; the file was altered")
    refuse(_faults_of_files([head.library, head.kernels_file, *head.sources], where))
    return head


def read_kernels(head: Head, data: bytes, where: str) -> Manifest:
    """Return the whole manifest: `head` and the kernels.json in `data`, whose digest the caller has compared.

    Raises:
        ArtifactError: as `read_head`, or two entries of one name, or a kernel that needs more than a launch gives.
    """
    from aotmm.pack.schema import Kernel, OwnKernel  # not to open a pack: defining these types takes milliseconds

    body = parse_json(data, where, "manifest", MAX_MANIFEST_BYTES)
    _take_parts(body, where)
    fields = {field.name: getattr(head, field.name) for field in dataclasses.fields(Head)}
    if head.functions:
        manifest = Manifest(**fields, own=decode(tuple[OwnKernel, ...], body, where))
    else:
        manifest = Manifest(**fields, kernels=decode(tuple[Kernel, ...], body, where))
    problems = _faults_of_images(manifest, where)
    for name, count in collections.Counter(kernel.name for kernel in manifest.every).items():
        if count > 1:
            problems.append(f"{where}: {count} kernels have the same name {name!r}")
    for kernel in manifest.every:
        if kernel.profile_scratch_bytes:
            words = f"needs {kernel.profile_scratch_bytes} B of profile scratch, which no launch has"
            problems.append(f"{where}: {kernel.name} {words}; build it without a profiler's instructions")
        _check_quantities(kernel, where, problems)
    if head.functions:
        problems += _faults_of_functions(manifest, where)
    refuse(problems)
    return manifest


def _faults_of_functions(manifest: Manifest, where: str) -> list[str]:
    """Return the faults of a pack of functions: their kernels lie side by side, in order, with equal arguments."""
    problems = []
    found = [name for name, _ in itertools.groupby(kernel.function for kernel in manifest.own)]
    if found != list(manifest.functions):
        problems.append(f"{where}: its kernels are of {found}, {FILE_NAME} has {list(manifest.functions)}")
    for name, members in itertools.groupby(manifest.own, lambda kernel: kernel.function):
        kinds = {(kernel.quantities, tuple(row.name for row in kernel.arguments)) for kernel in members}
        if len(kinds) > 1:
            problems.append(f"{where}: kernels of {name} have different arguments or quantities")
    return problems


def _check_quantities(kernel: "AnyKernel", where: str, problems: list[str]) -> None:
    """Add to `problems` quantities that a launch does not give, or that the kernel does not declare."""
    role = getattr(kernel, "role", None)
    if len(kernel.quantities) > MAX_QUANTITIES:
        problems.append(f"{where}: {kernel.name} has {len(kernel.quantities)} quantities, at most {MAX_QUANTITIES}")
    if role is not None and kernel.quantities != QUANTITIES[role]:
        problems.append(f"{where}: {kernel.name} declares other quantities than a {role} of this version has")
    maps = [row.tensor_map for row in kernel.parameters if row.tensor_map is not None]
    used = [row.value for row in kernel.parameters]
    used += [guard.value for guards in (kernel.guards, *(row.guards for row in maps)) for guard in guards]
    used += [name for row in maps for name in (row.inner, row.outer, row.batch, row.stride, row.batch_stride)]
    unknown = [repr(name[:_MAX_SHOWN]) for name in dict.fromkeys(used) if name not in kernel.quantities]
    if unknown:
        problems.append(f"{where}: {kernel.name} refers to {', '.join(unknown)}, which it does not declare")


def files(manifest: Manifest) -> list[File]:
    """Return every file of the pack but manifest.json itself."""
    return [manifest.library, manifest.kernels_file, *manifest.sources]


def room(size: int) -> int:
    """Return the bytes that an image of `size` bytes takes among others: one zero at least follows it."""
    return size + IMAGE_ALIGNMENT - size % IMAGE_ALIGNMENT


def code(head: Head, image: "Image", library: bytes, where: str) -> bytes:
    """Return the bytes of `image` in `library`, the content of the library of `head`; `where` names it in errors.

    Raises:
        ArtifactError: the library does not hold them there.
    """
    first, end = head.images.offset, head.images.offset + head.images.bytes
    begin = first + image.offset
    found = library[begin : begin + image.stored]
    if not image.whole:
        from aotmm.pack.edits import edited  # only here: who loads a pack does not need it

        found = edited(library[first + image.base : end], found, image.bytes)
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


def kernel_to(kernel: "AnyKernel") -> dict[str, Any]:
    """Return one kernel as plain JSON values."""
    entry: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(kernel)))
    return entry


def kernel_from(body: object, where: str) -> "AnyKernel":
    """Return the kernel in plain JSON values, of either kind; raises ArtifactError as `read_kernels`."""
    from aotmm.pack.schema import Kernel, OwnKernel

    return decode(OwnKernel if isinstance(body, dict) and "function" in body else Kernel, body, where)


def _json(body: object, indent: int | None = None) -> str:
    return json.dumps(body, sort_keys=True, indent=indent, ensure_ascii=True, allow_nan=False)


def _stated(digest: str) -> bytes:
    return f'"digest": "{digest}"'.encode()


def _faults_of_files(entries: list[File], where: str) -> list[str]:
    """Return the faults of the files of a pack, taken together."""
    problems = [
        f"{where}: file {entry.path!r} is not a plain path inside the pack"
        for entry in entries
        if not re.fullmatch(_PLAIN_PATH, entry.path) or {".", ".."} & set(entry.path.split("/"))
    ]
    counts = collections.Counter(entry.path.lower() for entry in [*entries, File(FILE_NAME, "", 0)])
    problems += [f"{where}: {count} files have the same path {path!r}" for path, count in counts.items() if count > 1]
    folders = {path[: match.start()] for path in counts for match in re.finditer("/", path)}
    return problems + [f"{where}: file {path!r} is a folder of others" for path in sorted(folders & counts.keys())]


def _faults_of_images(manifest: Manifest, where: str) -> list[str]:
    """Return the images that do not lie one after the other, from the first byte of their block to its last.

    Kernels may share one.
    """
    problems = []
    names: dict[Image, str] = {}
    for kernel in manifest.every:
        for kind, image in (("image", kernel.image), ("PTX", kernel.ptx)):
            if image is not None:
                names.setdefault(image, f"the {kind} of {kernel.name}")
    bases = {image.offset for image in names if image.whole}
    end = 0
    for image in sorted(names, key=lambda image: image.offset):
        if image.offset != end:
            problems.append(f"{where}: {names[image]} is at {image.offset}, expected at {end}")
        end = image.offset + room(image.stored)
        if image.whole and image.stored != image.bytes:
            problems.append(f"{where}: {names[image]} has {image.bytes} bytes, and {image.stored} are stored")
        if not image.whole and image.base not in bases:
            problems.append(f"{where}: {names[image]} is made of what begins at {image.base}, where no whole image is")
    images, library = manifest.images, manifest.library
    if end != images.bytes:
        problems.append(f"{where}: the kernels' images end at {end}, their block has {images.bytes} bytes")
    if images.offset + images.bytes > library.bytes:
        problems.append(
            f"{where}: the block of images has {images.bytes} bytes from {images.offset} on, {library.path} has "
            f"{library.bytes} bytes"
        )
    return problems
