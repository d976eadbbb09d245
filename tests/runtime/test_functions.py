"""Functions of a user's own, called on CPU tensors over a fake driver: what C reads of a call, and what Python does."""

from __future__ import annotations

import pytest

from tests.runtime.pretend import FUNCTIONS, run_functions

pytestmark = pytest.mark.skipif(not FUNCTIONS.is_dir(), reason="no packs of examples/own; build them: make own")

CALLS = """
import struct
from aotmm.runtime.functions import Function
add, softmax, layer_norm = (lib[f"{name}_kernel"] for name in ("add", "softmax", "layer_norm"))
x, y, out = (torch.randn(4096) for _ in range(3))
half, weight = torch.randn(16, 256).half(), torch.randn(256)
def last():
    one = driver.launches[-1]
    return one.grid, one.block, one.shared, one.params, one.stream, one.device, one.image
in_python = Function._launch
"""


def test_calls_without_python() -> None:
    """Every way to write a plain call gives the launch that Python gives, and no step of Python runs."""
    run_functions(
        CALLS
        + """
add(x, y, out, 0)  # binds the device
softmax(out, x, 16, 16, 0, 256, BLOCK=256)
layer_norm[(0,)](half, half, weight, weight, 256, 256, 1e-5)
assert driver.launches == []
plain = [
    (add, (4,), (x, y, out, 4096), {}),
    (add, (4, 1, 1), (x, y), {"n": 4096, "out_ptr": out}),
    (add, 4, (x, y, out[1:], 4095), {"BLOCK": 1024}),
    (add, None, (x, torch.nn.Parameter(y), out), {"n": 100}),
    (add, lambda meta: (meta["n"] // meta["BLOCK"] + meta["x_ptr"].dim(),), (x, y, out, 4096), {}),
    (softmax, (3, 2), (out, x, 16, 16, 16, 256), {"BLOCK": 256}),
    (softmax, (3,), (half, half, 16, 16, 16, 256), {"BLOCK": 1024, "num_warps": 4}),
    (softmax, None, (half, half, 16, 16, True, 256), {"BLOCK": 1024}),
    (layer_norm, (16,), (half, half, weight, weight, 256, 256, 1e-5), {}),
    (layer_norm, (16,), (half, half, weight, None, 256, 256, 1), {}),
    (layer_norm, lambda meta: (meta["BLOCK"],), (half, half, weight, weight, 256, 256, 1e-5), {"num_warps": 1}),
    (layer_norm, (16,), (half, half, weight, weight, 256, 256, 1e-5), {"BLOCK": 128, "num_warps": 1}),
]
seen = []
for function, grid, arguments, named in plain:
    in_python(function, grid, *arguments, **named)
    seen.append(last())
driver.launches.clear()
def forbidden(*_arguments, **_named):
    raise AssertionError("a step of Python")
for function in (add, softmax, layer_norm):
    function._served.clear()
    function.__class__._serve = forbidden
for (function, grid, arguments, named), want in zip(plain, seen, strict=True):
    assert function[grid](*arguments, **named) is None
    assert last() == want, (function, grid)
    if grid is None:
        function(*arguments, **named)
        assert last() == want
assert driver.misuse == []
"""
    )


