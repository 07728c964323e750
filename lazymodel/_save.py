"""Saving: sharded arrays to files, a piece of a tensor at a time, under a ceiling of host memory.

Responsible for which process writes which bytes and for staging them; `_destination` for where they go, and for files
that appear complete or not at all.
Values go the way that loading takes, backwards: an array is the leaf of a lazy tensor (`DeviceLeaf`), a mapping is
NumPy on such tensors, and what is written is read out of them box by box, so that nothing is gathered.

The format is safetensors, laid out as Hugging Face does (https://github.com/huggingface/safetensors#format): one
`model.safetensors`, or `model-00001-of-0000N.safetensors` with `model.safetensors.index.json`. Orbax writes its own
(`_save_orbax`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import secrets
import threading
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias, cast

import jax
import ml_dtypes
import numpy as np

from lazymodel._adapters import model_arrays
from lazymodel._agreement import agreement
from lazymodel._destination import SINGLE, FileDestination, FolderDestination, SavedFile
from lazymodel._errors import LazyModelError
from lazymodel._file_source import Convert, Workspace, assign, empty_aligned, slabs
from lazymodel._geometry import Box, box_shape, cover, fresh_view, geometry_of, intersect, normalize, shift
from lazymodel._lazy_tensor import LazyTensor, Leaf, PiecesLeaf, fill_parts, lazy
from lazymodel._mapping_table import WeightMap
from lazymodel._paths import path_text, unique_paths
from lazymodel._progress import Progress, progress_for
from lazymodel._save_orbax import save_orbax
from lazymodel._text import closest, format_bytes, parse_budget, parse_bytes
from lazymodel.checkpoints._safetensors import DTYPES, MAX_HEADER
from lazymodel.checkpoints._shards import SAVE_KEY

_jax = cast(Any, jax)  # parts of JAX's own annotations are incomplete

_DEFAULT_BUDGET = 256 << 20  # bytes; all threads with all they take, beyond which nothing gets faster
_BAND = 16 << 20  # bytes that are staged at a time: a write of some milliseconds, a transfer likewise
_THREADS = 4  # one disk is saturated by fewer; they overlap transfers, transposing and writing
_ALIGNMENT = 8  # bytes that the header is padded to, as the reference implementation pads it
_TAGS = {dtype: tag for tag, dtype in DTYPES.items()}
_FLOAT4 = np.dtype(ml_dtypes.float4_e2m1fn)

WriteFunction: TypeAlias = "Callable[[Mapping[str, LazyTensor]], Mapping[str, Any]]"


def save(
    model: Any,
    path: str | os.PathLike[str],
    *,
    mapping: WeightMap | WriteFunction | None = None,
    format: str = "safetensors",
    max_shard_size: int | str = "5GB",
    max_host_memory: int | str | None = None,
    metadata: Mapping[str, str] | None = None,
    progress: bool | Progress | Callable[[int, int], object] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a model's arrays, or any others, to a checkpoint; each shard is copied to the host once, in pieces.

    Where several processes share the arrays, all of them must call this with the same arguments. Each writes the
    shards that only it, or it first, holds, into files on a file system that all share; it fails in all or in none.

    At each instant the path opens as the complete old checkpoint or the complete new one: everything is written to a
    folder `.*.lazymodel-saving` first, and one rename makes it count. A failure, a full disk or a kill before that
    leaves what was there, and the next save removes what a killed one left. Files that are not of the checkpoint stay;
    a second saver of the same path is refused, as is what would hide a checkpoint of another format.

    Args:
        model: A mapping of path to array, any pytree of arrays, or a model of a known framework. Paths are those of
            `build_abstract`. Lazy tensors of another checkpoint are taken as well, which converts it. PRNG keys are
            saved as their key data; what is no array is left out.
        path: A file that ends with `.safetensors`, of any size; or a folder, which may hold other files. For Orbax a
            folder.
        mapping: The `WeightMap` that the model was loaded with, undone; or a function that takes path → `LazyTensor`
            and returns a flat dict of tensor name → lazy tensor or array, made with NumPy. None keeps the paths.
        format: `"safetensors"` or `"orbax"`. Orbax (package `orbax-checkpoint`) saves arrays as they are, so there a
            mapping may rename them and no more; its tree has the parts of the paths as keys.
        max_shard_size: Bytes of tensors of one file in a folder, or `"5GB"`. A larger tensor has a file to itself.
        max_host_memory: Ceiling for the host's staging memory in bytes, or `"1GiB"`; None is 256 MiB. Orbax takes what
            it takes.
        metadata: Strings to strings, for the header of every safetensors file. `{"format": "pt"}` is added unless
            `format` is given: Hugging Face's loaders ask for it, and it says that names and layouts are PyTorch's.
        progress: As for `materialize`, in bytes that this process writes.
        overwrite: Whether a checkpoint that is there already is replaced. One of another format never is, nor an Orbax
            folder with other files in it: both are errors before anything is written.

    Raises:
        LazyModelError: There is a checkpoint already, or a saver at work on it; a dtype does not exist in the format,
            the mapping does not fit, the disk is full, or a file cannot be written. What was there is as it was.
        CheckpointError: Another process failed, or a lazy tensor cannot be read.
    """
    arrays = _named_arrays(model)
    shardings = [array.sharding for array in arrays.values() if isinstance(array, jax.Array)]
    if format not in ("safetensors", "orbax"):
        raise LazyModelError(f"format is 'safetensors' or 'orbax'; got {format!r}")
    tensors = _map({name: _lazy_array(name, array) for name, array in arrays.items()}, mapping)
    if format == "orbax":
        save_orbax({name: _plain(name, tensor) for name, tensor in tensors.items()}, Path(path), overwrite=overwrite)
        return
    shared = any(not array.is_fully_addressable for array in arrays.values() if isinstance(array, jax.Array))
    leads = not shared or jax.process_index() == min(_processes(shardings))
    budget = _DEFAULT_BUDGET if max_host_memory is None else parse_budget(max_host_memory)
    terms = {"done": "saved", "given": "tensors differ", "mend": "Save the same model in all processes"}
    with contextlib.ExitStack() as stack:
        with agreement(shardings, **terms) as stage:
            single = Path(path).suffix == ".safetensors"
            shard_size = None if single else parse_bytes(max_shard_size, name="max_shard_size", at_least=1)
            files, checksum = _layout(tensors, shard_size, {"format": "pt"} | dict(metadata or {}))
            _check_budget(files, budget)
            target = FileDestination(Path(path), files) if single else FolderDestination(Path(path), files)
            if leads:
                stack.enter_context(target.begun(overwrite=overwrite))
            stage.outcome = f"write {len(tensors)} tensors (checksum {checksum})"
        with agreement(shardings, **terms) as stage:
            _write(target, budget, progress, stage.check, leads=leads)
        with agreement(shardings, **terms):
            if leads:
                target.commit()


