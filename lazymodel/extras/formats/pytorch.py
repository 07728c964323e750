"""PyTorch's files as `torch.save` has written them since PyTorch 1.6, read without PyTorch; nothing in them is run.

A file is a zip archive of members that are not compressed: `NAME/data.pkl`, a pickle of everything but the bytes of
tensors, and `NAME/data/KEY`, the bytes of one storage, of which tensors are views by offset, shape and strides. The
pickle is interpreted here, with the instructions that make dicts, lists, numbers and text, and a table of the names
that tensors are made with. Any other name makes an inert value, whose content is searched for tensors; any other
instruction is refused. Format: `torch/serialization.py`, `_save`.
"""

from __future__ import annotations

import math
import pickletools
import reprlib
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import ml_dtypes
import numpy as np

from lazymodel._remote.path import Location
from lazymodel._show.text import listed
from lazymodel._tensors.boxes import c_strides
from lazymodel._tensors.byte_reader import ByteReader
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.tensor_source import FileTensor
from lazymodel.checkpoints._checkpoint import Checkpoint, TensorHeader
from lazymodel.checkpoints._safetensors import short
from lazymodel.checkpoints._untrusted import (
    MAX_DIMENSIONS,
    MAX_NBYTES,
    TRUNCATED,
    check_pointer,
    corrupt,
    counts,
    mismatch,
)
from lazymodel.extras.formats.archive import LOCAL_HEADER, Window, stored_start, zip_directory

_MAX_PICKLE = 64 << 20  # bytes; a tensor takes about 200
_MAX_DEPTH = 64  # of dicts and lists in each other
_MAX_NAMES = 10  # characters of names for each byte of the pickle, which can refer to one list many times
_HEADERS = 2000  # that are fetched together: fewer than the blocks of an object that are kept

_LOAD = 'torch.load(path, weights_only=True, map_location="cpu")'
_CONVERT = f'save it again where PyTorch is: `torch.save({_LOAD}, "model.pt")`'
_RENAME = f'load it where PyTorch is, `state = {_LOAD}`, rename one, and save it: `torch.save(state, "model.pt")`'
_PLAIN = (
    f"load it where PyTorch is, `state = {_LOAD}`, make its tensors plain: sparse ones by `.to_dense()`, "
    "quantized ones by `.dequantize()`, conjugated or negated ones by `.resolve_conj().resolve_neg()`, others by "
    '`.to(dtype)`; and save it: `torch.save(state, "model.pt")`'
)
_TRUST = (
    'if you trust the file, load it where PyTorch is, `torch.load(path, weights_only=False, map_location="cpu")`, and '
    'save the dict of tensors in it: `torch.save(tensors, "model.pt")`'
)

_DTYPES: dict[str, np.dtype[Any]] = {
    f"torch.{name}": np.dtype(getattr(ml_dtypes, name))
    if hasattr(ml_dtypes, name)
    else np.dtype(name).newbyteorder("<")
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "complex64", "complex128"),
        *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
        *("float8_e5m2fnuz", "float8_e8m0fnu"),
    )
}
_CLASSES = {
    "Bool": "bool", "Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64",
    "Half": "float16", "BFloat16": "bfloat16", "Float": "float32", "Double": "float64", "ComplexFloat": "complex64",
    "ComplexDouble": "complex128", "Untyped": "uint8",
}  # fmt: skip
_STORAGES = {f"torch.{name}Storage": _DTYPES[f"torch.{dtype}"] for name, dtype in _CLASSES.items()}
_STORAGES["torch.storage.UntypedStorage"] = _DTYPES["torch.uint8"]
# How tensors are made → whether their dtype is another than the storage's, and comes after the other arguments.
_REBUILD = {"torch._utils._rebuild_tensor_v2": False, "torch._utils._rebuild_tensor_v3": True}
_PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_ORDERED, _VALUES = "collections.OrderedDict", ("torch.Size", "torch.device")
_WITH_ATTRIBUTES = "torch._tensor._rebuild_from_type_v2"  # function, class, arguments and attributes of a tensor
_MODULE = ("_parameters", "_buffers", "_modules")  # attributes of modules, which a `state_dict` does not name


