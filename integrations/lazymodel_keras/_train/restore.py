"""Training checkpoints back into Keras models: weights, optimizer state and metrics, each device its own shards.

Responsible for finding each variable's tensor in what `keras.callbacks.OrbaxCheckpoint`, `model.save` and
`save_weights` wrote, and for saying what does not fit. Files are read by the stream as any other checkpoint's.

Orbax checkpoints name variables by path. Stock Keras leaves what it does not find under the exact path as it is, in
silence; here paths are matched by `_train/names`, and what is left over is an error.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Unpack, cast, overload

import keras
from jax.sharding import NamedSharding, PartitionSpec

from lazymodel import AbstractModel, AbstractVariable, CheckpointError, Compile, LazyModelError, open_checkpoint
from lazymodel._errors import warn
from lazymodel._remote.path import Location, RemotePath
from lazymodel._show.text import closest, folded_names, listed
from lazymodel._show.timeline import Span
from lazymodel._tensors.casting import UNSAFE, check_mode
from lazymodel._tensors.stored import misshapen
from lazymodel.checkpoints._untrusted import read_json_file
from lazymodel_keras import _upstream
from lazymodel_keras._build import KerasModel, Materializing, check_all_used, check_options
from lazymodel_keras._model.abstract import extended, from_skeleton
from lazymodel_keras._model.skeleton import Skeleton, model_variables
from lazymodel_keras._record.patches import active, while_recording
from lazymodel_keras._record.recording import Recording
from lazymodel_keras._record.remote import RemoteFiles, check_storage_options
from lazymodel_keras._record.session import session
from lazymodel_keras._train.names import match_paths, match_slots

T = TypeVar("T")

_WEIGHTS = ("trainable_variables", "non_trainable_variables")
_OPTIMIZER = "optimizer_variables"
_METRICS = "metrics_variables"
_WITH_STATE = (".keras", ".weights.h5", ".weights.json")  # Keras' own files in which optimizer state may be
_SAVING = _upstream.SAVING_API
_SEED_STATE = "seed_generator_state"  # the random state of dropout and the like: training state, no weight


@overload
def restore(
    model: AbstractModel[T],
    path: str | os.PathLike[str],
    *,
    weights_only: bool = ...,
    strict: bool = ...,
    cast: str = ...,
    storage_options: Mapping[str, Any] | None = ...,
    compile: Compile | Sequence[Compile] | None = ...,
    **options: Unpack[Materializing],
) -> T: ...
@overload
def restore(
    model: T,
    path: str | os.PathLike[str],
    *,
    weights_only: bool = ...,
    strict: bool = ...,
    cast: str = ...,
    storage_options: Mapping[str, Any] | None = ...,
    compile: Compile | Sequence[Compile] | None = ...,
    **options: Unpack[Materializing],
) -> T: ...
def restore(
    model: Any,
    path: str | os.PathLike[str],
    *,
    weights_only: bool = False,
    strict: bool = True,
    cast: str = "safe",
    storage_options: Mapping[str, Any] | None = None,
    compile: Compile | Sequence[Compile] | None = None,
    **options: Unpack[Materializing],
) -> Any:
    """Puts a training checkpoint into a model, wherever its variables are placed; each device reads only its shards.

    The mesh may be another than the one that saved. Optimizer state is restored with the weights: an optimizer that was
    not built yet is built, its variables placed like those that they belong to. So are the metrics that have variables
    (`fit` begins each epoch with fresh ones) and the states of random generators, where the checkpoint has them.
    `training_state` tells the epoch to go on with.

    Args:
        model: A Keras model, which is filled in place and keeps its shardings. Or an abstract one, which needs memory
            for one copy of the state only: what `lazymodel.build_abstract` returned, not materialized yet; or, within
            `deferred()` or a function that is built abstractly, a model whose variables are still abstract.
        path: What `keras.callbacks.OrbaxCheckpoint` or `lk.TrainingCheckpoint` saved (the folder, for the newest step,
            or a step's); or a `.keras`, `.weights.h5`, `.weights.json` or legacy `.h5` file, of which the last is
            restored without its optimizer state. Or the URL of one of these, which is read from there; see
            `abstract_from_preset`.
        weights_only: Whether to leave optimizer, metrics and random states as they are; into an instance with another
            optimizer, say.
        strict: Whether a variable without a tensor, a tensor without a variable and a tensor of another shape are an
            error; if not, these variables stay as they are or are initialized, with a warning that lists them.
        cast: As in `AbstractModel.materialize`. Within a block or build function that casts unsafely, so does this.
        storage_options: For a URL: as in `lazymodel.open_checkpoint`. Within a block or build function, those given
            here hold for this call.
        compile: As in `from_preset`: what will be called, compiled while the checkpoint is read.
        **options: See `AbstractModel.materialize`; within a block or build function its own hold.

    Returns:
        The model, or the one that was made of the abstract one.

    Raises:
        CheckpointError: The checkpoint is missing, corrupt, or does not fit; nothing was restored then.
        LazyModelError: The model has no variables yet.

    Example:
        >>> abstract = lm.build_abstract(make_model).shard(mesh, {".*/kernel": P("model"), ".*": P()})
        >>> model = lk.restore(abstract, "checkpoints")  # saved as in the example of `TrainingCheckpoint`
        >>> int(model.optimizer.iterations.value)
        2
    """
    check_mode(cast)
    check_options("restore", options)
    text = os.path.expanduser(os.fspath(path))
    check_storage_options(text, storage_options)
    recording = active()
    remote = RemoteFiles(storage_options) if recording is None or storage_options is not None else recording.remote
    where = remote.located(text)
    if isinstance(model, AbstractModel):
        restored, recording = _restore_abstract(model, where, weights_only, strict, cast, remote)
        try:
            return restored.materialize(compile=compile, **options)
        finally:
            recording.close_files()
    if recording is None:
        _restore_placed(
            Recording(cast=cast, remote=remote), model, where, weights_only, strict, {**options, "compile": compile}
        )
        return model
    others, recording.files = recording.files, {}  # this call answers for its own
    outer_cast, outer_remote = recording.cast, recording.remote
    recording.cast, recording.remote = UNSAFE if cast == UNSAFE else outer_cast, remote
    try:
        read_state(recording, model, where, weights_only=weights_only, strict=strict)
        if recording.on_loaded is not None:
            recording.on_loaded(model, "restore", True)
    finally:
        recording.files = {**others, **recording.files}
        recording.cast, recording.remote = outer_cast, outer_remote
    return model


def _restore_placed(
    recording: Recording,
    model: Any,
    where: str | Location,
    weights_only: bool,
    strict: bool,
    options: Mapping[str, Any],
) -> None:
    """Restores into a model whose variables have their places, outside of any block."""
    try:
        with session(recording):
            read_state(recording, model, where, weights_only=weights_only, strict=strict)
        _materialize(recording, model, options)
    except BaseException:
        # The optimizer may have been built for this. It stays built, with nothing restored into it.
        for variable, recorded in list(recording.variables()):
            recorded.value = None
            if _upstream.value(variable) is not None:
                recording.forget(variable)
        _materialize(recording, model, {})
        raise
    finally:
        recording.close_files()


def read_state(
    recording: Recording, model: Any, path: str | Location, *, weights_only: bool = False, strict: bool = True
) -> None:
    """Assigns a checkpoint's tensors to a model's variables, unread, while a recording runs; raises as `restore`."""
    if not isinstance(model, keras.Model) or not model.variables:
        name = getattr(model, "name", type(model).__name__)
        raise LazyModelError(
            f"cannot restore {path} into {name!r}: it has no variables yet. Build it first, with "
            "model.build(input_shape) or by calling it on data."
        )
    where = Path(path) if isinstance(path, str) else path
    if not where.exists():
        raise CheckpointError(f"checkpoint {path} does not exist")
    if where.is_dir() and (where / "model.weights.h5").exists():
        where = where / "model.weights.h5"  # what `model.save(path, zipped=False)` wrote
    try:
        for variable in model_variables(model):
            recording.adopt(variable)
        read = _read_orbax if where.is_dir() else _read_keras
        read(recording, model, where, weights_only, strict)
    except BaseException:
        for variable, recorded in recording.variables():
            if _upstream.value(variable) is not None:
                recorded.value = None
        raise
    finally:
        for variable in model_variables(model):
            if _upstream.value(variable) is not None and recording.holds_nothing_for(variable):
                recording.forget(variable)


def is_orbax(path: Any) -> bool:
    """Whether stock Keras would look for an Orbax checkpoint at a path: a folder that is no saved model of its own."""
    where = path if isinstance(path, RemotePath) else Path(path)
    return where.is_dir() and not (where / "config.json").exists()


def model_from_orbax(
    path: str | Location, custom_objects: Any, compile: bool, safe_mode: bool, *, strict: bool = True
) -> Any:
    """The model that an Orbax checkpoint carries the configuration of, if it does, while a recording runs."""
    recording = active()
    assert recording is not None
    recording.refuse_unverified(str(path))
    checkpoint = open_checkpoint(cast(Any, path))
    item = getattr(checkpoint, "item", None)
    if item is None:
        raise CheckpointError(f"{path}: expected an Orbax checkpoint, found {checkpoint.format}")
    step = step_folder(path, str(item))
    texts = step / "model_config" / "_strings.json"
    config = read_json_file(texts).get("config") if texts.exists() else None
    if not isinstance(config, str):
        raise CheckpointError(
            f"{step}: expected the configuration of a model in {texts.name} of {texts.parent.name}, found none; it was "
            "saved with save_weights_only=True. Build the model and restore it with lazymodel_keras.restore."
        )
    model = _upstream.model_from_config(config, custom_objects, compile, safe_mode)
    read_state(recording, model, step, weights_only=not compile, strict=strict)
    if (step / "assets").is_dir():
        assets: dict[str, Any] = {}
        for name, tensor in open_checkpoint(cast(Any, step / "assets")).items():
            *folders, file = name.split("/")
            folder = assets
            for part in folders:
                folder = folder.setdefault(part, {})
            folder[file] = tensor.read()
        _upstream.load_assets(model, assets)
    return model


def step_folder(where: str | Location, inside: str) -> Location:
    """The folder of a step: what something that was found in it, or is it, at or below a place, is in."""
    if not isinstance(where, RemotePath):
        return Path(inside).parent
    below = inside.removeprefix(str(where)).strip("/")
    return (where / below if below else where).parent


# Into models ----------------------------------------------------------------------------------------------------------


class _PlacedModel(KerasModel):
    """A model whose variables have their places, which may be the memory of hosts until it is moved back."""

    def check_placed(self, variables: Mapping[str, AbstractVariable]) -> None:
        pass


def _materialize(recording: Recording, model: Any, options: Mapping[str, Any]) -> None:
    """Gives a model that is placed already what was recorded for it; what has no mesh is replicated on the model's.

    An optimizer that was made apart from the model has its step count on one device; arrays that are committed to it
    could not be used together with the model's.
    """
    skeleton = _PlacedModel(None, recording, model)
    if not skeleton.variables:
        return
    abstract = from_skeleton(skeleton)
    shardings = (getattr(_upstream.value(variable), "sharding", None) for variable in model.variables)
    meshes: Any = (sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding))
    if (mesh := next(meshes, None)) is not None:
        replicated = NamedSharding(mesh, PartitionSpec())
        elsewhere = {path: v for path, v in abstract.items() if not isinstance(v.sharding, NamedSharding)}
        moved = {path: dataclasses.replace(v, sharding=replicated) for path, v in elsewhere.items()}
        abstract = abstract.with_variables({**abstract.variables, **moved})
    abstract.materialize(**options)


def _restore_abstract(
    abstract: AbstractModel[Any], path: str | Location, weights_only: bool, strict: bool, cast: str, remote: RemoteFiles
) -> tuple[AbstractModel[Any], Recording]:
    """The abstract model with the checkpoint's tensors as sources and an optimizer that is built, and its recording."""
    skeleton = abstract.framework
    if not isinstance(skeleton, Skeleton) or skeleton.used:
        raise LazyModelError(
            f"cannot restore {path} into the abstract model {abstract.name}: expected one of a Keras model that was "
            "not materialized yet. Build it abstractly again, or restore into the materialized model."
        )
    start, recording = time.perf_counter(), skeleton.present().recording
    skeleton.used = True  # an optimizer is built that the abstract model knows nothing of
    recording.cast, recording.remote = cast, remote
    with session(recording):
        read_state(recording, skeleton.result, path, weights_only=weights_only, strict=strict)
    filled = KerasModel(None, recording, skeleton.result)
    filled.add_variables(skeleton.variables)
    restored = extended(abstract, filled)
    return dataclasses.replace(restored, spent=(*abstract.spent, Span.since(start, "build", "restoring"))), recording


# Keras' own files -----------------------------------------------------------------------------------------------------


def _read_keras(recording: Recording, model: Any, path: Location, weights_only: bool, strict: bool) -> None:
    optimizer = getattr(model, "optimizer", None)
    state: list[str] = []
    if path.name.endswith(_WITH_STATE):
        with open_checkpoint(cast(Any, path)) as file:
            state = [name for name in file if name.startswith("optimizer/vars/")]
    if optimizer is not None and state and not weights_only:
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        if strict and len(state) != len(optimizer.variables):
            raise CheckpointError(
                f"{path}: expected the {len(optimizer.variables)} variables of optimizer {optimizer.name!r}, found "
                f"{len(state)}. Compile the model with the optimizer that it was saved with, or pass weights_only=True."
            )
    skipped = [optimizer] if optimizer is not None and (weights_only or not state) else []
    loading, recording.loading = recording.loading, True  # what is wrong is said here, and what is loaded
    try:
        with recording.explaining(f"restoring {path}"):
            file = recording.remote.for_keras(path)
            if path.name.endswith(_WITH_STATE):
                _upstream.load_weights_file(model, file, skip_mismatch=not strict, objects_to_skip=skipped)
            else:
                model.load_weights(file, skip_mismatch=not strict)
    except (ValueError, KeyError, OSError) as error:
        raise CheckpointError(f"restoring {path}: {error}") from error
    finally:
        recording.loading = loading
    check_all_used(recording, f"restoring {path}", strict=strict)


# Orbax ----------------------------------------------------------------------------------------------------------------


def _read_orbax(recording: Recording, model: Any, path: Location, weights_only: bool, strict: bool) -> None:
    recording.refuse_unverified(str(path))
    file = recording.open(path if isinstance(path, RemotePath) else str(path), open_checkpoint)
    names: dict[str, dict[str, str]] = {}  # collection → path as saved → name in the checkpoint
    for name in file.tensors:
        collection, _, saved = name.partition("/")
        names.setdefault("weights" if collection in _WEIGHTS else collection, {})[saved] = name
    if not names.get("weights"):
        raise CheckpointError(
            f"{path}: expected variables of a Keras model under {' and '.join(_WEIGHTS)}, "
            f"found {listed(map(repr, sorted(names)))}"
        )
    optimizer = None if weights_only or not names.get(_OPTIMIZER) else getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    automatic = {_upstream.automatic_name(type(part)) for part in _parts(model)} | {"seed_generator", "variable"}

    weights = {variable.path: variable for variable in model.variables}
    if weights_only:
        weights = {path: variable for path, variable in weights.items() if not path.endswith(_SEED_STATE)}
        names["weights"] = {saved: name for saved, name in names["weights"].items() if not saved.endswith(_SEED_STATE)}
    saved_as = match_paths(list(weights), list(names["weights"]), automatic)
    taken = {path: names["weights"][saved] for path, saved in saved_as.items()}
    wanted = dict(weights)
    unused = {name for name in names["weights"].values() if name not in set(taken.values())}
    if optimizer is not None:
        slots = {variable.path: variable for variable in optimizer.variables}
        found = match_slots(slots, names[_OPTIMIZER], saved_as, automatic)
        wanted |= slots
        taken |= found
        unused |= {name for name in names[_OPTIMIZER].values() if name not in set(found.values())}
    _require_complete(model, path, wanted, taken, unused, strict=strict)
    if not weights_only and names.get(_METRICS):
        # Metrics that have no variables yet get them from the first batch, and fresh values at once.
        metrics = {variable.path: variable for variable in getattr(model, "metrics_variables", ())}
        matched = match_paths(list(metrics), list(names[_METRICS]), automatic)
        wanted |= metrics
        taken |= {path: names[_METRICS][saved] for path, saved in matched.items()}

    misfits = {of: name for of, name in taken.items() if tuple(wanted[of].shape) != file.tensors[name].shape}
    if misfits:
        shapes = {of: (wanted[of].shape, file.tensors[name].shape) for of, name in misfits.items()}
        found = listed((misshapen(of, *shapes[of], f"tensor {misfits[of]!r}") for of in misfits), separator="; ")
        if strict:
            raise CheckpointError(
                f"{path} does not fit {model.name!r}: {found}. Is this the checkpoint of another configuration? "
                "strict=False leaves these variables out."
            )
        warn(f"{path}: left out, since they do not fit: {found}")
    for of, name in taken.items():
        if of not in misfits:
            wanted[of].assign(file[name])


def _parts(model: Any) -> Iterable[Any]:
    """What gives variables of a model the first parts of their paths."""
    yield from _upstream.flat_layers(model)
    yield from getattr(model, "metrics", None) or ()
    optimizer = getattr(model, "optimizer", None)
    while optimizer is not None:
        yield optimizer
        yield from getattr(optimizer, "optimizers", ())
        optimizer = getattr(optimizer, "inner_optimizer", None)


def _require_complete(
    model: Any, path: Location, wanted: Mapping[str, Any], taken: Mapping[str, str], unused: set[str], *, strict: bool
) -> None:
    """Raises, or warns without `strict`, where variables lack tensors or tensors lack variables."""
    lacking = [variable_path for variable_path in wanted if variable_path not in taken]
    parts: list[str] = []
    names = sorted(unused)
    if lacking:
        near = closest(lacking[0], [name.partition("/")[2] for name in names])
        folded = listed(folded_names(lacking))
        parts.append(f"has no tensor for {len(lacking)} variables of {model.name!r}: {folded}{near}")
    if unused:
        parts.append(f"holds {len(unused)} tensors that {model.name!r} has no variable for: {listed(names)}")
    if parts and strict:
        raise CheckpointError(
            f"{path} {' and '.join(parts)}. Build the model and its optimizer as they were when it was saved; "
            "weights_only=True leaves the optimizer out, strict=False whatever does not match."
        )
    if parts:
        warn(f"{path} {' and '.join(parts)}. They are left out.")


@while_recording(lambda: _SAVING if hasattr(_SAVING, _upstream.LOAD_ORBAX) else None, _upstream.LOAD_ORBAX)
def _load_orbax(recording: Recording, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Has `keras.saving.load_model` read Orbax checkpoints lazily, and match their paths."""
    return model_from_orbax(*args, **kwargs)
