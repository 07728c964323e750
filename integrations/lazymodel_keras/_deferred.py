"""`deferred()` and `load_model`: unchanged Keras code, built abstractly and loaded shard by shard."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Unpack

import jax
import keras

from lazymodel import AbstractVariable, Compile, LazyModelError
from lazymodel._errors import warn
from lazymodel._sharding.auto import Auto
from lazymodel._sharding.rules import Rules, read_rules
from lazymodel._show.text import listed
from lazymodel.checkpoints._verify import Verify
from lazymodel_keras import _upstream
from lazymodel_keras._build import KerasModel, Materializing, check_all_used, check_options, require_rules
from lazymodel_keras._keywords import check_from_preset, ours
from lazymodel_keras._model.abstract import from_skeleton
from lazymodel_keras._record.patches import SharedPatches, active
from lazymodel_keras._record.recording import Recording
from lazymodel_keras._record.remote import RemoteFiles, check_storage_options
from lazymodel_keras._record.session import session
from lazymodel_keras._saved_models import check_saved_model
from lazymodel_keras._train.restore import is_orbax, model_from_orbax, read_state


class Placing(Materializing, total=False):
    """What is passed on to `AbstractModel.shard` besides, and documented there."""

    on_unmatched: str
    large: int | str
    repair: bool | Auto


@contextlib.contextmanager
def deferred(
    *,
    mesh: jax.sharding.Mesh | None = None,
    rules: Rules | None = None,
    strict: bool = True,
    cast: str = "safe",
    verify: Verify = False,
    storage_options: Mapping[str, Any] | None = None,
    compile: Compile | Sequence[Compile] | None = None,
    **options: Unpack[Placing],
) -> Generator[None]:
    """Within the block, this thread builds models abstractly, and every variable is made directly on its devices.

    When a `from_preset`, `load_weights`, `keras.saving.load_model` or `restore` call inside the block returns, that
    model is loaded and can be used; models and optimizers that were only built are initialized on leaving the block.
    All of them take URLs as `abstract_from_preset` does, and so does KerasHub's `from_preset` of tokenizers and
    preprocessors. Import `keras_hub` before entering it. An exception leaves Keras' global state as it was; models
    that were built and not loaded yet then have no values, and raise LazyModelError when they are used.

    Args:
        mesh: Devices for every variable, but for those made with a `layout` of their own; None uses the active
            `keras.distribution`, or one device.
        rules: Sharding rules that go with the mesh; see `AbstractModel.shard`. They hold for every model of the block,
            so a pattern need not match in each; one that matched in none is warned about at the end.
        strict: As in `abstract_from_preset`: whether weights that the model they are loaded into has no variable for
            are an error; if not, they are left out with a warning. Where `load_weights` is told to take only some
            (`skip_mismatch`, `objects_to_skip`), the rest is neither.
        cast: As in `abstract_from_preset`, for every file that is loaded in the block; so is `verify`.
        storage_options: As in `lazymodel.open_checkpoint`, for every URL in the block.
        compile: As in `from_preset`: what will be called with each model that is loaded in the block, as it is when it
            is loaded. A later `compile` of Keras, with another sampler or loss, has it compile anew.
        **options: `on_unmatched`, `large` and `repair` of `AbstractModel.shard`, and those of
            `AbstractModel.materialize`. There is a report for each model that is loaded, and one for what is
            initialized on leaving.

    Raises:
        CheckpointError: As `abstract_from_preset`, from the call that loads.
        ShardingError: The rules do not fit.
        LazyModelError: It was given an argument that nobody takes, or a `from_preset` in the block was.

    Example:
        >>> with lk.deferred(mesh=mesh, rules=lm.auto()):
        ...     model = keras_hub.models.Backbone.from_preset("preset")
        >>> model.count_params()
        2608
    """
    check_options("deferred", options, Placing)
    recording = Recording(verify, cast, RemoteFiles(storage_options))
    with _block(mesh, rules, strict, recording, options, compile):
        yield


def load_model(
    path: str | os.PathLike[str],
    custom_objects: Mapping[str, Any] | None = None,
    compile: bool | Compile | Sequence[Compile] = True,
    safe_mode: bool = True,
    *,
    mesh: jax.sharding.Mesh | None = None,
    rules: Rules | None = None,
    strict: bool = True,
    cast: str = "safe",
    verify: Verify = False,
    storage_options: Mapping[str, Any] | None = None,
    **options: Unpack[Placing],
) -> Any:
    """Does what `keras.saving.load_model` does, with each variable read straight into its shards.

    For `.keras` files and folders, legacy whole-model `.h5` files (with `compile=False`: Keras builds their optimizers
    for no variables), and Orbax checkpoints that carry the model's configuration, of which stock Keras leaves every
    variable that now has another path at its initial value. With `compile`, the optimizer's state is loaded too.
    `deferred()` does the same for unchanged code.

    Args:
        path: The file or folder; or the URL of a `.keras` archive, of a legacy `.h5` file or of an Orbax checkpoint.
            Weights in them are streamed from there, and no copy of them is made.
        custom_objects: As for Keras.
        compile: As for Keras: whether to compile the model as it was, and load the optimizer's state. Or, which means
            True as well, what will be called, compiled while the weights come, as in `from_preset`.
        safe_mode: As for Keras: whether to refuse code in the file.
        mesh: As in `from_preset`, and so is `rules`.
        strict: As in `abstract_from_preset`, and so are `cast`, `verify` and `storage_options`.
        **options: As in `deferred`.

    Raises:
        CheckpointError: There is no saved model, it is corrupt, or its weights do not fit its configuration.
        ShardingError: The rules do not fit.
        LazyModelError: Nobody takes an argument.

    Example:
        >>> keras.Sequential([keras.Input((16,)), keras.layers.Dense(64)]).save("model.keras")
        >>> model = lk.load_model("model.keras", mesh=mesh, rules={".*/kernel": P(None, "model"), ".*/bias": P()})
        >>> model.layers[0].kernel.value.sharding.spec
        P(None, 'model')
    """
    check_options("load_model", options, Placing)
    where = os.path.expanduser(os.fspath(path))
    check_storage_options(where, storage_options)
    recording = Recording(verify, cast, RemoteFiles(storage_options))
    called = None if isinstance(compile, bool) else compile
    compile = compile if isinstance(compile, bool) else True
    with _block(mesh, rules, strict, recording, options, called, one_model=True):
        place = recording.remote.located(where)
        check_saved_model(place)
        if not is_orbax(place):
            return keras.saving.load_model(where, custom_objects, compile=compile, safe_mode=safe_mode)
        model = model_from_orbax(place, custom_objects, compile, safe_mode, strict=strict)
        assert recording.on_loaded is not None
        recording.on_loaded(model, "load_model", True)
        return model


@contextlib.contextmanager
def _block(
    mesh: jax.sharding.Mesh | None,
    rules: Rules | None,
    strict: bool,
    recording: Recording,
    options: Placing,
    compile: Compile | Sequence[Compile] | None,
    *,
    one_model: bool = False,
) -> Generator[None]:
    """What `deferred` does; with `one_model`, rules are those of the first model that is loaded, as in `from_preset`.

    So a pattern that matches nothing in it is an error.
    """
    require_rules(mesh, rules, options.get("repair", False))
    materializing: Any = {name: value for name, value in options.items() if name in Materializing.__annotations__}
    sharding: Any = {name: value for name, value in options.items() if name not in materializing}
    block_rules = _BlockRules(rules) if isinstance(rules, Mapping) and not hasattr(rules, "device_mesh") else None
    current: Rules | None = rules if one_model else block_rules or rules

    def materialize(result: Any, what: str | None, *, only_own: bool) -> None:
        nonlocal current
        skeleton = KerasModel(None, recording, result, only_own=only_own)
        if not skeleton.variables:
            return
        if what is not None:
            check_all_used(recording, what, strict=strict)
        abstract = from_skeleton(skeleton)
        if mesh is not None:
            placed = {path: variable for path, variable in abstract.items() if _has_its_place(variable)}
            abstract = abstract.shard(mesh, current, **sharding)
            abstract = abstract.with_variables({**abstract.variables, **placed})
            current = block_rules or rules  # of what is left, one model or not, there may be anything
        abstract.materialize(compile=None if result is None else compile, **materializing)
        recording.initialized.clear()  # nothing of the block is built again
        recording.began = time.perf_counter()  # of the next model of the block

    def materialize_loaded(result: Any, what: str, partly: bool) -> None:
        if what.endswith("load_weights") and not recording.files:
            recording.refuse_unverified(what)
        materialize(result, None if partly else what, only_own=True)

    recording.on_loaded = materialize_loaded
    with session(recording), _hooks.needed():
        yield
    materialize(None, None, only_own=False)
    if block_rules is not None and block_rules.unused and not one_model:
        warn(f"no model of the block has a variable that these rules match: {listed(map(repr, block_rules.unused))}")


def _has_its_place(variable: AbstractVariable) -> bool:
    """Whether rules do not move it: optimizer state of what has its values already, or made with a `layout`."""
    of_placed = variable.follows == "" and variable.sharding is not None and variable.reason is None
    return of_placed or (variable.reason is not None and variable.reason.kind == "metadata")


class _BlockRules:
    """Rules by path and role for several models, and which of them never matched."""

    def __init__(self, rules: Mapping[Any, Any]) -> None:
        self._rules = rules
        self.unused = list(rules)

    def propose(
        self, variables: Mapping[str, AbstractVariable], mesh: jax.sharding.Mesh, *, large: int
    ) -> dict[str, tuple[Any, Any]]:
        answers = read_rules(self._rules, variables, mesh, large)[0]
        self.unused = [k for k in self.unused if read_rules({k: self._rules[k]}, variables, mesh, large)[1]]
        return {path: found for path, variable in variables.items() if (found := answers(variable)) is not None}


_hooks = SharedPatches()


@_hooks.replacing(keras.Model, "load_weights")
def _load_weights(original: Any, self: Any, filepath: Any, skip_mismatch: bool = False, **kwargs: Any) -> Any:
    def load() -> Any:
        recording: Recording = active()
        where = recording.remote.located(filepath)
        if not is_orbax(where):
            return original(self, recording.remote.for_keras(where), skip_mismatch, **kwargs)
        # Stock Keras has Orbax read whole arrays, and leaves in silence what it does not find by path.
        if given := [name for name, value in kwargs.items() if value is not None]:
            raise LazyModelError(f"load_weights takes no argument {given[0]!r} for an Orbax checkpoint: {where}")
        return read_state(recording, self, where, strict=not skip_mismatch)

    partly = bool(skip_mismatch or kwargs.get("objects_to_skip"))
    return _announced(original.__qualname__, load, of=self, partly=partly)


@_hooks.replacing(keras.saving, "load_model")
@_hooks.replacing(keras.models, "load_model")
def _load_model(
    original: Any, filepath: Any, custom_objects: Any = None, compile: bool = True, safe_mode: bool = True
) -> Any:
    def load() -> Any:
        remote = active().remote
        if not remote.serves(filepath):
            return original(filepath, custom_objects, compile, safe_mode)
        where = remote.located(filepath)
        check_saved_model(where)
        if is_orbax(where):
            return model_from_orbax(where, custom_objects, compile, safe_mode)
        load_file = _upstream.loader_of_file(original, where.name)
        return load_file(remote.for_keras(where), custom_objects, compile, safe_mode)

    return _announced(original.__qualname__, load)


@_hooks.replacing(lambda: getattr(_upstream.hub_models(), "Backbone", None), "from_preset")
@_hooks.replacing(lambda: getattr(_upstream.hub_models(), "Task", None), "from_preset")
def _from_preset(original: Any, cls: Any, preset: Any, *args: Any, **kwargs: Any) -> Any:
    if not active().loading:
        check_from_preset(cls, preset, kwargs, ours(taker="lazymodel_keras.deferred"))
    return _announced(original.__qualname__, lambda: original(cls, preset, *args, **kwargs))


def _announced(what: str, load: Callable[[], Any], *, of: Any = None, partly: bool = False) -> Any:
    """What a call that loads returns; the outermost tells the recording what is loaded: `of`, or what it returns."""
    recording: Recording = active()
    if recording.loading:
        return load()
    # What a call leaves unused of its files is its own affair, even if another one opens them again.
    outer_files, recording.files = recording.files, {}
    recording.loading = True
    try:
        # Keras names layers, and of the first that does not fit what was wrong; all tensors are known here.
        with recording.explaining(what):
            result = load()
        assert recording.on_loaded is not None
        recording.on_loaded(result if of is None else of, what, partly)
    finally:
        recording.loading = False
        recording.close_files()
        recording.files = outer_files
    return result