class _Name(str):
    """A name that a pickle would import. Nothing is."""


class _Inert:
    """What a name that is not known would make: the arguments of the call, which is not made, and what was added."""

    def __init__(self, name: str, arguments: Any = ()) -> None:
        self.name, self.arguments = name, arguments
        self.values, self.parts = list[Any](), list[Any]()  # what was appended; items and attributes

    def __repr__(self) -> str:
        return f"{short(self.name)}{reprlib.repr(self.arguments)}"


class _Storage(NamedTuple):
    key: str
    dtype: np.dtype[Any]
    nbytes: int


class _Tensor(NamedTuple):
    """A tensor as a pickle describes it; offset, shape and strides, in elements, are not checked yet."""

    storage: _Storage
    dtype: np.dtype[Any]
    offset: Any
    shape: Any
    strides: Any


class _Place(NamedTuple):
    """A checked tensor: its first byte in the file, its shape, and its strides in bytes."""

    dtype: np.dtype[Any]
    begin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class PyTorchFile(Checkpoint):
    """One file of `torch.save`: name → tensor. Opening reads the archive's directory and the pickle.

    Dicts and lists in each other become names: `{"model": {"w": …}, "ema": [a, b]}` has `model.w`, `ema.0` and `ema.1`.
    Objects are dicts of their attributes, and a module's names are those of its `state_dict`. What is not a tensor
    (numbers, None, NumPy's arrays) is left out, but text and sizes beside tensors are the metadata. A tensor alone is
    named as the file is. Tensors that share their bytes are as many tensors here, at the same place of the file.

    Raises:
        CheckpointError: The file is missing, truncated, a Git LFS pointer, older than PyTorch 1.6, big-endian, has
            compressed or encrypted members, objects but no tensors, a tensor that is not stored as its values (sparse,
            quantized), or one that exceeds its storage.
    """

    format = "pytorch"

    def __init__(self, path: Location) -> None:
        if not (head := check_pointer(path)).startswith(b"PK"):
            pickled = head.startswith(b"\x80")
            found = "a pickle alone, as before that" if pickled else f"{head[:8]!r} as its first bytes"
            raise mismatch(path, "the zip archive that torch.save writes since PyTorch 1.6", found, _CONVERT)
        self.source = path.reader()
        members, root = _members(self.source, path)
        if members.get(f"{root}byteorder") and _read(self.source, path, members[f"{root}byteorder"]) != b"little":
            raise mismatch(path, "little-endian values", "big-endian ones", _CONVERT)
        pickle = _read(self.source, path, members[f"{root}data.pkl"])
        with corrupt(f"{path}: expected a pickle of tensors, found a corrupt one"):
            interpreter = _Interpreter(str(path))
            content = interpreter.run(pickle)
            found, said = _flat(str(path), path.name.rpartition(".")[0], content, len(pickle))
        if interpreter.unknown and not found:
            names = listed([repr(short(name)) for name in interpreter.unknown])
            raise mismatch(path, "tensors", f"none, but {names}, which loading it would import", _TRUST)
        starts = _starts(self.source, path, members, root, {each.storage: None for each in found.values()})
        self._places = {
            name: _place(f"{path}: tensor {short(name)!r}", tensor, starts) for name, tensor in found.items()
        }
        super().__init__(path, cast("dict[str, Any]", self._places), [self.source])
        self.metadata = said

    def _tensor(self, name: str) -> LazyTensor:
        dtype, begin, shape, strides = self._places[name]
        if list(strides) == c_strides(shape, dtype.itemsize):
            return LazyTensor(FileTensor(name, self.source, begin, shape, dtype))
        count = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) // dtype.itemsize
        stored = LazyTensor(FileTensor(name, self.source, begin, (count,), dtype))
        return stored.at(np.lib.stride_tricks.as_strided(stored.addresses, shape, strides, subok=True))

    def describe(self, name: str) -> TensorHeader:
        dtype, begin, shape, strides = self._places[name]
        offset = begin if list(strides) == c_strides(shape, dtype.itemsize) else None
        return TensorHeader(dtype, shape, math.prod(shape) * dtype.itemsize, self.path, None, offset)


