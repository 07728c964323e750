"""Changes to the layers of a recorded model: LoRA pairs, enabled as KerasHub does, and Keras' own `Model.quantize`.

Keras' functions compute on lazy tensors, for one chunk of a kernel at a time, and its operations that lay tensors out
return views of them.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import keras
import numpy as np

from lazymodel import AbstractVariable, CheckpointError, LazyModelError, LazyTensor
from lazymodel._abstract.framework import Conversion, Framework, ModelSpec
from lazymodel._abstract.pairs import RANK, LoraPair
from lazymodel._abstract.variable import matched_paths
from lazymodel._mapping.initial import initial_value
from lazymodel._mapping.resolve import lazy_values
from lazymodel._mapping.source import MappedCheckpoint, described
from lazymodel._programs.programs import InitRecipe
from lazymodel._sharding.follow import along
from lazymodel._show.text import closest, listed
from lazymodel._tensors.casting import converted
from lazymodel._tensors.decoded import Computation, ComputedTensor, Output
from lazymodel._tensors.lazy import lazy
from lazymodel._tensors.tensor_source import View
from lazymodel._trace.errors import on_host
from lazymodel_keras import _upstream
from lazymodel_keras._record.recording import quick_collections

# Keras' layers in these modes have no LoRA, or not before calibration.
_WITHOUT_LORA = ("float8", "gptq", "awq")


def _refuse_inputs(inputs: Any) -> None:
    if inputs is not None:
        raise LazyModelError("inputs are for NNX modules, which Qwix calls; Keras knows the layers of its models")


def check_lora(rank: Any, targets: str | None, inputs: Any = None) -> None:
    """Raises LazyModelError for arguments that are invalid for any model."""
    _refuse_inputs(inputs)
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise LazyModelError(f"the rank of a LoRA is a positive integer; got {rank!r}")
    if targets is not None:
        matched_paths(targets, (), LazyModelError, "targets")


def add_lora(model: Any, rank: int, targets: str | None) -> None:
    """Enables LoRA on the target layers, like `Backbone.enable_lora`; raises as `enable_lora` above."""
    backbone = getattr(model, "backbone", None) or model
    layers = [layer for layer in _upstream.flat_layers(backbone, include_self=False) if layer.weights]
    able = [index for index, layer in enumerate(layers) if hasattr(layer, "enable_lora")]
    if targets is None:
        if not hasattr(backbone, "default_lora_layer_names"):
            raise LazyModelError(f"{model.name} is no KerasHub model and has no usual LoRA targets; say which")
        names = backbone.default_lora_layer_names()
        selected = [index for index in able if layers[index].name in names]
        expected = f"layers named {', '.join(map(repr, names))}"
    else:
        selected = [index for index in able if any(re.fullmatch(targets, v.path) for v in layers[index].weights)]
        paths = [variable.path for index in able for variable in layers[index].weights]
        expected = f"variables that match {targets!r}{closest(targets, paths)}"
    if not selected:
        raise LazyModelError(f"{model.name} has no LoRA targets: expected {expected}. Set the targets to a path regex")
    for layer in (layers[index] for index in selected):
        if (mode := layer.quantization_mode) in _WITHOUT_LORA:
            raise LazyModelError(f"{layer.path}: Keras has no LoRA for layers quantized with {mode!r}")
    try:
        if targets is None:
            backbone.enable_lora(rank)
            return
        # The same, with layers by position instead of by name.
        backbone.trainable = True
        for layer in _upstream.flat_layers(backbone, include_self=False):
            layer.trainable = False
        for index in selected:
            layers[index].trainable = True
            layers[index].enable_lora(rank)
        _upstream.set_lora_layers(backbone, selected, rank)
    except (ValueError, NotImplementedError) as error:  # a constraint on the kernel, or LoRA already
        raise LazyModelError(f"LoRA cannot be enabled on {model.name}: {error}") from error


def lora_pairs(result: Any, paths: Mapping[int, str]) -> list[LoraPair]:
    """The LoRA pairs of the layers of a Keras object, or of several; `paths` are those of variables by `id`."""
    found: list[LoraPair] = []
    for layer in _layers(result):
        if getattr(layer, "lora_enabled", False) and (variables := _upstream.lora_variables(layer)) is not None:
            weight, a, b = variables
            shape, last = (*a.shape[:-1], b.shape[-1]), len(a.shape) - 1  # int4 kernels are packed
            axes = (*range(last), RANK), (RANK, last)
            scale = layer.lora_alpha / layer.lora_rank
            tied = getattr(layer, "tie_weights", False)
            found.append(LoraPair(paths[id(weight)], paths[id(a)], paths[id(b)], shape, (axes,), scale, tied))
    places = {path: place for place, path in enumerate(paths.values())}
    return sorted(found, key=lambda pair: places[pair.base])


def _layers(result: Any) -> Iterable[Any]:
    """The layers of a Keras object, or of several, each once."""
    objects = result if isinstance(result, list | tuple) else (result,)
    roots = [each for each in objects if isinstance(each, keras.layers.Layer)]
    return {id(layer): layer for root in roots for layer in _upstream.flat_layers(root)}.values()


def quantized_counts(result: Any) -> dict[int, int]:
    """`id` of each variable that is there because a layer is quantized → the parameters that it stands for.

    A kernel stands for what it is computed from, however it is packed, and scales and the like for nothing.
    """
    layers = [layer for layer in _layers(result) if layer.built and layer.quantization_mode is not None]
    return {id(variable): size for layer in layers for variable, size in _upstream.quantized_sizes(layer)}


def held_lazily(value: Any) -> LazyTensor | None:
    """The value as a lazy tensor, also of a Keras variable that holds or will hold one; None for everything else.

    An abstract variable will hold the value assigned to it while it was recorded, or its initial value.
    """
    if isinstance(value, keras.Variable):
        variable, value = value, _upstream.value(value)
        recording = _upstream.active()
        if value is None and recording is not None and (recorded := recording.of(variable)) is not None:
            path, dtype = variable.path, jax.numpy.dtype(_upstream.own_dtype(variable))
            if recorded.value is not None:
                return recording.as_assigned(path, recorded.value, dtype)
            source, dtype = recorded.initial.source(path, tuple(variable.shape), dtype)
            recipes, sources = ((source,), {}) if isinstance(source, InitRecipe) else ((), {path: source})
            described = AbstractVariable(path, tuple(variable.shape), dtype)
            return lazy_values(ModelSpec({path: described}, recipes, sources, Framework(dict)))[path]
    return value if isinstance(value, LazyTensor) else None


lazy_operations = _upstream.SharedPatches()


def _viewing(name: str) -> Callable[..., Any]:
    """An operation of `keras.ops` that returns views of lazy tensors, and of variables that hold one, unread."""

    def operation(_: Any, original: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        several = isinstance(x, list | tuple)
        held = [held_lazily(each) for each in (x if several else [x])]
        if any(tensor is None for tensor in held):
            return original(x, *args, **kwargs)
        # NumPy has other names for the one further argument.
        further = [tuple(arg) if isinstance(arg, list) else arg for arg in (*args, *kwargs.values())]
        return getattr(np, name)(held if several else held[0], *further)

    return operation


for _name in ("reshape", "transpose", "squeeze", "expand_dims", "concatenate"):
    for _module in (keras.ops, _upstream.OPS):
        lazy_operations.replacing(_module, _name)(_viewing(_name))


Filters: TypeAlias = "str | Sequence[str] | Callable[[Any], bool] | None"

_MODES = ("int8", "int4", "float8")


def check_quantization(how: Any, inputs: Any = None) -> None:
    """Raises LazyModelError if `how` is not a quantization that needs only the weights."""
    _refuse_inputs(inputs)
    mode = how.mode if isinstance(how, keras.quantizers.QuantizationConfig) else how
    if mode in ("gptq", "awq"):
        raise LazyModelError(
            f"{mode!r} calibrates with data that is run through the model, so it cannot be done while "
            f"loading: load the model, then call model.quantize({mode!r}, config=…)"
        )
    if mode not in _MODES:
        raise LazyModelError(
            f"quantize takes {', '.join(map(repr, _MODES))} or a keras.quantizers.QuantizationConfig; got {how!r}"
        )


def quantize(model: Any, how: Any, filters: Filters = None) -> None:
    """Does what `model.quantize` does, for a model that is being recorded; `check_quantization` must accept `how`.

    Raises:
        LazyModelError: A layer is quantized already, or has a LoRA pair, or Keras raises.
    """
    quantized = [layer for layer in _upstream.flat_layers(model) if layer.quantization_mode is not None]
    if quantized:
        raise LazyModelError(
            f"{model.name} is quantized already: layer {quantized[0].path or quantized[0].name} is "
            f"{quantized[0].quantization_mode}"
        )
    adapted = [layer for layer in _upstream.flat_layers(model) if getattr(layer, "lora_enabled", False)]
    if adapted:
        raise LazyModelError(f"{model.name} has LoRA pairs already, at {adapted[0].path}; quantize comes before lora")
    options: dict[str, Any] = {"mode": how} if isinstance(how, str) else {"config": how}
    if "verbose" in inspect.signature(model.quantize).parameters:  # from Keras 3.16 on, it prints a report
        options["verbose"] = False
    try:
        with _patches.needed(), lazy_operations.needed(), quick_collections():
            model.quantize(**options, filters=filters)
    except (ValueError, TypeError) as error:
        raise LazyModelError(f"Keras cannot quantize {model.name} with {how!r}: {error}") from error
    if not any(layer.quantization_mode is not None for layer in _upstream.flat_layers(model)):
        raise LazyModelError(
            f"quantize({how!r}) changes nothing: none of the layers of {model.name}"
            f"{'' if filters is None else ' that the filters let through'} is one that Keras quantizes"
        )


# Keras' quantization functions ---------------------------------------------------------------------------------------

_PARTS = tuple(map(operator.itemgetter, range(3)))  # numbers, scales, zero points


@dataclasses.dataclass(frozen=True)
class _Quantizer:
    """A quantization function of Keras with its arguments: called for chunks on the host, traced for devices."""

    original: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __call__(self, values: np.ndarray) -> tuple[np.ndarray, ...]:
        return _on_host(self.original, values, *self.arguments)

    def traced(self, values: jax.Array) -> tuple[jax.Array, ...]:
        """Keras' own function for devices, in float32, where its rounding does not depend on what XLA fuses."""
        wide = values.astype(jnp.promote_types(values.dtype, jnp.float32))
        numbers, scale, *zero = self.original(wide, *self.arguments[:-1], to_numpy=False)
        return numbers, scale.astype(values.dtype), *zero


