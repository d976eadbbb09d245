"""Functions in packs, launched by aotmm and by the bare driver: both have to leave the same bits in memory.

`python -m tests.gpu.corpus FOLDER --out RESULT.json` does so with every function of the packs in FOLDER, as `aotmm
build --kernel` or `python -m tests.build.corpus --keep` made them. It knows no kernel: inputs are drawn by a fixed
seed, and integers are such that most kernels stay within memory. Those that do not, end the process that launches them.
So each function has a process of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import aotmm
from aotmm.errors import AotmmError, ArtifactError
from aotmm.pack.schema import Argument, Guard, OwnKernel
from aotmm.problem import AUTOTUNE, CONSTEXPR, FLOAT_TYPES, INTEGER_TYPES, NO_POINTER, POINTER_CODES, POINTER_TYPES
from tests.gpu import driver

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "tests.gpu.corpus")
SEED = 20261126
LIMIT_S = 20  # of a try
START_S = 120  # until torch is there in all processes, which start at once
REPEATS = 20  # of a kernel whose results differ

EQUAL, DIFFER = "equal", "differ"
VARYING, NOTHING, FAILED = "not deterministic", "wrote nothing", "does not run"
BEST = (DIFFER, EQUAL, VARYING, NOTHING, FAILED)  # what counts of several tries: the first of these
ENOUGH = (DIFFER, EQUAL)

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
        kind: "special" for pointers that are multiples of 16 bytes, "generic" for such that are not.
        number: of each integer argument, but for `STRIDES` if they are to be `apart`.
        grid: blocks along x, y and z. Nothing says which of them a kernel asks for. Those that it does not tell apart
            do the same, which goes well unless they write what they read.
    """

    kind: str
    number: int
    grid: tuple[int, int, int]
    apart: bool


TRIES = tuple(
    Inputs(kind, number, grid, apart)
    for kind in ("special", "generic")
    for number, grid, apart in (
        (64, (2, 2, 2), True),
        (64, (2, 1, 1), True),
        (64, (1, 1, 1), True),
        (16, (1, 1, 1), False),
        (128, (2, 1, 1), False),
    )
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
    """What came of the tries of a function with pointers of one kind."""

    function: str
    kind: str
    tries: list[Result] = field(default_factory=list)

    @property
    def best(self) -> Result:
        """The try that counts."""
        return min(self.tries, key=lambda row: BEST.index(row.result))


# ------------------------------------------------------------------------------------------------------- one launch
class Memory:
    """The buffers of a launch: one piece of memory, with room before and behind where each pointer points.

    Attributes:
        whole: all of it, in bytes.
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
        self.before = self.now()

    def now(self) -> torch.Tensor:
        """A copy of its content, outside the GPU, where no stray store can reach it."""
        return self.whole.to("cpu", copy=True)

    def restore(self) -> None:
        """Makes it as it was at first."""
        self.whole.copy_(self.before)

    def parts(self, content: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """By argument, its part of `content` and of what was there at first, both as bytes."""
        for number, name in enumerate(self.tensors):
            part = slice(number * self.ROOM, (number + 1) * self.ROOM)
            yield name, content[part], self.before[part]

    def changes(self, content: torch.Tensor) -> tuple[int, float]:
        """How many bytes of `content` are not as at first, and the share of finite ones among changed floats."""
        changed = floats = finite = 0
        for name, now, before in self.parts(content):
            dtype = self.tensors[name].dtype
            if torch.equal(now, before):
                continue
            differ = now != before
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


class Launches:
    """One function with its inputs, and its launches by either way."""

    def __init__(self, packs: Path, name: str, inputs: Inputs, device: str) -> None:
        self.function, self.grid = aotmm.load(packs)[name], inputs.grid
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

    def by_driver(self) -> torch.Tensor:
        """What the driver's launch leaves in memory. Raises CallError, ValueError."""
        values = parameters(self.kernel, self.given, self.scratch.data_ptr() if self.scratch.numel() else 0)
        self.memory.restore()
        function = driver.load(self.kernel, self.image)
        function.launch_values(self.grid, values)
        driver.synchronize()
        function.unload()
        return self.memory.now()

    def by_aotmm(self) -> torch.Tensor:
        """What aotmm's launch leaves in memory. Raises AotmmError, CallError."""
        self.memory.restore()
        self.function[self.grid](**self.given)
        driver.synchronize()
        return self.memory.now()


def tried(packs: Path, name: str, inputs: Inputs, device: str = "cuda") -> Result:
    """Launches a function by both ways, and compares what they leave in memory."""
    launches = Launches(packs, name, inputs, device)
    memory, kernel = launches.memory, launches.kernel.name
    try:
        first, second = launches.by_driver(), launches.by_driver()
    except (driver.CallError, ValueError) as error:
        return Result(inputs, kernel, FAILED, str(error))
    changed, finite = memory.changes(first)
    if not torch.equal(first, second):
        return Result(inputs, kernel, VARYING, "the driver's two launches differ", changed, finite)
    try:
        ours = launches.by_aotmm()
    except (AotmmError, driver.CallError, TypeError, ValueError) as error:
        return Result(inputs, kernel, DIFFER, f"aotmm: {type(error).__name__}: {error}", changed, finite)
    if not torch.equal(ours, first):
        if any(not torch.equal(first, launches.by_driver()) for _ in range(REPEATS)):
            return Result(inputs, kernel, VARYING, "some of the driver's launches differ", changed, finite)
        pairs = zip(memory.parts(ours), memory.parts(first), strict=True)
        wrong = [name for (name, now, _), (_, was, _) in pairs if not torch.equal(now, was)]
        return Result(inputs, kernel, DIFFER, f"other bytes in {', '.join(wrong)}", changed, finite)
    return Result(inputs, kernel, EQUAL if changed else NOTHING, "", changed, finite)


# -------------------------------------------------------------------------------------------------- in a process
def work(packs: Path, name: str, wanted: Sequence[int], device: str = "cuda") -> None:
    """Print before and after each try of `TRIES` what it is, in JSON; end after one that does not run."""
    settled: set[str] = set()
    for number in wanted:
        inputs = TRIES[number]
        if inputs.kind in settled:
            continue
        _say({"begin": number})
        signal.alarm(LIMIT_S)  # ends a process whose kernel never ends
        found = tried(packs, name, inputs, device)
        signal.alarm(0)
        _say({"end": number, "result": asdict(found)})
        if found.result in (FAILED, DIFFER):
            break  # the context may be of no use any more
        settled |= {inputs.kind} if found.result in ENOUGH else set()
    os._exit(0)  # without tidying up what may be broken


def _say(words: dict[str, Any]) -> None:
    print(json.dumps(words), flush=True)  # noqa: T201 - a command


def found_of(packs: Path, name: str, command: Sequence[str] = COMMAND) -> list[Found]:
    """What comes of a function, by kind of pointers, in as many processes as it needs."""
    found = {kind: Found(f"{packs.name}/{name}", kind) for kind in dict.fromkeys(row.kind for row in TRIES)}
    left = list(range(len(TRIES)))
    while left:
        lines, end = _lines([*command, str(packs), "--function", name, "--tries", json.dumps(left)])
        results = [_result(line["result"]) for line in lines if "end" in line]
        if not lines:
            raise RuntimeError(f"{packs}: {name}: {end}")
        if "end" not in lines[-1]:
            results.append(Result(TRIES[lines[-1]["begin"]], name, FAILED, end))
        for row in results:
            found[row.inputs.kind].tries.append(row)
        last = max(TRIES.index(row.inputs) for row in results)
        settled = [kind for kind, row in found.items() if row.tries and row.best.result in ENOUGH]
        left = [number for number in left if number > last and TRIES[number].kind not in settled]
    return list(found.values())


def _lines(command: Sequence[str]) -> tuple[list[dict[str, Any]], str]:
    """What a process printed, and how it ended."""
    settings = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=settings, capture_output=True, check=False, timeout=START_S + LIMIT_S * len(TRIES)
        )
    except subprocess.TimeoutExpired as late:
        text, end = late.stdout or b"", "its process did not end"
    else:
        words = done.stderr.decode(errors="replace").strip()[-300:]
        text, end = done.stdout, f"its process ended with status {done.returncode} {words}"
        if done.returncode == -signal.SIGALRM:
            end = f"it does not end within {LIMIT_S} s"
    return [json.loads(line) for line in text.decode().splitlines() if line.startswith("{")], end