def _members(source: ByteReader, path: Location) -> tuple[dict[str, zipfile.ZipInfo], str]:
    """Name → member of the archive, and the folder in it that has everything."""
    members: dict[str, zipfile.ZipInfo] = {}
    for info in zip_directory(source, path, "PyTorch"):
        if members.setdefault(info.filename, info) is not info:
            raise mismatch(path, "each member of the archive once", f"{short(info.filename)!r} twice")
    pickles = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        found = listed([repr(short(name)) for name in sorted(members)])
        raise mismatch(path, "one data.pkl in the archive, as torch.save writes it", found, _CONVERT)
    return members, pickles[0].removesuffix("data.pkl")


def _read(source: ByteReader, path: Location, info: zipfile.ZipInfo) -> bytes:
    start = stored_start(path, info, "PyTorch", _CONVERT)
    if info.file_size > _MAX_PICKLE:
        raise mismatch(path, f"at most {_MAX_PICKLE} bytes of {info.filename}", info.file_size)
    with Window(source, start, info.file_size) as window:
        return window.read() or b""


def _starts(
    source: ByteReader,
    path: Location,
    members: Mapping[str, zipfile.ZipInfo],
    root: str,
    storages: Mapping[_Storage, Any],
) -> dict[str, int]:
    """Key → first byte of each storage, all of which must be there and have the right size."""
    starts: dict[str, int] = {}
    needed = list(storages)
    for first in range(0, len(needed), _HEADERS):
        some = needed[first : first + _HEADERS]
        infos = [members.get(f"{root}data/{storage.key}") for storage in some]
        source.fetch_ahead([(info.header_offset, info.header_offset + LOCAL_HEADER) for info in infos if info])
        for storage, info in zip(some, infos, strict=True):
            what = f"{root}data/{short(storage.key)}"
            if info is None:
                raise mismatch(path, f"{what} in the archive", "none", TRUNCATED)
            starts[storage.key] = stored_start(path, info, "PyTorch", _CONVERT)
            if info.file_size != storage.nbytes:
                raise mismatch(path, f"{storage.nbytes} bytes of {what}", info.file_size, TRUNCATED)
    return starts


def _place(what: str, tensor: _Tensor, starts: Mapping[str, int]) -> _Place:
    """Where a tensor is, after every check of it."""
    storage, dtype, offset, *both = tensor
    shape, strides = (
        counts(each) if isinstance(each, tuple) and len(each) <= MAX_DIMENSIONS else None for each in both
    )
    first = counts((offset,))
    if shape is None or strides is None or first is None or len(shape) != len(strides):
        found = reprlib.repr((offset, *both))
        raise mismatch(what, f"an offset, at most {MAX_DIMENSIONS} extents and as many strides", found)
    if math.prod(max(extent, 1) for extent in shape) * dtype.itemsize >= MAX_NBYTES:
        raise mismatch(what, f"a shape of less than {MAX_NBYTES} bytes", reprlib.repr(shape))
    plain = tuple(c_strides(shape, dtype.itemsize))
    if not math.prod(shape):
        return _Place(dtype, starts[storage.key], shape, plain)
    end = first[0] + 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    if end * dtype.itemsize > storage.nbytes:
        raise mismatch(
            what, f"it within the {storage.nbytes} bytes of its storage", f"it up to byte {end * dtype.itemsize}"
        )
    begin = starts[storage.key] + first[0] * dtype.itemsize
    # Nothing depends on the stride of a single element.
    steps = (plain[axis] if shape[axis] == 1 else stride * dtype.itemsize for axis, stride in enumerate(strides))
    return _Place(dtype, begin, shape, tuple(steps))


