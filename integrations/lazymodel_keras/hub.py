"""KerasHub presets: KerasHub builds and converts, the values are streamed to where they belong.

`from_preset` is the drop-in for `cls.from_preset`; `abstract_from_preset` is the same stopped before any byte of a
weight was read. KerasHub's own constructors, preset loaders and converters run unchanged.
"""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import keras

from lazymodel import AbstractModel, CheckpointError, LazyModelWarning, Progress, ShardingError
from lazymodel._auto import Auto
from lazymodel._materialize import ReportTo
from lazymodel._report import closest, folded_names
from lazymodel._sharding import Rules
from lazymodel.checkpoints._untrusted import read_json_file, weight_map
from lazymodel.checkpoints._verify import Verify
from lazymodel_keras import _lora, _quantize
from lazymodel_keras._hugging_face import Leftovers
from lazymodel_keras._keywords import check_class, check_from_preset
from lazymodel_keras._model import abstract_model
from lazymodel_keras._recording import Recording
from lazymodel_keras._weight_files import known_layers

_LISTED = 8


def from_preset(
    cls: Any,
    preset: str | os.PathLike[str],
    load_weights: bool = True,
    *,
    mesh: jax.sharding.Mesh | None = None,
    rules: Rules | None = None,
    on_unmatched: str = "warn",
    large: int | str = "1MiB",
    repair: bool | Auto = False,
    strict: bool = True,
    cast: str = "safe",
    verify: Verify = False,
    quantize: Any = None,
    quantize_filters: _quantize.Filters = None,
    lora_rank: int | None = None,
    lora_targets: str | None = None,
    max_host_memory: int | str | None = None,
    progress: bool | Progress | Callable[[int, int], object] | None = None,
    report: ReportTo = None,
    **kwargs: Any,
) -> Any:
    """Does what `cls.from_preset(preset, load_weights, **kwargs)` does, with nothing ever whole on one device.

    The result is an ordinary Keras model, equal bit for bit to what the stock call returns.

    Args:
        cls: A KerasHub backbone or task class.
        preset: Anything that KerasHub resolves: a preset's name or URI, a preset folder, a Hugging Face folder.
        load_weights: Whether to load weights; if not, every variable is initialized on its devices.
        mesh: The devices; None uses the active `keras.distribution` if there is one, else one device.
        rules: Sharding rules that go with `mesh`; see `AbstractModel.shard`.
        on_unmatched: What to do about large variables without a rule; see `AbstractModel.shard`.
        large: From how many bytes on a variable is large, likewise.
        repair: Whether what the rules do not fit, and large variables without one, are sharded as `lazymodel.auto()`
            proposes, likewise.
        strict: Whether weights that the model has no variable for are an error; if not, they are left out with a
            warning that lists them. Of a Hugging Face or timm folder, this is what KerasHub's converter did not ask
            for, in all shards, but for what converters leave out on purpose: buffers such as rotary tables, tied
            weights that are stored twice, heads of other tasks. Scales and other parts of quantized weights that
            nothing takes are an error even then.
        cast: As in `AbstractModel.materialize`: `"safe"` makes it an error where a tensor of a file could lose what it
            means in its variable's dtype, which stock Keras casts in silence; `"unsafe"` casts as Keras does.
        verify: Whether to hash the weight files that are opened, and the index and shards that belong to them, before
            anything of them is used; as in `lazymodel.open_checkpoint`, with names relative to their folder. Other
            files of a preset, such as its configuration and vocabulary, are not hashed.
        quantize: `"int8"`, `"int4"`, `"float8"` or a `keras.quantizers.QuantizationConfig`: the result is the one of
            `model.quantize` after loading, but a kernel is quantized while it is read, and never exists whole in
            floating point. Schemes that calibrate with data (GPTQ, AWQ) need the loaded model. A quantizer of your own
            in a configuration is run while building, with one layer's weights read at a time. `"int4"` stores the
            kernels of `EinsumDense` as matrices, so rules for their float shapes do not fit; `lazymodel.auto()` does.
        quantize_filters: Which layers, as the `filters` of `model.quantize`.
        lora_rank: As `model.backbone.enable_lora(lora_rank)` after loading (and quantizing), with every pair
            initialized on its devices and split like its kernel, unless a rule says otherwise.
        lora_targets: Regex of whole paths (`re.fullmatch`): the layers whose kernel or embeddings it matches get a
            pair. None is the query and value projections, or what the backbone says.
        max_host_memory: Ceiling for the host's staging memory in bytes, or text such as `"4GiB"`.
        progress: A progress bar or callback; None shows a bar when a person is watching. See
            `AbstractModel.materialize`.
        report: True prints a `lazymodel.LoadReport` once the model is complete; a callable, such as `reports.append`,
            is given it instead.
        **kwargs: Passed on to KerasHub, such as `dtype` or `num_classes`. What neither its loader nor the class takes
            is an error; KerasHub would leave it out in silence.

    Raises:
        CheckpointError: The preset, or a file or tensor of it, is missing, corrupt, quantized in a way that is not
            read, or does not match the model, or has what the model has no variable for (with `strict`); with `verify`,
            also a file whose content has another hash, or whose hash nobody states.
        ShardingError: The rules do not fit.
        LazyModelError: The model cannot be quantized, or given LoRA pairs, in this way; or nobody takes an argument.
    """
    abstract = abstract_from_preset(
        *(cls, preset, load_weights),
        mesh=mesh,
        rules=rules,
        on_unmatched=on_unmatched,
        large=large,
        repair=repair,
        strict=strict,
        cast=cast,
        verify=verify,
        quantize=quantize,
        quantize_filters=quantize_filters,
        lora_rank=lora_rank,
        lora_targets=lora_targets,
        **kwargs,
    )
    return abstract.materialize(max_host_memory=max_host_memory, progress=progress, report=report)


