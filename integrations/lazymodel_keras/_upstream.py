"""All private parts of Keras and KerasHub that this package uses, and how functions of theirs are replaced.

Each part is here because no public name does the same; `tests/keras/test_upstream.py` fails when one of them moves.
Replaced functions are installed while a thread needs them, and act in that thread only.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import importlib
import inspect
import math
import operator
import pkgutil
import random
import re
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from types import CellType
from typing import Any

import h5py
import keras
import numpy as np

# The list of variables created in a StatelessScope and not initialized yet. Keras initializes them, whole and
# unsharded, on leaving any outermost StatelessScope, so abstract variables must not stay on it.
from keras.src.backend.common import global_state

# Assignments made while Keras traces, in a nested scope, are not the model's own values.
from keras.src.backend.common.stateless_scope import get_stateless_scope

# Where keyword arguments that no constructor of a model took end, and are dropped.
# Where Keras opens and reads `.weights.h5` and `.weights.json`. `_load_state` accepts only instances of these classes,
# and they are created inside `load_weights`, so there is no argument through which a lazy store could be passed.
from keras.src.saving.saving_lib import DiskIOStore, H5IOStore

# The name that Keras gives to an object without one, up to its number.
from keras.src.utils.naming import to_snake_case

# Receives keyword arguments that no constructor of a model took, and drops them.
Functional: Any = importlib.import_module("keras.src.models.functional").Functional

_PENDING = "uninitialized_variables"
_GLOBAL_SEED = "global_seed_generator"  # created on the first draw, and not a part of any model
_NAME_COUNTERS = "object_name_uids"  # counters of automatic names: dense, dense_1, …
_SCOPE = "stateless_scope"

# Keras' lazy import of TensorFlow, which it asks for `executing_eagerly` if the package is in `sys.modules`.
TENSORFLOW = importlib.import_module("keras.src.utils.module_utils").tensorflow

BACKEND: Any = importlib.import_module("keras.src.backend")

# The module in which Keras looks up `convert_to_numpy`, which copies every value whole before it is saved.
BACKEND_OPS: Any = BACKEND.ops if hasattr(BACKEND, "ops") else BACKEND  # from Keras 3.16 on

# The module in which `global_seed_generator` is looked up, which seeds all random numbers without a seed.
SEED_GENERATORS = importlib.import_module("keras.src.random.seed_generator")

# The modules in which Keras' layers look up quantization functions, and the operations that lay out the results. They
# only take arrays, so for lazy tensors they are replaced temporarily, in every module that has their names.
OPS = importlib.import_module("keras.src.ops")
COPY_OWNERS = [OPS] if BACKEND_OPS is BACKEND else [OPS, BACKEND_OPS.numpy]  # where optimizers look up `copy`
_QUANTIZERS: Any = importlib.import_module("keras.src.quantizers")
QUANTIZERS = [_QUANTIZERS] + [
    importlib.import_module(name)
    for _, name, _ in pkgutil.walk_packages(_QUANTIZERS.__path__, f"{_QUANTIZERS.__name__}.")
    if not name.endswith("_test")
]

# The modules in which `keras.saving.load_model` looks up the readers of an Orbax checkpoint (whole, through Orbax), of
# the weights of a `.keras` file (into memory, if they fit) and of those of a legacy HDF5 file.
SAVING_API = importlib.import_module("keras.src.saving.saving_api")
SAVING_LIB = importlib.import_module("keras.src.saving.saving_lib")
LEGACY_H5 = importlib.import_module("keras.src.legacy.saving.legacy_h5_format")
LOAD_ORBAX = "_load_model_from_orbax_checkpoint"
ORBAX_API: Any = SAVING_API if hasattr(SAVING_API, LOAD_ORBAX) else None  # from Keras 3.14 on

current_scope: Callable[[], Any] = get_stateless_scope
WeightsStore: Any = H5IOStore
WEIGHTS_STORE_OPEN = "_get_h5_file"
AssetStore: Any = DiskIOStore  # extracts archives that are passed to it inside `load_model`

# The class that defines `Variable.__init__` for every backend class; `keras.Variable` itself is the backend's.
VariableBase: Any = next(cls for cls in keras.Variable.__mro__ if "__init__" in vars(cls))

# The class whose `build` every optimizer's `build` calls with its variables.
OptimizerBase: Any = next(cls for cls in keras.optimizers.Optimizer.__mro__ if "build" in vars(cls))

# The class whose methods make the functions that `fit` and `evaluate` compile.
Trainer: Any = next(cls for cls in keras.Model.__mro__ if "make_train_function" in vars(cls))

# Attributes of a variable: its array, or None if it is abstract (`Variable.value` would create one); the dtype of its
# array (`Variable.dtype` differs if Keras casts automatically); its initializer while it is abstract; its given layout.
value: Callable[[Any], Any] = operator.attrgetter("_value")
own_dtype: Callable[[Any], str] = operator.attrgetter("_dtype")
initializer: Callable[[Any], Any] = operator.attrgetter("_initializer")
layout: Callable[[Any], Any] = operator.attrgetter("_layout")

# Returns True if Keras computes the shapes of a layer's outputs, which do not depend on the values of variables.
in_symbolic_scope: Callable[[], bool] = BACKEND.in_symbolic_scope


def set_scope(scope: Any) -> None:
    """Makes a StatelessScope the current one, with no pending variables."""
    global_state.set_global_attribute(_SCOPE, scope)
    global_state.set_global_attribute(_PENDING, [])


def initialize(variable: Any, initializer: Any) -> None:
    """Initializes a variable now."""
    variable._initialize_with_initializer(initializer)


def initialized(variable: Any, initializer: Any) -> Any:
    """The array that an abstract variable gets when Keras initializes it, placed by its layout or the distribution."""
    own = variable._layout
    initialize(variable, initializer)
    array, variable._value, variable._layout = variable._value, None, own
    return array


def set_initial(variable: Any, initializer: Any, shape: tuple[int, ...] | None) -> None:
    """Gives an abstract variable another initializer, called whenever Keras traces code that reads its value.

    Also sets its shape, as Keras does if an initializer returns another one; None keeps it.
    """
    variable._initializer = initializer
    if shape is not None:
        variable._shape, variable._ndim = shape, len(shape)


def assign_directly(variable: Any, value: Any) -> None:
    """`variable.assign` that ignores the current scope."""
    variable._direct_assign(value)


def as_tensor(variable: Any, value: Any, dtype: Any) -> Any:
    """The array that a variable creates from another value."""
    return variable._convert_to_tensor(value, dtype=dtype)


def give_value(variable: Any, array: Any, layout: Any) -> None:
    """Gives an abstract variable an array and a layout; None keeps the variable's own layout."""
    if layout is not None:
        variable._layout = layout
    variable._value = array
    variable._initializer = None


