"""Functions in packs, launched by aotmm and by the bare driver: both have to leave the same bits in memory.

`python -m tests.gpu.corpus FOLDER --out RESULT.json` does so with every function of the packs in FOLDER, as `aotmm
build --kernel` or `python -m tests.build.corpus --keep` made them. It knows no kernel: inputs are drawn by a fixed
seed, and integers are such that most kernels stay within memory. Those that do not, end the process that launches them,
which the pool replaces.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

import aotmm
from aotmm.errors import AotmmError, ArtifactError
from aotmm.pack.schema import Argument, Guard, OwnKernel
from aotmm.problem import AUTOTUNE, CONSTEXPR, FLOAT_TYPES, INTEGER_TYPES, NO_POINTER, POINTER_CODES, POINTER_TYPES
from aotmm.workers.pool import Heartbeat, Timeouts, Worker, WorkerDiedError, WorkerFactory, local
from tests.gpu import driver

SEED = 20261126
JOBS = min(8, os.cpu_count() or 1)
DAY_S = 24 * 3600.0
LIMIT_S = 15  # of a try
START_S = 120  # until torch is there in all processes, which start at once
REPEATS = 20  # of a kernel whose results differ

KINDS = ("special", "generic")  # pointers that are multiples of 16 bytes, and such that are not
EQUAL, DIFFER = "equal", "differ"
VARYING, NOTHING, FAILED, NOT_TRIED = "not deterministic", "wrote nothing", "does not run", "not tried"
BEST = (DIFFER, EQUAL, VARYING, NOTHING, FAILED, NOT_TRIED)  # what counts of several tries: the first of these
ENOUGH = (DIFFER, EQUAL, VARYING)  # no more tries after one of these

# ctypes of Triton's types. Others are pointers.
NUMBERS: dict[str, Any] = {
    "i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64,
    "u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float, "fp64": ctypes.c_double,
}  # fmt: skip
FLOAT = 0.125  # of each float argument
# From the last axis of a tensor to its first one, in elements: for 64 neighbours along the last two, and 16 before.
STRIDES = (16, 1 << 10, 1 << 16, 1 << 20)
AXIS = re.compile(r"_(batch|head|seq2?|dim|[a-zA-Z]{1,2})(_stride)?$")  # what ends the names of strides of one tensor


@dataclass(frozen=True)
class Inputs:
    """One try of a kernel.

    Attributes:
        number: of each integer argument, but for `STRIDES` if they are to be `apart`.
        grid: blocks along x, y and z. Nothing says which of them a kernel asks for. Those that it does not tell apart
            do the same, which goes well unless they write what they read.
        kind: of pointers, one of `KINDS`.
    """

    number: int
    grid: tuple[int, int, int]
    apart: bool
    kind: str = KINDS[0]


TRIES = (  # those that most kernels take first
    Inputs(64, (2, 1, 1), apart=True),
    Inputs(16, (1, 1, 1), apart=False),
    Inputs(64, (2, 2, 2), apart=True),
    Inputs(64, (1, 1, 1), apart=True),
    Inputs(128, (2, 1, 1), apart=False),
)


@dataclass(frozen=True)
class Result:
    """What came of a try.

    Attributes:
        result: one of `BEST`. reason: why, if that needs words.
        changed: bytes that the driver's launch changed.
        finite: the share of the floats among them that are finite.
    """

    inputs: Inputs
    kernel: str
    result: str
    reason: str = ""
    changed: int = 0
    finite: float = 1.0


@dataclass
class Found:
    """A function, and what came of it so far."""

    packs: Path
    name: str
    tries: list[Result] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Its name among those of several packs."""
        return f"{self.packs.name}/{self.name}"

    def best(self, kind: str) -> Result:
        """The try with pointers of this kind that counts."""
        tries = [row for row in self.tries if row.inputs.kind == kind]
        return min(tries, key=lambda row: BEST.index(row.result), default=Result(TRIES[0], "", NOT_TRIED))

    def following(self) -> Inputs | None:
        """What to try next: special pointers until one try is enough, then generic ones with the best of those."""
        best, count = self.best("special"), len(self.tries)
        if best.result not in ENOUGH and count < len(TRIES):
            return TRIES[count]
        generic = replace(best.inputs, kind="generic")
        return None if best.result == FAILED or self.tries[-1].inputs == generic else generic