def abstract_from_preset(
    cls: Any,
    preset: str | os.PathLike[str],
    load_weights: bool = True,
    *,
    mesh: jax.sharding.Mesh | None = None,
    rules: Rules | None = None,
    on_unmatched: str = "warn",
    large: int | str = "1MiB",
    repair: bool | Auto = False,
    strict: bool = True,
    cast: str = "safe",
    verify: Verify = False,
    quantize: Any = None,
    quantize_filters: _quantize.Filters = None,
    lora_rank: int | None = None,
    lora_targets: str | None = None,
    **kwargs: Any,
) -> AbstractModel:
    """The abstract model that `from_preset` would materialize; it carries its checkpoint.

    Takes and raises the same as `from_preset`; it has the quantized variables and the LoRA pairs.
    `print(abstract.plan())` shows what would be loaded and initialized.
    """
    check_class(cls)
    preset = os.fspath(preset)  # KerasHub takes strings only
    require_rules(mesh, rules, repair)
    check_preset(preset)
    here = inspect.signature(abstract_from_preset).parameters
    check_from_preset(cls, preset, kwargs, {name: "" if name in here else "materialize()" for name in OURS})
    _quantize.check(quantize, quantize_filters)
    _lora.check(lora_rank, lora_targets, quantize)

    def build() -> Any:
        model = cls.from_preset(preset, load_weights, **kwargs)
        if quantize is not None:
            _quantize.quantize(model, quantize, quantize_filters)
        if lora_rank is not None:
            _lora.enable(model, lora_rank, lora_targets)
        return model

    what = f"{cls.__name__}.from_preset({preset!r})"
    abstract = abstract_build(build, what=what, loads=True, strict=strict, cast=cast, verify=verify)
    if mesh is None:
        return abstract
    return abstract.shard(mesh, rules, on_unmatched=on_unmatched, large=large, repair=repair)


def abstract_build(
    build: Any, *, what: str, loads: bool, strict: bool = True, cast: str = "safe", verify: Verify = False
) -> AbstractModel:
    """Runs something that builds a model; failures to load it become one `CheckpointError`.

    Args:
        build: Called without arguments.
        what: What it does, for messages.
        loads: Whether loading is all it is for; if not, only what fails once a weight file was opened is a failure to
            load, and other errors are the user's own.
        strict: As in `from_preset`.
        cast: As in `from_preset`.
        verify: As in `from_preset`.

    Raises:
        CheckpointError: As `from_preset`.
    """
    recording = Recording(verify, cast)
    try:
        try:
            with recording:
                result = build()
        finally:
            recording.require_verified()
    except (ValueError, KeyError, OSError) as error:
        if not loads and not recording.files:
            raise
        problems = recording.unresolved_problems()
        if problems:
            more = f" ({len(problems)} tensors do not match)" if len(problems) > 1 else ""
            raise CheckpointError(f"{what}: {problems[0]}{more}") from error
        files = ", ".join(recording.files)
        if "could not be loaded" in str(error):  # Keras' loader, which goes on to the end before it raises
            lacking = [
                variable.path
                for variable, recorded in recording.variables()
                if recorded.value is None and keras.backend.is_float_dtype(variable._dtype)
            ]
            folded = folded_names(lacking)
            listed = ", ".join(folded[:_LISTED]) + (", …" if len(folded) > _LISTED else "")
            raise CheckpointError(
                f"{what}: {files} has no matching tensors for {len(lacking)} variables: {listed}; "
                "is this the checkpoint of another configuration or version?"
            ) from error
        layers = (
            known_layers(str(error.args[0]), _indexed_names(recording.files)) if isinstance(error, KeyError) else ""
        )
        raise CheckpointError(f"{what} failed{f' ({files})' if files else ''}: {error}{layers}") from error
    check_all_used(recording, what, strict=strict)
    return abstract_model(build, recording, result)


