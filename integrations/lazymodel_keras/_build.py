"""Runs code that builds a Keras model, and returns an abstract model that carries what would be loaded.

Responsible for turning failures to load into one error, for keyword arguments that no constructor takes, for tensors
that nothing requested, and for changing the layers of a built model: LoRA pairs, enabled as KerasHub does, and Keras'
own `Model.quantize`, whose functions compute on lazy tensors, for one chunk of a kernel at a time.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypedDict

import jax
import keras

from lazymodel import (
    AbstractModel,
    AbstractVariable,
    CheckpointError,
    LazyModelError,
    Progress,
    ShardingError,
)
from lazymodel._errors import warn
from lazymodel._sharding.follow import follow_weights
from lazymodel._sharding.shard import Rules
from lazymodel._show.progress import ReportTo
from lazymodel._show.text import closest, folded_names, listed, plural
from lazymodel.checkpoints._checkpoint import Verify
from lazymodel.checkpoints._untrusted import read_json_file, weight_map
from lazymodel_keras import _upstream
from lazymodel_keras._model.keras_object import KerasModel, from_skeleton, has_layout, model_variables
from lazymodel_keras._model.layers import add_lora, check_lora
from lazymodel_keras._record.files import known_layers
from lazymodel_keras._record.leftovers import Leftovers
from lazymodel_keras._record.recording import OpenedFile, Recording, session


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
    pairs = from_skeleton(KerasModel(None, recording, model, only_own=True))
    known = {variable.path: _described(variable) for variable in model_variables(model) if variable.path not in pairs}
    distribution = keras.distribution.distribution()
    without_rule = [path for path in pairs if not has_layout(path, distribution)]
    followed = follow_weights({**known, **pairs}, without_rule)
    pairs.with_variables({**pairs, **followed}).materialize(progress=False)


def _described(variable: Any) -> AbstractVariable:
    sharding = getattr(variable.value, "sharding", None)
    return AbstractVariable(variable.path, tuple(variable.shape), jax.numpy.dtype(variable.dtype), sharding)


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
    if options.get("on_unmatched") == "auto" and mesh is None:
        raise ShardingError("on_unmatched was given without mesh; it completes rules, so pass mesh and rules as well")
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


@_upstream.while_recording(_upstream.Functional, "__init__")
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
        if isinstance(error, FileNotFoundError) and "tokenizer" in str(error):
            reason = f"{reason} Add it for the preprocessor, or load without one: preprocessor=None"
        raise CheckpointError(f"{what} failed{f' ({files})' if files else ''}: {reason}{layers}") from error


def _indexed_names(files: Iterable[OpenedFile]) -> list[str]:
    """Returns the tensors listed by the indexes in the folders of some files."""
    folders = dict.fromkeys(file.where.parent for file in files)
    indexes = [index for folder in folders for index in folder.glob("*.safetensors.index.json")]
    return [name for index in indexes for name in weight_map(read_json_file(index), index)]


def _lost(file: OpenedFile) -> list[str]:
    """Messages about tensors that an adapter changes and nothing requested."""
    names = [name for name in getattr(file.tensors, "changed", ()) if name not in file.requested]
    untied = any(name.endswith(("lm_head.weight", "embed_out.weight")) for name in names)
    fix = ', as its embeddings are tied: set "tie_word_embeddings" to false in config.json if this model can be untied'
    return [f"an adapter changes {listed(names)}, which the model does not have{fix * untied}"] if names else []


def check_all_used(recording: Recording, what: str, *, strict: bool) -> None:
    """Warns about tensors in weight files that nothing requested, or with `strict` raises CheckpointError.

    Tensors that converters omit on purpose do not count; unused parts of quantized weights always raise.
    """
    leftovers = Leftovers(recording.files)
    if quantized := leftovers.quantized():
        raise CheckpointError(f"{what}: {'; '.join(quantized)}.")
    messages: list[str] = []
    for path, file in recording.files.items():
        messages += _lost(file)
        if not path.endswith((".weights.h5", ".keras")):
            continue
        # If a layer took some of its tensors, it omitted the others on purpose: Keras' own loading requires all.
        visited = {name.rpartition("/")[0] for name in file.tensors if name in file.requested}
        names = (name for name in file.unused if not name.startswith("optimizer/"))
        unused = [name for name in names if name.rpartition("/")[0] not in visited]
        if unused:
            number = plural(len(unused), "tensor")
            messages.append(f"{path} holds {number} that the model has no variable for: {listed(unused)}")
    messages += leftovers.unexpected()
    if not messages:
        return
    message = f"{what}: {'; '.join(messages)}".removesuffix("?")
    if strict:
        raise CheckpointError(f"{message}. Pass strict=False to lazymodel_keras.from_preset to leave them out.")
    warn(f"{message}. They are left out.")
