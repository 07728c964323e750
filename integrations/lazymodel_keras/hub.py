"""KerasHub presets: KerasHub builds and converts, the values are streamed to where they belong.

`from_preset` is the drop-in for `cls.from_preset`; `abstract_from_preset` is the same stopped before any byte of a
weight was read. KerasHub's own constructors, preset loaders and converters run unchanged.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from lazymodel import AbstractModel, CheckpointError, Compile, Progress
from lazymodel._remote.url import shown
from lazymodel._sharding.rules import Rules
from lazymodel._show.progress import ReportTo
from lazymodel._show.text import closest
from lazymodel.checkpoints._foreign import foreign
from lazymodel.checkpoints._verify import Verify
from lazymodel_keras._build import abstract_build, require_rules
from lazymodel_keras._gguf.folder import is_gguf
from lazymodel_keras._keywords import check_class, check_from_preset, ours
from lazymodel_keras._record.patches import collecting_patches
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
    """Does what `cls.from_preset(preset, load_weights, **kwargs)` does, with nothing ever whole on one device.

    The result is an ordinary Keras model, equal bit for bit to what the stock call returns. It is short for
    `abstract_from_preset(…).shard(mesh, rules).materialize()`; to quantize the model, or to give it LoRA pairs, say
    these steps.

    Args:
        cls: See `abstract_from_preset`, as for `preset`, `load_weights`, `strict`, `verify`, `storage_options` and what
            KerasHub takes.
        mesh: The devices; None uses the active `keras.distribution` if there is one, else one device.
        rules: Sharding rules that go with `mesh`; see `AbstractModel.shard`.
        on_unmatched: What to do about large variables without a rule, likewise.
        max_host_memory: See `AbstractModel.materialize`, as for `replicas`, `progress` and `report`.
        compile: What will be called, compiled while the weights come, one or a list: `lm.Compile("generate", batch=1,
            sequence=256)`, with the `max_length` and number of prompts of the call, `lm.Compile("predict", batch=8)`,
            `lm.Compile("train", batch=8)`, which builds the optimizer as well, or a jitted function of yours. See
            `lazymodel.Compile`, and docs/cold_start.md for what Keras compiles when. True and False are KerasHub's own:
            whether a task gets its default optimizer, loss and sampler.

    Raises:
        CheckpointError: As `abstract_from_preset`, and so is LazyModelError.
        ShardingError: The rules do not fit.
        DoesNotFitError: What is compiled does not fit the devices; see `AbstractModel.materialize`.

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
    given = ours(
        *("on_unmatched", "mesh", "rules", "max_host_memory", "replicas", "compile", "progress", "report"),
        *("strict", "verify", "storage_options"),
    )
    options = {"strict": strict, "verify": verify, "storage_options": storage_options}
    streaming: Any = {"max_host_memory": max_host_memory, "replicas": replicas, "progress": progress, "report": report}
    with collecting_patches.needed():
        abstract = _abstract(cls, preset, load_weights, kwargs, given, **options)
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
    """The abstract model of what `cls.from_preset(preset, load_weights, **kwargs)` returns; it carries its checkpoint.

    `print(abstract.plan())` shows what would be loaded and initialized. Shardings are those of the active
    `keras.distribution` if there is one; `shard` gives others.

    Args:
        cls: A KerasHub backbone or task class.
        preset: Anything that KerasHub resolves: a preset's name or URI, a preset folder, a Hugging Face folder. Or a
            GGUF file of a model that llama.cpp and KerasHub both know, vocabulary included; see docs/keras.md. Or the
            URL of such a folder or file: `gs://`, `s3://`, `az://`, `https://` or
            `hf://owner/name[@revision][/folder]`. Of a folder at a URL, the configuration, vocabularies and other small
            files that KerasHub asks for (256 MiB at most) are fetched into a temporary folder, and weights are streamed
            from where they are. Without obstore (`pip install 'lazymodel[remote]'`), KerasHub downloads `hf://` and
            `gs://` as it does by itself.
        load_weights: Whether to load weights; if not, every variable is initialized on its devices.
        strict: Whether weights that the model has no variable for are an error; if not, they are left out with a
            warning that lists them. Of a Hugging Face or timm folder, this is what KerasHub's converter did not ask
            for, in all shards, but for what converters leave out on purpose: buffers such as rotary tables, tied
            weights that are stored twice, heads of other tasks. Scales and other parts of quantized weights that
            nothing takes are an error even then.
        cast: As in `AbstractModel.materialize`: `"safe"` makes it an error where a tensor of a file could lose what it
            means in its variable's dtype, which stock Keras casts in silence; `"unsafe"` casts as Keras does.
        verify: Whether to hash the weight files that are opened, and the index and shards that belong to them, before
            anything of them is used; as in `lazymodel.open_checkpoint`, with names relative to their folder. Other
            files of a preset, such as its configuration and vocabulary, are not hashed; nor is anything at a URL, of
            which this is an error.
        storage_options: For a URL: as in `lazymodel.open_checkpoint`.
        **kwargs: Passed on to KerasHub, such as `dtype` or `num_classes`. What neither its loader nor the class takes
            is an error; KerasHub would leave it out in silence.

    Raises:
        CheckpointError: The preset, or a file or tensor of it, is missing, corrupt, quantized in a way that is not
            read, or does not match the model, or has what the model has no variable for (with `strict`); with `verify`,
            also a file whose content has another hash, or whose hash nobody states.
        LazyModelError: Nobody takes an argument.

    Example:
        >>> abstract = lk.abstract_from_preset(keras_hub.models.GemmaBackbone, "preset")
        >>> abstract.shard(mesh, lm.auto()).plan().read_nbytes == abstract.nbytes
        True
    """
    given = ours("strict", "cast", "verify", "storage_options")
    options = {"strict": strict, "cast": cast, "verify": verify, "storage_options": storage_options}
    return _abstract(cls, preset, load_weights, kwargs, given, **options)