def _indexed_names(files: Iterable[str]) -> list[str]:
    """The tensors that the indexes beside some files list."""
    folders = dict.fromkeys(Path(file).parent for file in files)
    indexes = [index for folder in folders for index in folder.glob("*.safetensors.index.json")]
    return [name for index in indexes for name in weight_map(read_json_file(index), index)]


def check_preset(preset: str) -> None:
    """Raises CheckpointError for a preset folder that is not there or not a preset, before anything is built."""
    if "://" in preset:
        return
    if not os.path.isdir(preset):
        looks_local = preset.startswith((".", os.sep, "~")) or os.sep in preset
        if os.path.exists(preset):
            raise CheckpointError(f"{preset} is a file; a preset is a folder with a config.json")
        if looks_local:
            raise CheckpointError(f"preset folder {preset} does not exist")
        known = set(_builtin_presets())
        if preset not in known:
            raise CheckpointError(
                f"{preset!r} is neither a folder nor a preset that KerasHub knows{closest(preset, sorted(known))}"
            )
        return
    if not os.path.exists(os.path.join(preset, "config.json")):
        raise CheckpointError(
            f"preset folder {preset} has no config.json; a preset is a folder that `save_to_preset` wrote or a "
            "Hugging Face model folder"
        )


def require_rules(mesh: Any, rules: Any, repair: Any = False) -> None:
    """Raises ShardingError where a mesh comes without rules, or rules or their repair without a mesh."""
    if repair and mesh is None:
        raise ShardingError("repair was given without mesh; it mends rules, so pass mesh and rules, too")
    if (mesh is None) != (rules is None):
        given, lacking = ("rules", "mesh") if mesh is None else ("mesh", "rules")
        raise ShardingError(f"{given} was given without {lacking}; pass both, or neither to use keras.distribution")


def _builtin_presets() -> list[str]:
    import keras_hub

    models: Any = keras_hub.models
    return [*models.Backbone.presets, *models.Task.presets]


def check_all_used(recording: Recording, what: str, *, strict: bool) -> None:
    """Warns where weight files hold tensors that nothing asked for, or with `strict` raises CheckpointError.

    What converters of other formats than Keras' own leave out on purpose is no matter; what is left of quantized
    weights is an error whatever `strict` says.
    """
    leftovers = Leftovers(recording.files)
    if quantized := leftovers.quantized():
        raise CheckpointError(f"{what}: {'; '.join(quantized)}.")
    messages: list[str] = []
    for path, file in recording.files.items():
        if not path.endswith((".weights.h5", ".keras")):
            continue
        # A layer that took some of its tensors and not all chose to: Keras' own way of loading insists on all of them.
        unused_names = set(file.unused)
        visited = {name.rpartition("/")[0] for name in file.tensors if name not in unused_names}
        unused = [
            name for name in file.unused if not name.startswith("optimizer/") and name.rpartition("/")[0] not in visited
        ]
        if unused:
            listed = ", ".join(unused[:_LISTED]) + (", …" if len(unused) > _LISTED else "")
            messages.append(f"{path} holds {len(unused)} tensors that the model has no variable for: {listed}")
    messages += leftovers.unexpected()
    if not messages:
        return
    message = f"{what}: {'; '.join(messages)}"
    message += " " if message.endswith("?") else ". "
    if strict:
        raise CheckpointError(f"{message}Pass strict=False to leave them out.")
    warnings.warn(f"{message}They are left out.", LazyModelWarning, stacklevel=_levels_to_caller())


def _levels_to_caller() -> int:
    """The `stacklevel` with which its caller warns of the line that called into this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in (
        "lazymodel_keras",
        "lazymodel",
    ):
        level, frame = level + 1, frame.f_back
    return level


# The arguments of this package's that may have been meant by one that nobody takes.
OURS = tuple(name for name in inspect.signature(from_preset).parameters if name not in ("cls", "preset", "kwargs"))

__all__ = ["abstract_from_preset", "from_preset"]