# ------------------------------------------------------------------------------------------------------- one launch
class Memory:
    """The buffers of a launch: one piece of memory, with room before and behind where each pointer points.

    Attributes:
        whole: all of it, in bytes.
        before: what was in it at first.
        tensors: by argument, from where it points to on.
    """

    ROOM = 32 << 20  # bytes of a buffer: a tensor of `STRIDES` behind its first quarter

    def __init__(self, pointers: Sequence[Argument], inputs: Inputs, device: str) -> None:
        """Draw floats of 1/64 to 1/4, whose logarithms and roots are numbers, and integers of 0 and 1."""
        self.whole = torch.empty(len(pointers) * self.ROOM, dtype=torch.uint8, device=device)
        generator = torch.Generator(device).manual_seed(SEED)
        self.tensors: dict[str, torch.Tensor] = {}
        for number, row in enumerate(pointers):
            dtype: torch.dtype = getattr(torch, POINTER_TYPES[row.type.removeprefix("*")])
            room = self.whole[number * self.ROOM : (number + 1) * self.ROOM].view(dtype)
            if dtype.is_floating_point:
                drawn = torch.rand(room.numel(), generator=generator, device=device) * (15 / 64) + 1 / 64
            else:
                drawn = torch.randint(0, 2, (room.numel(),), generator=generator, device=device)
            room.copy_(drawn)
            begin = room.numel() // 4 + (inputs.kind == "generic")
            self.tensors[row.name] = room[begin:]
        self.before = self.whole.clone()

    def holds(self, content: torch.Tensor) -> bool:
        """Whether it is, bit for bit, what `content` is."""
        return torch.equal(self.whole.view(torch.int64), content.view(torch.int64))

    def differing(self, content: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """By argument whose memory is not as in `content`: its bytes, and which of them differ."""
        for number, name in enumerate(self.tensors):
            part = slice(number * self.ROOM, (number + 1) * self.ROOM)
            differ = self.whole[part] != content[part]
            if differ.any():
                yield name, self.whole[part], differ

    def changes(self) -> tuple[int, float]:
        """How many bytes are not as at first, and the share of finite ones among changed floats."""
        changed = floats = finite = 0
        for name, now, differ in self.differing(self.before):
            dtype = self.tensors[name].dtype
            changed += int(differ.sum())
            if dtype.is_floating_point:
                values = now.view(dtype)[differ.view(-1, dtype.itemsize).any(1)].float()
                floats, finite = floats + values.numel(), finite + int(values.isfinite().sum())
        return changed, finite / floats if floats else 1.0


def first_fit(kernels: Sequence[OwnKernel], values: dict[str, int]) -> OwnKernel:
    """The first kernel with the types and constexprs of the very first one whose guards hold for these values."""

    def said(kernel: OwnKernel) -> list[Argument]:
        return [row for row in kernel.arguments if row.type != AUTOTUNE]

    for kernel in kernels:
        guards = [guard for guard in kernel.guards if guard.value in values]
        if said(kernel) == said(kernels[0]) and all(_holds(guard, values[guard.value]) for guard in guards):
            return kernel
    raise ValueError(f"no kernel of {kernels[0].function} fits")


def _holds(guard: Guard, value: int) -> bool:
    return {
        "equals": value == guard.operand,
        "multiple_of": value % guard.operand == 0,
        "below": value < guard.operand,
        "at_least": value >= guard.operand,
    }[guard.relation]


def parameters(kernel: OwnKernel, given: dict[str, Any], scratch: int) -> list[Any]:
    """The values of Triton's parameters, in order: arguments that are not compiled in, then the scratch pointers.

    Raises:
        ValueError: the kernel has others, or its launch needs more than parameters.
    """
    values = []
    for row in kernel.arguments:
        value = given.get(row.name)
        if row.type in (CONSTEXPR, AUTOTUNE, NO_POINTER):
            continue
        if row.type in NUMBERS:
            values.append(NUMBERS[row.type](value))
        elif isinstance(value, torch.Tensor):
            values.append(ctypes.c_uint64(value.data_ptr()))
        else:
            raise ValueError(f"{row.name} is a {row.type}, which this script does not give to the driver")
    values += [ctypes.c_uint64(scratch), ctypes.c_uint64(0)]
    if kernel.attributes:
        raise ValueError(f"it asks for launch attributes: {', '.join(row.name for row in kernel.attributes)}")
    if (sizes := [row.bytes for row in kernel.parameters]) != [ctypes.sizeof(value) for value in values]:
        raise ValueError(f"its parameters are of {sizes} bytes")
    return values


def integers(kernel: OwnKernel, inputs: Inputs) -> dict[str, int]:
    """The integer arguments by name. Names tell which are the strides of one tensor."""
    found = {row.name: inputs.number for row in kernel.arguments if row.type in INTEGER_TYPES}
    known = {row.name.removesuffix("_ptr") for row in kernel.arguments}  # a stride_a beside an a_ptr is all that it has
    tensors: dict[str, list[str]] = {}
    for name in found:
        axis = AXIS.search(name)
        if axis is not None and axis[1] not in known and ("stride" in name or name.startswith("s_")):
            tensors.setdefault(name[: axis.start()], []).append(name)
    for names in tensors.values():
        if inputs.apart and 1 < len(names) <= len(STRIDES):
            found |= dict(zip(reversed(names), STRIDES, strict=False))
    return found


def given_for(kernel: OwnKernel, inputs: Inputs, memory: Memory) -> dict[str, Any]:
    """All arguments of a call by name, as a user would write it."""
    given: dict[str, Any] = {**integers(kernel, inputs)}
    for row in kernel.arguments:
        if row.type == CONSTEXPR:
            given[row.name] = json.loads(row.value)
        elif row.name in memory.tensors:
            given[row.name] = memory.tensors[row.name]
        elif row.type in FLOAT_TYPES:
            given[row.name] = FLOAT
        elif row.type == NO_POINTER:
            given[row.name] = None
    return given


_load = cache(aotmm.load)


class Launches:
    """One function with its inputs, and its launches by either way."""

    def __init__(self, packs: Path, name: str, inputs: Inputs, device: str) -> None:
        self.function, self.grid = _load(packs)[name], inputs.grid
        pack = self.function.pack_for(0)
        kernels = [kernel for kernel in pack.manifest.own if kernel.function == name]
        pointers = [row for row in kernels[0].arguments if row.type in POINTER_CODES and row.type != NO_POINTER]
        self.memory = Memory(pointers, inputs, device)
        self.given = given_for(kernels[0], inputs, self.memory)
        addresses = {key: tensor.data_ptr() for key, tensor in self.memory.tensors.items()}
        self.kernel = first_fit(kernels, addresses | integers(kernels[0], inputs))
        self.image = pack.code(self.kernel.image)
        scratch_bytes = math.prod(self.grid) * self.kernel.global_scratch_bytes
        self.scratch = torch.zeros(scratch_bytes, dtype=torch.uint8, device=device)

    def by_driver(self) -> Memory:
        """The memory after the driver's launch. Raises CallError, ValueError."""
        values = parameters(self.kernel, self.given, self.scratch.data_ptr() if self.scratch.numel() else 0)
        self.memory.whole.copy_(self.memory.before)
        function = driver.load(self.kernel, self.image)
        function.launch_values(self.grid, values)
        driver.synchronize()
        function.unload()
        return self.memory

    def by_aotmm(self) -> Memory:
        """The memory after aotmm's launch. Raises AotmmError, CallError."""
        self.memory.whole.copy_(self.memory.before)
        self.function[self.grid](**self.given)
        driver.synchronize()
        return self.memory


def tried(packs: Path, name: str, inputs: Inputs, device: str = "cuda") -> Result:
    """Launches a function by both ways, and compares what they leave in memory."""
    launches = Launches(packs, name, inputs, device)
    memory, kernel = launches.memory, launches.kernel.name
    try:
        first = launches.by_driver().whole.clone()
        changed, finite = memory.changes()
        same = launches.by_driver().holds(first)
    except (driver.CallError, ValueError) as error:
        return Result(inputs, kernel, FAILED, str(error))
    if not same:
        return Result(inputs, kernel, VARYING, "the driver's two launches differ", changed, finite)
    try:
        same = launches.by_aotmm().holds(first)
    except (AotmmError, driver.CallError, TypeError, ValueError) as error:
        return Result(inputs, kernel, DIFFER, f"aotmm: {type(error).__name__}: {error}", changed, finite)
    if not same:
        wrong = ", ".join(name for name, *_ in memory.differing(first))
        if any(not launches.by_driver().holds(first) for _ in range(REPEATS)):
            return Result(inputs, kernel, VARYING, "some of the driver's launches differ", changed, finite)
        return Result(inputs, kernel, DIFFER, f"other bytes in {wrong}", changed, finite)
    return Result(inputs, kernel, EQUAL if changed else NOTHING, "", changed, finite)


# ------------------------------------------------------------------------------------------------ in several processes
def worker() -> Worker:
    """What does one try after another, in a process of the pool."""
    torch.zeros(1, device="cuda")  # makes the context
    return attempt


def attempt(task: tuple[Path, str, Inputs], heartbeat: Heartbeat, device: str = "cuda") -> Result:
    """One try. Raises CallError if the context is of no use any more; the last heartbeat has the result anyway."""
    packs, name, inputs = task
    heartbeat(Result(inputs, name, FAILED))  # unless there will be another
    found = tried(packs, name, inputs, device)
    heartbeat(found)
    driver.synchronize()
    return found


# ------------------------------------------------------------------------------------------------------ all of them
def functions_in(folder: Path) -> list[tuple[Path, str]]:
    """All functions of the packs in a folder, or in the folders below it, each with the folder to load."""
    try:
        library = aotmm.load(folder)
    except ArtifactError:
        below = sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
        return [row for each in below for row in functions_in(each)]
    return [(folder, name) for name in dict.fromkeys(name for pack in library.packs for name in pack.head.functions)]


def compare(
    wanted: Sequence[tuple[Path, str]],
    start: WorkerFactory = worker,
    jobs: int = JOBS,
    limit_s: float = DAY_S,
    tell: Callable[[Sequence[Found]], object] = len,
) -> list[Found]:
    """What comes of each function, in order; `tell` gets all of it after each that is finished.

    What is left after `limit_s` seconds is not tried. Whatever fails is tried again after all others.
    """
    end = time.monotonic() + limit_s
    all_found = [Found(*each) for each in wanted]
    waiting: dict[Future[Result], tuple[Found, Inputs]] = {}
    with local([start] * jobs, Timeouts(START_S, LIMIT_S)) as pool:

        def go_on(found: Found) -> None:
            inputs = found.following()
            if inputs is None:
                tell(all_found)
            else:
                waiting[pool.submit((found.packs, found.name, inputs))] = found, inputs

        for found in all_found:
            go_on(found)
        while waiting and (left := end - time.monotonic()) > 0:
            for future in wait(waiting, left, FIRST_COMPLETED).done:
                found, inputs = waiting.pop(future)
                try:
                    result = future.result()
                except WorkerDiedError as died:
                    result = died.last or Result(inputs, found.name, FAILED)
                    result = replace(result, reason=result.reason or died.why)
                found.tries.append(result)
                go_on(found)
    return all_found


def summary(all_found: Sequence[Found]) -> str:
    """How many functions came out how, by kind of pointers, and what is to be said of those that are not equal."""
    done = sum(found.following() is None for found in all_found)
    lines = [f"{done} of {len(all_found)} functions are done"]
    for kind in KINDS:
        rows = [(found.title, found.best(kind)) for found in all_found]
        counts = Counter(best.result for _, best in rows)
        lines.append(f"{kind}: " + ", ".join(f"{counts[result]} {result}" for result in BEST))
        rows.sort(key=lambda row: BEST.index(row[1].result))
        lines += [f"  {title}: {best.result} {best.reason}".rstrip() for title, best in rows if best.result != EQUAL]
    return "\n".join(lines)


def save(path: Path, all_found: Sequence[Found]) -> None:
    """Write it all in JSON, whole or not at all."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    rows = [
        {"function": found.title, "done": found.following() is None}
        | {kind: found.best(kind).result for kind in KINDS}
        | {"tries": [asdict(row) for row in found.tries]}
        for found in all_found
    ]
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps({"device": device, "torch": torch.__version__, "functions": rows}, indent=1))
    new.replace(path)


def main(start: WorkerFactory = worker) -> None:
    """Compare the functions in a folder; the exit status is 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="packs, or a folder of folders with packs")
    parser.add_argument("--out", type=Path, required=True, help="file for the results in JSON, also of a run cut short")
    parser.add_argument("--jobs", type=int, default=JOBS, help="processes at a time, %(default)s by default")
    parser.add_argument("--limit", type=float, default=DAY_S, help="seconds after which what is left is not tried")
    options = parser.parse_args()
    wanted = functions_in(options.folder.resolve())
    if not wanted:
        parser.error(f"there are no packs in {options.folder}")
    all_found = compare(wanted, start, options.jobs, options.limit, partial(save, options.out))
    save(options.out, all_found)
    print(summary(all_found))  # noqa: T201 - a command
    sys.exit(any(found.best(kind).result == DIFFER for found in all_found for kind in KINDS))


if __name__ == "__main__":
    from tests.gpu import corpus  # as the pool's processes import it

    corpus.main()
