"""Restores training checkpoints into Keras models: weights, optimizer state and metrics; each device reads its shards.

Responsible for finding each variable's tensor in checkpoints of `keras.callbacks.OrbaxCheckpoint`, `model.save` and
`save_weights`, and for reporting mismatches. The stream reads the files like those of any other checkpoint.

Orbax checkpoints name variables by path. Stock Keras silently skips variables that it does not find under the exact
path; here `_train/restore` matches paths, and what remains unmatched raises.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, Unpack, cast, overload

import keras
from jax.sharding import NamedSharding, PartitionSpec

from lazymodel import AbstractModel, AbstractVariable, CheckpointError, Compile, LazyModelError, open_checkpoint
from lazymodel._errors import warn
from lazymodel._remote.path import Location, RemotePath, location
from lazymodel._show.progress import Span
from lazymodel._show.text import closest, folded_names, listed, plural
from lazymodel._tensors.casting import SAFE, UNSAFE, check_mode, weights
from lazymodel._tensors.stored import misshapen
from lazymodel.checkpoints._untrusted import read_json_file
from lazymodel_keras import _upstream
from lazymodel_keras._build import Materializing, check_all_used, check_options, of_kind
from lazymodel_keras._model.keras_object import KerasModel, by_path, extended, from_skeleton, model_variables
from lazymodel_keras._record.files import RemoteFiles, check_storage_options
from lazymodel_keras._record.recording import LoadOptions, Recording, session

# Matching of saved paths and paths of a model, despite names that Keras gives differently in another program.
#
# Keras numbers automatic names over the whole process (`dense_4`), and variables of a model made from its configuration
# do not have the name of the model in front. Paths are matched across such differences if that is possible in only one
# way.


def _match_paths(paths: Iterable[str], saved: Iterable[str], automatic: set[str]) -> dict[str, str]:
    """Path of the model → saved path, for all that can be matched.

    Equal paths are matched first, if that matches all of the model's. Otherwise all are compared without the numbers of
    `automatic` names but with their order. Then one path may have fewer leading parts than the other, if it matches no
    other path.
    """
    if set(paths) <= set(saved):
        return {path: path for path in paths}
    ours, theirs = _renumbered(paths, automatic), _renumbered(saved, automatic)
    matched = {ours.pop(name): theirs.pop(name) for name in [*ours] if name in theirs}
    fits = [(path, theirs[end]) for name, path in ours.items() for end in _endings(name) if end in theirs]
    fits += [(ours[end], path) for name, path in theirs.items() for end in _endings(name) if end in ours]
    of_ours, of_theirs = (collections.Counter(pair[side] for pair in fits) for side in (0, 1))
    return matched | {path: other for path, other in fits if of_ours[path] == of_theirs[other] == 1}


def _endings(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[start:]) for start in range(len(parts))]


def _renumbered(paths: Iterable[str], automatic: set[str]) -> dict[str, str]:
    """Path with automatic names counted from 0 in their order (`dense_4`, `dense_7` → `dense#0`, …) → the path."""
    part = re.compile(rf"(?<![^/])({'|'.join(map(re.escape, automatic))})(?:_(\d+))?(?![^/])")
    found = {(base, int(number or 0)) for path in paths for base, number in part.findall(path)}
    ranks: dict[tuple[str, int], int] = {}
    for _, numbers in itertools.groupby(sorted(found), key=lambda each: each[0]):
        ranks |= {each: rank for rank, each in enumerate(numbers)}
    return {part.sub(lambda m: f"{m[1]}#{ranks[m[1], int(m[2] or 0)]}", path): path for path in paths}


def _match_slots(
    slots: Mapping[str, Any], names: Mapping[str, str], saved_as: Mapping[str, str], automatic: set[str]
) -> dict[str, str]:
    """Path of each optimizer variable → its name in the checkpoint, for all that can be matched.

    The state that an optimizer keeps for a variable is named after it, `adam/net_dense_kernel_momentum`.
    """
    prefixes = {path.replace("/", "_") + "_": saved.replace("/", "_") + "_" for path, saved in saved_as.items()}
    expected: dict[str, str] = {}
    for path in slots:
        scope, _, leaf = path.rpartition("/")
        owner = max((prefix for prefix in prefixes if leaf.startswith(prefix)), key=len, default="")
        expected[path] = (f"{scope}/" if scope else "") + prefixes.get(owner, "") + leaf[len(owner) :]
    matched = _match_paths(expected.values(), names, automatic)
    return {path: names[matched[name]] for path, name in expected.items() if name in matched}


def other_optimizers(model: Any) -> list[str]:
    """The attributes in which a model has optimizers besides `model.optimizer`, as generative adversarial nets do."""
    held = ((name, value) for name, value in vars(model).items() if not name.startswith("_"))
    optimizers = ((name, value) for name, value in held if isinstance(value, keras.Optimizer))
    return [name for name, value in optimizers if value is not getattr(model, "optimizer", None)]


T = TypeVar("T")

_WEIGHTS = ("trainable_variables", "non_trainable_variables")
_OPTIMIZER = "optimizer_variables"
_METRICS = "metrics_variables"
_WITH_STATE = (".keras", ".weights.h5", ".weights.json")  # Keras' own files that may contain optimizer state
SAVE_ALL = (
    "Save such a model with keras.callbacks.ModelCheckpoint('run.weights.h5', save_weights_only=True) within "
    "lazymodel_keras.streamed_saving(), which has the state of all, and restore it with lazymodel_keras.restore"
)
_SEED_STATE = "seed_generator_state"  # the random state of dropout and the like: training state, not a weight


class Restoring(Materializing, total=False):
    """The options of `restore`."""

    weights_only: bool
    strict: bool
    cast: str
    storage_options: Mapping[str, Any] | None
    compile: Compile | Sequence[Compile] | None


@overload
def restore(model: AbstractModel[T], path: str | os.PathLike[str], **options: Unpack[Restoring]) -> T: ...
@overload
def restore(model: T, path: str | os.PathLike[str], **options: Unpack[Restoring]) -> T: ...
def restore(model: Any, path: str | os.PathLike[str], **options: Unpack[Restoring]) -> Any:
    """Restores a training checkpoint into a model, wherever its variables are placed; each device reads its shards.

    The mesh may differ from the one that saved. Optimizer state is restored with the weights: an optimizer that was
    not built yet is built, with its variables placed like those that they belong to. Metrics that have variables
    (`fit` begins each epoch with new ones) and the states of random generators are also restored, if the checkpoint has
    them. `training_state` returns the epoch to resume from.

    Args:
        model: A Keras model, which is filled in place and keeps its shardings. Or an abstract one, which needs memory
            for only one copy of the state: the result of `lazymodel.build_abstract`, not materialized yet; or, within
            `deferred()` or a function that is built abstractly, a model whose variables are still abstract.
        path: A checkpoint of `keras.callbacks.OrbaxCheckpoint` or `lk.TrainingCheckpoint` (the folder, for the newest
            step, or the folder of a step); or a `.keras`, `.weights.h5`, `.weights.json` or legacy `.h5` file; the
            last is restored without its optimizer state. Or the URL of one of these, which is read from there; see
            `abstract_from_preset`.
        weights_only: True leaves optimizer, metrics and random states unchanged, for example for a different optimizer.
        strict: True raises for a variable without a tensor, a tensor without a variable and a tensor of another shape;
            False leaves these variables unchanged or initializes them, with a warning that lists them.
        cast: As in `AbstractModel.materialize`. Within a block or build function that casts unsafely, so does this.
        storage_options: For a URL: as in `lazymodel.open_checkpoint`. Within a block or build function, they apply to
            this call.
        compile: As in `from_preset`: what to compile while the checkpoint is read.
        **options: See `AbstractModel.materialize`; within a block or build function, its own options apply.

    Returns:
        The model, or the one built from the abstract model.

    Raises:
        CheckpointError: The checkpoint is missing, corrupt, or does not match; then nothing was restored.
        LazyModelError: The model has no variables yet.

    Example:
        >>> abstract = lm.build_abstract(make_model).shard(mesh, {".*/kernel": P("model"), ".*": P()})
        >>> model = lk.restore(abstract, "checkpoints")  # saved as in the example of `TrainingCheckpoint`
        >>> int(model.optimizer.iterations.value)
        2
    """
    check_options("restore", options, Restoring)
    cast, storage_options = options.get("cast", SAFE), options.get("storage_options")
    check_mode(cast)
    text = os.path.expanduser(os.fspath(path))
    check_storage_options(text, storage_options)
    outer = _upstream.active()
    remote = RemoteFiles(storage_options) if outer is None or storage_options is not None else outer.remote
    weights_only, strict = options.get("weights_only", False), options.get("strict", True)
    read = functools.partial(read_state, path=remote.located(text), weights_only=weights_only, strict=strict)
    materializing = {**of_kind(Materializing, options), "compile": options.get("compile")}
    if isinstance(model, AbstractModel):
        return _restore_abstract(model, read, cast, remote, materializing)
    if outer is None:
        return _restore_placed(Recording(LoadOptions(cast=cast), remote), model, read, materializing)
    before = outer.files, outer.cast, outer.remote
    # This call checks its own files only.
    outer.files, outer.cast, outer.remote = {}, UNSAFE if cast == UNSAFE else outer.cast, remote
    try:
        read(outer, model)
        if outer.on_loaded is not None:
            outer.on_loaded(model, "restore", True)
    finally:
        opened = outer.files
        outer.files, outer.cast, outer.remote = before
        outer.files |= opened
    return model


def _restore_placed(
    recording: Recording, model: Any, read: Callable[[Recording, Any], None], options: Mapping[str, Any]
) -> Any:
    """Restores into a model whose variables are placed, outside of any block."""
    try:
        with session(recording):
            read(recording, model)
        _materialize(recording, model, options)
    except BaseException:
        # The optimizer may have been built here. It stays built, with nothing restored into it.
        for variable, recorded in list(recording.variables()):
            recorded.value = None
            if _upstream.value(variable) is not None:
                recording.forget(variable)
        _materialize(recording, model, {})
        raise
    finally:
        recording.close_files()
    return model


def read_state(
    recording: Recording, model: Any, path: str | Location, *, weights_only: bool = False, strict: bool = True
) -> None:
    """Assigns a checkpoint's tensors to a model's variables, unread, in a recording; raises like `restore`."""
    if not isinstance(model, keras.Model) or not model.variables:
        name = getattr(model, "name", type(model).__name__)
        raise LazyModelError(
            f"cannot restore {path} into {name!r}: it has no variables yet. Build it first, with "
            "model.build(input_shape) or by calling it on data."
        )
    where = location(path)
    if not where.exists():
        raise CheckpointError(f"checkpoint {path} does not exist")
    if where.is_dir() and (where / "model.weights.h5").exists():
        where = where / "model.weights.h5"  # written by `model.save(path, zipped=False)`
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
            recorded = recording.of(variable)
            if _upstream.value(variable) is not None and recorded is not None and recorded.value is None:
                recording.forget(variable)


def is_orbax(path: Any) -> bool:
    """Returns True for a folder in which stock Keras looks for an Orbax checkpoint, as it is not a saved model."""
    where = location(path)
    return where.is_dir() and not (where / "config.json").exists()


def model_from_orbax(
    path: str | Location, custom_objects: Any, compile: bool, safe_mode: bool, *, strict: bool = True
) -> Any:
    """The model whose configuration an Orbax checkpoint contains, in a recording; without one, CheckpointError."""
    recording = _upstream.active()
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
    """The folder of a step: the parent of `inside`, which was found at or below `where`."""
    return location(where).named(inside).parent


# Models ---------------------------------------------------------------------------------------------------------------


class _PlacedModel(KerasModel):
    """A model whose variables are placed, possibly in host memory until they are moved back."""

    def check_placed(self, variables: Mapping[str, AbstractVariable]) -> None:
        pass


def _materialize(recording: Recording, model: Any, options: Mapping[str, Any]) -> None:
    """Gives a placed model its recorded values; variables without a mesh are replicated on the model's mesh.

    An optimizer that was created separately from the model has its step count on one device; arrays that are committed
    to it could not be used together with the model's arrays.
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
    abstract: AbstractModel[Any],
    read: functools.partial[None],
    cast: str,
    remote: RemoteFiles,
    options: Mapping[str, Any],
) -> Any:
    """Materializes an abstract model with the checkpoint's tensors as sources, and builds its optimizer."""
    skeleton = abstract.framework
    if not isinstance(skeleton, KerasModel) or skeleton.filled:
        raise LazyModelError(
            f"cannot restore {read.keywords['path']} into the abstract model {abstract.name}: expected one of a Keras "
            "model that was not materialized yet. Build it abstractly again, or restore into the materialized model."
        )
    start = time.perf_counter()
    base: Any = skeleton
    if skeleton.before is not None and _is_before(skeleton.before[0], read.keywords["path"]):
        base = skeleton.before[0].framework
    recording, result, variables = base.take()  # it gets an optimizer that the abstract model does not have
    recording.cast, recording.remote = cast, remote
    with session(recording):
        read(recording, result)
        for change in skeleton.changes[len(base.changes) :]:
            change(result)
    found = KerasModel(None, recording, result)
    if base is not skeleton:  # the same variables, in the same order
        variables = dict(zip(skeleton.variables, found.variables.values(), strict=False))
    restored = extended(abstract, found, variables)
    restored = dataclasses.replace(restored, spent=(*abstract.spent, Span.since(start, "build", "restoring")))
    try:
        return restored.materialize(**options)
    finally:
        recording.close_files()


