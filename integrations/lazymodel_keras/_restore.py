"""Training checkpoints back into Keras models: weights, optimizer state and metrics, each device its own shards.

Responsible for finding each variable's tensor in what `keras.callbacks.OrbaxCheckpoint`, `model.save` and
`save_weights` wrote, and for saying what does not fit. Files are read by the stream as any other checkpoint's.

Orbax checkpoints name variables by path, and one program gives a model other paths than another: Keras numbers
automatic names over the whole process (`dense_4`), and a model made from its configuration has variables without the
name of the model in front. Stock Keras leaves what it does not find under the exact path as it is, in silence; here
paths are matched up to such differences where that is possible in one way only, and what is left over is an error.
"""

from __future__ import annotations

import dataclasses
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import jax
import keras
from jax.sharding import NamedSharding, PartitionSpec

from lazymodel import (
    AbstractModel,
    AbstractVariable,
    CheckpointError,
    LazyModelError,
    LazyModelWarning,
    LazyTensor,
    Progress,
    open_checkpoint,
)
from lazymodel._abstract import unique_paths
from lazymodel._auto import Auto
from lazymodel._casting import UNSAFE, check_mode
from lazymodel._materialize import ReportTo
from lazymodel._optimizer import follow
from lazymodel._report import closest, folded_names
from lazymodel._sharding import Rules
from lazymodel.checkpoints._untrusted import read_json_file
from lazymodel.checkpoints._verify import Verify
from lazymodel_keras import _upstream
from lazymodel_keras._deferred import block
from lazymodel_keras._model import Skeleton, from_skeleton, model_variables
from lazymodel_keras._recording import Recording, active
from lazymodel_keras._saved_models import check_saved_model
from lazymodel_keras.hub import _levels_to_caller, check_all_used

_LISTED = 8
_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?")
_WEIGHTS = ("trainable_variables", "non_trainable_variables")
_OPTIMIZER = "optimizer_variables"
_METRICS = "metrics_variables"
_SEED_STATE = "seed_generator_state"  # the random state of dropout and the like: training state, no weight


