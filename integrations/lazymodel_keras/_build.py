"""Runs code that builds a Keras model, and returns an abstract model that carries what would be loaded.

Responsible for turning failures to load into one error, for keyword arguments that no constructor takes, for tensors
that nothing requested, and for changing the layers of a built model: LoRA pairs, enabled as KerasHub does, and Keras'
own `Model.quantize`, whose functions compute on lazy tensors, for one chunk of a kernel at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

import jax
import keras
import numpy as np

from lazymodel import (
    AbstractModel,
    AbstractVariable,
    CheckpointError,
    LazyModelError,
    LazyTensor,
    Progress,
    ShardingError,
)
from lazymodel._abstract.framework import ModelSpec
from lazymodel._errors import warn
from lazymodel._sharding.auto import Auto
from lazymodel._sharding.shard import Rules, follow_weights
from lazymodel._show.progress import ReportTo
from lazymodel._show.text import closest, folded_names, listed
from lazymodel._tensors.decoded import Computation, ComputedTensor, Output
from lazymodel._trace.errors import on_host
from lazymodel.checkpoints._untrusted import read_json_file, weight_map
from lazymodel.checkpoints._verify import Verify
from lazymodel_keras import _upstream
from lazymodel_keras._model.compiled import check, first_batch
from lazymodel_keras._model.keras_object import (
    AbstractKerasObject,
    extended,
    from_skeleton,
    has_layout,
    held_lazily,
    lazy_operations,
    model_variables,
)
from lazymodel_keras._record.patches import SharedPatches, active, while_recording
from lazymodel_keras._record.recording import OpenedFile, Recording, quick_collections, session
from lazymodel_keras._record.weight_files import Leftovers, known_layers

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
    values = Output(jax.numpy.dtype(dtype), (1,) * tensor.ndim, lambda found: found[0])
    return reduced, [values, Output(tensor.dtype, reduced, lambda found: found[1], small=True)]


def _over_groups(tensor: LazyTensor, block_size: int, dtype: str) -> tuple[tuple[int, ...], list[Output]]:
    groups = (block_size, 1)
    values = Output(jax.numpy.dtype(dtype), (1, 1), lambda found: found[0])
    scales = Output(tensor.dtype, groups, lambda found: found[1], small=True)
    return groups, [values, scales, Output(jax.numpy.dtype("int8"), groups, lambda found: found[2], small=True)]


def _pack_int4(original: Any, arr: Any, axis: int = 0, dtype: Any = "int8") -> Any:
    tensor = held_lazily(arr)
    order = None if tensor is None else _order(tensor)
    if tensor is None or order is None or not isinstance(tensor.source, ComputedTensor):
        return original(arr, axis, dtype)
    along = order[axis % tensor.ndim]

    def pack(found: tuple[np.ndarray, ...]) -> np.ndarray:
        return _on_host(lambda values: original(values, along, dtype)[:1], found[0])[0]

    ratios = tuple(2 if index == along else 1 for index in range(tensor.ndim))
    packed = np.transpose(tensor.source.computation.output(Output(jax.numpy.dtype(dtype), ratios, pack)), order)
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


_patches = SharedPatches()
for _name, _ours in {
    "abs_max_quantize": _chunked(_over_axes),
    "abs_max_quantize_grouped_with_zero_point": _chunked(_over_groups),
    "pack_int4": _pack_int4,
    "unpack_int4": _unpack_int4,
}.items():
    for _module in _upstream.QUANTIZERS:
        if hasattr(_module, _name):  # Keras before 3.14 has no groups
            _patches.replacing(_module, _name)(_ours)


class Opening(TypedDict, total=False):
    """Options of `abstract_from_preset` for loading weights, documented there."""

    strict: bool
    cast: str
    verify: Verify
    storage_options: Mapping[str, Any] | None


class Materializing(TypedDict, total=False):
    """Options of `AbstractModel.materialize`, documented there."""

    max_host_memory: int | str | None
    replicas: str | None
    progress: bool | Progress | Callable[[int, int], object] | None
    report: ReportTo


class Sharding(TypedDict, total=False):
    """Options of `AbstractModel.shard`, documented there."""

    mesh: jax.sharding.Mesh | None
    rules: Rules | None
    on_unmatched: str
    large: int | str
    repair: bool | Auto


class Loading(Opening, Sharding, Materializing):
    """Options of `deferred` and `load_model`."""


def of_kind(kind: Any, options: Any) -> dict[str, Any]:
    """Returns those of the options that a kind of options has."""
    return {name: value for name, value in options.items() if name in kind.__annotations__}


def check_options(function: str, options: Any, kind: Any) -> None:
    """Raises LazyModelError if a function was given an unknown argument, or a mesh without rules."""
    names = list(kind.__annotations__)
    for name in options:
        if name not in names:
            raise LazyModelError(f"lazymodel_keras.{function} takes no argument {name!r}{closest(name, names)}")
    mesh, rules = options.get("mesh"), options.get("rules")
    if options.get("repair") and mesh is None:
        raise ShardingError("repair was given without mesh; it repairs rules, so pass mesh and rules as well")
    if (mesh is None) != (rules is None):
        given, missing = ("rules", "mesh") if mesh is None else ("mesh", "rules")
        raise ShardingError(f"{given} was given without {missing}; pass both, or neither to use keras.distribution")


_OURS = {
    **dict.fromkeys(Sharding.__annotations__, "AbstractModel.shard"),
    **dict.fromkeys(Materializing.__annotations__, "AbstractModel.materialize"),
    **dict.fromkeys(Opening.__annotations__, "lazymodel_keras.abstract_from_preset"),
}
_STEPS = {
    **dict.fromkeys(("quantize", "quantize_filters"), "quantize('int8')"),
    **dict.fromkeys(("lora", "lora_rank", "lora_targets"), "lora(8)"),
}


@dataclasses.dataclass(frozen=True)
class Keywords:
    """Keyword arguments of a user that a constructor of KerasHub has to take.

    KerasHub passes arguments that its loaders do not know on to a constructor, which passes them on to Keras'
    functional model, and this drops them silently: a mistyped `mesh=` would load the model unsharded.

    Attributes:
        given: Their names.
        method: The method that got them, for messages, such as `.from_preset`; empty for the constructor itself.
        taker: The function that takes the arguments of lazymodel, for messages; empty if each has its own.
    """

    given: Collection[str]
    method: str = ".from_preset"
    taker: str = ""

    def check_ours(self, cls: Any) -> None:
        """Raises LazyModelError for an argument of another function of lazymodel, before anything is loaded."""
        parameters = inspect.signature(cls).parameters
        for name in self.given:
            if name in _OURS.keys() | _STEPS and name not in parameters:
                raise self.unknown(cls, name)

    def unknown(self, cls: Any, name: str) -> LazyModelError:
        """Returns the error about an argument that a class does not take."""
        names, backbone = _parameters(cls), getattr(cls, "backbone_cls", None)
        if name in _STEPS:
            step = f"lazymodel_keras.abstract_from_preset(cls, preset).{_STEPS[name]}.shard(mesh, rules).materialize()"
            hint = f"; it is a step: {step}"
        elif name in _OURS:
            hint = f"; it is an argument of {self.taker or _OURS[name]}"
        elif backbone is not None and name in _parameters(backbone):
            hint = f"; {backbone.__name__} takes it, so make that with it, and give it as backbone="
        else:
            hint = closest(name, [*_OURS, *_STEPS, *names] if self.method else names)
        return LazyModelError(f"{cls.__name__}{self.method} takes no argument {name!r}{hint}")


def _parameters(cls: type) -> set[str]:
    """Returns the names of the arguments of the constructors of a class and its base classes."""
    found = (inspect.signature(vars(base)["__init__"]) for base in cls.__mro__ if "__init__" in vars(base))
    return {name for signature in found for name in signature.parameters} - {"self", "args", "kwargs"}


@while_recording(_upstream.Functional, "__init__")
def _reject_dropped(recording: Recording, original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    if (keywords := recording.keywords) is not None:
        # Other classes may use their arguments before; but those hardly have names like ours.
        of_hub = type(self).__module__.partition(".")[0] == "keras_hub"
        for name in kwargs.keys() & set(keywords.given) - {"name", "trainable", "dtype"}:
            # A task without a preprocessor may be given None.
            taken = name == "preprocessor" and kwargs[name] is None
            if not taken and (of_hub or (keywords.method and closest(name, [*_OURS, *_STEPS]))):
                recording.refuse(keywords.unknown(type(self), name))
    original(self, *args, **kwargs)


class KerasModel(AbstractKerasObject):
    """The result of a build function, whose layers can be changed before it is sharded."""

    def quantize(self, model: Any, how: Any, filters: Filters) -> AbstractModel[Any]:
        check_quantization(how)
        return self._changed(model, "quantize", lambda built: quantize(built, how, filters))

    def lora(self, model: Any, rank: int, targets: str | None) -> AbstractModel[Any]:
        check_lora(rank, targets)
        return self._changed(model, "lora", lambda built: add_lora(built, rank, targets))

    def prepared(
        self, model: Any, what: str, *, inputs: Sequence[Any] = (), batch: int | None, sequence: int | None
    ) -> Any:
        skeleton = self.upcoming()
        if what != "train":
            return model
        check(skeleton.result, what)
        if _upstream.is_built(skeleton.result):
            return model
        data = first_batch(skeleton.result, what, inputs, batch, sequence)
        filled = self._with(skeleton.recording, skeleton.result, lambda built: _upstream.build_for(built, data))
        filled.add_variables(skeleton.variables)
        self.leave()
        return extended(model, filled)

    def _with(self, recording: Recording, result: Any, change: Callable[[Any], None]) -> KerasModel:
        """The model of a result after a change, which is made to each other object of it as well."""
        build = self.build

        def rebuild() -> Any:
            assert build is not None
            built = build()
            change(built)
            return built

        with contextlib.nullcontext() if active() is recording else session(recording):
            change(result)
        changed = KerasModel(build and rebuild, recording, result, only_own=self.only_own)
        changed.distribution = self.distribution
        return changed

    def _changed(self, model: ModelSpec, step: str, change: Callable[[Any], None]) -> AbstractModel[Any]:
        """The abstract model of the object after a change; the old model builds a new object when it needs one."""
        changes = {
            "an optimizer": model.optimized is not None,
            "other initializers": model.recipes is not self.spec.recipes,
            "shardings": dict(model) != dict(self.spec),
        }
        if before := [change for change, is_there in changes.items() if is_there]:
            raise LazyModelError(
                f"{model.name} has {before[0]} already, which are for its variables as they were built: {step} comes "
                "before shard, with_optimizer, reinitialize and rekey"
            )
        if not isinstance(self.present().result, keras.Model):
            raise LazyModelError(f"{step} changes one keras.Model; this is {type(self.result).__name__}")
        recording, result = self.give_away()
        recording.began = time.perf_counter()
        return from_skeleton(self._with(recording, result, change), quiet=True, spent=model.spent)


def abstract_build(
    recording: Recording, build: Callable[[], Any], what: str, *, loads: bool = False
) -> AbstractModel[Any]:
    """Runs code that builds a model; failures to load it become one `CheckpointError`, which begins with `what`.

    With `loads`, every error is a failure to load. Without, only errors after a weight file was opened are, and others
    are the user's own.
    """
    return finished(recording, build, recorded(recording, build, what, loads=loads), what)


def finished(recording: Recording, build: Callable[[], Any], result: Any, what: str) -> AbstractModel[Any]:
    """Returns the abstract model of a recorded `build` that returned `result`; see `check_all_used`."""
    check_all_used(recording, what, strict=recording.options.strict)
    return from_skeleton(KerasModel(build, recording, result))


def recorded(recording: Recording, build: Callable[[], Any], what: str, *, loads: bool = False) -> Any:
    """Runs and records `build`, and returns its result; errors are those of `abstract_build`."""
    try:
        with recording.explaining(what), session(recording):
            return build()
    except (ValueError, KeyError, OSError) as error:
        if not loads and not recording.files:
            raise
        files = ", ".join(recording.files)
        if "could not be loaded" in str(error):  # Keras' loader, which continues to the end before it raises
            missing = [
                variable.path
                for variable, recorded in recording.variables()
                if recorded.value is None and keras.backend.is_float_dtype(_upstream.own_dtype(variable))
            ]
            names = listed(folded_names(missing))
            raise CheckpointError(
                f"{what}: {files} has no matching tensors for {len(missing)} variables: {names}; "
                "is this the checkpoint of another configuration or version?"
            ) from error
        missing_key = isinstance(error, KeyError)
        layers = known_layers(str(error.args[0]), _indexed_names(recording.files.values())) if missing_key else ""
        reason = f"there is no {error}" if missing_key else error
        raise CheckpointError(f"{what} failed{f' ({files})' if files else ''}: {reason}{layers}") from error


def _indexed_names(files: Iterable[OpenedFile]) -> list[str]:
    """Returns the tensors listed by the indexes in the folders of some files."""
    folders = dict.fromkeys(file.where.parent for file in files)
    indexes = [index for folder in folders for index in folder.glob("*.safetensors.index.json")]
    return [name for index in indexes for name in weight_map(read_json_file(index), index)]


def check_all_used(recording: Recording, what: str, *, strict: bool) -> None:
    """Warns about tensors in weight files that nothing requested, or with `strict` raises CheckpointError.

    Tensors that converters omit on purpose do not count; unused parts of quantized weights always raise.
    """
    leftovers = Leftovers(recording.files)
    if quantized := leftovers.quantized():
        raise CheckpointError(f"{what}: {'; '.join(quantized)}.")
    messages: list[str] = []
    for path, file in recording.files.items():
        if not path.endswith((".weights.h5", ".keras")):
            continue
        # If a layer took some of its tensors, it omitted the others on purpose: Keras' own loading requires all.
        visited = {name.rpartition("/")[0] for name in file.tensors if name in file.requested}
        names = (name for name in file.unused if not name.startswith("optimizer/"))
        unused = [name for name in names if name.rpartition("/")[0] not in visited]
        if unused:
            messages.append(f"{path} holds {len(unused)} tensors that the model has no variable for: {listed(unused)}")
    messages += leftovers.unexpected()
    if not messages:
        return
    message = f"{what}: {'; '.join(messages)}".removesuffix("?")
    if strict:
        raise CheckpointError(f"{message}. Pass strict=False to lazymodel_keras.from_preset to leave them out.")
    warn(f"{message}. They are left out.")
