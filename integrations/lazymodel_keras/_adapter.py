"""The adapter that `lazymodel.build_abstract` finds for Keras.

Functions that only their result identifies as Keras factories: they run once, traced and recorded together.

Until it creates its first layer or optimizer, such a function is traced like any other, and small arrays are also
computed. From then on nothing is traced, and it runs like Keras' own factories. If the result is not of Keras, another
adapter handles it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
import sys
import tempfile
import typing
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import keras

import lazymodel
from lazymodel import AbstractModel, CheckpointError, LazyModelError, LazyModelWarning
from lazymodel._abstract.pairs import LoraPair
from lazymodel._errors import warn
from lazymodel._mapping.resolve import lazy_values
from lazymodel._remote.path import LocalPath, Location
from lazymodel._remote.url import shown
from lazymodel._show.text import closest, format_bytes, quiet_tensorflow
from lazymodel._trace.function import ValuedTrace
from lazymodel.checkpoints._open import located, weight_files
from lazymodel.checkpoints._untrusted import MAX_JSON, read_at_most
from lazymodel.extras.cli.convert import differences, forget
from lazymodel_keras import _upstream
from lazymodel_keras._build import Keywords, Opening, abstract_build, finished, recorded
from lazymodel_keras._model.keras_object import by_path, model_variables, replace
from lazymodel_keras._model.layers import lora_pairs
from lazymodel_keras._record.files import RemoteFiles, check_storage_options, is_gguf
from lazymodel_keras._record.recording import Recording, recording_problem
from lazymodel_keras._train.saving import save_preset
from lazymodel_keras.hub import abstract_from_preset


def _convert_model(
    cls: str,
    source: str,
    destination: str,
    *,
    to: str | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    adapter: str | None = None,
    verify: bool = False,
    source_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[str]:
    """Saves a model's folder as another one; returns the differences that `verify` found.

    Args:
        cls: The name of a class of KerasHub, such as `Gemma3CausalLM`.
        source: What the class's `from_preset` takes, with `source_options` for a URL.
        destination: A folder on a disk.
        to: As for `save_preset`, like further options; None means a preset.
        dtype: The dtype policy of the new model; None keeps that of the source.
        quantize: `"int8"` or `"int4"`, as Keras quantizes.
        adapter: As for `abstract_from_preset`.
        verify: True reads everything back and compares it with the source. A Hugging Face folder is always verified:
            for some shapes, KerasHub's exporters write a layout from which its own importer, and transformers, read
            other values.

    Raises:
        LazyModelError: As for `abstract_from_preset` and `save_preset`; KerasHub has no such class.
    """
    target = _hub_class(cls)
    if "://" in destination:
        raise LazyModelError(f"{destination}: expected the path of a folder, found a URL")
    if os.path.realpath(source) == os.path.realpath(destination):
        raise LazyModelError(f"{destination} is what is converted; convert to another path")
    given: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    abstract = abstract_from_preset(target, source, storage_options=source_options, adapter=adapter, **given)
    if quantize is not None:
        # Tokenizers are layers of a task that are never built, and Keras raises if it quantizes them.
        abstract = abstract.quantize(quantize, filters=lambda layer: layer.built)
    save_preset(abstract, destination, to=to or "preset", **options)
    if not verify and to != "huggingface":
        return []
    forget([entry.path for entry in os.scandir(destination)])
    expected = lazy_values(abstract)
    if to == "huggingface":  # an exported configuration names no task, and has weights only
        backbone = getattr(target, "backbone_cls", target)
        try:
            found = lazy_values(abstract_from_preset(backbone, destination, **given))
        except CheckpointError as error:
            return [f"KerasHub, which wrote it, cannot read it: {error}"]
        found = {path: tensor for path, tensor in found.items() if jnp.issubdtype(tensor.dtype, jnp.floating)}
    else:  # matched by order, since Keras renumbers some names; presets have no random states
        found = lazy_values(abstract_from_preset(target, destination, **given))
        found = {path: one for path, one in zip(expected, found.values(), strict=True) if one.file}
    expected = {path: tensor for path, tensor in expected.items() if path in found}
    return list(differences(expected, found, options))


def _plan_model(
    source: str, *, cls: str | None = None, dtype: str | None = None, **opening: Unpack[Opening]
) -> AbstractModel[Any]:
    """The abstract model that a preset or a configuration describes.

    Args:
        source: A preset's name or URI, the folder of a KerasHub preset or of a Hugging Face model, a GGUF file, a JSON
            file like their `config.json`, or the URL of such a folder or file. Weights in the folder are what would be
            loaded; none are needed. For a preset that is not on this machine, only the configuration is fetched, and
            for a URL also the headers of its weights.
        cls: The name of a KerasHub class, such as `Gemma3CausalLM`; None is the backbone that the configuration names.
        dtype: The dtype policy, such as `bfloat16`; None takes it from a Hugging Face configuration (`dtype` or
            `torch_dtype`), otherwise the default of `from_preset`.
        **opening: As for `abstract_from_preset`: `storage_options` for a URL, for example.

    Raises:
        CheckpointError: There is no such preset, file or folder, or KerasHub cannot read it.
        LazyModelError: KerasHub has no such class.
    """
    target = _hub_class(cls or "Backbone")
    options: dict[str, Any] = {}
    if not issubclass(target, _hub_class("Backbone")):
        options["preprocessor"] = None  # it needs vocabularies, and a plan needs no texts
    if dtype is not None:
        options["dtype"] = dtype
        try:
            keras.dtype_policies.get(dtype)
        except (TypeError, ValueError) as error:
            raise LazyModelError(f"{dtype!r} is not a dtype policy of Keras: {error}") from error
    stores = opening.get("storage_options")
    check_storage_options(source, stores)
    if is_gguf(source):
        return _planned(target, source, True, {**options, **opening})
    if os.path.exists(source) or RemoteFiles().serves(source):
        where = located(source, stores)
        if not where.is_file():
            _read_config(where / "config.json", shown(source), options)
            return _planned(target, source, bool(weight_files(where)), {**options, **opening})
        with tempfile.TemporaryDirectory() as folder:
            config = LocalPath(folder, "config.json")
            config.write_bytes(read_at_most(where, MAX_JSON, "JSON"))
            _read_config(config, shown(source), options)
            try:
                return _planned(target, folder, False, options, source)
            except CheckpointError as error:
                raise CheckpointError(str(error).replace(folder, shown(source))) from error
    try:
        return abstract_from_preset(target, source, load_weights=False, strict=False, **options)
    except (CheckpointError, LazyModelError):
        raise
    except Exception as error:  # each of KerasHub's hubs has its own errors
        raise CheckpointError(
            f"cannot get the configuration of preset {source!r} ({type(error).__name__}: {error}). It is fetched from "
            "the network unless it was before; give a folder or a config.json instead"
        ) from error


def _hub_class(name: str) -> Any:
    """Returns KerasHub's class of this name; raises LazyModelError if there is none, or KerasHub is not installed."""
    try:
        with quiet_tensorflow():
            import keras_hub
    except ModuleNotFoundError as error:
        raise LazyModelError(
            f"presets and configurations are read by KerasHub, and {error.name} is not installed: "
            "pip install 'lazymodel[keras]'"
        ) from error
    models: Any = keras_hub.models
    if (found := getattr(models, name, None)) is None:
        raise LazyModelError(f"keras_hub.models has no class {name!r}{closest(name, vars(models))}")
    return found


