"""Lazy tensors: arrays still on disk, on which NumPy's view operations work without reading a byte.

Implements NumPy's protocols on views (`_tensors/tensor_source`), and operations that are not views but stay lazy:
concatenation, and another order of elements. `_materialize/stream` decides where arrays go.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import EllipsisType, NoneType
from typing import Any, cast

import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._tensors.boxes import Box, box_shape, checked_box, clip, intersect, shift, whole_box
from lazymodel._tensors.buffers import Workspace, empty_aligned
from lazymodel._tensors.convert import Arithmetic, Convert, DType, Steps
from lazymodel._tensors.tensor_source import ArrayTensor, CompositeSource, Part, View, fill, fill_parts

READ_WORKSPACE = 64 << 20  # bytes of temporaries when a tensor is read outside of a stream

# Array methods that read the tensor. A list, so that looking for another one (`hasattr(x, "numpy")`) reads nothing.
_READING_METHODS = (
    *("all", "any", "argmax", "argmin", "argsort", "clip", "copy", "cumsum", "dot", "flatten", "item", "max", "mean"),
    *("min", "nonzero", "prod", "repeat", "round", "std", "sum", "take", "tobytes", "tofile", "tolist", "var"),
)


class ConcatenatedTensor(CompositeSource):
    """Tensors joined along an axis. A single one makes a view that is not contiguous C-ordered."""

    def __init__(self, tensors: Sequence[LazyTensor], axis: int) -> None:
        first = tensors[0]
        self.pieces, self.axis = tuple(tensors), axis
        self.name, self.file, self.offset, self.dtype = first.name, first.file, first.offset, first.dtype
        joined = sum(tensor.shape[axis] for tensor in tensors) if first.ndim else 1
        self.shape = tuple(joined if index == axis else extent for index, extent in enumerate(first.shape))
        self.min_scratch_nbytes = max(tensor.source.min_scratch_nbytes for tensor in tensors)

    def places(self) -> Iterator[tuple[LazyTensor, Box]]:
        """Each of the joined tensors, and its region in the whole."""
        start = 0
        for tensor in self.pieces:
            box = list(whole_box(tensor.shape))
            if box:
                box[self.axis] = slice(start, start + tensor.shape[self.axis])
                start = box[self.axis].stop
            yield cast(LazyTensor, tensor), tuple(box)

    def parts(self, boxes: Sequence[Box], outs: Sequence[np.ndarray], steps: Steps) -> list[Part]:
        parts: list[Part] = []
        for tensor, within in self.places():
            wanted = clip(zip(boxes, outs, strict=True), within)
            if wanted:
                own = [shift(common, within) for common, _ in wanted]
                parts += fill_parts(tensor.converted(steps), own, [out for _, out in wanted])
        return parts

    def reads(self, boxes: Sequence[Box]) -> Iterator[tuple[View, list[Box]]]:
        for tensor, within in self.places():
            if common := [found for box in boxes if (found := intersect(box, within)) is not None]:
                yield tensor, [shift(box, within) for box in common]


def _reading(function: Callable[[Any], Any]) -> Callable[[LazyTensor], Any]:
    return lambda tensor: function(tensor.read()[()])


class LazyTensor(View, np.lib.mixins.NDArrayOperatorsMixin):
    """An array still on disk. Checkpoints create it; users do not.

    Basic indexing, `transpose`, `reshape`, `split`, `concatenate`, `stack`, `astype` and the like return another lazy
    tensor and read nothing. So do `+`, `-`, `*` and `/` with a scalar. Other arithmetic and all other NumPy functions
    read this tensor and return an ordinary array.

    Example:
        >>> kernel = lm.open_checkpoint("model.safetensors")["up/kernel"]
        >>> np.split(kernel.T, 2)[0]  # nothing is read
        LazyTensor('up/kernel', float32[128, 64] in model.safetensors)
        >>> kernel[:, :4].read().shape
        (64, 4)
    """

    __slots__ = ()

    # Reading

    def read(self, box: Box | None = None) -> np.ndarray:
        """Reads a box into a fresh, C-contiguous, 64-byte-aligned array that shares memory with no other.

        Args:
            box: One slice per dimension, of step 1 and in range; None reads everything.

        Raises:
            CheckpointError: The file is truncated, changed or unreadable.
        """
        box = whole_box(self.shape) if box is None else checked_box(box, self.shape)
        out = empty_aligned(box_shape(box), self.dtype)
        fill(self, [box], [out], Workspace(READ_WORKSPACE))
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(f"tensor {self.name!r} is in {self.file}: reading it into an array always makes a copy")
        return (self if dtype is None else self.astype(dtype)).read()

    __float__, __int__, __bool__ = _reading(float), _reading(int), _reading(bool)
    __complex__, __index__ = _reading(complex), _reading(operator.index)

    def __getattr__(self, name: str) -> Any:
        if name in _READING_METHODS:
            return getattr(self.read(), name)
        raise AttributeError(f"LazyTensor has no attribute {name!r}; np.asarray(tensor) reads it into an array")

    # Views

    def __getitem__(self, index: Any) -> Any:
        keys = cast("tuple[Any, ...]", index if isinstance(index, tuple) else (index,))
        if not all(isinstance(key, _BASIC) and not isinstance(key, bool) for key in keys):
            return self.read()[index]  # advanced indexing copies in NumPy as well
        # The Ellipsis keeps NumPy from making a scalar, for which it would read the made-up address.
        return self.at(self.addresses[keys if any(key is Ellipsis for key in keys) else (*keys, Ellipsis)])

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
        return self.at(self.addresses.T)

    def swapaxes(self, axis1: int, axis2: int) -> LazyTensor:
        """As `ndarray.swapaxes`."""
        return self.at(self.addresses.swapaxes(axis1, axis2))

    def squeeze(self, axis: Any = None) -> LazyTensor:
        """As `ndarray.squeeze`."""
        return self.at(self.addresses.squeeze(axis))

    def reshape(self, *shape: Any, order: Any = "C", copy: bool | None = None) -> Any:
        """As `ndarray.reshape`. If that is not a view, elements are rearranged while they are read."""
        target = shape[0] if len(shape) == 1 else shape
        if order not in ("C", "A", None) or copy:
            return self.read().reshape(target, order=order)
        try:
            return self.at(np.reshape(self.addresses, target, copy=False))
        except ValueError:
            exact, last = self.before_rounding()
            rebased = LazyTensor(ConcatenatedTensor([exact], 0))
            return rebased.at(np.reshape(rebased.addresses, target, copy=False)).converted(last)

    def ravel(self, order: Any = "C") -> Any:
        """As `ndarray.ravel`; lazy for C order."""
        return self.reshape(-1, order=order)

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> LazyTensor:
        """A cast that is done while reading; bit-equal to `ndarray.astype`."""
        dtype, (exact, _) = np.dtype(dtype), self.before_rounding()
        return self if dtype == self.dtype else exact.converted((Convert(dtype),) if dtype != exact.dtype else ())

    def rounded(self, dtype: Any) -> LazyTensor:
        """A cast that a later one replaces: the elements are rounded once, to the dtype in which they are read."""
        return self if dtype == self.dtype else self.converted((Convert(np.dtype(dtype), replaceable=True),))

    def before_rounding(self) -> tuple[LazyTensor, Steps]:
        """The tensor without what `rounded` added last, and that."""
        last = self.steps[-1:] if self.steps and self.steps[-1].replaceable else ()
        return LazyTensor(self.source, self.addresses, self.steps[: len(self.steps) - len(last)]), last

    def view(self, dtype: Any = None) -> Any:
        """The same bits as another dtype. Reads the tensor if the item size changes."""
        if dtype is None:
            return self
        dtype = np.dtype(dtype)
        return self.converted((Convert(dtype, True),)) if dtype.itemsize == self.itemsize else self.read().view(dtype)

    def __repr__(self) -> str:
        where = f" in {self.file}" if self.file else ""
        return f"LazyTensor({self.name!r}, {self.dtype.name}{list(self.shape)}{where})"

    # NumPy's protocols

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        scalars = sum(isinstance(value, _SCALARS) for value in inputs)
        # All operands except this tensor, which occurs once, are scalars.
        if ufunc in SCALAR_UFUNCS and method == "__call__" and not kwargs and scalars == len(inputs) - 1:
            convert = _arithmetic(ufunc, self.dtype, inputs)
            if convert.dtype.kind != "c":  # complex products may be fused or not, depending on their addresses
                return self.converted((convert,))
        return getattr(ufunc, method)(*_read_all(inputs), **_read_all(kwargs))

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func in _VIEW_FUNCTIONS and args and isinstance(args[0], LazyTensor):
            tensor = args[0]
            result = func(tensor.addresses, *args[1:], **kwargs)
            if isinstance(result, np.ndarray):
                return tensor.at(result)
            return [tensor.at(view) for view in cast("list[np.ndarray]", result)]
        if func in _FUNCTIONS:
            result = _FUNCTIONS[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*_read_all(args), **_read_all(kwargs))


def lazy(array: Any, name: str = "array") -> LazyTensor:
    """A lazy tensor for an array in memory, so that arrays and tensors are handled alike.

    Raises:
        CheckpointError: It has elements that are not numbers, which NumPy would parse or replace: objects, text, dates,
            records, masked elements.
    """
    if isinstance(array, LazyTensor):
        return array
    values = np.asarray(array)
    if values.dtype.kind in "OSUMm" or values.dtype.type is np.void or np.ma.is_masked(array):
        found = "masked elements" if np.ma.is_masked(array) else f"an array of dtype {values.dtype}"
        raise CheckpointError(f"{name!r}: expected numbers, found {found}; convert it to an array of numbers first")
    return LazyTensor(ArrayTensor(values, name))


_BASIC = (NoneType, EllipsisType, slice, int, np.integer)  # of indexing; a bool is a mask
_SCALARS = (bool, int, float, complex, np.generic)
# Arithmetic that rounds each result separately, so it does not depend on the box in which an element is read.
SCALAR_UFUNCS: frozenset[Any] = frozenset((np.add, np.subtract, np.multiply, np.true_divide, np.negative))


def _arithmetic(ufunc: Any, dtype: DType, inputs: tuple[Any, ...]) -> Convert:
    """Arithmetic of one array and scalars as a conversion. Raises the errors that NumPy raises for the array."""
    # Without the array itself, so that no tensor is kept alive.
    compute = Arithmetic(ufunc, tuple(value if isinstance(value, _SCALARS) else None for value in inputs))
    return Convert(compute(np.empty(1, dtype)[:0]).dtype, function=compute)


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
    tensors = [lazy(array) for array in arrays]
    ndim = tensors[0].ndim
    if not -ndim <= axis < ndim or len({tensor.ndim for tensor in tensors}) > 1:
        return NotImplemented  # NumPy raises the error, here and below
    axis = int(axis) % ndim
    if len({(*tensor.shape[:axis], *tensor.shape[axis + 1 :]) for tensor in tensors}) > 1:
        return NotImplemented
    dtype = np.dtype(kwargs.get("dtype") or np.result_type(*(tensor.dtype for tensor in tensors)))
    # If some are known more precisely, all are joined so.
    precise = [exact.dtype for exact, last in (each.before_rounding() for each in tensors) if last]
    exact = dtype if kwargs.get("dtype") else np.result_type(dtype, *precise)
    return LazyTensor(ConcatenatedTensor([tensor.astype(exact) for tensor in tensors], axis)).rounded(dtype)


def _stack(arrays: Any, axis: int = 0, **kwargs: Any) -> Any:
    tensors = [lazy(array) for array in arrays]
    if len({tensor.shape for tensor in tensors}) > 1 or not -tensors[0].ndim <= axis + 1 <= tensors[0].ndim + 1:
        return NotImplemented
    axis = int(axis) % (tensors[0].ndim + 1)
    index = (*(slice(None),) * axis, None)
    return _concatenate([tensor[index] for tensor in tensors], axis, **kwargs)


# NumPy returns views, never copies, from these. Anything added here must do so too.
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


def _copy(a: Any, *_: Any, **__: Any) -> Any:
    return a  # it is read-only


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


def left_over(checkpoint: Mapping[str, Any], used: Iterable[str]) -> list[str]:
    """Names of tensors that are not used, neither by this name nor by another that the checkpoint has for them."""
    aliases: Mapping[str, str] = getattr(checkpoint, "aliases", {})
    taken = {aliases.get(name, name) for name in used}
    return [name for name in checkpoint if aliases.get(name, name) not in taken]