@dataclasses.dataclass(frozen=True)
class _Packed:
    """Packs pairs of numbers along an axis, as Keras does."""

    original: Callable[..., Any]
    axis: int
    dtype: str

    def __call__(self, found: tuple[Any, ...]) -> Any:
        numbers = found[0]
        if isinstance(numbers, np.ndarray):
            return _on_host(lambda values: self.original(values, self.axis, self.dtype)[:1], numbers)[0]
        ends = [(0, extent % 2 if axis == self.axis else 0) for axis, extent in enumerate(numbers.shape)]
        low, high = (jax.lax.slice_in_dim(jnp.pad(numbers, ends), n, None, 2, self.axis) for n in range(2))
        return ((high << 4) | (low & 15)).astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class _Requantized:
    """Makes the variables of a quantized layer from a weight on devices; equal ones are one program."""

    quantizer: _Quantizer
    shape: tuple[int, ...]  # of the matrix that is quantized
    transposed: bool  # True if it is the weight transposed, not only reshaped
    parts: tuple[tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...], Any], ...]  # output, shape, order, dtype

    def __call__(self, weight: jax.Array) -> list[jax.Array]:
        found = self.quantizer.traced(weight.T if self.transposed else weight.reshape(self.shape))
        return [
            of(found).reshape([shape[axis] for axis in order]).transpose(np.argsort(order)).astype(dtype)
            for of, shape, order, dtype in self.parts
        ]


