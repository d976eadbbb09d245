"""The libraries for torch: linked when they are missing or old, and loadable anywhere."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from aotmm.build import torch_library
from aotmm.errors import PackError
from tests.build.test_link import GLIBC_LIBRARY

# Of the limited API by 3.10. Source: Python's documentation, "Contents of Limited API".
LIMITED_API = {
    *("PyArg_ParseTuple", "PyBool_Type", "PyCFunction_NewEx", "PyCallable_Check"),
    *("PyDict_Copy", "PyDict_GetItemWithError", "PyDict_New", "PyDict_SetItem"),
    *("PyDict_Size", "PyErr_Clear", "PyErr_Occurred", "PyErr_SetString"),
    *("PyEval_RestoreThread", "PyEval_SaveThread", "PyExc_RuntimeError", "PyFloat_AsDouble"),
    *("PyFloat_Type", "PyLong_AsLong", "PyLong_AsLongLongAndOverflow", "PyLong_AsVoidPtr"),
    *("PyLong_Type", "PyModule_AddObjectRef", "PyModule_Create2", "PyObject_Call"),
    *("PyObject_CallFunctionObjArgs", "PyObject_CallNoArgs", "PyObject_GC_Del", "PyObject_GC_Track"),
    *("PyObject_GC_UnTrack", "PyObject_RichCompareBool", "PySequence_Concat", "PyTuple_GetItem"),
    *("PyTuple_New", "PyTuple_Pack", "PyTuple_SetItem", "PyTuple_Size"),
    *("PyTuple_Type", "PyType_FromSpec", "PyType_GetSlot", "PyUnicode_InternFromString"),
    *("PyUnicode_Type", "Py_BuildValue", "Py_DecRef", "Py_IncRef"),
    *("_PyObject_GC_New", "_Py_FalseStruct", "_Py_NoneStruct", "_Py_NotImplementedStruct"),
}


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A copy of the sources of what serves torch, where it is linked then."""
    for name in torch_library.SOURCES:
        (tmp_path / name).write_bytes((torch_library.NATIVE / name).read_bytes())
    monkeypatch.setattr(torch_library, "NATIVE", tmp_path)
    monkeypatch.setattr(torch_library, "LIBRARY", tmp_path / "libaotmm_torch.so")
    monkeypatch.setattr(torch_library, "DIRECT_CALL", tmp_path / "_direct_call.abi3.so")
    return tmp_path


@pytest.mark.parametrize("changed", torch_library.SOURCES)
def test_torch_library_is_linked_when_needed(native: Path, changed: str) -> None:
    """Both files are linked once, and again only after a source changed."""
    assert torch_library.link_torch_library()
    assert not torch_library.link_torch_library()
    with (native / changed).open("a") as handle:
        handle.write("/* changed */\n")
    assert torch_library.link_torch_library()
    assert sorted(path.name for path in native.glob("*.so")) == ["_direct_call.abi3.so", "libaotmm_torch.so"]
    torch_library.DIRECT_CALL.unlink()
    assert torch_library.link_torch_library()
    assert not list(native.glob(".torch-*"))


def test_what_torch_needs_loads_anywhere(native: Path) -> None:
    """Neither needs more than glibc; of CPython the module uses the limited API of 3.10 alone."""
    assert torch_library.link_torch_library()
    for library in (torch_library.LIBRARY, torch_library.DIRECT_CALL):
        dynamic = ELFFile(io.BytesIO(library.read_bytes())).get_section_by_name(".dynamic")
        assert all(re.fullmatch(GLIBC_LIBRARY, tag.needed) for tag in dynamic.iter_tags("DT_NEEDED"))
    symbols = ELFFile(io.BytesIO((native / "_direct_call.abi3.so").read_bytes())).get_section_by_name(".dynsym")
    used = {symbol.name for symbol in symbols.iter_symbols() if re.match("_?Py", symbol.name)}
    assert used - {"PyInit__direct_call"} == LIMITED_API


def test_torch_library_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, native: Path) -> None:
    """Where the torch library cannot be written the error is a PackError that names it."""
    monkeypatch.setattr(torch_library, "LIBRARY", native / "absent" / "libaotmm_torch.so")
    with pytest.raises(PackError, match=r"absent/libaotmm_torch\.so cannot be written: "):
        torch_library.link_torch_library()