def test_calls_of_any_kind() -> None:
    """Of 5,000 drawn calls, right and wrong ones, each gives the launch or the error that it gives in Python."""
    run_functions(
        CALLS
        + """
import numpy, random
rng = random.Random(20)
grids = [None, 3, (2,), (2, 3, 4), [5], (0,), (2**31,), (1, 70000), (-1,), (), (1.5,), "x", True, numpy.int64(2),
         (2**70,), lambda meta: (meta["num_warps"],), lambda meta: len(meta), lambda meta: [2, 3]]
pointers = [x, x[1:], half, half.double(), None, weight, torch.nn.Parameter(y), x.to("meta"), x.numpy(), 16, "x",
            torch.empty(0), x.to(torch.complex64), x.to(torch.float8_e5m2), torch.zeros(3, dtype=torch.bool)]
numbers = [0, 1, 16, 256, 1000, 2**31 - 1, 2**31, -1, 2**63, 2**70, -(2**70), True, 1.0, 1e-5, 1e300, float("inf"), "x",
           None, numpy.int32(16), numpy.float32(2)]
names = {"BLOCK": [128, 256, 512, 1024, 1024.0, True, None, "1024"], "num_warps": [1, 4, 8, 4.0], "num_stages": [3],
         "m": [1]}
places = {add: "pppn", softmax: "ppnnnn", layer_norm: "ppppnnn"}
usual = {add: [x, y, out, 4096], softmax: [half, half, 16, 16, 16, 256],
         layer_norm: [half, half, weight, None, 256, 256, 1e-5]}
def outcome(call):
    driver.launches.clear()
    try:
        call()
    except (TypeError, ValueError, KeyError, OverflowError, aotmm.errors.AotmmError) as error:
        assert driver.launches == []
        return type(error), str(error)
    return last() if driver.launches else None
launched = 0
for _ in range(5000):
    function = rng.choice(list(places))
    arguments = list(usual[function])
    for _ in range(rng.choice((0, 0, 1, 1, 2, 5))):
        place = rng.randrange(len(arguments))
        arguments[place] = rng.choice(pointers if places[function][place] == "p" else numbers)
    named = {"BLOCK": 1024} if function is softmax else {}
    for _ in range(rng.choice((0, 0, 1, 2))):
        name = rng.choice(list(names))
        named[name] = rng.choice(names[name])
    for _ in range(rng.choice((0, 0, 0, 1, 3))):
        keys = [row.name for row in function.kernels[0].arguments]
        named[keys[len(arguments) - 1]] = arguments.pop()
    if rng.random() < 0.05:
        arguments.append(rng.choice(numbers))
    grid = rng.choice(grids)
    want = outcome(lambda: in_python(function, grid, *arguments, **named))
    assert outcome(lambda: function[grid](*arguments, **named)) == want, (function, grid, arguments, named)
    launched += len(driver.launches)
assert launched > 300, launched
assert driver.misuse == []
"""
    )


def test_a_grid_is_computed_once() -> None:
    """Whatever it is: Python reads a list, and None stands for the pack's own grid."""
    run_functions(
        CALLS
        + """
add(x, y, out, 0)  # binds the device
for found, blocks in (([2, 3], (2, 3, 1)), ((2,), (2, 1, 1)), (True, (1, 1, 1)), (None, (4, 1, 1))):
    computed = []
    def grid(meta):
        computed.append(meta["n"])
        return found
    add[grid](x, y, out, 4096)
    assert computed == [4096] and last()[0] == blocks, (found, computed, last())
"""
    )


def test_a_number_that_is_too_large() -> None:
    """It is named, with its type."""
    run_functions(
        CALLS
        + """
for eps in (1e39, 10**400):
    try:
        layer_norm[(16,)](half, half, weight, weight, 256, 256, eps)
        raise SystemExit(f"{eps} was taken")
    except ValueError as error:
        assert str(error) == f"layer_norm_kernel: eps={eps} is too large for fp32", error
"""
    )


def test_failures_of_the_driver() -> None:
    """What the driver refuses is a DriverError of that one call, which is not tried again; the next call works."""
    run_functions(
        CALLS
        + """
from aotmm.errors import DriverError
add(x, y, out, 4096)
driver.launches.clear()
driver.fail_next("cuLaunchKernelEx", 2)
try:
    add(x, y, out, 4096)
    raise AssertionError("no error")
except DriverError as error:
    assert "cuLaunchKernelEx failed on CUDA device 0 for kernel add_kernel_special" in str(error)
    assert (error.call, error.code, error.device) == ("cuLaunchKernelEx", 2, 0)
assert driver.launches == []
add(x, y, out, 4096)
assert len(driver.launches) == 1
"""
    )