def conversions(model: ModelSpec, weights: Mapping[str, Any]) -> list[Conversion]:
    """How the variables of a quantized model are computed from weights, path → its value before, as far as known."""
    found: list[Conversion] = []
    for computation, paths, path in _quantizations(model, weights):
        weight, given = weights[path], computation.source
        transposed = _is_transposed(weight, given)
        parts: list[Any] = []
        for part in paths:
            view: Any = model.sources[part]
            parts.append((view.source.output.of, view.shape, tuple(view.file_order()), model[part].dtype))
        function = _Requantized(cast(_Quantizer, computation.function), given.shape, transposed, tuple(parts))
        # Columns of a packed matrix belong to the first axis of the weight after those of its rows.
        rows = [n for n in range(1, weight.ndim) if math.prod(weight.shape[:n]) == given.shape[0]]
        dims: list[int | None] = [None] * weight.ndim
        if weight.ndim == len(model[path].shape):
            dims = [*range(weight.ndim)]
        elif rows:
            dims[0], dims[rows[0]] = 0, 1
        sharding = along(model[path].sharding, dims, weight.shape)
        described = dataclasses.replace(model[path], shape=weight.shape, dtype=weight.dtype, sharding=sharding)
        found.append(Conversion(described, tuple(paths), function))
    return found


