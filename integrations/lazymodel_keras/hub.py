"""KerasHub presets: KerasHub builds and converts, and the values are streamed to their devices.

`from_preset` replaces `cls.from_preset`; `abstract_from_preset` does the same without reading any weight. KerasHub's
own constructors, preset loaders and converters run unchanged.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from lazymodel import AbstractModel, CheckpointError, Compile, LazyModelError, Progress
from lazymodel._remote.url import shown
from lazymodel._sharding.shard import Rules
from lazymodel._show.progress import ReportTo
from lazymodel._show.text import closest
from lazymodel.checkpoints._open import foreign
from lazymodel.checkpoints._verify import Verify
from lazymodel_keras import _upstream
from lazymodel_keras._build import Keywords, abstract_build, require_rules
from lazymodel_keras._gguf.folder import is_gguf
from lazymodel_keras._record.patches import collecting_patches
from lazymodel_keras._record.recording import LoadOptions
from lazymodel_keras._record.remote import check_storage_options

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
    max_host_memory: int | str | None = None,
    replicas: str | None = None,
    compile: Compile | Sequence[Compile] | bool | None = None,
    progress: bool | Progress | Callable[[int, int], object] | None = None,
    report: ReportTo = None,
    **kwargs: Any,
) -> T:
    """Does what `cls.from_preset(preset, load_weights, **kwargs)` does, but never holds the model whole on one device.

    The result is an ordinary Keras model, equal bit for bit to that of the stock call. It is short for
    `abstract_from_preset(…).shard(mesh, rules).materialize()`; use these steps to quantize the model, or to add LoRA
    pairs.

    Args:
        cls: See `abstract_from_preset`, also for `preset`, `load_weights`, `strict`, `verify`, `storage_options` and
            arguments of KerasHub.
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
    require_rules(mesh, rules)
    if isinstance(compile, bool):
        kwargs, compile = {**kwargs, "compile": compile}, None
    streaming: Any = {"max_host_memory": max_host_memory, "replicas": replicas, "progress": progress, "report": report}
    with collecting_patches.needed():
        options = LoadOptions(strict, verify=verify, storage_options=storage_options)
        abstract = _abstract(cls, preset, load_weights, options, kwargs)
        if mesh is not None:
            abstract = abstract.shard(mesh, rules, on_unmatched=on_unmatched)
        return abstract.materialize(compile=compile, **streaming)


def abstract_from_preset(
    cls: type[T],
    preset: str | os.PathLike[str],
    load_weights: bool = True,
    *,
    strict: bool = True,
    cast: str = "safe",
    verify: Verify = False,
    storage_options: Mapping[str, Any] | None = None,
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
            stored twice, heads of other tasks. Unused scales and other parts of quantized weights always raise.
        cast: As in `AbstractModel.materialize`: `"safe"` raises if a tensor of a file could lose its meaning in its
            variable's dtype, which stock Keras casts silently; `"unsafe"` casts like Keras.
        verify: True hashes the weight files that are opened, and the index and shards that belong to them, before they
            are used; as in `lazymodel.open_checkpoint`, with names relative to their folder. Other files of a preset,
            such as its configuration and vocabulary, are not hashed; neither are files at a URL, for which this raises.
        storage_options: For a URL: as in `lazymodel.open_checkpoint`.
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
    return _abstract(cls, preset, load_weights, LoadOptions(strict, cast, verify, storage_options), kwargs)


def _abstract(
    cls: Any, preset: Any, load_weights: bool, options: LoadOptions, kwargs: dict[str, Any]
) -> AbstractModel[Any]:
    _check_class(cls)
    preset = os.fspath(preset)  # KerasHub only takes strings
    check_storage_options(preset, options.storage_options)
    check_preset(preset)
    keywords = Keywords(kwargs.keys())
    keywords.check_ours(cls)
    what = f"{cls.__name__}.from_preset({shown(preset)!r})"
    try:
        return abstract_build(
            lambda: cls.from_preset(preset, load_weights, **kwargs),  # looked up while recording
            what=what,
            loads=True,
            options=options,
            keywords=keywords,
        )
    except CheckpointError as error:
        if not (hint := _hint(preset, error)):
            raise
        raise CheckpointError(f"{str(error).rstrip('.')}; {hint}") from error


def _check_class(cls: Any) -> None:
    """Raises LazyModelError for anything but a class with `from_preset`, such as the name of one."""
    if inspect.isclass(cls) and callable(getattr(cls, "from_preset", None)):
        return
    models: Any = _upstream.hub_models()
    names = [] if models is None else [name for name in vars(models) if inspect.isclass(getattr(models, name))]
    if isinstance(cls, str) and (name := cls.rpartition(".")[2]) in names:
        hint = f"pass the class itself, keras_hub.models.{name}"
    elif isinstance(cls, str):
        hint = f"pass the class itself, not a name{closest(cls, names)}"
    elif inspect.isclass(type(cls)) and hasattr(type(cls), "from_preset"):
        hint = f"pass its class, {type(cls).__name__}"
    else:
        hint = "pass a class that has from_preset"
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