def _flat(path: str, stem: str, content: Any, nbytes: int) -> tuple[dict[str, _Tensor], dict[str, Any]]:
    """Name → tensor in dicts and lists in each other, as many as a pickle of so many bytes can name; and name → text or
    size that has tensors beside it.
    """
    found: dict[str, _Tensor] = {}
    said: dict[str, Any] = {}
    inside: list[_Inert] = []
    left = 1_000_000 + _MAX_NAMES * nbytes

    def visit(name: str | None, value: Any, depth: int, maker: str = "") -> None:
        nonlocal left
        left -= 1 + len(name or "")
        if depth > _MAX_DEPTH or left < 0:
            expected = f"dicts and lists at most {_MAX_DEPTH} deep, and not one of them everywhere"
            raise mismatch(path, expected, f"more at {short(name or '')!r}")
        if maker and isinstance(value, _Tensor | _Storage):
            raise mismatch(path, "tensors as they are stored", maker, _PLAIN)
        if isinstance(value, _Tensor):
            name = stem if name is None else name
            if name in found:
                raise mismatch(path, "each name once", f"two tensors named {short(name)!r}", _RENAME)
            found[name] = value
        elif isinstance(value, dict):
            beside = any(isinstance(each, _Tensor) for each in cast("dict[str, Any]", value).values())
            for key, each in cast("dict[str, Any]", value).items():
                inner = name if key in _MODULE else key if name is None else f"{name}.{key}"
                visit(inner, each, depth + 1, maker)
                if beside and (isinstance(each, str) or (isinstance(each, tuple) and counts(cast("Any", each)))):
                    said[str(inner)] = each
        elif isinstance(value, _Inert) and value not in inside:  # objects refer to each other in circles
            inside.append(value)
            visit(name, value.arguments, depth + 1, maker or f"{short(name or stem)!r} made by {value.name!r}")
            for part in (value.values, *value.parts):
                visit(name, part, depth + 1, maker)
            inside.pop()
        elif isinstance(value, list | tuple):
            values = cast("Sequence[Any]", value)
            left -= len(values)
            for number, each in enumerate(values):
                if isinstance(each, dict | list | tuple | _Inert):  # numbers can be many
                    visit(str(number) if name is None else f"{name}.{number}", each, depth + 1, maker)

    visit(None, content, 0)
    return found, said