# Arrays as lazy tensors -----------------------------------------------------------------------------------------------


class DeviceLeaf(Leaf):
    """An array on devices, of which this process may hold only a part.

    Attributes:
        array: The array.
        complete: Whether all of it is on this process's devices.
        owned: The boxes that this process is to write where several hold the array: those of its first replicas.
    """

    def __init__(self, name: str, array: jax.Array) -> None:
        self.name, self.file, self.offset, self.array = name, "", 0, array
        self.shape, self.dtype = tuple(array.shape), np.dtype(array.dtype)
        self.complete = array.is_fully_addressable
        self._shards: dict[Any, tuple[Box, Any]] = {}
        self.owned: list[Box] = []
        for shard in array.addressable_shards:
            key = tuple(part.indices(extent)[:2] for part, extent in zip(shard.index, self.shape, strict=True))
            box = tuple(slice(start, stop) for start, stop in key)
            if key not in self._shards:
                self._shards[key] = (box, shard)
            if shard.replica_id == 0:
                self.owned.append(box)

    def fill_box(self, box: Box, out: np.ndarray, steps: tuple[Convert, ...], workspace: Workspace) -> None:
        filled = 0
        for where, shard in self._shards.values():
            common = intersect(box, where) if self.shape else box
            if common is None:
                continue
            target = out[(*shift(common, box), ...)]
            filled += target.size
            within = shift(common, where)
            if shard.device.platform == "cpu":
                assign(target, np.asarray(shard.data)[(*within, ...)], steps)  # not a copy
                continue
            # Copies of pieces that die here: NumPy's copy of a whole shard would stay with the array.
            for piece in slabs(target.shape, max(workspace.room // (2 * self.dtype.itemsize), 1)):
                start = [w.start + p.start for w, p in zip(within, piece, strict=True)]
                values = np.asarray(_slice(shard.data, start, box_shape(piece)))
                assign(target[(*piece, ...)], values, steps)
        if filled < out.size:
            raise LazyModelError(
                f"{self.name!r}: a part of it is on another process's devices, so it cannot be read here. With several "
                "processes, a function for saving may only use views, np.stack, np.concatenate and scalars"
            )


def _sliced(array: jax.Array, start: Sequence[Any], shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(array, start, shape)


_slice = _jax.jit(_sliced, static_argnums=2)


def _lazy_array(name: str, array: Any) -> LazyTensor:
    if not isinstance(array, jax.Array):
        return lazy(array, name)
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return LazyTensor(DeviceLeaf(name, array))


def _named_arrays(model: Any) -> dict[str, Any]:
    """Path → array, each array under its first path, as `build_abstract` names variables."""
    found = model_arrays(model)
    if found is None:
        leaves, _ = jax.tree_util.tree_flatten_with_path(dict(model) if isinstance(model, Mapping) else model)
        arrays = (jax.Array, np.ndarray, LazyTensor)
        kept = [(path_text(keys), leaf) for keys, leaf in leaves if isinstance(leaf, arrays)]
        paths = unique_paths([path for path, _ in kept])
        found = dict(zip(paths, (leaf for _, leaf in kept), strict=True))
    seen: set[int] = set()
    distinct = {path: leaf for path, leaf in found.items() if not (id(leaf) in seen or seen.add(id(leaf)))}
    if not distinct:
        raise LazyModelError(
            f"there are no arrays in what was given to save, {type(model)}; an abstract model has none before it is "
            "materialized"
        )
    for name, array in distinct.items():
        if isinstance(array, jax.Array) and array.is_deleted():
            raise LazyModelError(f"{name!r} was deleted or donated; save what the last step returned instead")
    return distinct


def _processes(shardings: Sequence[jax.sharding.Sharding]) -> set[int]:
    return {device.process_index for sharding in shardings for device in cast(Any, sharding.device_set)}


def _map(arrays: dict[str, LazyTensor], mapping: WeightMap | WriteFunction | None) -> dict[str, LazyTensor]:
    """The tensors to write, by name."""
    if mapping is None:
        return arrays
    written: Any = mapping.write(arrays) if isinstance(mapping, WeightMap) else mapping(_Named(arrays))
    if not isinstance(written, Mapping):
        raise LazyModelError(f"a function for saving returns a dict of tensor name to tensor; got {type(written)}")
    tensors: dict[str, LazyTensor] = {}
    for name, value in cast("Mapping[Any, Any]", written).items():
        if not isinstance(name, str) or not isinstance(value, LazyTensor | np.ndarray | np.generic | jax.Array):
            raise LazyModelError(
                f"a function for saving returns a flat dict of tensor name to tensor; got {name!r}: {type(value)}"
            )
        tensors[name] = _lazy_array(name, value)
    return tensors


class _Named(dict[str, LazyTensor]):
    """Arrays by path, for a function that may ask for one that is not there."""

    def __missing__(self, path: str) -> LazyTensor:
        raise LazyModelError(f"the model has no variable {path!r}{closest(path, self)}")


# Files ----------------------------------------------------------------------------------------------------------------


def _layout(
    tensors: Mapping[str, LazyTensor], shard_size: int | None, metadata: Mapping[str, str]
) -> tuple[list[SavedFile], int]:
    """Divides tensors among files, in their order; a single file where `shard_size` is None.

    Returns:
        The files, and a checksum of what they will have in them but for the values, the same in every process.
    """
    if bad := [key for key, value in metadata.items() if not isinstance(cast(Any, value), str)]:
        raise LazyModelError(f"metadata maps strings to strings; found {bad[0]!r}: {metadata[bad[0]]!r}")
    groups: list[dict[str, LazyTensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        nbytes = _stored_nbytes(name, tensor)
        if shard_size is not None and groups[-1] and size + nbytes > shard_size:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += nbytes
    metadata = {key: value for key, value in metadata.items() if key != SAVE_KEY}  # copied from another checkpoint
    save_id = secrets.token_hex(8)
    if len(groups) == 1:
        names = [SINGLE]
    else:
        names = [f"model-{n:05}-of-{len(groups):05}.safetensors" for n in range(1, len(groups) + 1)]
        metadata[SAVE_KEY] = save_id
    files = [_file(name, group, metadata) for name, group in zip(names, groups, strict=True)]
    # Only the leading process's headers are written; every process has an id, all of the same length.
    return files, zlib.crc32(b"".join(file.header.replace(save_id.encode(), b"") for file in files))


def _stored_nbytes(name: str, tensor: LazyTensor) -> int:
    tag = _TAGS.get(tensor.dtype)
    if tag is None:
        raise LazyModelError(
            f"{name!r}: safetensors has no dtype {tensor.dtype.name}, only {', '.join(sorted(_TAGS.values()))}; "
            "cast it with a mapping, or save with format='orbax'"
        )
    if name == "__metadata__":
        raise LazyModelError("a tensor cannot be called '__metadata__' in safetensors; rename it with a mapping")
    if tensor.dtype != _FLOAT4:
        return tensor.nbytes
    if tensor.size % 2:
        raise LazyModelError(f"{name!r}: safetensors packs 4-bit floats in pairs, and {list(tensor.shape)} is odd")
    return tensor.size // 2


def _file(name: str, tensors: Mapping[str, LazyTensor], metadata: Mapping[str, str]) -> SavedFile:
    # Larger dtypes first, as the reference implementation has it: then every tensor is aligned to its own.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    begins: list[int] = []
    end = 0
    for tensor_name, tensor in ordered:
        begins.append(end)
        end += _stored_nbytes(tensor_name, tensor)
        offsets = [begins[-1], end]
        header[tensor_name] = {"dtype": _TAGS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    try:
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        bad = error.object[error.start : error.end]
        raise LazyModelError(f"the name of a tensor has {bad!r} in it, which cannot be written as UTF-8") from None
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER:
        raise LazyModelError(f"names and shapes take {format_bytes(len(text))}; safetensors allows {MAX_HEADER} bytes")
    data = len(text) + 8
    placed = [(n, tensor, data + begin) for (n, tensor), begin in zip(ordered, begins, strict=True)]
    return SavedFile(name, len(text).to_bytes(8, "little") + text, tuple(placed), data + end)


# Writing --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Elements to write: a lazy tensor, and where each of its elements goes.

    Attributes:
        name: The tensor that they belong to, for messages.
        tensor: Its axes are in file order.
        start: Byte in the file of its first element.
        strides: Bytes in the file, descending but for axes of extent 1.
        packed: Whether two elements are a byte; then it has one dimension.
    """

    name: str
    tensor: LazyTensor
    start: int
    strides: tuple[int, ...]
    packed: bool = False


def _pieces(name: str, tensor: LazyTensor, offset: int, *, leads: bool) -> Iterator[_Piece]:
    """What this process writes of a tensor."""
    if not tensor.size:
        return
    if _complete(tensor.leaf):
        if leads and tensor.dtype == _FLOAT4:
            yield _Piece(name, tensor.reshape(-1), offset, (1,), packed=True)
        elif leads:
            strides = fresh_view(tensor.shape, tensor.itemsize).strides
            yield _Piece(name, tensor, offset, strides)
        return
    if tensor.dtype == _FLOAT4:
        raise LazyModelError(
            f"{name!r}: 4-bit floats that several processes share cannot be written, because two are one byte"
        )
    for own, target in _owned(tensor, fresh_view(tensor.shape, tensor.itemsize), leads=leads):
        order = sorted(range(own.ndim), key=lambda axis, target=target: -abs(target.strides[axis]))
        own, target = own.transpose(order), target.transpose(order)
        flip = tuple(slice(None, None, -1 if stride < 0 else 1) for stride in target.strides)
        geometry = geometry_of(target[(*flip, ...)])
        yield _Piece(name, own[(*flip, ...)], offset + geometry.start, geometry.strides)


def _complete(leaf: Leaf) -> bool:
    if isinstance(leaf, PiecesLeaf):
        return all(_complete(piece.leaf) for piece in leaf.pieces)
    return not isinstance(leaf, DeviceLeaf) or leaf.complete


def _owned(tensor: LazyTensor, target: np.ndarray, *, leads: bool) -> Iterator[tuple[LazyTensor, np.ndarray]]:
    """The parts of a tensor that this process is to write, each with the part of `target`, addresses, it goes to."""
    leaf = tensor.leaf
    if not tensor.size:
        return
    if _complete(leaf):
        if leads:
            yield tensor, target
        return
    geometry, view, repeated = normalize(tensor.geometry(), target)
    if repeated:
        axis = repeated[0]
        index: tuple[Any, ...] = (slice(None),) * axis
        for position in range(tensor.shape[axis]):
            yield from _owned(tensor[(*index, position)], target[(*index, position, ...)], leads=leads)
        return
    covering = cover(geometry, leaf.shape, leaf.dtype.itemsize)
    aligned = covering.align(view)
    if aligned is None:
        # No plain box of the leaf: halves of it become one sooner or later, a single element at the latest.
        order: list[int] = tensor.file_order()
        axis = next(axis for axis in order if tensor.shape[axis] > 1)
        index = (slice(None),) * axis
        half = tensor.shape[axis] // 2
        for part in (slice(0, half), slice(half, None)):
            yield from _owned(tensor[(*index, part)], target[(*index, part, ...)], leads=leads)
    elif isinstance(leaf, PiecesLeaf):
        start = 0
        for piece in leaf.pieces:
            end = start + piece.shape[leaf.axis] if leaf.shape else 1
            within = tuple(slice(start, end) if i == leaf.axis else slice(0, n) for i, n in enumerate(leaf.shape))
            common = intersect(covering.box, within) if leaf.shape else ()
            if common is not None:
                own = piece[shift(common, within)].converted(tensor.steps)
                yield from _owned(own, aligned[(*shift(common, covering.box), ...)], leads=leads)
            start = end
    else:
        for box in cast(DeviceLeaf, leaf).owned:
            common = intersect(covering.box, box) if leaf.shape else ()
            if common is not None:
                own = LazyTensor(leaf)[common].converted(tensor.steps)
                yield own, aligned[(*shift(common, covering.box), ...)]


def _check_budget(files: Sequence[SavedFile], budget: int) -> None:
    """Raises LazyModelError where a tensor cannot be read within the budget."""
    for file in files:
        for name, tensor, _ in file.tensors:
            if tensor.leaf.unit_nbytes + 2 * tensor.itemsize > budget:
                raise LazyModelError(
                    f"{name!r}: reading any of it takes {format_bytes(tensor.leaf.unit_nbytes)} at once, more than "
                    f"max_host_memory={format_bytes(budget)}"
                )


def _write(
    target: FileDestination | FolderDestination,
    budget: int,
    progress: bool | Progress | Callable[[int, int], object] | None,
    check: Callable[[], None],
    *,
    leads: bool,
) -> None:
    """Writes what is this process's, in file order; what `check`, called with every piece, raises ends it."""
    pieces = [
        (file, [piece for name, tensor, at in file.tensors for piece in _pieces(name, tensor, at, leads=leads)])
        for file in target.files
    ]
    unit = max((piece.tensor.leaf.unit_nbytes for _, group in pieces for piece in group), default=0)
    threads = max(min(_THREADS, os.cpu_count() or 1, budget // (unit + 2 * _BAND)), 1)
    band = max(min(_BAND, (budget // threads - unit) // 2), 1)
    bar = progress_for(progress)
    bar.start(sum(piece.tensor.nbytes for _, group in pieces for piece in group), f"{target.path.name}: saving")
    try:
        for file, group in pieces:
            where = target.file(file)
            try:
                with _descriptor(where) as fd:
                    _write_file(fd, group, threads, band, unit, bar, check)
            except OSError as error:
                raise LazyModelError(_failure(target.path, where, error)) from error
    finally:
        bar.finish()


def _failure(path: Path, where: Path, error: OSError) -> str:
    hint = ""
    if isinstance(error, FileNotFoundError):
        hint = "; with several processes the path must be on a file system that all of them share"
    return f"cannot write {path} ({where.name}): {error.strerror}{hint}"


@contextlib.contextmanager
def _descriptor(path: Path) -> Generator[int]:
    fd = os.open(path, os.O_WRONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        yield fd
        os.fsync(fd)  # renamed before its bytes are on disk, a power failure could leave it there without them
    finally:
        os.close(fd)


def _write_file(
    fd: int, pieces: Sequence[_Piece], threads: int, band: int, unit: int, bar: Progress, check: Callable[[], None]
) -> None:
    jobs = _jobs(pieces, band)
    lock, stopped = threading.Lock(), threading.Event()

    def work() -> None:
        workspace = Workspace(band + unit)
        buffer = np.empty(0, np.uint8)
        while not stopped.is_set():
            with lock:
                job = next(jobs, None)
            if job is None:
                return
            try:
                piece, box, others = job
                nbytes = math.prod(box_shape(box)) * piece.tensor.itemsize
                if buffer.nbytes < nbytes:
                    buffer = empty_aligned((nbytes,), np.dtype(np.uint8))
                values = buffer[:nbytes].view(piece.tensor.dtype).reshape(box_shape(box))
                for part in fill_parts(piece.tensor, [box], [values]):
                    part.run(workspace)
                _put(fd, piece, box, values)
                with lock:
                    bar.advance(nbytes, piece.name)
                    check()
                    others.remove(box)
                    if not others:
                        piece.tensor.leaf.release()
            except BaseException:
                stopped.set()
                raise

    with ThreadPoolExecutor(threads) as pool:
        for worker in [pool.submit(work) for _ in range(threads)]:
            worker.result()


def _jobs(pieces: Sequence[_Piece], band: int) -> Iterator[tuple[_Piece, Box, list[Box]]]:
    """Each piece in bands, with the list of those that are still to be done."""
    for piece in pieces:
        boxes = list(slabs(piece.tensor.shape, _elements(piece, band)))
        others = boxes[:]
        for box in boxes:
            yield piece, box, others


def _elements(piece: _Piece, band: int) -> int:
    """Elements of a band; an even number where two are a byte."""
    elements = max(band // piece.tensor.itemsize, 1)
    return max(elements - elements % 2, 2) if piece.packed else elements


def _put(fd: int, piece: _Piece, box: Box, values: np.ndarray) -> None:
    """Writes a box of a piece, run by run."""
    if piece.packed:
        bits = values.view(np.uint8)
        packed = (bits[0::2] & 15) | (bits[1::2] << 4)  # the earlier element in the low bits, as it is read
        _pwrite(fd, packed, piece.start + box[0].start // 2)
        return
    start = piece.start + sum(part.start * stride for part, stride in zip(box, piece.strides, strict=True))
    run, outer = values.itemsize, values.ndim
    while outer and (values.shape[outer - 1] == 1 or piece.strides[outer - 1] == run):
        outer -= 1
        run *= values.shape[outer]
    rows = values.view(np.uint8).reshape(-1, run) if values.ndim else values.reshape(1).view(np.uint8).reshape(1, run)
    for row, index in zip(rows, np.ndindex(*values.shape[:outer]), strict=True):
        _pwrite(fd, row, start + sum(i * stride for i, stride in zip(index, piece.strides, strict=False)))


def _pwrite(fd: int, data: np.ndarray, offset: int) -> None:
    view = memoryview(cast(Any, data))
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


# Orbax ----------------------------------------------------------------------------------------------------------------


def _plain(name: str, tensor: LazyTensor) -> Any:
    """The array that a lazy tensor is all of, as it is."""
    leaf = tensor.leaf
    geometry = geometry_of(fresh_view(leaf.shape, leaf.dtype.itemsize))
    if tensor.steps or tensor.geometry() != geometry:
        raise LazyModelError(f"{name!r}: Orbax saves arrays as they are, so a mapping may only rename them")
    if isinstance(leaf, DeviceLeaf):
        return leaf.array
    return tensor.read()
