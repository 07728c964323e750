"""`deferred()` and `load_model`: unchanged Keras code, built abstractly and loaded shard by shard."""

from __future__ import annotations

import contextlib
import os
import time
import zipfile
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack, cast

import h5py
import jax
import keras

from lazymodel import AbstractVariable, CheckpointError, Compile, LazyModelError, open_checkpoint
from lazymodel._errors import warn
from lazymodel._remote.path import Location, RemotePath
from lazymodel._sharding.auto import Auto
from lazymodel._sharding.shard import Rules, read_rules
from lazymodel._show.text import closest, listed
from lazymodel.checkpoints._untrusted import check_pointer, read_json_file
from lazymodel.checkpoints._verify import Verify
from lazymodel_keras import _upstream
from lazymodel_keras._build import KerasModel, Keywords, Materializing, check_all_used, check_options, require_rules
from lazymodel_keras._model.keras_object import from_skeleton
from lazymodel_keras._record.patches import SharedPatches, active
from lazymodel_keras._record.recording import LoadOptions, Recording, session
from lazymodel_keras._record.remote import check_storage_options
from lazymodel_keras._train.restore import is_orbax, model_from_orbax, read_state

_HDF5 = b"\x89HDF\r\n\x1a\n"
_EXPECTED = (
    "expected a .keras file, a legacy .h5 file or a folder that model.save wrote, or an Orbax checkpoint that "
    "keras.callbacks.OrbaxCheckpoint wrote"
)


def _check_saved_model(path: str | Location) -> None:
    """Raises CheckpointError if a path is not a saved model; names the path, what was expected and what was found."""
    if isinstance(path, str) and "://" in path:
        return
    where = Path(path) if isinstance(path, str) else path
    found = _other_than_a_file(where) if where.is_file() else _other_than_a_folder(where)
    if found is not None:
        raise CheckpointError(f"cannot load a model from {path}: {_EXPECTED}; found {found}")


def _other_than_a_file(where: Location) -> str | None:
    """Returns a description of a file that is not a saved model; None if it is one."""
    if where.stat().st_size == 0:
        return "an empty file"
    if where.name.endswith(".weights.h5"):
        return "weights without a model's configuration; build the model, then load them with lazymodel_keras.restore"
    if where.suffix == ".keras":
        with where.open("rb") as file:
            is_zip = zipfile.is_zipfile(cast(Any, file))
        return None if is_zip else "a file that is not a zip archive, or a truncated one"
    if where.suffix in (".h5", ".hdf5"):
        # A file at a URL is only opened if it begins with HDF5's signature, as in files that Keras writes.
        is_hdf5 = check_pointer(where).startswith(_HDF5) if isinstance(where, RemotePath) else h5py.is_hdf5(where)
        return None if is_hdf5 else "a file that is not HDF5, or a truncated one"
    return f"a file of another kind ({where.suffix or 'without a suffix'})"


def _other_than_a_folder(where: Location) -> str | None:
    """Returns a description of a folder that is not a saved model, or of nothing at the path; None if it is one."""
    if not where.is_dir():
        above = where.parent
        if isinstance(above, RemotePath):
            return "nothing there"
        return f"nothing{closest(where.name, os.listdir(above)) if above.is_dir() else f'; there is no folder {above}'}"
    if (where / "config.json").exists():
        config: Any = read_json_file(where / "config.json")
        if isinstance(config, dict) and "class_name" in cast("dict[str, Any]", config):
            return None
        return (
            "the config.json of another library; load a preset or Hugging Face folder with lazymodel_keras.from_preset"
        )
    names = sorted(each.name for each in where.iterdir())
    if not names:
        return "nothing there" if isinstance(where, RemotePath) else "an empty folder"
    folder = f"a folder with {listed(names, most=4)}"
    try:
        with open_checkpoint(cast(Any, where)) as checkpoint:
            if hasattr(checkpoint, "item"):
                return None
            return f"{folder}, which is a checkpoint without a model's configuration ({checkpoint.format})"
    except CheckpointError:
        if any(name.isdecimal() or "orbax" in name or name.startswith("_") for name in names):
            raise  # the error describes the problem of the step
        return folder