def _is_before(before: Mapping[str, AbstractVariable], path: Any) -> bool:
    """Returns True if a checkpoint is of a model before it was quantized: it has no quantized numbers and no histories.

    Names do not show it, since Keras numbers the variables of a layer.
    """
    with open_checkpoint(path) as checkpoint:
        own = [name for name in checkpoint if not name.startswith(("optimizer", _METRICS))]
        most = sum(variable.follows is None for variable in before.values())
        return len(own) <= most and not any(weights(checkpoint[name]) for name in own)


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
    loading, recording.loading = recording.loading, True  # errors and loaded objects are reported here
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
    if not weights_only and (others := other_optimizers(model)):
        raise CheckpointError(
            f"{path}: a checkpoint of this kind has the state of `model.optimizer` only, and {model.name!r} also has "
            f"{listed(others)}. {SAVE_ALL}, or pass weights_only=True."
        )
    optimizer = None if weights_only or not names.get(_OPTIMIZER) else getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    automatic = _automatic_names(model)
    weights = by_path(model.variables)
    if weights_only:
        weights = {of: variable for of, variable in weights.items() if not of.endswith(_SEED_STATE)}
        names["weights"] = {saved: name for saved, name in names["weights"].items() if not saved.endswith(_SEED_STATE)}
    saved_as = _match_paths(weights, names["weights"], automatic)
    targets, taken = dict(weights), {of: names["weights"][saved] for of, saved in saved_as.items()}
    unused = {*names["weights"].values()}
    if optimizer is not None:
        slots = by_path(optimizer.variables)
        targets |= slots
        taken |= _match_slots(slots, names[_OPTIMIZER], saved_as, automatic)
        unused |= {*names[_OPTIMIZER].values()}
    _require_complete(model, path, targets, taken, sorted(unused - {*taken.values()}), strict=strict)
    if not weights_only and names.get(_METRICS):
        # Metrics without variables yet get them from the first batch, with initial values.
        metrics = by_path(getattr(model, "metrics_variables", ()))
        targets |= metrics
        taken |= {of: names[_METRICS][it] for of, it in _match_paths(metrics, names[_METRICS], automatic).items()}

    mismatches = {of: name for of, name in taken.items() if tuple(targets[of].shape) != file.tensors[name].shape}
    if mismatches:
        shapes = {of: (targets[of].shape, file.tensors[name].shape) for of, name in mismatches.items()}
        found = listed((misshapen(of, *shapes[of], f"tensor {mismatches[of]!r}") for of in mismatches), separator="; ")
        if strict:
            raise CheckpointError(
                f"{path} does not fit {model.name!r}: {found}. Is this the checkpoint of another configuration? "
                "strict=False leaves these variables out."
            )
        warn(f"{path}: left out, since they do not fit: {found}")
    for of, name in taken.items():
        if of not in mismatches:
            targets[of].assign(file[name])


