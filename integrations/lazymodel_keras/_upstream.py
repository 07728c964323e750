"""Every use that this package makes of Keras' and KerasHub's private parts, in one place.

Each is here because no public name does it; `tests/keras/test_upstream.py` fails when one of them moves.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import importlib
import inspect
import operator
import random
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from types import CellType, CodeType, FunctionType
from typing import Any

import h5py
import keras
import numpy as np

# The list of variables made in a StatelessScope and not initialized yet. Keras initializes it, whole and unsharded,
# on leaving any outermost StatelessScope, so abstract variables must not stay on it.
from keras.src.backend.common import global_state

# Assignments made while Keras traces, in a nested scope, are not the model's own values.
from keras.src.backend.common.stateless_scope import get_stateless_scope

# Where Keras opens and reads `.weights.h5` and `.weights.json`. `_load_state` accepts only instances of these classes,
# and they are made inside `load_weights`, so there is no argument through which a lazy store could be passed.
from keras.src.saving.saving_lib import DiskIOStore, H5IOStore

# The name that Keras gives to an object without one, up to its number.
from keras.src.utils.naming import to_snake_case

_PENDING = "uninitialized_variables"
_GLOBAL_SEED = "global_seed_generator"  # made when first drawn from, and part of no model
_NAME_COUNTERS = "object_name_uids"  # how Keras numbers automatic names: dense, dense_1, …
_SCOPE = "stateless_scope"

# Where Keras looks up `convert_to_numpy`, which copies every value whole before it is saved.
BACKEND = importlib.import_module("keras.src.backend")

# Where `global_seed_generator` is looked up, which has the seeds of all random numbers that are given none.
SEED_GENERATORS = importlib.import_module("keras.src.random.seed_generator")

# Where Keras' layers find the functions that they quantize with, and the operations that lay out the results. They take
# arrays only, so lazy tensors need them replaced for a while, in every module that has their names.
OPS = importlib.import_module("keras.src.ops")
QUANTIZERS = tuple(importlib.import_module(f"keras.src.quantizers{name}") for name in ("", ".quantizers"))

# The modules in which `keras.saving.load_model` looks up what reads an Orbax checkpoint (whole, through Orbax), the
# weights of a `.keras` file (into memory, where there is room) and those of a legacy HDF5 file.
SAVING_API = importlib.import_module("keras.src.saving.saving_api")
SAVING_LIB = importlib.import_module("keras.src.saving.saving_lib")
LEGACY_H5 = importlib.import_module("keras.src.legacy.saving.legacy_h5_format")
LOAD_ORBAX = "_load_model_from_orbax_checkpoint"  # of `SAVING_API`, from Keras 3.14 on

current_scope: Callable[[], Any] = get_stateless_scope
WeightsStore: Any = H5IOStore
WEIGHTS_STORE_OPEN = "_get_h5_file"
AssetStore: Any = DiskIOStore  # extracts archives, which it is given inside `load_model`

# The class that defines `Variable.__init__` for every backend class; `keras.Variable` itself is the backend's.
VariableBase: Any = next(cls for cls in keras.Variable.__mro__ if "__init__" in vars(cls))

# The class whose `build` that of every optimizer calls with the variables that it is for.
OptimizerBase: Any = next(cls for cls in keras.optimizers.Optimizer.__mro__ if "build" in vars(cls))

# Of a variable: its array, or None where it is abstract (`Variable.value` would make one); the dtype of its array
# (`Variable.dtype` is another where Keras casts automatically); what initializes it as long as it is abstract;
# the layout that it was given.
value: Callable[[Any], Any] = operator.attrgetter("_value")
own_dtype: Callable[[Any], str] = operator.attrgetter("_dtype")
initializer: Callable[[Any], Any] = operator.attrgetter("_initializer")
layout: Callable[[Any], Any] = operator.attrgetter("_layout")

# Whether Keras computes the shapes of a layer's outputs, for which the values of variables do not matter.
in_symbolic_scope: Callable[[], bool] = BACKEND.in_symbolic_scope


def set_scope(scope: Any) -> None:
    """Makes a StatelessScope the current one, with no pending variables."""
    global_state.set_global_attribute(_SCOPE, scope)
    global_state.set_global_attribute(_PENDING, [])


def initialize(variable: Any, initializer: Any) -> None:
    """Initializes a variable now."""
    variable._initialize_with_initializer(initializer)


def initialized(variable: Any, initializer: Any) -> Any:
    """The array that an abstract variable gets when Keras initializes it, where its layout or the distribution says."""
    own = variable._layout
    initialize(variable, initializer)
    array, variable._value, variable._layout = variable._value, None, own
    return array


def set_initial(variable: Any, initializer: Any, shape: tuple[int, ...] | None) -> None:
    """Gives an abstract variable another initializer, which is called whenever Keras traces what reads its value.

    And another shape, as Keras does where an initializer returns one; None keeps its own.
    """
    variable._initializer = initializer
    if shape is not None:
        variable._shape, variable._ndim = shape, len(shape)


def assign_directly(variable: Any, value: Any) -> None:
    """`variable.assign` without a look at the current scope."""
    variable._direct_assign(value)


def as_tensor(variable: Any, value: Any, dtype: Any) -> Any:
    """What a variable makes of a value that is no array."""
    return variable._convert_to_tensor(value, dtype=dtype)


def give_value(variable: Any, array: Any, layout: Any) -> None:
    """Makes an abstract variable one with an array, which keeps its layout; None leaves the variable's own."""
    if layout is not None:
        variable._layout = layout
    variable._value = array
    variable._initializer = None