def _result(row: dict[str, Any]) -> Result:
    inputs = Inputs(**row["inputs"] | {"grid": tuple(row["inputs"]["grid"])})
    return Result(**row | {"inputs": inputs})


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
    wanted: Sequence[tuple[Path, str]], command: Sequence[str] = COMMAND, jobs: int | None = None
) -> list[Found]:
    """What comes of each function, in order."""
    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        return [row for rows in pool.map(lambda each: found_of(each[0], each[1], command), wanted) for row in rows]


def summary(found: Sequence[Found]) -> str:
    """How many functions came out how, by kind of pointers, and what is to be said of those that are not equal."""
    lines = []
    for kind in dict.fromkeys(row.kind for row in found):
        rows = [row for row in found if row.kind == kind]
        counts = Counter(row.best.result for row in rows)
        words = ", ".join(f"{counts[result]} {result}" for result in (EQUAL, *BEST[:1], *BEST[2:]))
        lines.append(f"{kind}: of {len(rows)} functions {words}")
        lines += [
            f"  {row.function}: {row.best.result} {row.best.reason}".rstrip()
            for result in BEST
            for row in rows
            if row.best.result == result != EQUAL
        ]
    return "\n".join(lines)


def main(command: Sequence[str] = COMMAND) -> None:
    """Compare the functions in a folder; the exit status is 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="packs, or a folder of folders with packs")
    parser.add_argument("--out", type=Path, help="file for the results in JSON")
    parser.add_argument("--jobs", type=int, help="processes at a time; as many as there are processors by default")
    parser.add_argument("--function", help=argparse.SUPPRESS)
    parser.add_argument("--tries", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.function is not None:
        work(options.folder, options.function, options.tries)
        return
    wanted = functions_in(options.folder.resolve())
    if not wanted:
        parser.error(f"there are no packs in {options.folder}")
    found = compare(wanted, command, options.jobs)
    if options.out is not None:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        rows = [asdict(row) | {"result": row.best.result} for row in found]
        options.out.write_text(json.dumps({"device": device, "torch": torch.__version__, "functions": rows}, indent=1))
    print(summary(found))  # noqa: T201 - a command
    sys.exit(any(row.best.result == DIFFER for row in found))


if __name__ == "__main__":
    main()