def _automatic_names(model: Any) -> set[str]:
    """The names, up to their numbers, that Keras gives to parts of a model without a name."""
    parts = [*_upstream.flat_layers(model), *(getattr(model, "metrics", None) or ())]
    optimizer = getattr(model, "optimizer", None)
    while optimizer is not None:
        parts += [optimizer, *getattr(optimizer, "optimizers", ())]
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return {_upstream.automatic_name(type(part)) for part in parts} | {"seed_generator", "variable"}


def _require_complete(
    model: Any, path: Location, targets: Iterable[str], taken: Mapping[str, str], unused: Sequence[str], *, strict: bool
) -> None:
    """Raises, or warns without `strict`, if variables have no tensor or tensors have no variable."""
    missing = [variable_path for variable_path in targets if variable_path not in taken]
    parts: list[str] = []
    if missing:
        near = closest(missing[0], [name.partition("/")[2] for name in unused])
        folded = listed(folded_names(missing))
        parts.append(f"has no tensor for {len(missing)} variables of {model.name!r}: {folded}{near}")
    if unused:
        parts.append(f"holds {plural(len(unused), 'tensor')} that {model.name!r} has no variable for: {listed(unused)}")
    if parts and strict:
        raise CheckpointError(
            f"{path} {' and '.join(parts)}. Build the model and its optimizer as they were when it was saved; "
            "weights_only=True leaves the optimizer out, strict=False whatever does not match."
        )
    if parts:
        warn(f"{path} {' and '.join(parts)}. They are left out.")


@_upstream.while_recording(_upstream.ORBAX_API, _upstream.LOAD_ORBAX)
def _load_orbax(recording: Recording, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes `keras.saving.load_model` read Orbax checkpoints lazily, and match their paths."""
    return model_from_orbax(*args, **kwargs)