def restore(
    model: Any,
    path: str | os.PathLike[str],
    *,
    weights_only: bool = False,
    strict: bool = True,
    cast: str = "safe",
    max_host_memory: int | str | None = None,
    progress: bool | Progress | Callable[[int, int], object] | None = None,
    report: ReportTo = None,
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
            restored without its optimizer state.
        weights_only: Whether to leave optimizer, metrics and random states as they are; into an instance with another
            optimizer, say.
        strict: Whether a variable without a tensor, a tensor without a variable and a tensor of another shape are an
            error; if not, these variables stay as they are or are initialized, with a warning that lists them.
        cast: As in `AbstractModel.materialize`. Within a block or build function that casts unsafely, so does this.
        max_host_memory: As in `AbstractModel.materialize`; within a block or build function its own holds.
        progress: Likewise.
        report: Likewise.

    Returns:
        The model, or the one that was made of the abstract one.

    Raises:
        CheckpointError: The checkpoint is missing, corrupt, or does not fit; nothing was restored then.
        LazyModelError: The model has no variables yet.
    """
    check_mode(cast)
    options: Any = {"max_host_memory": max_host_memory, "progress": progress, "report": report}
    where = os.path.expanduser(os.fspath(path))
    if isinstance(model, AbstractModel):
        restored, recording = _restore_abstract(model, where, weights_only, strict, cast)
        try:
            return restored.materialize(**options)
        finally:
            recording.close_files()
    recording = active()
    if recording is not None:
        others, recording.files = recording.files, {}  # this call answers for its own
        outer, recording.cast = recording.cast, UNSAFE if cast == UNSAFE else recording.cast
        try:
            read_state(recording, model, where, weights_only=weights_only, strict=strict)
            if recording.on_loaded is not None:
                recording.on_loaded(model, "restore", True)
        finally:
            recording.files = {**others, **recording.files}
            recording.cast = outer
        return model
    recording = Recording(cast=cast)
    try:
        with recording:
            read_state(recording, model, where, weights_only=weights_only, strict=strict)
        _materialize(recording, model, options)
    except BaseException:
        # The optimizer may have been built for this. It stays built, with nothing restored into it.
        for variable, recorded in list(recording.variables()):
            recorded.value = None
            if variable._value is not None:
                recording.forget(variable)
        _materialize(recording, model, {})
        raise
    finally:
        recording.close_files()
    return model


def load_model(
    path: str | os.PathLike[str],
    custom_objects: Mapping[str, Any] | None = None,
    compile: bool = True,
    safe_mode: bool = True,
    *,
    mesh: jax.sharding.Mesh | None = None,
    rules: Rules | None = None,
    on_unmatched: str = "warn",
    large: int | str = "1MiB",
    repair: bool | Auto = False,
    strict: bool = True,
    cast: str = "safe",
    verify: Verify = False,
    max_host_memory: int | str | None = None,
    progress: bool | Progress | Callable[[int, int], object] | None = None,
    report: ReportTo = None,
) -> Any:
    """Does what `keras.saving.load_model` does, with each variable read straight into its shards.

    For `.keras` files and folders, legacy whole-model `.h5` files (with `compile=False`: Keras builds their optimizers
    for no variables), and Orbax checkpoints that carry the model's configuration, of which stock Keras leaves every
    variable that now has another path at its initial value. With `compile`, the optimizer's state is loaded too.
    `deferred()` does the same for unchanged code.

    Args:
        path: The file or folder.
        custom_objects: As for Keras.
        compile: As for Keras: whether to compile the model as it was, and load the optimizer's state.
        safe_mode: As for Keras: whether to refuse code in the file.
        mesh: As in `from_preset`, and so are `rules`, `on_unmatched`, `large`, `repair`, `strict`, `cast`, `verify`,
            `max_host_memory`, `progress` and `report`.

    Raises:
        CheckpointError: There is no saved model, it is corrupt, or its weights do not fit its configuration.
        ShardingError: The rules do not fit.
    """
    where = os.path.expanduser(os.fspath(path))
    check_saved_model(where)
    with block(
        *(mesh, rules, strict, cast, verify),
        sharding={"on_unmatched": on_unmatched, "large": large, "repair": repair},
        materializing={"max_host_memory": max_host_memory, "progress": progress, "report": report},
        one_model=True,
    ):
        if not is_orbax(where):
            return keras.saving.load_model(where, custom_objects, compile=compile, safe_mode=safe_mode)
        model = model_from_orbax(where, custom_objects, compile, safe_mode, strict=strict)
        recording = active()
        assert recording is not None and recording.on_loaded is not None
        recording.on_loaded(model, "load_model", True)
        return model


def read_state(recording: Recording, model: Any, path: str, *, weights_only: bool = False, strict: bool = True) -> None:
    """Assigns a checkpoint's tensors to a model's variables, unread, while a recording runs.

    Raises:
        CheckpointError: As `restore`.
        LazyModelError: As `restore`.
    """
    if not isinstance(model, keras.Model) or not model.variables:
        name = getattr(model, "name", type(model).__name__)
        raise LazyModelError(
            f"cannot restore {path} into {name!r}: it has no variables yet. Build it first, with "
            "model.build(input_shape) or by calling it on data."
        )
    if not os.path.exists(path):
        raise CheckpointError(f"checkpoint {path} does not exist")
    if os.path.isdir(path) and os.path.exists(os.path.join(path, "model.weights.h5")):
        path = os.path.join(path, "model.weights.h5")  # what `model.save(path, zipped=False)` wrote
    try:
        for variable in model_variables(model):
            recording.adopt(variable)
        if os.path.isdir(path):
            _read_orbax(recording, model, path, weights_only, strict)
        else:
            _read_keras(recording, model, path, weights_only, strict)
    except BaseException:
        for variable, recorded in recording.variables():
            if variable._value is not None:
                recorded.value = None
        raise
    finally:
        for variable in model_variables(model):
            if variable._value is not None and recording.holds_nothing_for(variable):
                recording.forget(variable)


def is_orbax(path: str | os.PathLike[str]) -> bool:
    """Whether stock Keras would look for an Orbax checkpoint at a path: a folder that is no saved model of its own."""
    return os.path.isdir(path) and not os.path.exists(os.path.join(path, "config.json"))


def model_from_orbax(
    path: str | os.PathLike[str], custom_objects: Any, compile: bool, safe_mode: bool, *, strict: bool = True
) -> Any:
    """The model that an Orbax checkpoint carries the configuration of, while a recording runs.

    Raises:
        CheckpointError: It was saved with `save_weights_only`, or does not fit its own configuration.
    """
    recording = active()
    assert recording is not None
    recording.refuse_unverified(os.fspath(path))
    step = _step_folder(os.fspath(path))
    texts = step / "model_config" / "_strings.json"
    config = read_json_file(texts).get("config") if texts.exists() else None
    if not isinstance(config, str):
        raise CheckpointError(
            f"{step}: expected the configuration of a model in {texts.name} of {texts.parent.name}, found none; it was "
            "saved with save_weights_only=True. Build the model and restore it with lazymodel_keras.restore."
        )
    model = _upstream.model_from_config(config, custom_objects, compile, safe_mode)
    read_state(recording, model, os.fspath(step), weights_only=not compile, strict=strict)
    if (step / "assets").is_dir():
        assets: dict[str, Any] = {}
        for name, tensor in open_checkpoint(step / "assets").items():
            *folders, file = name.split("/")
            folder = assets
            for part in folders:
                folder = folder.setdefault(part, {})
            folder[file] = tensor.read()
        _upstream.load_assets(model, assets)
    return model


def _step_folder(path: str) -> Path:
    checkpoint = open_checkpoint(path)
    item = getattr(checkpoint, "item", None)
    if item is None:
        raise CheckpointError(f"{path}: expected an Orbax checkpoint, found {checkpoint.format}")
    return Path(item).parent


# Into models ----------------------------------------------------------------------------------------------------------


def _materialize(recording: Recording, model: Any, options: dict[str, Any]) -> None:
    """Gives a model that is placed already what was recorded for it."""
    skeleton = Skeleton(None, recording, model)
    if skeleton.variables:
        abstract = from_skeleton(skeleton)
        abstract.with_variables(_on_mesh(model, abstract.variables)).materialize(**options)


def _on_mesh(model: Any, variables: Mapping[str, AbstractVariable]) -> dict[str, AbstractVariable]:
    """The variables, those without a mesh replicated on the model's where it has one.

    An optimizer that was made apart from the model has its step count on one device; arrays that are committed to it
    could not be used together with the model's.
    """
    values = (variable._value for variable in model.variables if variable._value is not None)
    meshes = (value.sharding.mesh for value in values if isinstance(value.sharding, NamedSharding))
    mesh = cast("Any", next(meshes, None))
    if mesh is None:
        return dict(variables)
    replicated = NamedSharding(mesh, PartitionSpec())
    return {
        path: variable
        if isinstance(variable.sharding, NamedSharding)
        else dataclasses.replace(variable, sharding=replicated)
        for path, variable in variables.items()
    }


def _restore_abstract(
    abstract: AbstractModel, path: str, weights_only: bool, strict: bool, cast: str
) -> tuple[AbstractModel, Recording]:
    """The abstract model with the checkpoint's tensors as sources and an optimizer that is built, and its recording."""
    skeleton = getattr(abstract.rebuild, "__self__", None)
    if not isinstance(skeleton, Skeleton) or skeleton.used:
        raise LazyModelError(
            f"cannot restore {path} into the abstract model {abstract.name}: expected one of a Keras model that was "
            "not materialized yet. Build it abstractly again, or restore into the materialized model."
        )
    recording = skeleton.recording
    skeleton.used = True  # an optimizer is built that the abstract model knows nothing of
    recording.cast = cast
    with recording:
        read_state(recording, skeleton.result, path, weights_only=weights_only, strict=strict)
    known = {id(variable) for variable, _ in skeleton.variables.values()}
    more = [(variable, recorded) for variable, recorded in recording.variables() if id(variable) not in known]
    paths = unique_paths([*skeleton.variables, *(variable.path for variable, _ in more)])
    filled = Skeleton(None, recording, skeleton.result)
    filled.variables = dict(zip(paths, [*skeleton.variables.values(), *more], strict=True))
    new = from_skeleton(filled)
    own = {path: dataclasses.replace(abstract[path], origin=new[path].origin) for path in abstract}
    state = {path: variable for path, variable in new.items() if path not in own}
    restored = dataclasses.replace(
        new,
        variables={**own, **follow(state, own)},
        # The abstract model's own ways of initializing, which may have been changed since it was built.
        recipes=(*abstract.recipes, *(r for r in new.recipes if not set(r.paths).intersection(own))),
        sources={**abstract.sources, **new.sources},
        programs=abstract.programs,
    )
    return restored, recording


# Keras' own files -----------------------------------------------------------------------------------------------------


def _read_keras(recording: Recording, model: Any, path: str, weights_only: bool, strict: bool) -> None:
    optimizer = getattr(model, "optimizer", None)
    state: list[str] = []
    if path.endswith((".keras", ".weights.h5", ".weights.json")):
        with open_checkpoint(path) as file:
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
        if path.endswith((".keras", ".weights.h5", ".weights.json")):
            _upstream.load_weights_file(model, path, skip_mismatch=not strict, objects_to_skip=skipped)
        else:
            model.load_weights(path, skip_mismatch=not strict)
    except (ValueError, KeyError, OSError) as error:
        problems = recording.unresolved_problems()
        more = f" ({len(problems)} tensors do not match)" if len(problems) > 1 else ""
        raise CheckpointError(f"restoring {path}: {problems[0] if problems else error}{more}") from error
    finally:
        recording.loading = loading
        recording.require_verified()
    check_all_used(recording, f"restoring {path}", strict=strict)


# Orbax ----------------------------------------------------------------------------------------------------------------


def _read_orbax(recording: Recording, model: Any, path: str, weights_only: bool, strict: bool) -> None:
    recording.refuse_unverified(path)
    file = recording.open(path, open_checkpoint)
    names: dict[str, dict[str, str]] = {}  # collection → path as saved → name in the checkpoint
    for name in file.tensors:
        collection, _, saved = name.partition("/")
        names.setdefault("weights" if collection in _WEIGHTS else collection, {})[saved] = name
    if not names.get("weights"):
        raise CheckpointError(
            f"{path}: expected variables of a Keras model under {' and '.join(_WEIGHTS)}, "
            f"found {sorted(names)[:_LISTED]}"
        )
    optimizer = None if weights_only else getattr(model, "optimizer", None)
    if optimizer is not None and names.get(_OPTIMIZER) and not optimizer.built:
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
    if optimizer is not None and names.get(_OPTIMIZER):
        slots = {variable.path: variable for variable in optimizer.variables}
        found = _match_slots(slots, names[_OPTIMIZER], saved_as, automatic)
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

    fitting: dict[str, LazyTensor] = {}
    misfits: list[str] = []
    for variable_path, name in taken.items():
        tensor, shape = file.tensors[name], tuple(wanted[variable_path].shape)
        if tensor.shape == shape:
            fitting[variable_path] = file[name]
        else:
            misfits.append(f"{variable_path!r}: expected shape {shape}, found {tensor.shape} in tensor {name!r}")
    if misfits:
        listed = "; ".join(misfits[:_LISTED]) + ("; …" if len(misfits) > _LISTED else "")
        if strict:
            raise CheckpointError(
                f"{path} does not fit {model.name!r}: {listed}. Is this the checkpoint of another configuration? "
                "strict=False leaves these variables out."
            )
        warnings.warn(f"{path}: left out, since they do not fit: {listed}", LazyModelWarning, stacklevel=_stacklevel())
    for variable_path, tensor in fitting.items():
        wanted[variable_path].assign(tensor)


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
    model: Any, path: str, wanted: Mapping[str, Any], taken: Mapping[str, str], unused: set[str], *, strict: bool
) -> None:
    """Raises, or warns without `strict`, where variables lack tensors or tensors lack variables."""
    lacking = [variable_path for variable_path in wanted if variable_path not in taken]
    parts: list[str] = []
    if lacking:
        folded = folded_names(lacking)
        listed = ", ".join(folded[:_LISTED]) + (", …" if len(folded) > _LISTED else "")
        names = [name.partition("/")[2] for name in sorted(unused)]
        parts.append(
            f"has no tensor for {len(lacking)} variables of {model.name!r}: {listed}{closest(lacking[0], names)}"
        )
    if unused:
        listed = ", ".join(sorted(unused)[:_LISTED]) + (", …" if len(unused) > _LISTED else "")
        parts.append(f"holds {len(unused)} tensors that {model.name!r} has no variable for: {listed}")
    if parts and strict:
        raise CheckpointError(
            f"{path} {' and '.join(parts)}. Build the model and its optimizer as they were when it was saved; "
            "weights_only=True leaves the optimizer out, strict=False whatever does not match."
        )
    if parts:
        warnings.warn(f"{path} {' and '.join(parts)}. They are left out.", LazyModelWarning, stacklevel=_stacklevel())