class Placing(Materializing, total=False):
    """Options of `AbstractModel.shard` in addition, documented there."""

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
    """Within the block, this thread builds models abstractly, and every variable is created directly on its devices.

    When a `from_preset`, `load_weights`, `keras.saving.load_model` or `restore` call inside the block returns, that
    model is loaded and can be used; models and optimizers that were only built are initialized on leaving the block.
    All of them take URLs like `abstract_from_preset`, and so does KerasHub's `from_preset` of tokenizers and
    preprocessors. Import `keras_hub` before entering it. After an exception, Keras' global state is as before; models
    that were built and not loaded yet then have no values, and raise LazyModelError when they are used.

    Args:
        mesh: Devices for every variable, except those created with their own `layout`; None uses the active
            `keras.distribution`, or one device.
        rules: Sharding rules that go with the mesh; see `AbstractModel.shard`. They apply to every model of the block,
            so a pattern need not match in each; a pattern that matched in none gives a warning at the end.
        strict: As in `abstract_from_preset`: True raises for weights that the model they are loaded into has no
            variable for; False omits them with a warning. If `load_weights` is called to load only some
            (`skip_mismatch`, `objects_to_skip`), the rest neither raises nor warns.
        cast: As in `abstract_from_preset`, for every file that is loaded in the block; so is `verify`.
        storage_options: As in `lazymodel.open_checkpoint`, for every URL in the block.
        compile: As in `from_preset`, for each model that is loaded in the block, in its state at that time. A later
            `compile` of Keras, with another sampler or loss, makes Keras compile again.
        **options: `on_unmatched`, `large` and `repair` of `AbstractModel.shard`, and the options of
            `AbstractModel.materialize`. There is one report for each loaded model, and one for the variables that are
            initialized on leaving.
    Raises:
        CheckpointError: As for `abstract_from_preset`, from the call that loads.
        ShardingError: The rules do not fit.
        LazyModelError: It, or a `from_preset` in the block, was given an unknown argument.

    Example:
        >>> with lk.deferred(mesh=mesh, rules=lm.auto()):
        ...     model = keras_hub.models.Backbone.from_preset("preset")
        >>> model.count_params()
        2608
    """
    check_options("deferred", options, Placing)
    recording = Recording(LoadOptions(strict, cast, verify, storage_options))
    with _block(mesh, rules, recording, options, compile):
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
    """Does what `keras.saving.load_model` does, and reads each variable directly into its shards.

    For `.keras` files and folders, legacy whole-model `.h5` files (with `compile=False`: Keras builds their optimizers
    without variables), and Orbax checkpoints that contain the model's configuration; for these, stock Keras leaves
    every variable whose path has changed at its initial value. With `compile`, the optimizer's state is loaded too.
    `deferred()` does the same for unchanged code.

    Args:
        path: The file or folder; or the URL of a `.keras` archive, of a legacy `.h5` file or of an Orbax checkpoint.
            Weights are streamed from there, without a copy.
        custom_objects: As for Keras.
        compile: As for Keras: True compiles the model as it was, and loads the optimizer's state. Or what to compile
            while the weights are loaded, as in `from_preset`, which implies True.
        safe_mode: As for Keras: True rejects code in the file.
        mesh: As in `from_preset`, and so is `rules`.
        strict: As in `abstract_from_preset`, and so are `cast`, `verify` and `storage_options`.
        **options: As in `deferred`.

    Raises:
        CheckpointError: There is no saved model, it is corrupt, or its weights do not match its configuration.
        ShardingError: The rules do not fit.
        LazyModelError: An argument is unknown.

    Example:
        >>> keras.Sequential([keras.Input((16,)), keras.layers.Dense(64)]).save("model.keras")
        >>> model = lk.load_model("model.keras", mesh=mesh, rules={".*/kernel": P(None, "model"), ".*/bias": P()})
        >>> model.layers[0].kernel.value.sharding.spec
        P(None, 'model')
    """
    check_options("load_model", options, Placing)
    where = os.path.expanduser(os.fspath(path))
    check_storage_options(where, storage_options)
    recording = Recording(LoadOptions(strict, cast, verify, storage_options))
    called = None if isinstance(compile, bool) else compile
    compile = compile if isinstance(compile, bool) else True
    with _block(mesh, rules, recording, options, called, one_model=True):
        _check_saved_model(recording.remote.located(where))
        return keras.saving.load_model(where, custom_objects, compile=compile, safe_mode=safe_mode)