def _abstract(
    cls: Any, preset: Any, load_weights: bool, kwargs: dict[str, Any], given: dict[str, str], **options: Any
) -> AbstractModel[Any]:
    check_class(cls)
    preset = os.fspath(preset)  # KerasHub takes strings only
    check_storage_options(preset, options["storage_options"])
    check_preset(preset)

    def build() -> Any:
        # Within the recording, which knows how to read what is at a URL.
        check_from_preset(cls, preset, kwargs, given)
        return cls.from_preset(preset, load_weights, **kwargs)

    try:
        return abstract_build(build, what=f"{cls.__name__}.from_preset({shown(preset)!r})", loads=True, **options)
    except CheckpointError as error:
        if not (hint := _hint(preset, error)):
            raise
        raise CheckpointError(f"{str(error).rstrip('.')}; {hint}") from error


def _hint(preset: str, error: CheckpointError) -> str:
    """What to do about a preset whose weights are in a form that is not read, or whose hub does not answer."""
    if os.path.isdir(preset):
        return foreign(os.listdir(preset)).strip() if "safetensors` doesn't exist" in str(error) else ""
    # requests' errors are an OSError; KerasHub takes a hub that does not answer for one without the file.
    unanswered = isinstance(error.__cause__, OSError) or "has no config.json" in str(error)
    said = "if the hub cannot be reached from here, download the preset elsewhere, and pass its folder"
    return said if unanswered and _OF_A_HUB.match(preset) else ""


def check_preset(preset: str) -> None:
    """Raises CheckpointError for a preset folder that is not there or not a preset, before anything is built."""
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
        of_hub = f"; of the Hugging Face hub it is 'hf://{preset}'" if named else ""
        raise CheckpointError(f"preset folder {preset} does not exist{of_hub}")
    import keras_hub

    models: Any = keras_hub.models
    if preset not in (known := {*models.Backbone.presets, *models.Task.presets}):
        raise CheckpointError(
            f"{preset!r} is neither a folder nor a preset that KerasHub knows{closest(preset, sorted(known))}"
        )