def test_nothing_is_kept() -> None:
    """Calls, refused ones too, keep no reference to what they were given; a function that nobody holds is freed."""
    run_functions(
        CALLS
        + """
import gc, sys, weakref
def counts():
    return [sys.getrefcount(each) for each in (x, grid, compute, None, settings)]
grid, compute, settings = (4, 1), lambda meta: (meta["n"],), {"n": 4096}
def calls():
    for _ in range(1000):
        add[grid](x, y, out, 4096)
        add[compute](x, y, out, **settings)
        try:
            add[grid](x, y, out, 2**31)
        except aotmm.errors.NoKernelError:
            pass
    driver.launches.clear()
    gc.collect()
calls()
before = counts()
calls()
assert counts() == before, (before, counts())
from aotmm.runtime.functions import Function
pack = next(pack for pack in lib.packs if pack.arch == "sm80")
gc.disable()
other = Function("add_kernel", (pack,), lambda _ordinal: [pack])
other(x, y, out, 4096)
gone = weakref.ref(other)
del other
assert gone() is None, "no cycle keeps it"
"""
    )


def test_what_launches_in_a_grid() -> None:
    """`function[grid]` may be kept, and called from threads and by a tuple; a cycle through it is collected.

    Its memory is used again by the next one, so that several at once, and one that lives on, must not share theirs.
    """
    run_functions(
        CALLS
        + """
import collections, gc, threading, weakref
add(x, y, out, 4096)  # binds the device
one, other = add[(1,)], add[2]
for launch, grid in ((other, 2), (one, 1), (add[(3, 1)], 3), (one, 1)):
    assert launch(x, y, out, 4096) is None
    assert last()[0] == (grid, 1, 1)
type(one).__call__(one, x, y, out_ptr=out, n=4096)
assert last()[0] == (1, 1, 1)
try:
    type(one)()
    raise AssertionError("one of nothing")
except TypeError:
    pass

driver.launches.clear()
def calls(grid):
    kept = add[(grid,)]
    for _ in range(300):
        kept(x, y, out, 4096)
        add[(grid + 100,)](x, y, out, 4096)
threads = [threading.Thread(target=calls, args=(grid,)) for grid in range(1, 5)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
want = {(grid + behind, 1, 1): 300 for grid in range(1, 5) for behind in (0, 100)}
assert collections.Counter(launch.grid for launch in driver.launches) == want

class Mark:
    pass
mark = Mark()
def computed(meta, mark=mark):
    return (cycle[0] is not None,)
cycle = [add[computed]]
computed.cycle, gone = cycle, weakref.ref(mark)
del computed, cycle, mark
gc.collect()
assert gone() is None
"""
    )


def test_guards_are_checked_in_each_launch() -> None:
    """A variant that served the call before does not serve one that breaks its guards, nor the other way round."""
    run_functions(
        CALLS
        + """
from aotmm.errors import NoKernelError
add(x, y, out, 4096)
launch, images = add[(4,)], []
for n, to in ((4096, out), (4095, out), (4096, out), (4096, out[1:]), (16, out), (1, out)):
    launch(x, y, to, n)
    images.append(last()[-1])
special, generic = images[:2]
assert special != generic
assert images == [special, generic, special, generic, special, generic]
launch(x, y, out, 4096)
driver.launches.clear()
try:
    launch(x, y, out, 2**31)
    raise AssertionError("launched")
except NoKernelError as error:
    assert "n=2147483648" in str(error)
assert driver.launches == []
"""
    )