@contextlib.contextmanager
def holding_lazily(values: Sequence[tuple[Any, Any]]) -> Generator[None]:
    """Gives abstract variables lazy tensors for values, for a while: Keras takes what a variable has as it is."""
    try:
        for variable, value in values:
            variable._value = value
        yield
    finally:
        for variable, _ in values:
            variable._value = None


def uncommitted(array: Any) -> Any:
    """The array in the same buffer, committed to no device, as those are that Keras makes without a distribution.

    Only the constructor that JAX' own arrays have says so; whatever is public puts an array on a device.
    """
    return type(array)(array.aval, array.sharding, [array], committed=False)


@contextlib.contextmanager
def initialized_by(variables: Sequence[Any], initializers: Sequence[Any]) -> Generator[None]:
    """Gives abstract variables other initializers, which is what reading their value calls, for a while."""
    own = [variable._initializer for variable in variables]
    for variable, initializer in zip(variables, initializers, strict=True):
        variable._initializer = initializer
    try:
        yield
    finally:
        for variable, initializer in zip(variables, own, strict=True):
            variable._initializer = initializer


def build_for(model: Any, batch: Any) -> None:
    """Builds what `fit` builds of a model before its first step: its metrics and its optimizer."""
    model._symbolic_build(data_batch=batch)


def is_built(model: Any) -> bool:
    """Whether there is none of it left to build."""
    parts = (model._compile_metrics, model._compile_loss, model.optimizer)
    return all(part is None or part.built for part in parts)


class Called(Exception):
    """Ends a call, and has the arguments of the one that it led to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.arguments = args, kwargs


def called(*args: Any, **kwargs: Any) -> Any:
    """Raises `Called` with what it is called with."""
    raise Called(*args, **kwargs)


def jitted_cells(function: Callable[..., Any]) -> list[CellType]:
    """The cells in which a function, and those that it closes over, have jitted functions, the outermost first.

    Keras' `train_function` and KerasHub's `generate_function` call a jitted function that nothing else refers to.
    """
    found: list[CellType] = []
    seen: set[int] = set()
    waiting = [function]
    while waiting:
        for cell in getattr(waiting.pop(0), "__closure__", None) or ():
            if id(cell) in seen or not callable(content := cell.cell_contents):
                continue
            seen.add(id(cell))
            if hasattr(content, "lower") and hasattr(content, "trace"):
                found.append(cell)
            else:
                waiting.append(content)
    return found


def call_of_jitted(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """The jitted function that a function calls when it is called so, and its arguments; nothing is run."""
    (cell,) = jitted_cells(function)
    jitted, cell.cell_contents = cell.cell_contents, called
    try:
        function(*args, **kwargs)
    except Called as call:
        return jitted, *call.arguments
    finally:
        cell.cell_contents = jitted
    raise AssertionError(f"{function} did not call {jitted}")


def stored_name(store: Any, key: str) -> str:
    """The name in its file of what a `WeightsStore` has under a key of the current entry."""
    return store._h5_entry_group[key].name.lstrip("/")


@contextlib.contextmanager
def no_pending_variables() -> Generator[None]:
    """Empties the list of variables that Keras would initialize on leaving the current StatelessScope, for a while."""
    pending = global_state.get_global_attribute(_PENDING)
    global_state.set_global_attribute(_PENDING, [])
    try:
        yield
    finally:
        global_state.set_global_attribute(_PENDING, pending)


def not_pending(variable: Any) -> None:
    """Takes a variable off that list."""
    if pending := global_state.get_global_attribute(_PENDING):
        global_state.set_global_attribute(_PENDING, [other for other in pending if other is not variable])


def global_seed_state() -> Any:
    """The state variable of Keras' global seed generator, or None while there is no such generator."""
    generator = global_state.get_global_attribute(_GLOBAL_SEED)
    return None if generator is None else generator.state