def quantized_checkpoint(
    model: ModelSpec, weights: Mapping[str, Any], added: Collection[str], checkpoint: Mapping[str, Any]
) -> Mapping[str, Any]:
    """A checkpoint with what a quantized model has in place of each weight, computed while it is read.

    `weights` are the values from which the model's own are computed, and `added` the variables that it got. Raises
    CheckpointError for numbers without their scales.
    """
    found, computed = dict[str, LazyTensor](), set[str]()
    for computation, paths, path in _quantizations(model, weights):
        computed.update(paths)
        given = [each for each in paths if each in checkpoint]
        if not given or len(given) == len(paths):
            continue
        weight, value = weights[path], lazy(checkpoint[path], path) if path in checkpoint else None
        if value is None or not jnp.issubdtype(value.dtype, jnp.floating):
            kind = "" if value is None else f" ({value.dtype.name})"
            left = listed(repr(each) for each in paths if each not in given)
            raise CheckpointError(
                f"{described(checkpoint)} has {given[0]!r}{kind}, and not {left}, without which quantized numbers mean "
                f"nothing: expected all of them, or {path!r} as floating-point numbers, which are quantized"
            )
        if value.shape != weight.shape:
            continue  # the model's error
        value, matrix = converted(value, weight.dtype), computation.source
        source = value.T if _is_transposed(weight, matrix) else value.reshape(matrix.shape)
        new = Computation(source, computation.function, computation.steps)
        for part in paths:
            view: Any = model.sources[part]
            found[part] = LazyTensor(new.output(view.source.output).source, view.addresses, view.steps)
    if not any(path in checkpoint for path in added):
        # Not computed from weights: the places of groups, and the histories of float8.
        found |= {path: initial_value(model, path) for path in model if path in added and path not in computed}
    return MappedCheckpoint({**checkpoint, **found}, checkpoint) if found else checkpoint


def _quantizations(model: ModelSpec, weights: Mapping[str, Any]) -> Iterator[tuple[Computation, list[str], str]]:
    """Keras' computations in a model's values: the variables that one makes, and the one that was the weight."""
    together: dict[Computation, list[str]] = {}
    for path, value in model.sources.items():
        source = value.source if isinstance(value, LazyTensor) else None
        if isinstance(source, ComputedTensor) and isinstance(source.computation.function, _Quantizer):
            together.setdefault(source.computation, []).append(path)
    for computation, paths in together.items():
        if (path := next((path for path in paths if path in weights), None)) is not None:
            yield computation, paths, path


def _is_transposed(weight: View, given: View) -> bool:
    """Returns True if a matrix that is quantized is a weight transposed, not only reshaped."""
    return weight.ndim == 2 and weight.T.geometry() == given.geometry()