def _read_config(path: Location, source: str, options: dict[str, Any]) -> None:
    """Adds the dtype of a Hugging Face configuration to options without one.

    Raises CheckpointError if the file exists and does not describe a model.
    """
    if not path.exists():
        return
    try:
        config = json.loads(read_at_most(path, MAX_JSON, "JSON").decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source} is not JSON: {error}") from error
    if not isinstance(config, dict) or not {"registered_name", "model_type", "architecture"} & set(config):
        raise CheckpointError(
            f"{source} is not a model's configuration: it has none of the keys registered_name (KerasHub), "
            "model_type (Hugging Face) and architecture (timm)"
        )
    stated = config.get("dtype") or config.get("torch_dtype")
    if "dtype" in options or "model_type" not in config or stated not in ("bfloat16", "float16", "float32"):
        return
    options["dtype"] = stated
    if stated != keras.config.floatx():
        stating = (
            f"planned in {stated}, as the configuration of {source} states; from_preset takes {keras.config.floatx()}"
        )
        print(f"lazymodel: {stating} unless dtype={stated!r} is given", file=sys.stderr)


def _planned(target: Any, preset: str, load: bool, options: Mapping[str, Any], source: str = "") -> AbstractModel[Any]:
    try:
        if load:
            return abstract_from_preset(target, preset, load_weights=True, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", LazyModelWarning)
            # A model that does not compute what its configuration says needs the same memory.
            loose: dict[str, Any] = {**options, "strict": False}
            planned = abstract_from_preset(target, preset, load_weights=False, **loose)
        for each in caught:
            if issubclass(each.category, LazyModelWarning):
                print(f"lazymodel: {each.message}".replace(preset, shown(source or preset)), file=sys.stderr)
            else:
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        return planned
    except (TypeError, AttributeError, IndexError) as error:  # a configuration with values of wrong types
        raise CheckpointError(f"KerasHub cannot build a model from {shown(preset)}: {error}") from error


class KerasAdapter:
    """Builds Keras classes, their bound methods such as `from_preset`, and factories that return Keras models.

    Example:
        >>> abstract = lm.build_abstract(keras_hub.models.GemmaBackbone, **config)
        >>> abstract["token_embedding/embeddings"].shape
        (64, 16)
    """

    def matches(self, build: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Returns True if `build` is a Keras class, a method bound to one, or a function that may build a Keras model.

        A function of Keras or KerasHub, or one with a return annotation, is known before it runs. For any other, its
        result shows it; see `build_factory`.
        """
        known = _is_keras(build)
        if known is not None:
            return known
        if not callable(build) or hasattr(build, "init") or hasattr(build, _TRACED):
            return False
        return jax.tree_util.all_leaves([build])  # others are models of a framework whose models are pytrees

    def build_abstract(self, build: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractModel[Any]:
        """Runs `build(*args, **kwargs)` with every variable left abstract."""
        name = getattr(build, "__qualname__", type(build).__name__)
        if isinstance(build, keras.layers.Layer):
            raise LazyModelError(
                f"build_abstract got {build.name!r}, a {name} whose variables exist already: pass the class and its "
                "arguments, or a function that builds it. lm.reshard moves an existing model"
            )
        if _is_keras(build) is None:
            return build_factory(build, args, kwargs, name)
        run = functools.partial(build, *args, **kwargs)  # merges nested partial functions
        recording = Recording()
        recording.keywords = keywords = Keywords(run.keywords.keys(), "", "lazymodel_keras.from_preset")
        if getattr(run.func, "__name__", "") == "from_preset":
            recording.keywords = keywords = dataclasses.replace(keywords, method=".from_preset")
            cls: Any = getattr(run.func, "__self__", None)
            keywords.check_ours(cls)
            # `from_preset` is looked up while recording, when it is patched.
            run = functools.partial(lambda *args, **kwargs: cls.from_preset(*args, **kwargs), *run.args, **run.keywords)
        return abstract_build(recording, run, name)

    from_config = staticmethod(_plan_model)
    convert = staticmethod(_convert_model)

    def arrays(self, model: Any) -> dict[str, Any] | None:
        """The values of the variables of a model or layer, its optimizer's and metrics' included."""
        variables = _variables(model)
        return None if variables is None else {path: variable.value for path, variable in variables.items()}

    def step_advice(self, model: Any) -> str:
        """Why `save_step` should not save a model, since `restore` would not find its names; empty if it may."""
        optimizer = getattr(model, "optimizer", None) if isinstance(model, keras.Model) else None
        if optimizer is None or not optimizer.built:
            return ""
        return (
            f"{model.name!r} is a Keras model with an optimizer, whose names differ in another program: give fit the "
            "callback lazymodel_keras.TrainingCheckpoint, or call model.save_weights('run.weights.h5') within "
            "lazymodel_keras.streamed_saving(); lazymodel_keras.restore restores both"
        )

    def lora_pairs(self, model: Any) -> list[LoraPair] | None:
        variables = _variables(model)
        if variables is None:
            return None
        return lora_pairs(model, {id(variable): path for path, variable in variables.items()})

    def with_arrays(self, model: Any, arrays: Mapping[int, Any]) -> Any:
        """Sets the arrays in place; returns the model."""
        for variable in model_variables(model):
            if (array := arrays.get(id(variable.value))) is not None:
                replace(variable, array)
        return model


def _variables(model: Any) -> dict[str, Any] | None:
    """The variables of a Keras object by path; None for other objects."""
    if not isinstance(model, keras.layers.Layer):
        return None
    return by_path({id(variable): variable for variable in model_variables(model)}.values())


def _is_keras(build: Any) -> bool | None:
    """Returns True if something builds Keras models; None for a function that does not show it."""
    while isinstance(build, functools.partial):
        build = build.func
    owner = build if inspect.isclass(build) else getattr(build, "__self__", None)
    if owner is not None and not inspect.ismodule(owner):
        return inspect.isclass(owner) and issubclass(owner, keras.layers.Layer)
    if (getattr(build, "__module__", None) or "").split(".")[0] in ("keras", "keras_hub"):
        return True
    try:
        returned: Any = typing.get_type_hints(build).get("return")
    except (NameError, TypeError, AttributeError):
        returned = None
    if returned != Any and inspect.isclass(returned):  # since Python 3.11 Any is a class
        return issubclass(returned, keras.layers.Layer)
    return None


adapter = KerasAdapter()


_TRACED = "_traced_by_lazymodel"
_ANNOTATE = "Annotate it as `def build(...) -> keras.Model:`, and it runs as a Keras factory from the start"
_LARGE_NBYTES = 1 << 20


def build_factory(build: Any, args: tuple[Any, ...], kwargs: dict[str, Any], what: str) -> AbstractModel[Any]:
    """Returns the abstract model of `build(*args, **kwargs)`, for any framework; `what` names it in messages."""
    outcome: list[Callable[[], AbstractModel[Any]]] = []  # filled if it is Keras'
    traces: list[ValuedTrace] = []  # each is kept until the outer trace ends
    inputs = any(isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((args, kwargs)))

    def traced(*args: Any, **kwargs: Any) -> Any:
        run = functools.partial(build, *args, **kwargs)
        if inputs or recording_problem():
            return _traced(run, what)
        traces[:] = [ValuedTrace()]
        result = _valued(run, what, traces[0], outcome)
        return () if outcome else result

    functools.update_wrapper(traced, build)
    traced.__name__ = getattr(build, "__name__", type(build).__name__)
    setattr(traced, _TRACED, True)  # the adapter then leaves it to JAX
    model = lazymodel.build_abstract(traced, *args, **kwargs)
    return outcome[0]() if outcome else model


def _traced(run: Callable[[], Any], what: str) -> Any:
    """Runs a function that cannot be recorded; raises if it returns a Keras object."""
    outer: Recording | None = _upstream.active()

    def reject() -> None:
        raise LazyModelError(
            recording_problem()
            or f"{what} takes arrays of JAX and returns a Keras model, whose layers need their values. {_ANNOTATE}; or "
            f"pass a function without arguments: build_abstract(lambda: {what}(...))"
        )

    if outer is not None:
        outer.on_made = reject
    try:
        result = run()
    finally:
        if outer is not None:
            outer.on_made = None
    if _has_keras(result):
        reject()
    return result


def _valued(
    run: Callable[[], Any], what: str, trace: ValuedTrace, outcome: list[Callable[[], AbstractModel[Any]]]
) -> Any:
    """Runs a function that may be a Keras factory; if so, `outcome` gets a callable that builds the model or raises."""
    recording = Recording()

    def made() -> None:
        if not trace.leave():
            raise LazyModelError(
                f"{what} makes Keras layers, but before computes arrays with JAX that are large or have side effects, "
                f"while it may still be a JAX function. {_ANNOTATE}"
            )

    with trace:
        recording.on_made = made
        try:
            result = recorded(recording, run, what)
        except Exception as error:
            if not trace.left:
                raise
            outcome.append(functools.partial(_raise, error))  # outside of the trace, which would explain it
            return None
        finally:
            recording.on_made = None
    if _has_keras(result):
        outcome.append(functools.partial(finished, recording, run, result, what))
    elif trace.left:
        nbytes = sum(leaf.nbytes for leaf in _leaves(result) if isinstance(leaf, jax.Array))
        if nbytes > _LARGE_NBYTES:
            warn(
                f"{what} makes Keras layers and returns none of them, so the {format_bytes(nbytes)} of arrays that it "
                "returns were computed whole. Return the layers, and all of them are built abstractly"
            )
    return result


def _has_keras(result: Any) -> bool:
    return any(isinstance(leaf, keras.layers.Layer | keras.Variable) for leaf in _leaves(result))


def _leaves(result: Any) -> list[Any]:
    # NNX modules are pytrees that may contain themselves.
    return jax.tree.leaves(result, is_leaf=lambda leaf: not isinstance(leaf, tuple | list | dict))


def _raise(error: Exception) -> AbstractModel[Any]:
    raise error