def remembered_draws() -> Callable[[], None]:
    """Remembers process-wide sources: automatic names, and the random generators of Python, NumPy and Keras.

    What it returns puts them back to where they are now, as often as it is called.
    """
    names = copy.deepcopy(global_state.get_global_attribute(_NAME_COUNTERS) or collections.defaultdict(int))
    python, numpy = random.getstate(), np.random.get_state()
    generator = global_state.get_global_attribute(_GLOBAL_SEED)
    state = None if generator is None else generator.state._value

    def restore() -> None:
        global_state.set_global_attribute(_NAME_COUNTERS, copy.deepcopy(names))
        random.setstate(python)
        np.random.set_state(numpy)
        global_state.set_global_attribute(_GLOBAL_SEED, generator)
        if generator is not None:
            generator.state._value = state

    return restore


@contextlib.contextmanager
def undone_draws() -> Generator[None]:
    """Undoes what building inside it takes; see `remembered_draws`."""
    restore = remembered_draws()
    try:
        yield
    finally:
        restore()


def flat_layers(model: Any, *, include_self: bool = True) -> list[Any]:
    """A model's layers and theirs, in the order in which `Model.quantize` and KerasHub's `enable_lora` visit them."""
    return list(model._flatten_layers(include_self=include_self))


def _preset_utils() -> Any:
    """KerasHub's module that reads presets; None where KerasHub was not imported."""
    return sys.modules.get("keras_hub.src.utils.preset_utils")


def preset_loader_class() -> Any:
    """The class that reads KerasHub's presets, and decides which dtype a backbone is built with; None without it."""
    return getattr(_preset_utils(), "PresetLoader", None)


def hub_models() -> Any:
    """`keras_hub.models`; None where KerasHub was not imported."""
    return getattr(sys.modules.get("keras_hub"), "models", None)


def classes_defining(method: str) -> list[Any]:
    """The classes of KerasHub, of whole presets and of parts of one, that define a method; none without it."""
    hub: Any = sys.modules.get("keras_hub")
    if hub is None or hub_models() is None:
        return []
    bases = [hub.models.Backbone, hub.models.Task, hub.models.Preprocessor, hub.tokenizers.Tokenizer]
    bases += [getattr(hub.layers, f"{kind}Converter", None) for kind in ("Audio", "Image", "Video")]
    return [cls for cls in bases if cls is not None and method in vars(cls)]


def classes_of_preset(cls: Any, preset: Any) -> tuple[Any, Any]:
    """The class that `cls.from_preset(preset)` makes an object of, and that of its backbone, None where it is unknown.

    KerasHub decides this inside `from_preset`, with the arguments gone when it returns.
    """
    module: Any = _preset_utils()
    if module is None or hub_models() is None:
        return cls, None
    try:
        backbone = module.get_preset_loader(preset).check_backbone_class()
        if not issubclass(cls, hub_models().Task):
            return backbone if issubclass(backbone, cls) else cls, backbone
        of_another = issubclass(backbone, hub_models().Backbone) and cls.backbone_cls != backbone
        return module.find_subclass(preset, cls, backbone) if of_another else cls, backbone
    except Exception:  # of whichever hub KerasHub asks; it fails again when it loads, and says more
        return cls, None


def backbone_keywords() -> frozenset[str]:
    """The arguments that the loader of a task gives to its backbone; it takes them by name out of its `**kwargs`."""
    loader = preset_loader_class()
    # A recording wraps it.
    constants = () if loader is None else inspect.unwrap(loader.get_backbone_kwargs).__code__.co_consts
    return frozenset(constant for constant in constants if isinstance(constant, str))


def set_lora_layers(backbone: Any, positions: list[int], rank: int) -> None:
    """Tells a backbone which of its layers have a LoRA pair, as its `save_lora_weights` wants to know."""
    backbone._lora_enabled_layers = positions
    backbone._lora_rank = rank


def automatic_name(cls: type) -> str:
    """The name that Keras gives to objects of a class that have none, up to its number."""
    return to_snake_case(cls.__name__)


def load_weights_file(model: Any, path: Any, *, skip_mismatch: bool, objects_to_skip: list[Any]) -> None:
    """`model.load_weights` of a `.keras`, `.weights.h5` or `.weights.json` file, skipping objects of any of them."""
    SAVING_LIB.load_weights_only(model, path, skip_mismatch, objects_to_skip)


def loader_of_file(load_model: Callable[..., Any], name: str) -> Callable[..., Any]:
    """What `load_model` calls for a file of this name, which takes an open file as well; for others, itself."""
    if name.endswith(".keras"):
        return SAVING_LIB.load_model
    if name.endswith((".h5", ".hdf5")):
        return load_legacy_file
    return load_model


def load_legacy_file(file: Any, *options: Any) -> Any:
    """`load_model` of a legacy HDF5 file."""
    with h5py.File(file, "r") as opened:
        return LEGACY_H5.load_model_from_hdf5(opened, *options)