def _chunked(outputs: Callable[..., tuple[tuple[int, ...], list[Output]]]) -> Callable[..., Any]:
    """A replacement for a quantization function of Keras: for a lazy tensor, its results are computed in chunks.

    `outputs` takes the tensor, the function's second argument and its dtype; it returns the units of chunks, and the
    results.
    """

    def quantizer(_: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(original).bind(*args, **kwargs)
        bound.apply_defaults()
        inputs, *rest = bound.args
        tensor = held_lazily(inputs)
        if tensor is None or not bound.arguments["to_numpy"]:
            return original(*args, **kwargs)
        steps, results = outputs(tensor, rest[0], bound.arguments["dtype"])
        rest = [tuple(each) if isinstance(each, list) else each for each in rest]
        computation = Computation(tensor, _Quantizer(original, tuple(rest)), steps)
        return tuple(map(computation.output, results))

    return quantizer


def _over_axes(tensor: LazyTensor, axis: Any, dtype: str) -> tuple[tuple[int, ...], list[Output]]:
    axes = {index % tensor.ndim for index in ((axis,) if isinstance(axis, int) else axis)}
    reduced = tuple(extent if index in axes else 1 for index, extent in enumerate(tensor.shape))
    values = Output(jax.numpy.dtype(dtype), (1,) * tensor.ndim, _PARTS[0])
    return reduced, [values, Output(tensor.dtype, reduced, _PARTS[1], small=True)]


def _over_groups(tensor: LazyTensor, block_size: int, dtype: str) -> tuple[tuple[int, ...], list[Output]]:
    groups = (block_size, 1)
    values = Output(jax.numpy.dtype(dtype), (1, 1), _PARTS[0])
    scales = Output(tensor.dtype, groups, _PARTS[1], small=True)
    return groups, [values, scales, Output(jax.numpy.dtype("int8"), groups, _PARTS[2], small=True)]


def _pack_int4(_: Any, original: Any, arr: Any, axis: int = 0, dtype: Any = "int8") -> Any:
    tensor = held_lazily(arr)
    order = None if tensor is None else _order(tensor)
    if tensor is None or order is None or not isinstance(tensor.source, ComputedTensor):
        return original(arr, axis, dtype)
    packed_axis = order[axis % tensor.ndim]
    ratios = tuple(2 if index == packed_axis else 1 for index in range(tensor.ndim))
    output = Output(jax.numpy.dtype(dtype), ratios, _Packed(original, packed_axis, dtype))
    packed = np.transpose(tensor.source.computation.output(output), order)
    return packed, packed.shape, tensor.shape[axis]


def _order(tensor: LazyTensor) -> tuple[int, ...] | None:
    """For each axis of a tensor, the axis of its leaf, if it is only a transposition of the leaf; otherwise None."""
    order = tensor.file_order()
    same = tensor.transpose(order).geometry() == LazyTensor(tensor.source).geometry()
    return tuple(int(axis) for axis in np.argsort(order)) if order and same and not tensor.steps else None


def _unpack_int4(_: Any, original: Any, packed: Any, orig_len: int, axis: int = 0, dtype: Any = "int8") -> Any:
    tensor = held_lazily(packed)
    if tensor is None:
        return original(packed, orig_len, axis, dtype)
    # A LoRA pair only needs the shape of the kernel.
    shape = [orig_len if index == axis % tensor.ndim else extent for index, extent in enumerate(tensor.shape)]
    return keras.KerasTensor(shape, dtype=dtype)


def _on_host(function: Callable[..., Any], *args: Any) -> tuple[np.ndarray, ...]:
    """The results of a function of Keras as NumPy arrays; nothing is put on an accelerator."""
    with on_host():
        return tuple(np.asarray(result) for result in function(*args))


_patches = _upstream.SharedPatches()
for _name, _ours in {
    "abs_max_quantize": _chunked(_over_axes),
    "abs_max_quantize_grouped_with_zero_point": _chunked(_over_groups),
    "pack_int4": _pack_int4,
    "unpack_int4": _unpack_int4,
}.items():
    for _module in _upstream.QUANTIZERS:
        if hasattr(_module, _name):  # Keras before 3.14 has no groups
            _patches.replacing(_module, _name)(_ours)