@contextlib.contextmanager
def _holding(attribute: str, values: Sequence[tuple[Any, Any]]) -> Generator[None]:
    own = [(variable, getattr(variable, attribute)) for variable, _ in values]
    try:
        for variable, value in values:
            setattr(variable, attribute, value)
        yield
    finally:
        for variable, value in own:
            setattr(variable, attribute, value)


# Temporarily give abstract variables lazy tensors as values, since Keras takes a variable's value as it is; and other
# initializers, which are called when their value is read. Both take pairs of a variable and what it gets.
holding_lazily = functools.partial(_holding, "_value")
initialized_by = functools.partial(_holding, "_initializer")


def uncommitted(array: Any) -> Any:
    """The array in the same buffer, committed to no device, like those that Keras creates without a distribution.

    Only the constructor of JAX' own arrays can do this; every public function commits an array to a device.
    """
    return type(array)(array.aval, array.sharding, [array], committed=False)


def build_for(model: Any, batch: Any) -> None:
    """Builds the parts of a model that `fit` builds before its first step: its metrics and its optimizer."""
    model._symbolic_build(data_batch=batch)


def is_built(model: Any) -> bool:
    """Returns True if metrics, loss and optimizer of a model are built."""
    parts = (model._compile_metrics, model._compile_loss, model.optimizer)
    return all(part is None or part.built for part in parts)