def _stacklevel() -> int:
    return _levels_to_caller() - 1


# Paths ----------------------------------------------------------------------------------------------------------------


def match_paths(paths: list[str], saved: list[str], automatic: set[str]) -> dict[str, str]:
    """The saved path of each of a model's paths, as far as there is one.

    Equal paths are matched first, if that leaves none of the model's over. Otherwise all are compared without the
    numbers of automatic names but with their order, and then one may lack leading parts of the other, where it fits no
    other path.

    Args:
        paths: The model's.
        saved: The checkpoint's.
        automatic: What Keras calls objects of the model that have no name, up to the number.
    """
    exact = set(saved)
    if all(path in exact for path in paths):
        return {path: path for path in paths}
    ours, theirs = _renumbered(paths, automatic), _renumbered(saved, automatic)
    matched: dict[str, str] = {}
    by_name = {name: original for original, name in theirs.items()}
    for path, name in ours.items():
        if name in by_name:
            matched[path] = by_name.pop(name)
    # (suffix → paths that end with it) of those that are left, in both directions.
    left = {path: name for path, name in ours.items() if path not in matched}
    endings = _endings(left), _endings({original: name for name, original in by_name.items()})
    candidates: dict[str, set[str]] = {path: set() for path in left}
    for path, name in left.items():
        candidates[path].update(endings[1].get(name, ()))
    for name, original in by_name.items():
        for path in endings[0].get(name, ()):
            candidates[path].add(original)
    claims: dict[str, list[str]] = {}
    for path, originals in candidates.items():
        for original in originals:
            claims.setdefault(original, []).append(path)
    for path, originals in candidates.items():
        if len(originals) == 1 and len(claims[original := next(iter(originals))]) == 1:
            matched[path] = original
    return matched


