"""The products to tune and measure: shapes by sweep (`shapes.json`), and the tenth of all that is never tuned on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from aotmm.errors import SpecError
from aotmm.pack.schema import kind_of
from aotmm.pack.table import Sample, ShapeTimes
from aotmm.problem import DTYPES, LAYOUTS

FILE = Path(__file__).parent / "shapes.json"
_PARTS = 10  # of all products; one of them is held out


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """A (M, K) @ B (K, N); "n" is row-major, "t" column-major, A's before B's. `name` is its origin."""

    M: int
    N: int
    K: int
    layout: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.M}x{self.N}x{self.K} {self.layout}"

    @property
    def macs(self) -> int:
        """Return the multiply-adds of the product."""
        return self.M * self.N * self.K


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of a grouped product, two or more.

    Attributes:
        dimension: what is in groups: "M", rows of A, each group with a B of its own, or "K", each with a C of its own.
        routing: how the sizes came about. sizes: of the groups; their sum is the size of the dimension.
    """

    dimension: str
    routing: str
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{'rows' if self.dimension == 'M' else 'K'} in {len(self.sizes)} groups ({self.routing})"


@dataclass(frozen=True, slots=True)
class Case:
    """One product: contiguous A and B in the layout of `shape`, C row-major.

    Attributes:
        dtype: of A and B (`problem.DTYPES`).
        activation: that after a bias vector of N, which may be "none"; None for the plain product.
        fast_accum: fp8 sums in the tensor cores' own precision.
        offset_a, offset_b: bytes from a 128-byte line of memory to the first element of A and of B.
        batch: number of equal products, one after the other in memory.
        groups: of a grouped product, which is no batch; None of any other.
        block_scaled: fp8 with block scales, those of A contiguous along M, those of B along K.
    """

    shape: Shape
    dtype: str
    activation: str | None = None
    fast_accum: bool = False
    offset_a: int = 0
    offset_b: int = 0
    batch: int = 1
    groups: Groups | None = None
    block_scaled: bool = False

    def __str__(self) -> str:
        bias = ", bias" + f" and {self.activation}" * (self.activation != "none") if self.activation else ""
        offsets = f", A +{self.offset_a} B +{self.offset_b} bytes" if self.offset_a or self.offset_b else ""
        products = f"{self.batch} of " if self.batch > 1 else ""
        groups = f", {self.groups}" if self.groups else ""
        sums = ", fast sums" * self.fast_accum + ", block scales" * self.block_scaled
        return f"{products}{self.shape} {self.dtype}{bias}{sums}{offsets}{groups}"

    @property
    def element_bytes(self) -> int:
        """Return the bytes of an element of A and B."""
        return DTYPES[self.dtype].bytes

    @property
    def kind(self) -> str:
        """Return its kind, one of `schema.KINDS`."""
        return kind_of(relaxed=self.dtype == "tf32" or self.fast_accum, block_scaled=self.block_scaled)

    @property
    def output(self) -> str:
        """Return the type of C: bf16 for fp8 operands, otherwise what they give by default."""
        return "bf16" if self.dtype.startswith("fp8") else DTYPES[self.dtype].output

    @property
    def matrices(self) -> tuple[int, int, int]:
        """Return how many matrices A, B and C are."""
        if self.groups is None:
            return self.batch, self.batch, self.batch
        count = len(self.groups.sizes)
        return (1, count, 1) if self.groups.dimension == "M" else (1, 1, count)

    @property
    def bytes(self) -> int:
        """Return the least traffic: A and B read, but for those of empty groups, and C written."""
        M, N, K = self.shape.M, self.shape.N, self.shape.K
        of_a, of_b, of_c = self.matrices
        if self.groups and self.groups.dimension == "M":
            of_b -= self.groups.sizes.count(0)
        return (of_a * M * K + of_b * K * N) * self.element_bytes + of_c * M * N * DTYPES[self.output].bytes

    @property
    def macs(self) -> int:
        """Return the multiply-adds of all products."""
        return self.batch * self.shape.macs

    def timed(self, samples: Iterable[Sample], *, drawn: bool, held_out: bool = False) -> ShapeTimes:
        """Return the product with its times, as tables have them."""
        return ShapeTimes(
            element_bytes=self.element_bytes,
            layout=self.shape.layout,
            kind=self.kind,
            M=self.shape.M,
            N=self.shape.N,
            K=self.shape.K,
            offset_a=self.offset_a,
            offset_b=self.offset_b,
            batch=self.batch,
            drawn=drawn,
            held_out=held_out,
            times=tuple(samples),
        )


def case_of(body: dict[str, Any]) -> Case:
    """Return the case of which `body` is the `asdict`, as in JSON. Raises TypeError or KeyError if it is none."""
    groups = body.get("groups")
    if groups is not None:
        groups = Groups(**(groups | {"sizes": tuple(groups["sizes"])}))
    return Case(**(body | {"shape": Shape(**body["shape"]), "groups": groups}))


@dataclass(frozen=True, slots=True)
class Sweep:
    """Shapes of one kind, in the order in which they are measured."""

    name: str
    about: str
    shapes: tuple[Shape, ...]


@dataclass(frozen=True)
class Shapes:
    """The content of a file of shapes."""

    held_out_seed: int
    sweeps: tuple[Sweep, ...]

    def sweep(self, name: str) -> Sweep:
        """Return the sweep called `name`. Raises SpecError if there is none."""
        for sweep in self.sweeps:
            if sweep.name == name:
                return sweep
        raise SpecError(f"unknown sweep {name!r}; known: {', '.join(sweep.name for sweep in self.sweeps)}")

    def held_out(self, case: Case) -> bool:
        """Return whether no choice may know the times of `case`: it is of the tenth that tests choices.

        A hash of sizes, layout and operands' offsets decides, whatever the types. Products of the sweeps never are.
        """
        offsets = case.offset_a, case.offset_b
        text = f"{self.held_out_seed} {case.shape}{f' {offsets}' if any(offsets) else ''}"
        text += f" {case.batch}" if case.batch > 1 else ""
        digest = hashlib.sha256(text.encode()).digest()
        return int.from_bytes(digest[:8], "big") % _PARTS == 0 and not self.swept(case)

    def swept(self, case: Case) -> bool:
        """Return whether a sweep has the sizes and layout of `case`: one product, of operands that begin at a line."""
        return not (case.offset_a or case.offset_b) and case.batch == 1 and replace(case.shape, name="") in self._swept

    @cached_property
    def _swept(self) -> frozenset[Shape]:
        return frozenset(replace(shape, name="") for sweep in self.sweeps for shape in sweep.shapes)


def read(path: Path = FILE) -> Shapes:
    """Return the sweeps in the file `path`, by default ours.

    Raises:
        SpecError: the file cannot be read, or an entry is not [M, N, K, layout] or [M, N, K, layout, name].
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        return Shapes(
            held_out_seed=int(body["held_out_seed"]),
            sweeps=tuple(
                Sweep(name, str(sweep["about"]), tuple(_shape(entry) for entry in sweep["shapes"]))
                for name, sweep in body["sweeps"].items()
            ),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SpecError(
            f"{path} is no file of shapes: {type(error).__name__} {error}; aotmm/timing/shapes.json is one"
        ) from error


def _shape(entry: list[Any]) -> Shape:
    M, N, K, layout, *name = entry
    if layout not in LAYOUTS or len(name) > 1 or not all(isinstance(size, int) and size > 0 for size in (M, N, K)):
        raise ValueError(f"found {entry}, wanted [M, N, K, layout] or [M, N, K, layout, name]")
    return Shape(M, N, K, layout, *name)
