"""LoRA pairs that are created on their devices, split like the kernels that they belong to.

Responsible for choosing the layers and for enabling LoRA on them as KerasHub does, on models whose variables are
abstract and on finished ones. The pairs are ordinary variables, created by Keras; `_record/initializers` initializes
them, and the core splits them.

Quantization while streaming: Keras quantizes abstract layers, and values are computed chunk by chunk when read.

Responsible for running Keras' own `Model.quantize` on a model whose weights are still lazy tensors. Meanwhile, Keras'
quantization functions are replaced by ones that return lazy tensors of the results; these call the original functions
for one chunk of a kernel at a time. So the abstract model has the quantized variables, the materialized model is equal
bit for bit to a quantized loaded model, and no whole float kernel ever exists.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias

import jax
import keras
import numpy as np

from lazymodel import AbstractVariable, LazyModelError, LazyTensor
from lazymodel._sharding.shard import follow_weights
from lazymodel._show.text import closest
from lazymodel._tensors.decoded import Computation, ComputedTensor, Output
from lazymodel._trace.errors import on_host
from lazymodel_keras import _upstream
from lazymodel_keras._model.keras_object import (
    AbstractKerasObject,
    from_skeleton,
    has_layout,
    held_lazily,
    lazy_operations,
    model_variables,
)
from lazymodel_keras._record.patches import SharedPatches
from lazymodel_keras._record.recording import Recording, session

# Keras' layers in these modes have no LoRA, or not before calibration.
_WITHOUT_LORA = ("float8", "gptq", "awq")


def enable_lora(model: Any, rank: int, targets: str | None = None) -> None:
    """Does what `model.backbone.enable_lora(rank)` does, and creates every pair directly where its kernel is.

    On a finished model, KerasHub's own method leaves the pairs on one device, or whole on every device of the
    active `keras.distribution`; these are split like their kernels. Everything else in the backbone is frozen. A model
    that was compiled before has to be compiled again, as after KerasHub's own method.

    Args:
        model: A KerasHub task or backbone that has its weights, or with `targets` any built Keras model.
        rank: As in `AbstractModel.lora`.
        targets: Likewise.

    Raises:
        LazyModelError: The rank is not a positive integer, no layer is a target, or a target cannot have a pair.

    Example:
        >>> lk.enable_lora(model, 4)
        >>> [variable.shape for variable in model.trainable_variables[:2]]
        [(2, 16, 4), (4, 8)]
    """
    check_lora(rank, targets)
    with session(Recording()) as recording:
        add_lora(model, rank, targets)
    pairs = from_skeleton(AbstractKerasObject(None, recording, model, only_own=True))
    known = {variable.path: _described(variable) for variable in model_variables(model) if variable.path not in pairs}
    distribution = keras.distribution.distribution()
    without_rule = [path for path in pairs if not has_layout(path, distribution)]
    followed = follow_weights({**known, **pairs}, without_rule)
    pairs.with_variables({**pairs, **followed}).materialize(progress=False)


def check_lora(rank: Any, targets: str | None) -> None:
    """Raises LazyModelError for arguments that are invalid for any model."""
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise LazyModelError(f"the rank of a LoRA is a positive integer; got {rank!r}")
    if targets is not None:
        try:
            re.compile(targets)
        except (re.error, TypeError) as error:
            raise LazyModelError(f"LoRA targets {targets!r} are not a regular expression: {error}") from error


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


def _described(variable: Any) -> AbstractVariable:
    sharding = getattr(variable.value, "sharding", None)
    return AbstractVariable(variable.path, tuple(variable.shape), jax.numpy.dtype(variable.dtype), sharding)


Filters: TypeAlias = "str | Sequence[str] | Callable[[Any], bool] | None"

_MODES = ("int8", "int4", "float8")


def check_quantization(how: Any) -> None:
    """Raises LazyModelError if `how` is not a quantization that needs only the weights."""
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
    try:
        with _patches.needed(), lazy_operations.needed(), _quick_collections():
            model.quantize(**options, filters=filters)
    except (ValueError, TypeError) as error:
        raise LazyModelError(f"Keras cannot quantize {model.name} with {how!r}: {error}") from error
    if not any(layer.quantization_mode is not None for layer in _upstream.flat_layers(model)):
        raise LazyModelError(
            f"quantize({how!r}) changes nothing: none of the layers of {model.name}"
            f"{'' if filters is None else ' that the filters let through'} is one that Keras quantizes"
        )


@contextlib.contextmanager
def _quick_collections() -> Generator[None]:
    """Keeps the garbage collector from checking existing objects.

    Keras collects garbage whenever a layer releases a variable, to free its memory at once: half a second for each
    layer of a large program. Abstract variables have no memory.
    """
    if gc.get_freeze_count():
        yield  # frozen by other code, which we must not undo
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# Keras' quantization functions ---------------------------------------------------------------------------------------


def _dtype(name: str) -> np.dtype[Any]:
    return jax.numpy.dtype(name)


def _chunked(outputs: Callable[..., tuple[tuple[int, ...], list[Output]]]) -> Callable[..., Any]:
    """A replacement for a quantization function of Keras: for a lazy tensor, its results are computed in chunks.

    `outputs` takes the tensor, the function's second argument and its dtype; it returns the units of chunks, and the
    results.
    """

    def quantizer(original: Any, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(original).bind(*args, **kwargs)
        bound.apply_defaults()
        inputs, over, *rest = bound.args
        tensor = held_lazily(inputs)
        if tensor is None or not bound.arguments["to_numpy"]:
            return original(*args, **kwargs)
        steps, results = outputs(tensor, over, bound.arguments["dtype"])
        computation = Computation(tensor, lambda values: _on_host(original, values, over, *rest), steps)
        return tuple(map(computation.output, results))

    return quantizer


def _over_axes(tensor: LazyTensor, axis: Any, dtype: str) -> tuple[tuple[int, ...], list[Output]]:
    axes = {index % tensor.ndim for index in ((axis,) if isinstance(axis, int) else axis)}
    reduced = tuple(extent if index in axes else 1 for index, extent in enumerate(tensor.shape))
    values = Output(_dtype(dtype), (1,) * tensor.ndim, lambda found: found[0])
    return reduced, [values, Output(tensor.dtype, reduced, lambda found: found[1], small=True)]


def _over_groups(tensor: LazyTensor, block_size: int, dtype: str) -> tuple[tuple[int, ...], list[Output]]:
    groups = (block_size, 1)
    values = Output(_dtype(dtype), (1, 1), lambda found: found[0])
    scales = Output(tensor.dtype, groups, lambda found: found[1], small=True)
    return groups, [values, scales, Output(_dtype("int8"), groups, lambda found: found[2], small=True)]


def _pack_int4(original: Any, arr: Any, axis: int = 0, dtype: Any = "int8") -> Any:
    tensor = held_lazily(arr)
    order = None if tensor is None else _order(tensor)
    if tensor is None or order is None or not isinstance(tensor.source, ComputedTensor):
        return original(arr, axis, dtype)
    along = order[axis % tensor.ndim]

    def pack(found: tuple[np.ndarray, ...]) -> np.ndarray:
        return _on_host(lambda values: original(values, along, dtype)[:1], found[0])[0]

    ratios = tuple(2 if index == along else 1 for index in range(tensor.ndim))
    packed = np.transpose(tensor.source.computation.output(Output(_dtype(dtype), ratios, pack)), order)
    return packed, packed.shape, tensor.shape[axis]


def _order(tensor: LazyTensor) -> tuple[int, ...] | None:
    """For each axis of a tensor, the axis of its leaf, if it is only a transposition of the leaf; otherwise None."""
    order = tensor.file_order()
    same = tensor.transpose(order).geometry() == LazyTensor(tensor.source).geometry()
    return tuple(int(axis) for axis in np.argsort(order)) if order and same and not tensor.steps else None


def _unpack_int4(original: Any, packed: Any, orig_len: int, axis: int = 0, dtype: Any = "int8") -> Any:
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


_QUANTIZERS: dict[str, Callable[..., Any]] = {
    "abs_max_quantize": _chunked(_over_axes),
    "abs_max_quantize_grouped_with_zero_point": _chunked(_over_groups),
    "pack_int4": _pack_int4,
    "unpack_int4": _unpack_int4,
}
_patches = SharedPatches()


@_patches.register
def _install(undo: contextlib.ExitStack) -> None:
    for name, ours in _QUANTIZERS.items():
        for module in _upstream.QUANTIZERS:
            if hasattr(module, name):  # Keras before 3.14 has no groups
                _patches.replace(undo, module, name, ours)
