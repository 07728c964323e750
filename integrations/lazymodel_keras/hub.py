"""The functions that load: presets and saved models, abstractly or onto their devices, and blocks of unchanged code.

KerasHub's and Keras' own constructors, loaders and converters run unchanged; the values are streamed to their devices.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import time
import zipfile
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar, Unpack
from typing import cast as cast_type

import jax
import keras

from lazymodel import (
    AbstractModel,
    AbstractVariable,
    CheckpointError,
    Compile,
    LazyModelError,
    Progress,
    open_adapter,
    open_checkpoint,
)
from lazymodel._abstract.garbage import no_full_collections
from lazymodel._errors import warn
from lazymodel._remote.path import Location, RemotePath, location
from lazymodel._remote.url import is_url, shown
from lazymodel._sharding.shard import Rules, read_rules
from lazymodel._show.progress import ReportTo
from lazymodel._show.text import closest, listed
from lazymodel.checkpoints._checkpoint import Verify
from lazymodel.checkpoints._open import foreign
from lazymodel.checkpoints._untrusted import read_json_file
from lazymodel_keras import _upstream
from lazymodel_keras._build import (
    Keywords,
    Loading,
    Materializing,
    Opening,
    Sharding,
    abstract_build,
    check_all_used,
    check_options,
    of_kind,
)
from lazymodel_keras._model.keras_object import KerasModel, from_skeleton
from lazymodel_keras._record.files import check_storage_options, is_gguf
from lazymodel_keras._record.recording import LoadOptions, Recording, session
from lazymodel_keras._train.restore import is_orbax, model_from_orbax, read_state

T = TypeVar("T")
_OF_A_HUB = re.compile(r"(hf|kaggle)://|[\w.-]+$")


def from_preset(
    cls: type[T],
    preset: str | os.PathLike[str],
    load_weights: bool = True,
    *,
    mesh: jax.sharding.Mesh | None = None,
    rules: Rules | None = None,
    on_unmatched: str = "warn",
    strict: bool = True,
    verify: Verify = False,
    storage_options: Mapping[str, Any] | None = None,
    adapter: str | os.PathLike[str] | None = None,
    max_host_memory: int | str | None = None,
    replicas: str | None = None,
    compile: Compile | Sequence[Compile] | bool | None = None,
    progress: bool | Progress | Callable[[int, int], object] | None = None,
    report: ReportTo = None,
    **kwargs: Any,
) -> T:
    """Does what `cls.from_preset(preset, load_weights, **kwargs)` does, but never holds the model whole on one device.

    The result is an ordinary Keras model, equal bit for bit to that of the stock call, but for epsilons, rotary scaling
    and RoBERTa's token type in a Hugging Face folder, which stock ignores; the load report notes them. It is short for
    `abstract_from_preset(…).shard(mesh, rules).materialize()`; use these steps to quantize the model, or to add LoRA
    pairs.

    Args:
        cls: See `abstract_from_preset`, also for `preset`, `load_weights`, `strict`, `verify`, `storage_options`,
            `adapter` and arguments of KerasHub.
        mesh: The devices; None uses the active `keras.distribution` if there is one, else one device.
        rules: Sharding rules that go with `mesh`; see `AbstractModel.shard`.
        on_unmatched: Handling of large variables without a rule, likewise.
        max_host_memory: See `AbstractModel.materialize`, also for `replicas`, `progress` and `report`.
        compile: What to compile while the weights are loaded, one or a list: `lm.Compile("generate", batch=1,
            sequence=256)`, with the `max_length` and number of prompts of the call, `lm.Compile("predict", batch=8)`,
            `lm.Compile("train", batch=8)`, which builds the optimizer as well, or your own jitted function. See
            `lazymodel.Compile`, and docs/cold_start.md for what Keras compiles when. True and False are KerasHub's own
            option: True gives a task its default optimizer, loss and sampler.

    Raises:
        CheckpointError: As for `abstract_from_preset`, and so is LazyModelError.
        ShardingError: The rules do not fit.
        DoesNotFitError: A compiled program does not fit the devices; see `AbstractModel.materialize`.

    Example:
        >>> model = lk.from_preset(keras_hub.models.GemmaBackbone, "preset", mesh=mesh, rules="auto", dtype="bfloat16")
        >>> model.token_embedding.embeddings.value.sharding.spec
        P('model',)
        >>> compile = lm.Compile("predict", batch=1, sequence=8)
        >>> model = lk.from_preset(keras_hub.models.GemmaBackbone, "preset", compile=compile)
        >>> tokens = {name: np.ones((1, 8), "int32") for name in ("token_ids", "padding_mask")}
        >>> model.predict(tokens, verbose=0).shape  # compiles nothing
        (1, 8, 16)
    """
    options = locals()
    check_options("from_preset", of_kind(Loading, options), Loading)
    if isinstance(compile, bool):
        kwargs, compile = {**kwargs, "compile": compile}, None
    with no_full_collections():
        abstract = abstract_from_preset(
            cls, preset, load_weights, adapter=adapter, **of_kind(Opening, options), **kwargs
        )
        if mesh is not None:
            abstract = abstract.shard(mesh, rules, on_unmatched=on_unmatched)
        return abstract.materialize(compile=compile, **of_kind(Materializing, options))


def abstract_from_preset(
    cls: type[T],
    preset: str | os.PathLike[str],
    load_weights: bool = True,
    *,
    strict: bool = True,
    cast: str = "safe",
    verify: Verify = False,
    storage_options: Mapping[str, Any] | None = None,
    adapter: str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> AbstractModel[T]:
    """The abstract model of `cls.from_preset(preset, load_weights, **kwargs)`, together with its checkpoint.

    `print(abstract.plan())` shows what would be loaded and initialized. Shardings are those of the active
    `keras.distribution` if there is one; `shard` assigns others.

    Args:
        cls: A KerasHub backbone or task class.
        preset: Anything that KerasHub resolves: a preset's name or URI, a preset folder, a Hugging Face folder. Or a
            GGUF file of a model that both llama.cpp and KerasHub know, vocabulary included; see docs/keras.md. Or the
            URL of such a folder or file: `gs://`, `s3://`, `az://`, `https://` or
            `hf://owner/name[@revision][/folder]`. From a folder at a URL, the configuration, vocabularies and other
            small files that KerasHub requests (256 MiB at most) are fetched into a temporary folder, and weights are
            streamed from the URL. Without obstore (`pip install 'lazymodel[remote]'`), KerasHub downloads `hf://` and
            `gs://` by itself.
        load_weights: True loads weights; False initializes every variable on its devices.
        strict: True raises for weights that the model has no variable for; False omits them, with a warning that lists
            them. For a Hugging Face or timm folder, these are weights in any shard that KerasHub's converter did not
            request, except what converters omit on purpose: buffers such as rotary tables, tied weights that are
            stored twice, heads of other tasks. Unused scales and other parts of quantized weights always raise. It also
            raises, or warns, for a Hugging Face `config.json` that says another function than KerasHub's class
            computes, such as another activation.
        cast: As in `AbstractModel.materialize`: `"safe"` raises if a tensor of a file could lose its meaning in its
            variable's dtype, which stock Keras casts silently; `"unsafe"` casts like Keras.
        verify: True hashes the weight files that are opened, and the index and shards that belong to them, before they
            are used; as in `lazymodel.open_checkpoint`, with names relative to their folder. Other files of a preset,
            such as its configuration and vocabulary, are not hashed; neither are files at a URL, for which this raises.
        storage_options: For a URL: as in `lazymodel.open_checkpoint`.
        adapter: Folder or URL of a LoRA adapter of PEFT to merge into the weights of a Hugging Face folder, as
            `lazymodel.merge` does.
        **kwargs: Passed on to KerasHub, such as `dtype` or `num_classes`. An argument that neither its loader nor the
            class takes raises; KerasHub would drop it silently.

    Raises:
        CheckpointError: The preset, or a file or tensor of it, is missing, corrupt, quantized in an unknown way, does
            not match the model, or is unexpected (with `strict`); with `verify`, also if the hash of a file differs or
            no hash is stated.
        LazyModelError: An argument is unknown.

    Example:
        >>> abstract = lk.abstract_from_preset(keras_hub.models.GemmaBackbone, "preset")
        >>> abstract.shard(mesh, lm.auto()).plan().read_nbytes == abstract.nbytes
        True
    """
    _check_class(cls)
    preset = os.fspath(preset)  # KerasHub only takes strings
    check_storage_options(preset, storage_options)
    check_preset(preset)
    options = storage_options if adapter is not None and is_url(adapter) else None
    opened = None if adapter is None else open_adapter(adapter, options)
    recording = Recording(LoadOptions(strict, cast, verify, storage_options, opened))
    recording.keywords = keywords = Keywords(kwargs.keys())
    keywords.check_ours(cls)
    what = f"{cls.__name__}.from_preset({shown(preset)!r})"
    hub: Any = cls
    try:
        # `from_preset` is looked up while recording, when it is patched.
        built = abstract_build(recording, lambda: hub.from_preset(preset, load_weights, **kwargs), what, loads=True)
    except CheckpointError as error:
        if not (hint := _hint(preset, error)):
            raise
        raise CheckpointError(f"{str(error).rstrip('.')}; {hint}") from error
    if opened is not None and not recording.merged:
        raise LazyModelError(
            f"adapter {opened.path}: expected weights of a Hugging Face folder to merge it into, found none that "
            f"{what} loaded; give the folder of the base model, with safetensors"
        )
    return built


def _check_class(cls: Any) -> None:
    """Raises LazyModelError for anything but a class with `from_preset`, such as the name of one."""
    if inspect.isclass(cls) and callable(getattr(cls, "from_preset", None)):
        return
    hint = "pass a class that has from_preset"
    if isinstance(cls, str):
        names = [name for name, found in vars(_upstream.hub_models() or keras).items() if inspect.isclass(found)]
        hint = f"pass the class itself{closest(cls.rpartition('.')[2], names)}"
    elif hasattr(type(cls), "from_preset"):
        hint = f"pass its class, {type(cls).__name__}"
    raise LazyModelError(f"expected a KerasHub class, such as keras_hub.models.GemmaCausalLM; got {cls!r}: {hint}")


def _hint(preset: str, error: CheckpointError) -> str:
    """A hint for a preset whose weights have an unsupported form, or whose hub does not answer."""
    if os.path.isdir(preset):
        return foreign(os.listdir(preset)).strip() if "safetensors` doesn't exist" in str(error) else ""
    # requests' errors are an OSError; KerasHub treats a hub that does not answer like one without the file.
    unanswered = isinstance(error.__cause__, OSError) or "has no config.json" in str(error)
    fix = "if the hub cannot be reached from here, download the preset elsewhere, and pass its folder"
    return fix if unanswered and _OF_A_HUB.match(preset) else ""


def check_preset(preset: str) -> None:
    """Raises CheckpointError for a preset folder that does not exist or is not a preset, before anything is built."""
    if "://" in preset or is_gguf(preset):
        return
    if os.path.isdir(preset):
        if not os.path.exists(os.path.join(preset, "config.json")):
            raise CheckpointError(
                f"preset folder {preset} has no config.json; a preset is a folder that `save_to_preset` wrote or a "
                "Hugging Face model folder"
            )
        return
    if os.path.exists(preset):
        raise CheckpointError(f"{preset} is a file; a preset is a folder with a config.json")
    if preset.startswith((".", "~")) or os.sep in preset:
        named = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", preset)
        of_hub = f"; on the Hugging Face hub it is 'hf://{preset}'" if named else ""
        raise CheckpointError(f"preset folder {preset} does not exist{of_hub}")
    import keras_hub

    models: Any = keras_hub.models
    if preset not in (known := {*models.Backbone.presets, *models.Task.presets}):
        raise CheckpointError(
            f"{preset!r} is neither a folder nor a preset that KerasHub knows{closest(preset, sorted(known))}"
        )


# Saved models, and blocks of unchanged code --------------------------------------------------------------------------

_HDF5 = b"\x89HDF\r\n\x1a\n"
_EXPECTED = (
    "expected a .keras file, a legacy .h5 file or a folder that model.save wrote, or an Orbax checkpoint that "
    "keras.callbacks.OrbaxCheckpoint wrote"
)


def _check_saved_model(path: str | Location) -> None:
    """Raises CheckpointError if a path is not a saved model; names the path, what was expected and what was found."""
    if isinstance(path, str) and "://" in path:
        return
    where = location(path)
    found = _other_than_a_file(where) if where.is_file() else _other_than_a_folder(where)
    if found is not None:
        raise CheckpointError(f"cannot load a model from {path}: {_EXPECTED}; found {found}")


def _other_than_a_file(where: Location) -> str | None:
    """Returns a description of a file that is not a saved model; None if it is one."""
    if where.stat().st_size == 0:
        return "an empty file"
    if where.name.endswith(".weights.h5"):
        return "weights without a model's configuration; build the model, then load them with lazymodel_keras.restore"
    if where.suffix not in (".keras", ".h5", ".hdf5"):
        return f"a file of another kind ({where.suffix or 'without a suffix'})"
    archive = where.suffix == ".keras"
    with where.open("rb") as file:
        good = zipfile.is_zipfile(cast_type(Any, file)) if archive else file.read(len(_HDF5)) == _HDF5
    return None if good else f"a file that is not {'a zip archive' if archive else 'HDF5'}, or a truncated one"


def _other_than_a_folder(where: Location) -> str | None:
    """Returns a description of a folder that is not a saved model, or of nothing at the path; None if it is one."""
    if not where.is_dir():
        above = where.parent
        if isinstance(above, RemotePath):
            return "nothing there"
        return f"nothing{closest(where.name, os.listdir(above)) if above.is_dir() else f'; there is no folder {above}'}"
    if (where / "config.json").exists():
        config: Any = read_json_file(where / "config.json")
        if isinstance(config, dict) and "class_name" in cast_type("dict[str, Any]", config):
            return None
        return (
            "the config.json of another library; load a preset or Hugging Face folder with lazymodel_keras.from_preset"
        )
    names = sorted(each.name for each in where.iterdir())
    if not names:
        return "nothing there" if isinstance(where, RemotePath) else "an empty folder"
    folder = f"a folder with {listed(names, most=4)}"
    try:
        with open_checkpoint(cast_type(Any, where)) as checkpoint:
            if hasattr(checkpoint, "item"):
                return None
            return f"{folder}, which is a checkpoint without a model's configuration ({checkpoint.format})"
    except CheckpointError:
        if any(name.isdecimal() or "orbax" in name or name.startswith("_") for name in names):
            raise  # the error describes the problem of the step
        return folder


@contextlib.contextmanager
def deferred(
    *,
    compile: Compile | Sequence[Compile] | None = None,
    **options: Unpack[Loading],
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
        **options: `on_unmatched` of `AbstractModel.shard`, and the options of
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
    check_options("deferred", options, Loading)
    with _block(Recording(LoadOptions(**of_kind(Opening, options))), options, compile):
        yield


def load_model(
    path: str | os.PathLike[str],
    custom_objects: Mapping[str, Any] | None = None,
    compile: bool | Compile | Sequence[Compile] = True,
    safe_mode: bool = True,
    **options: Unpack[Loading],
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
    check_options("load_model", options, Loading)
    where = os.path.expanduser(os.fspath(path))
    check_storage_options(where, options.get("storage_options"))
    recording = Recording(LoadOptions(**of_kind(Opening, options)))
    called = None if isinstance(compile, bool) else compile
    compile = compile if isinstance(compile, bool) else True
    with _block(recording, options, called, one_model=True):
        _check_saved_model(recording.remote.located(where))
        try:
            return keras.saving.load_model(where, custom_objects, compile=compile, safe_mode=safe_mode)
        except ValueError as error:
            if isinstance(error, LazyModelError) or "could not be loaded" not in str(error):
                raise
            raise CheckpointError(
                f"{shown(where)}: its weights do not match its own configuration; other versions of Keras may read it, "
                f"and 3.15 reads no AWQ that it has saved: {error}"
            ) from error


@contextlib.contextmanager
def _block(
    recording: Recording,
    options: Loading,
    compile: Compile | Sequence[Compile] | None,
    *,
    one_model: bool = False,
) -> Generator[None]:
    """Does what `deferred` does.

    With `one_model`, rules are those of the first loaded model, as in `from_preset`: a pattern that matches nothing in
    it raises.
    """
    mesh, rules = options.get("mesh"), options.get("rules")
    materializing: Any = of_kind(Materializing, options)
    sharding: Any = of_kind(Sharding, options)
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
            sharding["rules"] = current
            abstract = abstract.shard(**sharding)
            abstract = abstract.with_variables({**abstract.variables, **placed})
            current = block_rules or rules  # later variables may be of other models
        abstract.materialize(compile=None if result is None else compile, **materializing)
        recording.notes.clear()
        recording.initialized.clear()  # nothing of the block is built again
        recording.began = time.perf_counter()  # for the next model of the block

    def materialize_loaded(result: Any, what: str, partly: bool) -> None:
        if what.endswith("load_weights") and not recording.files:
            recording.refuse_unverified(what)
        materialize(result, None if partly else what, only_own=True)

    recording.on_loaded = materialize_loaded
    with session(recording), _hooks.needed(recording):
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


_hooks = _upstream.SharedPatches()


@_hooks.replacing(keras.Model, "load_weights")
def _load_weights(
    recording: Recording, original: Any, self: Any, filepath: Any, skip_mismatch: bool = False, **kwargs: Any
) -> Any:
    def load() -> Any:
        where = recording.remote.located(filepath)
        if not is_orbax(where):
            return original(self, recording.remote.for_keras(where), skip_mismatch, **kwargs)
        # Stock Keras has Orbax read whole arrays, and silently omits those that it does not find by path.
        if given := [name for name, value in kwargs.items() if value is not None]:
            raise LazyModelError(f"load_weights takes no argument {given[0]!r} for an Orbax checkpoint: {where}")
        return read_state(recording, self, where, strict=not skip_mismatch)

    partly = bool(skip_mismatch or kwargs.get("objects_to_skip"))
    return _announced(recording, original.__qualname__, load, of=self, partly=partly)


@_hooks.replacing(keras.saving, "load_model")
@_hooks.replacing(keras.models, "load_model")
def _load_model(
    recording: Recording,
    original: Any,
    filepath: Any,
    custom_objects: Any = None,
    compile: bool = True,
    safe_mode: bool = True,
) -> Any:
    remote = recording.remote

    def load() -> Any:
        where = remote.located(filepath)
        if is_orbax(where):
            return model_from_orbax(where, custom_objects, compile, safe_mode, strict=recording.options.strict)
        if not remote.serves(filepath):
            return original(filepath, custom_objects, compile, safe_mode)
        _check_saved_model(where)
        load_file = _upstream.loader_of_file(original, where.name)
        return load_file(remote.for_keras(where), custom_objects, compile, safe_mode)

    def load_all() -> Any:
        model = load()
        if compile and recording.options.strict:
            _check_optimizer(recording, model)
        return model

    return _announced(recording, original.__qualname__, load_all)


def _check_optimizer(recording: Recording, model: Any) -> None:
    """Raises CheckpointError if a file has optimizer state that Keras, which only warns, left out."""
    optimizer = getattr(model, "optimizer", None)
    for path, file in recording.files.items():
        state = {name for name in file.tensors if name.startswith("optimizer/vars/")}
        if state and optimizer is not None and not state & file.requested:
            raise CheckpointError(
                f"{path}: expected the {len(optimizer.variables)} variables of optimizer {optimizer.name!r}, found "
                f"{len(state)}. If its loss was scaled, call keras.config.set_dtype_policy('mixed_float16') before; "
                "compile=False loads the model without its optimizer"
            )


@_hooks.replacing(lambda: getattr(_upstream.hub_models(), "Backbone", None), "from_preset")
@_hooks.replacing(lambda: getattr(_upstream.hub_models(), "Task", None), "from_preset")
def _from_preset(recording: Recording, original: Any, cls: Any, preset: Any, *args: Any, **kwargs: Any) -> Any:
    if recording.loading:
        return original(cls, preset, *args, **kwargs)
    recording.keywords = keywords = Keywords(kwargs.keys(), taker="lazymodel_keras.deferred")
    keywords.check_ours(cls)
    try:
        return _announced(recording, original.__qualname__, lambda: original(cls, preset, *args, **kwargs))
    finally:
        recording.keywords = None


def _announced(
    recording: Recording, what: str, load: Callable[[], Any], *, of: Any = None, partly: bool = False
) -> Any:
    """Runs a call that loads; the outermost one reports the loaded object to the recording: `of`, or its result."""
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
