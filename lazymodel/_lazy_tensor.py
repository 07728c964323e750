"""Lazy tensors: arrays still on disk that take NumPy's view operations without reading a byte.

Responsible for what an array *means*: which elements of which leaf, in which order, converted how; and for planning
how to fill arrays with boxes of it (`fill_parts`). How bytes come off a disk is in `_file_source`, which files there
are in `checkpoints`, and where arrays go in `_stream`. A view is
NumPy's own, on an array of made-up addresses (`_geometry`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, cast

import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._file_source import (
    RUN,
    RUN_NBYTES,
    RUNS,
    STAGING,
    Convert,
    FileSource,
    Workspace,
    assign,
    empty_aligned,
    run_bytes,
    slabs,
    strided,
)
from lazymodel._geometry import (
    Addresses,
    Box,
    Geometry,
    bounding,
    box_shape,
    checked_box,
    cover,
    fresh_view,
    geometry_of,
    intersect,
    normalize,
    repeat,
    run_axis,
    runs_in,
    shift,
)

PART = 32 << 20  # bytes that one part of a fill writes: the unit that threads share out
ONE_PASS_RUN = 64 << 10  # bytes; boxes whose rows are longer are read row by row rather than scattered
READ_WORKSPACE = 64 << 20  # bytes of temporaries when a tensor is read outside of a stream

# Array methods that read the tensor. A list, so that asking for anything else (`hasattr(x, "numpy")`) reads nothing.
_READING_METHODS = (
    *("all", "any", "argmax", "argmin", "argsort", "clip", "copy", "cumsum", "dot", "flatten", "item", "max", "mean"),
    *("min", "nonzero", "prod", "repeat", "round", "std", "sum", "take", "tobytes", "tofile", "tolist", "var"),
)


# Leaves ---------------------------------------------------------------------------------------------------------------


class Leaf:
    """What a lazy tensor is a view of: an array of a shape and dtype that can be read.

    Attributes:
        name: The tensor's name in its checkpoint, for messages.
        file: Path of its file, or an empty string where there is none.
        offset: Byte offset in the file, by which reads are ordered.
        shape: Its shape.
        dtype: Its dtype as stored.
        row_step: Reads should start and end at multiples of this along the first axis (a file's chunking).
        unit_nbytes: Bytes of temporaries that reading even one element needs, such as a chunk's when decompressed.
    """

    name: str
    file: str
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    row_step: int = 1
    unit_nbytes: int = 0

    def fill_box(self, box: Box, out: np.ndarray, steps: tuple[Convert, ...], workspace: Workspace) -> None:
        """Fills `out` with a box of the leaf, converted; temporaries within `workspace.room` or `unit_nbytes`."""
        raise NotImplementedError

    def release(self) -> None:
        """Gives up what it keeps for the next box, which counts in `unit_nbytes`: all that was wanted has been read."""

    def fill(self, geometry: Geometry, out: np.ndarray, steps: tuple[Convert, ...], workspace: Workspace) -> None:
        """Fills `out` with a normalized geometry of the leaf, converted."""
        covering = cover(geometry, self.shape, self.dtype.itemsize)
        if (aligned := covering.align(out)) is not None:
            self.fill_box(covering.box, aligned, steps, workspace)
            return
        shape = box_shape(covering.box)
        # Half of the room: reading the box may need temporaries as well.
        if math.prod(shape) * self.dtype.itemsize > workspace.room // 2 and max(geometry.shape) > 1:
            axis = geometry.shape.index(max(geometry.shape))
            half = geometry.shape[axis] // 2
            for part in (slice(0, half), slice(half, None)):
                index = (*(slice(None),) * axis, part)
                self.fill(geometry.take(axis, part), out[index], steps, workspace)
            return
        with workspace.array(shape, self.dtype) as values:
            self.fill_box(covering.box, values, (), workspace)
            assign(out, strided(values, covering.offset, geometry.shape, covering.strides), steps)


class FileLeaf(Leaf):
    """A C-contiguous tensor in a file, from a byte offset on."""

    def __init__(
        self, name: str, source: FileSource, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self.name, self.source, self.file, self.offset = name, source, source.path, offset
        self.shape, self.dtype = shape, dtype

    def fill(self, geometry: Geometry, out: np.ndarray, steps: tuple[Convert, ...], workspace: Workspace) -> None:
        start = self.offset + geometry.start
        with self._named():
            self.source.read_strided(start, geometry.strides, self.dtype, out, steps, workspace)
            self.source.check_unchanged()

    def fill_runs(self, start: int, outs: Sequence[np.ndarray]) -> None:
        """Fills C-contiguous arrays one after the other, with what begins at a byte of the leaf; no conversion."""
        with self._named():
            self.source.read_into(self.offset + start, *outs)
            self.source.check_unchanged()

    def fill_scattered(self, start: int, runs: np.ndarray) -> None:
        """Fills runs of memory, as `FileSource.read_runs` takes them, from a byte of the leaf on; no conversion."""
        with self._named():
            self.source.read_runs(self.offset + start, runs)
            self.source.check_unchanged()

    @contextlib.contextmanager
    def _named(self) -> Generator[None]:
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"tensor {self.name!r}: {error}") from error


class ArrayLeaf(Leaf):
    """An array in memory."""

    def __init__(self, array: np.ndarray, name: str = "array") -> None:
        self.name, self.file, self.offset, self.array = name, "", 0, array
        self.shape, self.dtype = array.shape, array.dtype

    def fill_box(self, box: Box, out: np.ndarray, steps: tuple[Convert, ...], workspace: Workspace) -> None:
        assign(out, self.array[(*box, ...)], steps)


class DividedLeaf(Leaf):
    """A leaf that is made of other tensors, and divides the work of filling boxes by itself.

    Attributes:
        pieces: What it is made of.
        reads_pieces: Whether reading it reads these. False for what is known once something else was read.
    """

    pieces: tuple[LazyTensor, ...]
    reads_pieces: bool = True

    def fill_box(self, box: Box, out: np.ndarray, steps: tuple[Convert, ...], workspace: Workspace) -> None:
        for part in self.parts([box], [out], steps):
            part.run(workspace)

    def parts(self, boxes: Sequence[Box], outs: Sequence[np.ndarray], steps: tuple[Convert, ...]) -> list[Part]:
        """The parts that fill boxes of it, converted."""
        raise NotImplementedError

    def release(self) -> None:
        for piece in self.pieces:
            piece.leaf.release()


class PiecesLeaf(DividedLeaf):
    """Tensors joined along an axis; with a single one, a fresh C order for a view that is not contiguous."""

    def __init__(self, pieces: Sequence[LazyTensor], axis: int) -> None:
        first = pieces[0]
        self.pieces, self.axis = tuple(pieces), axis
        self.name, self.file, self.offset, self.dtype = first.name, first.file, first.offset, first.dtype
        joined = sum(piece.shape[axis] for piece in pieces) if first.ndim else 1
        self.shape = tuple(joined if index == axis else extent for index, extent in enumerate(first.shape))
        self.unit_nbytes = max(piece.leaf.unit_nbytes for piece in pieces)

    def parts(self, boxes: Sequence[Box], outs: Sequence[np.ndarray], steps: tuple[Convert, ...]) -> list[Part]:
        parts: list[Part] = []
        start = 0
        for piece in self.pieces:
            end = start + piece.shape[self.axis] if self.shape else 1
            within = tuple(slice(start, end) if i == self.axis else slice(0, n) for i, n in enumerate(self.shape))
            piece_boxes: list[Box] = []
            piece_outs: list[np.ndarray] = []
            for box, out in zip(boxes, outs, strict=True):
                common = intersect(box, within)
                if common is not None:
                    piece_boxes.append(shift(common, within))
                    piece_outs.append(out[(*shift(common, box), ...)])
            if piece_boxes:
                parts += fill_parts(piece.converted(steps), piece_boxes, piece_outs)
            start = end
        return parts


# Filling --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A piece of work that fills a part of some arrays.

    Attributes:
        nbytes: Bytes of the arrays that it writes.
        run: Does it, with temporaries from a workspace; parts of one plan may run in any order and in different
            threads.
    """

    nbytes: int
    run: Callable[[Workspace], None]


def prefers_one_pass(tensor: LazyTensor, boxes: Sequence[Box]) -> bool:
    """Whether boxes are better filled together, by reading the region they tile once and scattering it.

    They are when their rows in the file are short: then each box alone would read its neighbours' bytes too.
    """
    if len(boxes) < 2 or not tensor.size:
        return False
    region = bounding(boxes)
    if sum(math.prod(box_shape(box)) for box in boxes) != math.prod(box_shape(region)):
        return False
    for box in boxes:
        geometry = tensor.geometry(box)
        kept = [(abs(s), n) for n, s in zip(geometry.shape, geometry.strides, strict=True) if n > 1 and s]
        kept.sort(reverse=True)
        run = run_bytes(tuple(n for _, n in kept), tuple(s for s, _ in kept), tensor.itemsize_stored)
        if run < ONE_PASS_RUN and run < math.prod(n for _, n in kept) * tensor.itemsize_stored:
            return True
    return False


def fill_parts(tensor: LazyTensor, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> list[Part]:
    """Plans how to fill `outs`, arrays of the tensor's dtype, with boxes of the tensor.

    Args:
        tensor: What to read.
        boxes: Ranges in every dimension, step 1.
        outs: As many arrays, each of its box's shape.
    """
    leaf = tensor.leaf
    if isinstance(leaf, DividedLeaf):
        parts: list[Part] = []
        aligned: list[tuple[Box, np.ndarray]] = []
        for box, out in zip(boxes, outs, strict=True):
            if not out.size:
                continue
            geometry, view, repeated = normalize(tensor.geometry(box), out)
            covering = cover(geometry, leaf.shape, leaf.dtype.itemsize)
            target = None if repeated else covering.align(view)
            if target is None:
                parts += _box_parts(tensor, box, out)
            else:
                aligned.append((covering.box, target))
        if aligned:
            parts += leaf.parts([box for box, _ in aligned], [out for _, out in aligned], tensor.steps)
        return parts
    if prefers_one_pass(tensor, boxes):
        return _scatter_parts(tensor, boxes, outs)
    if isinstance(leaf, FileLeaf) and not tensor.steps:
        return _run_parts(tensor, leaf, boxes, outs)
    return [part for box, out in zip(boxes, outs, strict=True) for part in _box_parts(tensor, box, out)]


def _run_parts(tensor: LazyTensor, leaf: FileLeaf, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> list[Part]:
    """Parts for boxes of a file: those that are one run in it are read together where they are neighbours."""
    parts: list[Part] = []
    runs: list[tuple[int, np.ndarray]] = []
    for box, out in zip(boxes, outs, strict=True):
        if not out.size:
            continue
        geometry, view, repeated = normalize(tensor.geometry(box), out)
        contiguous = run_bytes(geometry.shape, geometry.strides, tensor.itemsize) == view.nbytes
        if not contiguous or repeated or not view.flags.c_contiguous:
            parts += _box_parts(tensor, box, out)
            continue
        flat, step = view.reshape(-1), max(PART // tensor.itemsize, 1)
        for first in range(0, flat.size, step):
            runs.append((geometry.start + first * tensor.itemsize, flat[first : first + step]))
    runs.sort(key=lambda run: run[0])
    group: list[np.ndarray] = []
    start = end = 0
    for position, out in runs:
        if group and (position != end or end + out.nbytes - start > PART):
            parts.append(Part(end - start, functools.partial(_fill_runs, leaf, start, group)))
            group = []
        if not group:
            start = end = position
        group.append(out)
        end += out.nbytes
    if group:
        parts.append(Part(end - start, functools.partial(_fill_runs, leaf, start, group)))
    return parts


def _fill_runs(leaf: FileLeaf, start: int, outs: Sequence[np.ndarray], workspace: Workspace) -> None:
    leaf.fill_runs(start, outs)


def _box_parts(tensor: LazyTensor, box: Box, out: np.ndarray) -> list[Part]:
    """Parts that each read a range of a box along its outermost axis in the file."""
    if not out.size:
        return []
    piece = tensor[box]
    order: list[int] = piece.file_order()
    piece, view = piece.transpose(order), out.transpose(order)
    parts: list[Part] = []
    for part in slabs(piece.shape, max(PART // out.itemsize, 1), _row_step(piece)):
        target = view[(*part, ...)]
        parts.append(Part(target.nbytes, functools.partial(_fill_box, piece, part, target)))
    return parts


def _fill_box(tensor: LazyTensor, box: Box, out: np.ndarray, workspace: Workspace) -> None:
    geometry, view, repeated = normalize(tensor.geometry(box), out)
    tensor.leaf.fill(geometry, view, tensor.steps, workspace)
    repeat(out, repeated)


def _scatter_parts(tensor: LazyTensor, boxes: Sequence[Box], outs: Sequence[np.ndarray]) -> list[Part]:
    """Parts that each read a range of the region that the boxes tile, and scatter it over them."""
    region = bounding(boxes)
    whole = tensor[region]
    order: list[int] = whole.file_order()
    whole = whole.transpose(order)
    targets: list[tuple[Box, np.ndarray]] = []
    for box, out in zip(boxes, outs, strict=True):
        relative = shift(box, region)
        ordered: Box = tuple(relative[axis] for axis in order)
        targets.append((ordered, out.transpose(order)))
    # As stored: the conversion is part of the scattering.
    stored = LazyTensor(whole.leaf, whole._view)
    step = _row_step(stored)
    parts: list[Part] = []
    for part in slabs(whole.shape, max(PART // whole.dtype.itemsize, 1), step):

        def run(workspace: Workspace, part: Box = part) -> None:
            if _copy_runs(whole, part, targets, workspace) or _scatter_runs(
                stored, part, targets, whole.steps, workspace
            ):
                return
            room = max(workspace.room // 2 if tensor.leaf.unit_nbytes else workspace.room, 1)
            for piece in slabs(box_shape(part), max(min(STAGING, room) // stored.dtype.itemsize, 1), step):
                slab = tuple(slice(p.start + q.start, p.start + q.stop) for p, q in zip(part, piece, strict=True))
                with workspace.array(box_shape(slab), stored.dtype) as values:
                    _fill_box(stored, slab, values, workspace)
                    for box, out in targets:
                        common = intersect(box, slab)
                        if common is not None:
                            assign(out[shift(common, box)], values[shift(common, slab)], whole.steps)

        parts.append(Part(math.prod(box_shape(part)) * whole.dtype.itemsize, run))
    return parts


def _copy_runs(tensor: LazyTensor, part: Box, targets: Sequence[tuple[Box, np.ndarray]], workspace: Workspace) -> bool:
    """Copies a part of a file out of a map of it, in long runs, to one target after the other; else returns False."""
    leaf = tensor.leaf
    if not isinstance(leaf, FileLeaf) or not leaf.source.plain:
        return False
    wanted = [(common, out[shift(common, box)]) for box, out in targets if (common := intersect(box, part))]
    runs = [math.prod(out.shape[run_axis(part, common, out) :]) for common, out in wanted]
    if min(runs) * tensor.itemsize_stored < RUN:
        return False
    with leaf.source.mapped() as memory:
        if memory is None:
            return False
    for common, out in wanted:
        _fill_box(tensor, common, out, workspace)
    return True


def _scatter_runs(
    stored: LazyTensor,
    part: Box,
    targets: Sequence[tuple[Box, np.ndarray]],
    steps: tuple[Convert, ...],
    workspace: Workspace,
) -> bool:
    """Lets the kernel scatter a part that is one range of a file, unconverted and in long runs; else returns False."""
    leaf = stored.leaf
    if steps or not isinstance(leaf, FileLeaf) or not leaf.source.scatters or workspace.room < RUNS * RUN_NBYTES:
        return False
    wanted = [(common, out[shift(common, box)]) for box, out in targets if (common := intersect(box, part))]
    lengths = [math.prod(values.shape[run_axis(part, common, values) :]) for common, values in wanted]
    if min(lengths) * stored.itemsize_stored < RUN or not stored[part]._view.flags.c_contiguous:
        return False
    for slab in slabs(box_shape(part), RUNS * min(lengths)):
        piece = tuple(slice(p.start + q.start, p.start + q.stop) for p, q in zip(part, slab, strict=True))
        found = [
            runs_in(piece, common, values[shift(common, box)])
            for box, values in wanted
            if (common := intersect(box, piece))
        ]
        starts, runs = zip(*found, strict=True)
        # Shards of one axis take turns, so their runs need no sorting; the last ones of an uneven split do.
        join = np.stack if len({each.size for each in starts}) == 1 else np.concatenate
        axis = 1 if join is np.stack else 0
        starts, runs = join(starts, axis).reshape(-1), join(runs, axis).reshape(-1, 2)
        if (starts[1:] < starts[:-1]).any():
            runs = runs[np.argsort(starts, kind="stable")]
        leaf.fill_scattered(stored[piece].geometry().start, runs)
    return True


def _row_step(tensor: LazyTensor) -> int:
    """The leaf's `row_step` where the tensor's first axis is the leaf's, whole rows, from its first row on; else 1."""
    leaf = tensor.leaf
    if leaf.row_step == 1 or not tensor.ndim:
        return 1
    geometry = tensor.geometry()
    row = math.prod(leaf.shape[1:]) * leaf.dtype.itemsize
    return leaf.row_step if geometry.strides[0] == row and geometry.start // row % leaf.row_step == 0 else 1


# The duck array -------------------------------------------------------------------------------------------------------


class LazyTensor(np.lib.mixins.NDArrayOperatorsMixin):
    """An array still on disk. Made by a checkpoint, not by hand.

    Basic indexing, `transpose`, `reshape`, `split`, `concatenate`, `stack`, `astype` and the like return another lazy
    tensor and read nothing; so do `+`, `-`, `*` and `/` with a scalar. Other arithmetic and every other NumPy function
    read this one tensor and return an ordinary array.

    Attributes:
        leaf: What it is a view of.
        steps: Conversions applied to what is read.
    """

    __slots__ = ("_view", "dtype", "leaf", "steps")

    def __init__(self, leaf: Leaf, view: np.ndarray | None = None, steps: tuple[Convert, ...] = ()) -> None:
        if view is None:
            view = fresh_view(leaf.shape, leaf.dtype.itemsize)
            if not steps and not leaf.dtype.isnative:
                steps = (Convert(leaf.dtype.newbyteorder("=")),)
        self.leaf, self._view, self.steps = leaf, view.view(Addresses), steps
        self.dtype: np.dtype[Any] = steps[-1].dtype if steps else leaf.dtype

    @property
    def name(self) -> str:
        """Its name in its checkpoint."""
        return self.leaf.name

    @property
    def file(self) -> str:
        """Path of the file that it is in (of the first piece, for a concatenation); empty for an array in memory."""
        return self.leaf.file

    @property
    def offset(self) -> int:
        """Byte offset in the file of its earliest element."""
        geometry = geometry_of(self._view)
        back = sum((n - 1) * s for n, s in zip(geometry.shape, geometry.strides, strict=True) if s < 0 and n)
        return self.leaf.offset + (geometry.start + back if self.size and isinstance(self.leaf, FileLeaf) else 0)

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of its dimensions."""
        return self._view.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self._view.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._view.size

    @property
    def itemsize(self) -> int:
        """Bytes of one element, of `dtype`."""
        return self.dtype.itemsize

    @property
    def itemsize_stored(self) -> int:
        """Bytes of one element in the file."""
        return self._view.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, of `dtype`."""
        return self.size * self.dtype.itemsize

    def geometry(self, box: Box | None = None) -> Geometry:
        """Start and strides, in bytes of the leaf, of a box or of all."""
        return geometry_of(self._view if box is None else self._view[(*box, ...)])

    def file_order(self) -> list[int]:
        """Its axes by descending stride: the order in which the file has them; repeated ones last."""
        return sorted(range(self.ndim), key=lambda axis: -abs(self._view.strides[axis]))

    def converted(self, steps: tuple[Convert, ...]) -> LazyTensor:
        """The same elements with further conversions."""
        return LazyTensor(self.leaf, self._view, self.steps + steps) if steps else self

    def _with(self, view: np.ndarray) -> LazyTensor:
        return LazyTensor(self.leaf, view, self.steps)

    # Reading

    def read(self, box: Box | None = None) -> np.ndarray:
        """Reads a box into a fresh, C-contiguous, 64-byte-aligned array that shares memory with nothing.

        Args:
            box: One slice a dimension, of step 1 and in range; None reads everything.

        Raises:
            CheckpointError: The file is truncated, changed or unreadable.
        """
        whole = tuple(slice(0, extent) for extent in self.shape)
        box = whole if box is None else checked_box(box, self.shape)
        out = empty_aligned(box_shape(box), self.dtype)
        workspace = Workspace(READ_WORKSPACE)
        for part in fill_parts(self, [box], [out]):
            part.run(workspace)
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(f"tensor {self.name!r} is in {self.file}: an array of it is always a copy")
        return (self if dtype is None else self.astype(dtype)).read()

    def __float__(self) -> float:
        return float(self.read())

    def __int__(self) -> int:
        return int(self.read())

    def __bool__(self) -> bool:
        return bool(self.read())

    def __complex__(self) -> complex:
        return complex(self.read())

    def __index__(self) -> int:
        return operator.index(self.read()[()])

    def __getattr__(self, name: str) -> Any:
        if name in _READING_METHODS:
            return getattr(self.read(), name)
        raise AttributeError(f"LazyTensor has no attribute {name!r}; np.asarray(tensor) reads it into an array")

    # Views

    def __getitem__(self, index: Any) -> Any:
        keys = cast("tuple[Any, ...]", index if isinstance(index, tuple) else (index,))
        if not all(_is_basic(key) for key in keys):
            return self.read()[index]  # advanced indexing copies in NumPy as well
        # The Ellipsis keeps NumPy from making a scalar, for which it would read the made-up address.
        return self._with(self._view[keys if any(key is Ellipsis for key in keys) else (*keys, Ellipsis)])

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("len() of a tensor without dimensions")
        return self.shape[0]

    def __iter__(self) -> Iterator[LazyTensor]:
        if not self.ndim:
            raise TypeError("iteration over a tensor without dimensions")
        return (self[index] for index in range(self.shape[0]))

    @property
    def T(self) -> LazyTensor:
        """All dimensions reversed."""
        return self._with(self._view.T)

    def transpose(self, *axes: Any) -> LazyTensor:
        """As `ndarray.transpose`."""
        return self._with(self._view.transpose(*axes))

    def swapaxes(self, axis1: int, axis2: int) -> LazyTensor:
        """As `ndarray.swapaxes`."""
        return self._with(self._view.swapaxes(axis1, axis2))

    def squeeze(self, axis: Any = None) -> LazyTensor:
        """As `ndarray.squeeze`."""
        return self._with(self._view.squeeze(axis))

    def reshape(self, *shape: Any, order: Any = "C", copy: bool | None = None) -> Any:
        """As `ndarray.reshape`; where that is not a view, elements are rearranged while they are read."""
        target = shape[0] if len(shape) == 1 else shape
        if order not in ("C", "A", None) or copy:
            return self.read().reshape(target, order=order)
        try:
            return self._with(np.reshape(self._view, target, copy=False))
        except ValueError:
            rebased = LazyTensor(PiecesLeaf([self], 0))
            return rebased._with(np.reshape(rebased._view, target, copy=False))

    def ravel(self, order: Any = "C") -> Any:
        """As `ndarray.ravel`, lazily for C order."""
        return self.reshape(-1, order=order)

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> LazyTensor:
        """A cast, carried out while reading; bit-equal to `ndarray.astype`."""
        dtype = np.dtype(dtype)
        return self if dtype == self.dtype else self.converted((Convert(dtype),))

    def view(self, dtype: Any = None) -> Any:
        """The same bits as another dtype; read where the item size changes."""
        if dtype is None:
            return self
        dtype = np.dtype(dtype)
        return self.converted((Convert(dtype, True),)) if dtype.itemsize == self.itemsize else self.read().view(dtype)

    def __repr__(self) -> str:
        where = f" in {self.file}" if self.file else ""
        return f"LazyTensor({self.name!r}, {self.dtype.name}{list(self.shape)}{where})"

    # NumPy's protocols

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if ufunc in _SCALAR_UFUNCS and method == "__call__" and not kwargs and self._alone_among(inputs):
            convert = _arithmetic(ufunc, self.dtype, inputs)
            if convert.dtype.kind != "c":  # products of these may be fused or not, depending on where they lie
                return self.converted((convert,))
        return getattr(ufunc, method)(*_read_all(inputs), **_read_all(kwargs))

    def _alone_among(self, inputs: tuple[Any, ...]) -> bool:
        """Whether all operands but this one, which occurs once, are scalars."""
        others = [value for value in inputs if value is not self]
        return len(others) == len(inputs) - 1 and all(isinstance(value, _SCALARS) for value in others)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func in _VIEW_FUNCTIONS and args and isinstance(args[0], LazyTensor):
            tensor = args[0]
            result = func(tensor._view, *args[1:], **kwargs)
            if isinstance(result, np.ndarray):
                return tensor._with(result)
            return [tensor._with(view) for view in cast("list[np.ndarray]", result)]
        if func in _FUNCTIONS:
            result = _FUNCTIONS[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*_read_all(args), **_read_all(kwargs))


def lazy(array: Any, name: str = "array") -> LazyTensor:
    """A lazy tensor over an array in memory, so that arrays and tensors go one way."""
    return array if isinstance(array, LazyTensor) else LazyTensor(ArrayLeaf(np.asarray(array), name))


_SCALARS = (bool, int, float, complex, np.generic)
# Arithmetic whose every result is rounded by itself, and so does not depend on which box an element is read in.
_SCALAR_UFUNCS: frozenset[Any] = frozenset((np.add, np.subtract, np.multiply, np.true_divide, np.negative))


def _arithmetic(ufunc: Any, dtype: np.dtype[Any], inputs: tuple[Any, ...]) -> Convert:
    """Arithmetic of one array of a dtype and scalars as a conversion; NumPy raises what it would for the array."""

    def compute(values: np.ndarray) -> np.ndarray:
        return np.asarray(ufunc(*(value if isinstance(value, _SCALARS) else values for value in inputs)))

    inputs = tuple(value if isinstance(value, _SCALARS) else None for value in inputs)  # keeps no tensor alive
    return Convert(compute(np.empty(1, dtype)[:0]).dtype, function=compute)


def _is_basic(key: Any) -> bool:
    if key is None or key is Ellipsis or isinstance(key, slice):
        return True
    return isinstance(key, (int, np.integer)) and not isinstance(key, bool)


def _read_all(value: Any) -> Any:
    """A nested argument with every lazy tensor in it read."""
    if isinstance(value, LazyTensor):
        return value.read()
    if isinstance(value, dict):
        return {key: _read_all(item) for key, item in cast("dict[Any, Any]", value).items()}
    if type(value) in (list, tuple):
        items = [_read_all(item) for item in cast("Sequence[Any]", value)]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def _concatenate(arrays: Any, axis: Any = 0, **kwargs: Any) -> Any:
    if axis is None or set(kwargs) - {"dtype", "casting"}:
        return NotImplemented
    pieces = [lazy(array) for array in arrays]
    ndim = pieces[0].ndim
    if not -ndim <= axis < ndim or len({piece.ndim for piece in pieces}) > 1:
        return NotImplemented  # NumPy words the error, here and below
    axis = int(axis) % ndim
    if len({(*piece.shape[:axis], *piece.shape[axis + 1 :]) for piece in pieces}) > 1:
        return NotImplemented
    dtype = kwargs.get("dtype") or np.result_type(*(piece.dtype for piece in pieces))
    return LazyTensor(PiecesLeaf([piece.astype(dtype) for piece in pieces], axis))


def _stack(arrays: Any, axis: int = 0, **kwargs: Any) -> Any:
    pieces = [lazy(array) for array in arrays]
    if len({piece.shape for piece in pieces}) > 1 or not -pieces[0].ndim <= axis + 1 <= pieces[0].ndim + 1:
        return NotImplemented
    axis = int(axis) % (pieces[0].ndim + 1)
    index = (*(slice(None),) * axis, None)
    return _concatenate([piece[index] for piece in pieces], axis, **kwargs)


# NumPy answers these with views, never copies; anything added here must as well.
_VIEW_FUNCTIONS: frozenset[Any] = frozenset(
    (
        *(np.transpose, np.swapaxes, np.moveaxis, np.rollaxis, np.squeeze, np.expand_dims, np.broadcast_to),
        *(np.split, np.array_split, np.hsplit, np.vsplit, np.dsplit, np.flip, np.fliplr, np.flipud),
        *(np.atleast_1d, np.atleast_2d, np.atleast_3d),
    )
)


def _reshape(a: Any, shape: Any, order: Any = "C", *, copy: bool | None = None) -> Any:
    return lazy(a).reshape(shape, order=order, copy=copy)


def _ravel(a: Any, order: Any = "C") -> Any:
    return lazy(a).ravel(order)


def _copy(a: Any, order: Any = "K", subok: bool = False) -> Any:
    return a  # nothing can write into it


def _size(a: Any, axis: Any = None) -> int:
    return a.size if axis is None else NotImplemented


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.reshape: _reshape,
    np.ravel: _ravel,
    np.concatenate: _concatenate,
    np.stack: _stack,
    np.copy: _copy,
    np.shape: operator.attrgetter("shape"),
    np.ndim: operator.attrgetter("ndim"),
    np.size: _size,
}