def callbacks_of_caller() -> list[Any]:
    """The callbacks of the list that is calling the caller's `set_model`: Keras gives a callback the model only."""
    caller = sys._getframe(2).f_locals.get("self")
    return list(caller.callbacks) if isinstance(caller, keras.callbacks.CallbackList) else []


def output_of_caller() -> Any:
    """What a layer returned, if Keras is asking the caller for the layout of it; Keras only gives its path."""
    return sys._getframe(2).f_locals.get("outputs")


# The names of the jitted function by which `predict` joins outputs of several steps, before and from Keras 3.16 on.
JOINS_OUTPUTS = ("concatenate", "_concatenate_outputs")


class Called(Exception):
    """Ends a call, and holds the arguments of the inner call."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.arguments = args, kwargs


def called(*args: Any, **kwargs: Any) -> Any:
    """Raises `Called` with its arguments."""
    raise Called(*args, **kwargs)


def _jitted_cells(function: Callable[..., Any]) -> list[CellType]:
    """The cells in which a function, and those that it closes over, hold jitted functions, outermost first.

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


def jitted_functions(function: Callable[..., Any]) -> list[Any]:
    """The jitted functions that a function, and those that it closes over, refer to, outermost first."""
    return [cell.cell_contents for cell in _jitted_cells(function)]