def test_types_behind_pointers() -> None:
    """C reads each type that a kernel may have as its own number, and sends every other one to Python."""
    run_functions(
        CALLS
        + """
import ctypes
from aotmm.problem import POINTER_CODES, POINTER_TYPES
from aotmm.runtime import own
from aotmm.runtime.function_call import Calls, connected
assert connected()
seen, slow = [], []
def record(number, values, _open, grid, device, stream):
    seen.append((number, values[0], values[1], bool(grid), device, stream))
    return 0
table = own._COwn(launch=dict(own._COwn._fields_)["launch"](record))
calls = Calls()
every_type = 2 ** len(POINTER_CODES) - 1
rows = (("x", 0, 0, 1, every_type, True, ()),)
calls._prepare(rows, 1, 2, ({},), lambda *arguments: slow.append(arguments), print)
calls._bind(0, ctypes.addressof(table), 7)
for name, of_torch in POINTER_TYPES.items():
    tensor = torch.empty(4, dtype=getattr(torch, of_torch))[1:]
    calls[None](tensor)
    assert seen.pop() == (7, tensor.data_ptr(), POINTER_CODES.index(f"*{name}"), False, 0, None), name
others = [torch.empty(1, dtype=torch.complex64), torch.empty(1, dtype=torch.complex128), x.to_sparse(),
          x.to("meta"), x.numpy(), 1]
for tensor in others:
    calls[None](tensor)
assert [id(row[2]) for row in slow] == [id(tensor) for tensor in others] and seen == []
for broken in (lambda: calls._prepare(*[None] * 6), lambda: Calls()[1]):
    try:
        broken()
        raise AssertionError("no error")
    except RuntimeError:
        pass
"""
    )


@pytest.mark.parametrize("lacking", ["module", "place"])
def test_in_python(lacking: str) -> None:
    """Calls are Python's where the module of C is missing, and where the place in torch's tensors is not found."""
    run_functions(
        CALLS
        + """
from aotmm.runtime import direct_call, function_call
direct_call.place_of_tensor = lambda: None
assert not function_call.connected()
assert (function_call.Calls is function_call.InPython) == (LACKING == "module")
add[(4,)](x, y, out, 4096)
add(x, y, out, n=4096)
layer_norm[lambda meta: (meta["BLOCK"],)](half, half, weight, weight, 256, 256, 1e-5)
assert [launch.grid for launch in driver.launches] == [(4, 1, 1), (4, 1, 1), (512, 1, 1)]
""",
        before={"module": "import sys; sys.modules['aotmm.native._direct_call'] = None", "place": ""}[lacking]
        + f"\nLACKING = {lacking!r}",
    )


def test_tuning() -> None:
    """`aotmm tune --kernel` times all that fit each call, in its own grid; `load` goes by the table, in C too."""
    run_functions(
        CALLS
        + """
import contextlib, pathlib, tempfile
from click.testing import CliRunner
from aotmm.cli import main
from aotmm.tune import functions as tuned
seen = []
def record(launch, turns):
    launch(0)
    grid, warps = driver.launches[-1].grid, driver.launches[-1].block[0] // 32
    seen.append((grid, warps))
    return lambda: {4: 1000.0, 1: 600.0}[warps]
tuned.Calls.__init__.__defaults__ = (record,)
torch.cuda.Stream, torch.cuda.stream = object, lambda _stream: contextlib.nullcontext()
torch.cuda.get_device_name = lambda: "a GPU"
folder = pathlib.Path(tempfile.mkdtemp())
calls, table = folder / "calls.py", folder / "table.json"
calls.write_text('''
import torch
def layer_norm_kernel(launch):
    for n in (64, 256):
        x, weight = torch.zeros(16, n).half(), torch.zeros(n)
        launch[lambda meta: (16, meta["BLOCK"])](x, x.clone(), weight, None, n, n, 1e-5)
def softmax_kernel(launch):
    pass
''')
def tune(*words):
    place = ["--arch", "sm80", "--pack", str(pretend.FUNCTIONS), "--out", str(table)]
    return CliRunner().invoke(main, ["tune", *place, *words])
done = tune("--kernel", "layer_norm_kernel", "--calls", str(calls))
assert done.exit_code == 0, done.output
first, fast = (f"layer_norm_kernel_None_BLOCK{words}_special" for words in ("512_num_warps4", "128_num_warps1"))
assert f"layer_norm_kernel at [64]: {fast} 0.60 us, {first} 1.00 us" in done.output, done.output
assert set(seen) == {((16, 512, 1), 4), ((16, 128, 1), 1)}
by_table = aotmm.load(pretend.FUNCTIONS, table=table)
def warps(library, **named):
    library["layer_norm_kernel"][(16,)](half, half, weight, None, 256, 112, 1e-5, **named)
    return driver.launches[-1].block[0] // 32
assert [warps(lib), warps(by_table), warps(by_table)] == [4, 1, 1]
assert warps(by_table, num_warps=4) == 4
text = str(by_table["layer_norm_kernel"].explain(half, half, weight, None, 256, 112, 1e-5))
assert text.startswith(f"{fast}, measured faster than {first} at the nearest sizes of the table"), text
assert f"{first}: fits too" in text
for words, error in (
    (("--kernel", "softmax_kernel", "--calls", str(calls)), "softmax_kernel made no call"),
    (("--kernel", "add_kernel", "--calls", str(calls)), "has no function add_kernel(launch)"),
    (("--kernel", "add_kernel"), "say --calls and --out with --kernel"),
):
    done = tune(*words)
    assert done.exit_code and error in done.output + str(done.exception), done.output
"""
    )


