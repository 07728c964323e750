"""Runs code that builds a Keras model, and returns an abstract model that carries what would be loaded.

Responsible for turning failures to load into one error, for keyword arguments that no constructor takes, for tensors
that nothing requested, and for changing the layers of a built model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypedDict

import keras

from lazymodel import AbstractModel, CheckpointError, LazyModelError, Progress, ShardingError
from lazymodel._abstract.framework import ModelSpec
from lazymodel._errors import warn
from lazymodel._show.progress import ReportTo
from lazymodel._show.text import closest, folded_names, listed
from lazymodel.checkpoints._untrusted import read_json_file, weight_map
from lazymodel_keras import _upstream
from lazymodel_keras._model.compiled import check, first_batch
from lazymodel_keras._model.keras_object import AbstractKerasObject, extended, from_skeleton
from lazymodel_keras._record.hugging_face import Leftovers
from lazymodel_keras._record.patches import active, while_recording
from lazymodel_keras._record.recording import LoadOptions, OpenedFile, Recording, session
from lazymodel_keras._record.weight_files import known_layers
from lazymodel_keras._transform import Filters, add_lora, check_lora, check_quantization, quantize


class Materializing(TypedDict, total=False):
    """Options of `AbstractModel.materialize`, documented there."""

    max_host_memory: int | str | None
    replicas: str | None
    progress: bool | Progress | Callable[[int, int], object] | None
    report: ReportTo


def check_options(function: str, options: Mapping[str, Any], taken: type = Materializing) -> None:
    """Raises LazyModelError if a function was given an unknown argument."""
    names = list(taken.__annotations__)
    for name in options:
        if name not in names:
            raise LazyModelError(f"lazymodel_keras.{function} takes no argument {name!r}{closest(name, names)}")


_SHARD = dict.fromkeys(("mesh", "rules", "on_unmatched", "large", "repair"), "AbstractModel.shard")
_MATERIALIZE = dict.fromkeys(("max_host_memory", "replicas", "progress", "report"), "AbstractModel.materialize")
_LOAD = dict.fromkeys(("strict", "cast", "verify", "storage_options"), "lazymodel_keras.abstract_from_preset")
_OURS = {**_SHARD, **_MATERIALIZE, **_LOAD}
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
        with contextlib.nullcontext() if active() is skeleton.recording else session(skeleton.recording):
            _upstream.build_for(skeleton.result, data)
        build = self.build

        def rebuild() -> Any:
            assert build is not None
            built = build()
            _upstream.build_for(built, data)
            return built

        filled = KerasModel(build and rebuild, skeleton.recording, skeleton.result, only_own=self.only_own)
        filled.distribution = self.distribution
        filled.add_variables(skeleton.variables)
        self.leave()
        return extended(model, filled)

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
        build = self.build
        assert build is not None

        def rebuild() -> Any:
            built = build()
            change(built)
            return built

        recording, result = self.give_away()
        recording.began = time.perf_counter()
        with session(recording):
            change(result)
        changed = KerasModel(rebuild, recording, result)
        changed.distribution = self.distribution
        return from_skeleton(changed, quiet=True, spent=model.spent)


def abstract_build(
    build: Any,
    *,
    what: str,
    loads: bool,
    options: LoadOptions | None = None,
    keywords: Keywords | None = None,
) -> AbstractModel[Any]:
    """Runs code that builds a model; failures to load it become one `CheckpointError`, which begins with `what`.

    With `loads`, every error is a failure to load. Without, only errors after a weight file was opened are, and others
    are the user's own. `keywords` are those that no constructor may drop.
    """
    recording = Recording(options)
    recording.keywords = keywords
    result = recorded(recording, build, what, loads=loads)
    return finished(recording, build, result, what, strict=recording.options.strict, taken=loads)


def finished(
    recording: Recording, build: Callable[[], Any], result: Any, what: str, *, strict: bool = True, taken: bool = False
) -> AbstractModel[Any]:
    """Returns the abstract model of a recorded `build` that returned `result`; see `check_all_used`."""
    check_all_used(recording, what, strict=strict, taken=taken)
    return from_skeleton(KerasModel(build, recording, result))


def recorded(recording: Recording, build: Callable[[], Any], what: str, *, loads: bool) -> Any:
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


def require_rules(mesh: Any, rules: Any, repair: Any = False) -> None:
    """Raises ShardingError for a mesh without rules, or for rules or their repair without a mesh."""
    if repair and mesh is None:
        raise ShardingError("repair was given without mesh; it repairs rules, so pass mesh and rules as well")
    if (mesh is None) != (rules is None):
        given, missing = ("rules", "mesh") if mesh is None else ("mesh", "rules")
        raise ShardingError(f"{given} was given without {missing}; pass both, or neither to use keras.distribution")


def check_all_used(recording: Recording, what: str, *, strict: bool, taken: bool = True) -> None:
    """Warns about tensors in weight files that nothing requested, or with `strict` raises CheckpointError.

    Tensors that converters omit on purpose do not count; unused parts of quantized weights always raise.
    `taken` is True if the function that the user called has the parameter `strict`.
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
    message = f"{what}: {'; '.join(messages)}"
    message += "" if message.endswith("?") else "."
    if strict:
        hint = "Pass strict=False" if taken else "Use lazymodel_keras.abstract_from_preset with strict=False"
        raise CheckpointError(f"{message} {hint} to leave them out.")
    warn(f"{message} They are left out.")