def model_from_config(text: str, custom_objects: Any, compile: bool, safe_mode: bool) -> Any:
    """The model that a `config.json` of a `.keras` file or the `model_config` of an Orbax checkpoint describes."""
    return SAVING_LIB._model_from_config(text, custom_objects, compile, safe_mode)


def load_assets(model: Any, assets: dict[str, Any]) -> None:
    """Gives a model its files (vocabularies, say) from a nested dict of byte arrays; Keras 3.14 saves such."""
    SAVING_LIB._load_assets_from_dict(model, assets)


def modules_with(name: str, function: Any) -> Iterator[Any]:
    """The modules of KerasHub that have a function by this name, such as those that imported it."""
    for path in list(sys.modules):  # names alone: thousands of new pairs would have the garbage collector go over all
        if path.startswith("keras_hub.") and vars(module := sys.modules[path]).get(name) is function:
            yield module


def get_preset_file() -> Any:
    """KerasHub's function for the path of a file of a preset, which downloads it; None without KerasHub."""
    return getattr(_preset_utils(), "get_file", None)


_CONVERTERS = "keras_hub.src.utils.transformers"


def preset_file(preset: str, name: str) -> str:
    """The path of a file of a preset, which KerasHub downloads."""
    return get_preset_file()(preset, name)


def converter(name: str) -> Any:
    """KerasHub's module that converts a kind of model from Hugging Face."""
    return importlib.import_module(f"{_CONVERTERS}.convert_{name}")


def _late(name: str) -> Any:
    """A module of KerasHub, which imports it when it first needs it; None without KerasHub, or where that cannot be."""
    if "keras_hub" not in sys.modules:
        return None
    try:
        return importlib.import_module(f"{_CONVERTERS}.{name}")
    except ImportError:  # of what some converters need
        return None


def transformers_loader() -> Any:
    """The class of KerasHub that reads Hugging Face folders, and finds their converter; None without it."""
    module = _late("preset_loader")
    return None if module is None else module.TransformersPresetLoader


def safetensors_loader() -> Any:
    """The class of KerasHub that finds a tensor's shard in the index of a Hugging Face folder; None without it."""
    return getattr(_late("safetensor_utils"), "SafetensorLoader", None)


def index_of(loader: Any) -> str:
    """The path of the index that such a loader has read."""
    module = _late("safetensor_utils")
    return module.get_file(loader.preset, module.SAFETENSOR_CONFIG_FILE)


EXPORTED = "_to_numpy_dict"


def exporter() -> Any:
    """KerasHub's module that writes Hugging Face folders, whose `EXPORTED` makes arrays of all weights; or None.

    What it writes the weights with takes arrays in memory only.
    """
    module = _late("export.hf_exporter")
    return module if hasattr(module, EXPORTED) else None


def gpt_oss_converter() -> Any:
    """The module that converts GPT-OSS from Hugging Face; or None."""
    return _late("convert_gpt_oss")


_DECODER, _DECODER_ARGUMENTS = "dequantize_mxfp4", ("blocks", "scales")


def with_gpt_oss_decoder(convert_weights: Any, wrap: Callable[[Any], Any]) -> Any:
    """GPT-OSS' `convert_weights` with the function that decodes MXFP4 replaced by `wrap(it)`; None if there is none.

    That function is defined anew within each of its calls, so no attribute leads to it. What does is the code of the
    outer one, which is copied with another code in the place of the inner one.
    """
    decoder = _inner_function(convert_weights, _DECODER)
    if decoder is None or decoder.__code__.co_varnames[: decoder.__code__.co_argcount] != _DECODER_ARGUMENTS:
        return None

    def replacement(blocks: Any, scales: Any) -> Any:
        return lazymodel_decoder(blocks, scales)  # noqa: F821  # pyright: ignore[reportUndefinedVariable]

    # It is made with the free variables of what it replaces, whether it uses them or not.
    code = replacement.__code__.replace(co_freevars=decoder.__code__.co_freevars)
    constants = convert_weights.__code__.co_consts
    replaced = tuple(code if constant is decoder.__code__ else constant for constant in constants)
    names = {**convert_weights.__globals__, "lazymodel_decoder": wrap(decoder)}
    code = convert_weights.__code__.replace(co_consts=replaced)
    of_converter = convert_weights.__name__, convert_weights.__defaults__, convert_weights.__closure__
    return FunctionType(code, names, *of_converter)


def _inner_function(function: Any, name: str) -> Any:
    """A function that is defined in another one and uses no variables of it but such functions; else None."""
    found = [code for code in function.__code__.co_consts if isinstance(code, CodeType) and code.co_name == name]
    if len(found) != 1:
        return None
    used = [_inner_function(function, other) for other in found[0].co_freevars]
    if None in used:
        return None
    return FunctionType(found[0], function.__globals__, name, None, tuple(CellType(other) for other in used))