_PUSHED = {
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Interpreter:
    """Carries out a pickle's instructions on a stack, as Python does, but only those that make values.

    They are those of protocol 2, which torch.save uses, to 5. A dict has text as keys; `_Tensor`s are among the values.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.unknown: dict[str, None] = {}  # names of what is left inert

    def run(self, data: bytes) -> Any:
        """What a pickle holds."""
        stack, memo = self.stack, self.memo
        for opcode, argument, _ in pickletools.genops(data):
            code = opcode.name
            if code in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
                memo[len(memo) if code == "MEMOIZE" else cast(int, argument)] = stack[-1]
            elif code in _PUSHED:
                stack.append(argument)
            elif code in _CONSTANTS:
                stack.append(_CONSTANTS[code])
            elif code in ("BINGET", "LONG_BINGET"):
                stack.append(memo[cast(int, argument)])
            elif code == "MARK":
                self.marks.append(len(stack))
            elif code not in ("PROTO", "FRAME", "STOP"):
                self._step(code, argument)
        return stack.pop()

    def _step(self, code: str, argument: Any) -> None:
        """Carries out an instruction that makes a value of others, or changes one."""
        stack = self.stack
        match code:
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST" | "EMPTY_SET":
                stack.append([])
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = _TUPLES[code]
                stack[-count:] = [tuple(stack[-count:])]
            case "TUPLE" | "FROZENSET":
                stack.append(tuple(self._since_mark()))
            case "APPEND" | "APPENDS" | "ADDITEMS":
                values = [stack.pop()] if code == "APPEND" else self._since_mark()
                (stack[-1].values if isinstance(stack[-1], _Inert) else stack[-1]).extend(values)
            case "SETITEM" | "SETITEMS":
                pairs = [stack.pop(-2), stack.pop()] if code == "SETITEM" else self._since_mark()
                if isinstance(target := stack[-1], _Inert):
                    target.parts.append(target := {})
                self._set_items(target, pairs)
            case "GLOBAL" | "STACK_GLOBAL":
                name = argument.replace(" ", ".") if code == "GLOBAL" else f"{stack.pop(-2)}.{stack.pop()}"
                stack.append(_Name(name))
            case "REDUCE":
                arguments = stack.pop()
                stack[-1] = self._made(stack[-1], arguments)
            case "NEWOBJ":
                arguments = stack.pop()
                stack[-1] = self._inert(stack[-1])
                stack[-1].parts.append(arguments)
            case "BUILD":  # attributes, such as the versions of modules that a state_dict has
                attributes = stack.pop()
                if isinstance(stack[-1], _Inert):
                    stack[-1].parts.append(attributes)
            case "BINPERSID":
                stack[-1] = self._storage(stack[-1])
            case _:
                raise mismatch(self.path, "a pickle of tensors, numbers and text", f"its instruction {code}", _TRUST)

    def _since_mark(self) -> list[Any]:
        mark = self.marks.pop()
        values = self.stack[mark:]
        del self.stack[mark:]
        return values

    def _set_items(self, target: Any, pairs: Sequence[Any]) -> None:
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if (text := str(key) if isinstance(key, str | int) else reprlib.repr(key)) in target:
                raise mismatch(self.path, "each key of a dict once", f"{short(text)!r} twice", _RENAME)
            target[text] = value

    def _made(self, name: Any, arguments: Any) -> Any:
        """What calling a name with arguments makes."""
        if isinstance(name, _Name) and isinstance(arguments, tuple):
            values = cast("Sequence[Any]", arguments)
            if name == _ORDERED and not values:
                return {}
            if name in _VALUES:
                return values[0] if name == _VALUES[0] and values else None
            if name in _REBUILD and len(values) >= 6 and isinstance(values[0], _Storage):
                own_dtype = _REBUILD[name]
                if any(values[6 + own_dtype :]):
                    found = "a tensor that is conjugated or negated when it is read"
                    raise mismatch(self.path, "values as they are stored", found, _PLAIN)
                dtype = self._dtype(values[6], _DTYPES) if own_dtype else values[0].dtype
                return _Tensor(values[0], dtype, *values[1:4])
            if name in _PARAMETERS and isinstance(values[0], _Tensor | _Inert):
                return values[0]
            if name == _WITH_ATTRIBUTES and values[0] in (*_REBUILD, *_PARAMETERS):
                return self._made(values[0], values[2])
            if name not in (_ORDERED, *_REBUILD, *_PARAMETERS):
                return self._inert(name, arguments)
        found = f"{short(str(name))!r} made of {reprlib.repr(arguments)}"
        raise mismatch(self.path, "tensors made of storages", found)

    def _inert(self, name: Any, arguments: Any = ()) -> _Inert:
        if not isinstance(name, _Name):
            raise mismatch(self.path, "the name of a class", reprlib.repr(name))
        self.unknown[name] = None
        return _Inert(name, arguments)

    def _storage(self, described: Any) -> _Storage:
        """What a persistent id describes: ("storage", its class, its key, the device that it was on, its elements)."""
        kind, name, key, _, count = described
        if kind != "storage" or not isinstance(name, _Name) or not isinstance(key, str) or counts((count,)) is None:
            raise mismatch(self.path, "the id of a storage", reprlib.repr(described))
        dtype = self._dtype(name, _STORAGES)
        return _Storage(key, dtype, count * dtype.itemsize)

    def _dtype(self, name: Any, known: Mapping[str, np.dtype[Any]]) -> np.dtype[Any]:
        if name not in known:
            expected = f"one of the dtypes {', '.join(_DTYPES).replace('torch.', '')}"
            raise mismatch(self.path, expected, short(str(name)), _PLAIN)
        return known[name]