def test_torch_op() -> None:
    """An op has the function's arguments, those that it writes marked; torch checks it, and traces it for compiling."""
    run_functions(
        CALLS
        + """
from torch.library import opcheck
from aotmm.errors import SpecError
plain, of_rows = add.torch_op("own_test::add"), softmax.torch_op("own_test::softmax")
normed = layer_norm.torch_op("own_test::ln")
for op, words in (
    (plain, "Tensor x_ptr, Tensor y_ptr, Tensor(a2!) out_ptr, SymInt n, *, SymInt[]? grid=None"),
    (of_rows, "Tensor(a0!) out_ptr, Tensor in_ptr, SymInt out_stride, SymInt in_stride, SymInt n_rows, SymInt n_cols, "
     "int BLOCK, *, SymInt[]? grid=None"),
    (normed, "Tensor x_ptr, Tensor(a1!) y_ptr, Tensor weight_ptr, Tensor? bias_ptr, SymInt stride, SymInt N, "
     "float eps, *, int? BLOCK=None, int? num_warps=None, SymInt[] grid"),
):
    schema = str(op.default._schema).partition("(")[2]
    assert schema == words + ") -> ()", schema
opcheck(plain.default, (x, y, out, 4096))
opcheck(plain.default, (x, y, out, 4096), {"grid": [4, 2]})
opcheck(of_rows.default, (out, x, 16, 16, 16, 256, 256))
opcheck(normed.default, (half, half.clone(), weight, None, 256, 256, 1e-5), {"grid": (16,), "num_warps": 1})
for grid, named in (((16,), {}), ((3,), {"num_warps": 1, "BLOCK": 128})):
    layer_norm[grid](half, half, weight, None, 256, 256, 1e-5, **named)
    want = last()
    normed(half, half, weight, None, 256, 256, 1e-5, grid=grid, **named)
    assert last() == want
@torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
def twice(a, b):
    c = torch.empty_like(a)
    plain(a, b, c, a.numel())
    d = torch.empty_like(c)
    plain(c, b, d, c.numel(), grid=[c.numel() // 1024])
    return d
driver.launches.clear()
assert twice(x, y).shape == x.shape and twice(x[:2048], y[:2048]).shape == (2048,)
assert [launch.grid[0] for launch in driver.launches] == [4, 4, 2, 2]
for name, error in (("softmax", SpecError), ("own_test::add", RuntimeError), ("a::b::c", SpecError)):
    try:
        add.torch_op(name)
    except error:
        continue
    raise AssertionError(name)
"""
    )