def _endings(names: Mapping[str, str]) -> dict[str, list[str]]:
    """What ends with some parts, by these; a name ends with all of itself too."""
    endings: dict[str, list[str]] = {}
    for original, name in names.items():
        parts = name.split("/")
        for start in range(len(parts)):
            endings.setdefault("/".join(parts[start:]), []).append(original)
    return endings


def _renumbered(paths: list[str], automatic: set[str]) -> dict[str, str]:
    """Path → the path with automatic names counted from 0 in their own order: `dense_4`, `dense_7` → `dense#0`, …"""
    numbers: dict[str, set[int]] = {}
    split: dict[str, list[tuple[str, int | None]]] = {}
    for path in paths:
        split[path] = []
        for part in path.split("/"):
            match = _NUMBERED.fullmatch(part)
            assert match is not None
            if match[1] in automatic:
                number = int(match[2] or 0)
                numbers.setdefault(match[1], set()).add(number)
                split[path].append((match[1], number))
            else:
                split[path].append((part, None))
    ranks = {base: {number: rank for rank, number in enumerate(sorted(found))} for base, found in numbers.items()}
    return {
        path: "/".join(base if number is None else f"{base}#{ranks[base][number]}" for base, number in parts)
        for path, parts in split.items()
    }


def _match_slots(
    slots: Mapping[str, Any], names: Mapping[str, str], saved_as: Mapping[str, str], automatic: set[str]
) -> dict[str, str]:
    """The name in the checkpoint of each optimizer variable, as far as there is one.

    The state that an optimizer keeps of a variable is called after it, `adam/net_dense_kernel_momentum`.
    """
    prefixes = {path.replace("/", "_") + "_": saved.replace("/", "_") + "_" for path, saved in saved_as.items()}
    expected: dict[str, str] = {}
    for path in slots:
        scope, _, leaf = path.rpartition("/")
        owner = max((prefix for prefix in prefixes if leaf.startswith(prefix)), key=len, default="")
        leaf = prefixes.get(owner, "") + leaf[len(owner) :]
        expected[path] = f"{scope}/{leaf}" if scope else leaf
    matched = match_paths(list(expected.values()), list(names), automatic)
    return {path: names[matched[name]] for path, name in expected.items() if name in matched}
