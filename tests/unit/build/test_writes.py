"""Which pointers a kernel writes, read from texts of Triton's compiler; in doubt all of them."""

from __future__ import annotations

import pytest

from aotmm.build.own.writes import written

POINTERS = "%a: !tt.ptr<f32> loc(#a), %n: i32, %b: !tt.ptr<f32>, %c: !tt.ptr<f16>"
HEAD = f"module {{\n  tt.func public @f({POINTERS}) attributes {{x = 1}} {{"
TAIL = "    tt.return loc(#loc)\n  }\n}"


def found(*lines: str) -> tuple[str, ...]:
    """The written ones of the pointers A, B and C of a kernel with these lines."""
    return written("\n".join([HEAD, *lines, TAIL]), ("A", "B", "C"))


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        ((), ""),
        (("%0 = tt.load %a : !tt.ptr<f32>", "tt.store %b, %0 : !tt.ptr<f32>"), "B"),
        (("%0 = tt.addptr %c, %n : !tt.ptr<f16>, i32", "%1 = tt.atomic_rmw fadd, %0, %n : f32"), "C"),
        (("%0 = arith.select %n, %a, %b : !tt.ptr<f32>", "tt.store %0, %n : !tt.ptr<f32>"), "AB"),
        # names of an inner region are its own
        (("scf.if %n {", "%0 = tt.splat %a : x", "}", "%0 = tt.splat %b : x", "tt.store %0, %n : x"), "B"),
        # a loop hands pointers on, from one turn to the next
        (
            (
                "%0:2 = scf.for %i = %n to %n step %n iter_args(%p = %a, %q = %b) -> (x, x)  : i32 {",
                "tt.store %p, %n : x",
                "scf.yield %q, %p : x, x",
                "}",
            ),
            "AB",
        ),
        (("%0 = scf.if %n -> (x) {", "scf.yield %a : x", "} else {", "scf.yield %c : x", "}", "tt.store %0, %n"), "AC"),
        (("%0 = tt.make_tensor_descriptor %b, [%n], [%n] : x", "tt.descriptor_store %0[%n], %n : x"), "B"),
        (("%0 = tt.descriptor_load %b[%n] : x", "tt.store %c, %0 : x"), "C"),
        # doubt: an unknown operation, a call, a pointer out of memory, a jump with a pointer
        (("%0 = tt.extern_elementwise %a {x = 1} : x",), "A"),
        (("tt.call @g(%a, %b) : x",), "AB"),
        (("%0 = tt.load %a : x", "%1 = tt.int_to_ptr %0 : x", "tt.store %1, %n : !tt.ptr<f16>"), "ABC"),
        (
            (
                "%0 = tt.load %a : x",
                "%1 = tt.int_to_ptr %0 : i64 -> !tt.ptr<f16>",
                "%2 = tt.make_tensor_descriptor %1, [%n], [%n] : !tt.ptr<f16>, !tt.tensordesc<16xf16>",
                "%3 = arith.addi %n, %n : i32",
                "tt.descriptor_store %2[%n], %3 : !tt.tensordesc<16xf16>, tensor<16xf16>",
            ),
            "ABC",
        ),
        (("cf.br ^bb1(%a : x)",), "ABC"),
    ],
)
def test_written(lines: tuple[str, ...], names: str) -> None:
    """Stores and atomics write what their pointer comes from; loads do not, and what they give is no pointer."""
    assert found(*lines) == tuple(names)


def test_other_parameters() -> None:
    """Of a kernel whose parameters are not those of the function, all are counted as written."""
    assert written(f"{HEAD}\n{TAIL}", ("A", "B")) == ("A", "B")
    assert written("", ("A",)) == ("A",)