@contextlib.contextmanager
def _block(
    mesh: jax.sharding.Mesh | None,
    rules: Rules | None,
    recording: Recording,
    options: Placing,
    compile: Compile | Sequence[Compile] | None,
    *,
    one_model: bool = False,
) -> Generator[None]:
    """Does what `deferred` does.

    With `one_model`, rules are those of the first loaded model, as in `from_preset`: a pattern that matches nothing in
    it raises.
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
            check_all_used(recording, what, strict=recording.options.strict)
        abstract = from_skeleton(skeleton)
        if mesh is not None:
            placed = {path: variable for path, variable in abstract.items() if _has_its_place(variable)}
            abstract = abstract.shard(mesh, current, **sharding)
            abstract = abstract.with_variables({**abstract.variables, **placed})
            current = block_rules or rules  # later variables may be of other models
        abstract.materialize(compile=None if result is None else compile, **materializing)
        recording.initialized.clear()  # nothing of the block is built again
        recording.began = time.perf_counter()  # for the next model of the block

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
    """Returns True if rules do not move it: optimizer state of a placed variable, or created with a `layout`."""
    of_placed = variable.follows == "" and variable.sharding is not None and variable.reason is None
    return of_placed or (variable.reason is not None and variable.reason.kind == "metadata")


class _BlockRules:
    """Rules by path and role for several models; keeps track of those that never matched."""

    def __init__(self, rules: Mapping[Any, Any]) -> None:
        self._rules = rules
        self.unused = list(rules)

    def propose(
        self, variables: Mapping[str, AbstractVariable], mesh: jax.sharding.Mesh, *, large: int
    ) -> dict[str, tuple[Any, Any]]:
        self.unused = [k for k in self.unused if read_rules({k: self._rules[k]}, variables, mesh, large)[1]]
        return read_rules(self._rules, variables, mesh, large)[0]


_hooks = SharedPatches()


@_hooks.replacing(keras.Model, "load_weights")
def _load_weights(original: Any, self: Any, filepath: Any, skip_mismatch: bool = False, **kwargs: Any) -> Any:
    def load() -> Any:
        recording: Recording = active()
        where = recording.remote.located(filepath)
        if not is_orbax(where):
            return original(self, recording.remote.for_keras(where), skip_mismatch, **kwargs)
        # Stock Keras has Orbax read whole arrays, and silently omits those that it does not find by path.
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
        recording: Recording = active()
        remote = recording.remote
        where = remote.located(filepath)
        if is_orbax(where):
            return model_from_orbax(where, custom_objects, compile, safe_mode, strict=recording.options.strict)
        if not remote.serves(filepath):
            return original(filepath, custom_objects, compile, safe_mode)
        _check_saved_model(where)
        load_file = _upstream.loader_of_file(original, where.name)
        return load_file(remote.for_keras(where), custom_objects, compile, safe_mode)

    return _announced(original.__qualname__, load)


@_hooks.replacing(lambda: getattr(_upstream.hub_models(), "Backbone", None), "from_preset")
@_hooks.replacing(lambda: getattr(_upstream.hub_models(), "Task", None), "from_preset")
def _from_preset(original: Any, cls: Any, preset: Any, *args: Any, **kwargs: Any) -> Any:
    recording: Recording = active()
    if recording.loading:
        return original(cls, preset, *args, **kwargs)
    recording.keywords = keywords = Keywords(kwargs.keys(), taker="lazymodel_keras.deferred")
    keywords.check_ours(cls)
    try:
        return _announced(original.__qualname__, lambda: original(cls, preset, *args, **kwargs))
    finally:
        recording.keywords = None


def _announced(what: str, load: Callable[[], Any], *, of: Any = None, partly: bool = False) -> Any:
    """Runs a call that loads; the outermost one reports the loaded object to the recording: `of`, or its result."""
    recording: Recording = active()
    if recording.loading:
        return load()
    # Unused tensors are checked for each call, even if another call opens the same files again.
    outer_files, recording.files = recording.files, {}
    recording.loading = True
    try:
        # Keras' error is about the first layer that does not match; all tensors are known here.
        with recording.explaining(what):
            result = load()
        assert recording.on_loaded is not None
        recording.on_loaded(result if of is None else of, what, partly)
    finally:
        recording.loading = False
        recording.close_files()
        recording.files = outer_files
    return result