def call_of_jitted(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """The jitted function that a function calls, and the arguments of that call; runs nothing."""
    (cell,) = _jitted_cells(function)
    jitted, cell.cell_contents = cell.cell_contents, called
    try:
        function(*args, **kwargs)
    except Called as call:
        return jitted, *call.arguments
    finally:
        cell.cell_contents = jitted
    raise AssertionError(f"{function} did not call {jitted}")


def stored_name(store: Any, key: str) -> str:
    """The name in its file of the value that a `WeightsStore` has under a key of the current entry."""
    return store._h5_entry_group[key].name.lstrip("/")


@contextlib.contextmanager
def no_pending_variables() -> Generator[None]:
    """Temporarily empties the list of variables that Keras would initialize on leaving the current StatelessScope."""
    pending = global_state.get_global_attribute(_PENDING)
    global_state.set_global_attribute(_PENDING, [])
    try:
        yield
    finally:
        global_state.set_global_attribute(_PENDING, pending)


def not_pending(variable: Any) -> None:
    """Removes a variable from that list."""
    if pending := global_state.get_global_attribute(_PENDING):
        global_state.set_global_attribute(_PENDING, [other for other in pending if other is not variable])


def global_seed_state() -> Any:
    """The state variable of Keras' global seed generator, or None while there is no such generator."""
    generator = global_state.get_global_attribute(_GLOBAL_SEED)
    return None if generator is None else generator.state


def remembered_draws() -> Callable[[], None]:
    """Saves process-wide state: automatic names, and the random generators of Python, NumPy and Keras.

    Returns a function that restores it, and that may be called repeatedly.
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
    """Undoes the draws of building inside of it; see `remembered_draws`."""
    restore = remembered_draws()
    try:
        yield
    finally:
        restore()


def flat_layers(model: Any, *, include_self: bool = True) -> list[Any]:
    """A model's layers and their layers, in the order in which `Model.quantize` and KerasHub's `enable_lora` visit."""
    return list(model._flatten_layers(include_self=include_self))


def preset_utils() -> Any:
    """Returns KerasHub's module that reads presets, whose `get_file` downloads; None if KerasHub was not imported."""
    return sys.modules.get("keras_hub.src.utils.preset_utils")


def preset_loader_class() -> Any:
    """The class that reads KerasHub's presets and chooses the dtype of a backbone; None without KerasHub."""
    return getattr(preset_utils(), "PresetLoader", None)


def hub_models() -> Any:
    """`keras_hub.models`; None if KerasHub was not imported."""
    return getattr(sys.modules.get("keras_hub"), "models", None)


def classes_defining(method: str) -> list[Any]:
    """The classes of KerasHub, for whole presets and for parts of one, that define a method; none without KerasHub."""
    hub: Any = sys.modules.get("keras_hub")
    if hub is None or hub_models() is None:
        return []
    bases = [hub.models.Backbone, hub.models.Task, hub.models.Preprocessor, hub.tokenizers.Tokenizer]
    bases += [getattr(hub.layers, f"{kind}Converter", None) for kind in ("Audio", "Image", "Video")]
    return [cls for cls in bases if cls is not None and method in vars(cls)]


def set_lora_layers(backbone: Any, positions: list[int], rank: int) -> None:
    """Sets which layers of a backbone have a LoRA pair, for its `save_lora_weights`."""
    backbone._lora_enabled_layers = positions
    backbone._lora_rank = rank


# Attributes of a layer with a LoRA pair: the weight and the pair. `kernel` and `embeddings` are sums with the pair.
_ADAPTED = (("_kernel", "lora_kernel_a", "lora_kernel_b"), ("_embeddings", "lora_embeddings_a", "lora_embeddings_b"))


def lora_variables(layer: Any) -> tuple[Any, Any, Any] | None:
    """The weight of a layer to which its LoRA pair belongs, and the pair; None if it has no pair as Keras makes it."""
    for names in _ADAPTED:
        if all(isinstance(getattr(layer, name, None), keras.Variable) for name in names):
            weight, a, b = (getattr(layer, name) for name in names)
            return weight, a, b
    return None


def requantized(layer: Any) -> list[tuple[Any, Any]]:
    """Variables of a quantized layer, each with its value after the LoRA pair was merged; Keras saves these values."""
    kind = "kernel" if hasattr(layer, "_kernel") else "embeddings"
    own = getattr(layer, f"_get_{kind}_with_merged_lora", None)  # before Keras 3.16
    values = layer._get_weight_with_merged_lora(kind) if own is None else own()
    variables = [getattr(layer, f"_{kind}"), getattr(layer, f"{kind}_scale"), getattr(layer, f"{kind}_zero", None)]
    return [pair for pair in zip(variables, values, strict=False) if pair[1] is not None]


# Attributes of a quantized layer: its weights, which may be packed, and what quantization added to them.
_QUANTIZED = ("_kernel", "quantized_kernel", "_embeddings", "reverse_embeddings")
_ADDED = re.compile(r"\w+_(?:scale|zero|amax_history)|g_idx|awq_scales")


def quantized_sizes(layer: Any) -> list[tuple[Any, int]]:
    """The variables of a quantized layer, each with the elements that its floating-point layer has in place of it.

    Shapes of packed weights do not tell: the last byte may be half empty.
    """
    if isinstance(layer, keras.layers.Embedding):
        size = layer.input_dim * layer.output_dim
    elif isinstance(layer, keras.layers.EinsumDense):
        shape = [*(getattr(layer, "original_kernel_shape", None) or layer._kernel.shape)]
        if layer.quantization_mode == "int4" and hasattr(layer, "_int4_pack_axis"):  # before Keras 3.14
            shape[layer._int4_pack_axis] = layer._orig_length_along_pack_axis
        size = math.prod(shape)
    elif isinstance(layer, keras.layers.Dense):
        spec: Any = layer.input_spec
        size = spec.axes[-1] * layer.units
    else:
        return []
    own = {name: variable for name, variable in vars(layer).items() if isinstance(variable, keras.Variable)}
    sizes = {name: size if name in _QUANTIZED else 0 for name in own if name in _QUANTIZED or _ADDED.fullmatch(name)}
    return [(own[name], size) for name, size in sizes.items()]


def drop_lora(layer: Any) -> None:
    """Removes the LoRA pair of a layer, which is then as before `enable_lora`, up to its weight's value.

    `del layer.lora_kernel_a` would collect garbage for each pair.
    """
    weight = lora_variables(layer)
    assert weight is not None
    for name in next(names for names in _ADAPTED if hasattr(layer, names[0]))[1:]:
        layer._untrack_variable(getattr(layer, name))
        object.__delattr__(layer, name)
    layer.lora_enabled, layer.lora_rank, layer.lora_alpha = False, None, None
    # Quantized weights are never trainable.
    weight[0].trainable = layer.trainable and any(weight[0] is each for each in layer._trainable_variables)


def drop_lora_layers(backbone: Any) -> None:
    """Removes what a backbone knows about its LoRA pairs."""
    for name in ("_lora_enabled_layers", "_lora_rank"):
        if hasattr(backbone, name):
            delattr(backbone, name)


def automatic_name(cls: type) -> str:
    """The name, up to its number, that Keras gives to objects of a class without one."""
    return to_snake_case(cls.__name__)


def load_weights_file(model: Any, path: Any, *, skip_mismatch: bool, objects_to_skip: list[Any]) -> None:
    """`model.load_weights` for a `.keras`, `.weights.h5` or `.weights.json` file; can skip objects in all of them."""
    SAVING_LIB.load_weights_only(model, path, skip_mismatch, objects_to_skip)


def loader_of_file(load_model: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Keras' loader for a file of this name, which also takes an open file; for others, `load_model` itself."""
    if name.endswith(".keras"):
        return SAVING_LIB.load_model
    if name.endswith((".h5", ".hdf5")):
        return load_legacy_file
    return load_model


def load_legacy_file(file: Any, *options: Any) -> Any:
    """`load_model` for a legacy HDF5 file."""
    with h5py.File(file, "r") as opened:
        return LEGACY_H5.load_model_from_hdf5(opened, *options)


def model_from_config(text: str, custom_objects: Any, compile: bool, safe_mode: bool) -> Any:
    """The model that a `config.json` of a `.keras` file or the `model_config` of an Orbax checkpoint describes."""
    return SAVING_LIB._model_from_config(text, custom_objects, compile, safe_mode)


def load_assets(model: Any, assets: dict[str, Any]) -> None:
    """Gives a model its files (such as vocabularies) from a nested dict of byte arrays, as Keras 3.14 saves them."""
    SAVING_LIB._load_assets_from_dict(model, assets)


def modules_with(name: str, function: Any) -> Iterator[Any]:
    """The modules of KerasHub that have a function under this name, such as those that imported it."""
    for path in list(sys.modules):  # only names: thousands of new pairs would start the garbage collector
        if path.startswith("keras_hub.") and vars(module := sys.modules[path]).get(name) is function:
            yield module


def safetensors() -> Any:
    """Returns the package that KerasHub reads Hugging Face folders with; None if it is not installed."""
    try:
        return importlib.import_module("safetensors")
    except ImportError:
        return None  # KerasHub raises itself if a converter needs it


_CONVERTERS = "keras_hub.src.utils.transformers"


def preset_file(preset: str, name: str) -> str:
    """The path of a file of a preset, which KerasHub downloads."""
    return preset_utils().get_file(preset, name)


def converter(name: str) -> Any:
    """KerasHub's module that converts a type of model from Hugging Face."""
    return importlib.import_module(f"{_CONVERTERS}.convert_{name}")


def _late(name: str) -> Any:
    """A module that KerasHub imports when it first needs it; None without KerasHub, or if the import fails."""
    if "keras_hub" not in sys.modules:
        return None
    try:
        return importlib.import_module(f"{_CONVERTERS}.{name}")
    except ImportError:  # of packages that some converters need
        return None


def transformers_loader() -> Any:
    """KerasHub's class that reads Hugging Face folders and finds their converter; None without KerasHub."""
    module = _late("preset_loader")
    return None if module is None else module.TransformersPresetLoader


def safetensors_loader() -> Any:
    """KerasHub's class that finds a tensor's shard in the index of a Hugging Face folder; None without KerasHub."""
    return getattr(_late("safetensor_utils"), "SafetensorLoader", None)


def index_of(loader: Any) -> str:
    """The path of the index that such a loader has read."""
    module = _late("safetensor_utils")
    return module.get_file(loader.preset, module.SAFETENSOR_CONFIG_FILE)


def shard_of(loader: Any, name: str) -> Any:
    """A shard of such a loader, open as `safetensors.safe_open` gives it."""
    module = _late("safetensor_utils")
    return module.safetensors.safe_open(module.get_file(loader.preset, name), framework="np")


EXPORTED = "_to_numpy_dict"


def exporter() -> Any:
    """KerasHub's module that writes Hugging Face folders, whose `EXPORTED` makes arrays of all weights; or None.

    Its writer of weights only takes arrays in memory.
    """
    module = _late("export.hf_exporter")
    return module if hasattr(module, EXPORTED) else None


def gpt_oss_converter() -> Any:
    """The module that converts GPT-OSS from Hugging Face; or None."""
    return _late("convert_gpt_oss")


# Patches --------------------------------------------------------------------------------------------------------------


class SharedPatches:
    """Patches that are installed while at least one thread needs them, and act in such threads only."""

    def __init__(self) -> None:
        self._patches: list[tuple[Any, str, Any]] = []  # owner, name, replacement
        self._lock = threading.Lock()
        self._users = 0
        self._undo = contextlib.ExitStack()
        self._thread = threading.local()  # like Keras' own global state

    @property
    def value(self) -> Any:
        """The value that this thread needs them with; None if it does not."""
        return getattr(self._thread, "value", None)

    @contextlib.contextmanager
    def needed(self, value: Any = True) -> Generator[None]:
        """Keeps the patches installed in the block, where they get a value."""
        with self._lock:
            if self._users == 0:
                self._install()
            self._users += 1
        before, self._thread.value = self.value, value
        try:
            yield
        finally:
            self._thread.value = before
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._undo.close()

    def replacing(self, owner: Any, name: str) -> Callable[[Any], Any]:
        """Calls the decorated `ours(value, original, …)` in place of `owner.name(…)`.

        For a module, also in the modules of KerasHub that have imported the name from there. `owner` may be a function
        that returns it, several, or None.
        """

        def decorate(ours: Any) -> Any:
            self._patches.append((owner, name, ours))
            return ours

        return decorate

    def _install(self) -> None:
        with contextlib.ExitStack() as undo:
            for owner, name, ours in self._patches:
                found = owner() if inspect.isfunction(owner) else owner
                for holder in found if isinstance(found, list) else [found]:
                    if holder is not None:
                        self._replace(undo, holder, name, ours)
            self._undo = undo.pop_all()

    def _replace(self, undo: contextlib.ExitStack, owner: Any, name: str, ours: Any) -> None:
        found = vars(owner)[name]
        original = getattr(found, "__func__", found)  # for a class method

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            value = self.value
            return original(*args, **kwargs) if value is None else ours(value, original, *args, **kwargs)

        importers = modules_with(name, found) if inspect.ismodule(owner) else ()
        for holder in (owner, *importers):
            replace(undo, holder, name, call if found is original else type(found)(call))


def replace(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Sets an attribute until `undo` closes."""
    undo.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, value)


recording_patches = SharedPatches()
while_recording = recording_patches.replacing  # replacements get the `Recording` that is running in this thread


def active() -> Any:
    """The `Recording` that is running in this thread, or None."""
    return recording_patches.value
