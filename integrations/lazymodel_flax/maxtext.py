"""Hugging Face checkpoints in MaxText's models, read and written by MaxText's own tables (maxtext 0.2.5).

A table of MaxText names the tensors of each parameter, and its hooks, written in NumPy, turn one tensor into a layer of
the parameter, or back. Here they get lazy tensors, so each device reads its own shards, and they are steps of a
`WeightMap`.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx, traverse_util

from lazymodel import (
    CheckpointError,
    From,
    LazyModelError,
    WeightMap,
    build_abstract,
    map_checkpoint,
    open_checkpoint,
)
from lazymodel._abstract.framework import ModelSpec
from lazymodel._errors import required
from lazymodel._mapping.resolve import given_checkpoint
from lazymodel._mapping.source import described
from lazymodel._show.text import listed
from lazymodel._tensors.lazy import lazy

__all__ = ["load_safetensors_dynamic_state", "weight_map"]

_Shape = tuple[int, ...]


def load_safetensors_dynamic_state(path: str, abstract_params: Any, maxtext_config: Any) -> tuple[None, Any]:
    """Replaces MaxText's function of this name: the same arguments, the same parameters bit for bit.

    Assigned to `maxtext.common.checkpointing`, it loads for `source_checkpoint_layout="safetensors_dynamic"`.

    Args:
        path: A folder, file or URL for `open_checkpoint`; empty for the Hugging Face repository that MaxText knows.
        abstract_params: Shapes, dtypes and shardings, which the parameters will have.
        maxtext_config: As for `weight_map`.

    Raises:
        CheckpointError: Tensors are missing, or do not fit.
        LazyModelError: As for `weight_map`.

    Example:
        >>> from maxtext.common import checkpointing  # doctest: +SKIP
        >>> checkpointing.load_safetensors_dynamic_state = load_safetensors_dynamic_state  # doctest: +SKIP
    """
    tree = nnx.to_pure_dict(abstract_params) if isinstance(abstract_params, nnx.State) else abstract_params
    flat = {"/".join(map(str, path)): leaf for path, leaf in traverse_util.flatten_dict(tree).items()}

    def parameters() -> Any:
        return jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), tree)

    abstract = build_abstract(parameters)
    if meshes := [leaf.sharding.mesh for leaf in flat.values() if hasattr(leaf.sharding, "mesh")]:
        abstract = abstract.shard(meshes[0], lambda variable: flat[variable.path].sharding)
    repository = _module("globals", "maxtext.utils").HF_IDS.get(maxtext_config.model_name)
    if not (path or repository):
        raise LazyModelError(f"MaxText has no repository for {maxtext_config.model_name!r}: give load_parameters_path")
    with open_checkpoint(path or f"hf://{repository}") as checkpoint:
        table = weight_map(maxtext_config, checkpoint, abstract)
        mapped = map_checkpoint(checkpoint, table, abstract)
        params = abstract.materialize(mapped, initialize="nothing")
    return None, {"params": params.get("params", params)}


def weight_map(config: Any, checkpoint: Any, model: Any, hf_config: Mapping[str, Any] | None = None) -> WeightMap:
    """The table of MaxText's own conversion, to load a Hugging Face checkpoint into a model, and to save one as such.

    Args:
        config: MaxText's, with the name of a model in its `PARAM_MAPPING`.
        checkpoint: Has names and shapes, as for `map_checkpoint`; nothing is read.
        model: Abstract or live: the result of MaxText's `from_config`, or its parameters.
        hf_config: Hugging Face's configuration, as `to_dict` returns it; None takes the one that MaxText has for the
            name.

    Returns:
        A table that loads what MaxText's hooks make, and saves what they make with `saving_to_hf`. State of random
        number generators is left out, and tensors without a parameter are ignored.

    Raises:
        LazyModelError: MaxText is not installed, or has no table for this name.
        CheckpointError: Tensors of a parameter are missing.

    Example:
        >>> abstract = lm.build_abstract(build, jax.random.key(0))  # doctest: +SKIP
        >>> checkpoint = lm.open_checkpoint("Llama-3.1-8B")  # doctest: +SKIP
        >>> table = maxtext.weight_map(config, checkpoint, abstract)  # doctest: +SKIP
        >>> abstract.materialize(lm.map_checkpoint(checkpoint, table, abstract))  # doctest: +SKIP
    """
    tables, name = _module("param_mapping"), config.model_name.replace("-Instruct", "")
    if name not in tables.PARAM_MAPPING or name not in tables.HOOK_FNS:
        raise LazyModelError(f"MaxText has no table for {name!r}; it has {listed(tables.PARAM_MAPPING)}")
    if hf_config is None:
        hf_config = _module("hf_model_configs").HF_MODEL_CONFIGS[name].to_dict()
    scan = config.scan_layers
    sources = tables.PARAM_MAPPING[name](hf_config, config, scan_layers=scan)
    hooks = _on_lazy_tensors(tables.HOOK_FNS[name])
    load, save = (hooks(hf_config, config, scan_layers=scan, saving_to_hf=saving) for saving in (False, True))
    tensors = given_checkpoint(checkpoint)
    variables = model if isinstance(model, ModelSpec) else given_checkpoint(model)
    paths = {_key(path): path for path in variables}
    entries: dict[str, From | None] = {path: None for path in variables if re.search(r"(^|[/_])rngs/", path)}
    used = set[str]()
    for parameter in _parameters(sources, load, save, paths):
        if parameter.source is None:
            entries |= dict.fromkeys(parameter.paths)
        else:
            shapes = [tuple(variables[path].shape) for path in parameter.paths]
            entries |= zip(parameter.paths, parameter.entries(shapes, tensors, config), strict=True)
            used.update(*_layers(parameter.source)[0])
    return WeightMap(entries, ignore=[name for name in tensors if name not in used])


def _module(name: str, package: str = "maxtext.checkpoint_conversion.utils") -> Any:
    return required(f"{package}.{name}", "a table of MaxText", "maxtext")


def _key(path: str) -> str:
    """The parameter's name in MaxText's tables, without the collection that they begin with."""
    name = re.sub(r"/(\d+)(?=/|$)", r"_\1", path).removesuffix("/value")
    return name.removeprefix("params/").replace("/", "-")


@dataclasses.dataclass(frozen=True)
class _Parameter:
    """One parameter of MaxText, or several that are made of the same tensors."""

    keys: tuple[str, ...]
    paths: list[str]
    source: Any  # a name, a tuple of names, or a list of these, nested for each stacked axis
    load: Callable[[Any, list[_Shape]], list[Any]]  # of the tensors of a layer, and its shapes
    save: Callable[[list[Any], Any], Any]  # of the values of a layer, and the shape of its tensor, or shapes

    def entries(self, shapes: list[_Shape], tensors: Mapping[str, Any], config: Any) -> Iterator[From]:
        """The entry of each variable, by their shapes."""
        names, counts = _layers(self.source)
        if absent := [name for group in names for name in group if name not in tensors]:
            raise CheckpointError(
                f"{described(tensors)}: expected {listed(map(repr, absent))} for {self.paths[0]!r}, as MaxText's table "
                "says, found no such tensors; is this the checkpoint of another configuration? Then pass its hf_config"
            )
        axes = self._axes(shapes[0], counts, config)
        layers = [tuple(extent for axis, extent in enumerate(shape) if axis not in axes) for shape in shapes]
        stored = [tuple(np.shape(tensors[name])) for name in names[0]]
        sizes = [shape[0] for shape in stored] if len(stored) > 1 else None
        several = len(layers) > 1

        def hook(value: Any) -> Any:
            split = value if sizes is None else tuple(np.split(value, np.cumsum(sizes)[:-1].tolist()))
            made = self.load(split, layers)
            return made if several else made[0]

        def saving_hook(value: Any) -> Any:
            made = self.save(value if several else [value], stored[0] if sizes is None else tuple(stored))
            return np.reshape(made, stored[0]) if sizes is None else np.concatenate(made)

        template, texts = _numbered(names) if counts else (names[0], [])
        for number, layer in enumerate(layers):
            outputs = {"output": number, "of": len(layers)} if several else {}
            entry = From(*template, sizes=sizes).apply(hook, saving_hook, **outputs)
            yield _stacked(entry, texts, counts, axes, len(layer)) if counts else entry

    def _axes(self, shape: _Shape, counts: list[int], config: Any) -> tuple[int, ...]:
        """The axes along which layers are stacked, the outermost first, as in MaxText's `to_maxtext`."""
        if len(counts) > 1:
            return tuple(_module("tensor_handling").stacked_axes(self.keys[0], config, len(counts)))
        scanned = config.scan_layers and shape[config.param_scan_axis : config.param_scan_axis + 1] == tuple(counts)
        return (config.param_scan_axis if scanned else 0,) if counts else ()


def _parameters(
    sources: Mapping[Any, Any], load: Mapping[Any, Any], save: Mapping[Any, Any], paths: Mapping[str, str]
) -> Iterator[_Parameter]:
    """The parameters of a model in MaxText's tables; `paths` has their paths by key."""
    fused = {key: keys for keys in save if isinstance(keys, tuple) and keys not in sources for key in keys}
    for key, source in sources.items():
        split = isinstance(key, tuple)  # its hook returns all, stacked along the last axis
        keys = key if split else fused.get(key, (key,))  # of `fused` each is loaded alone, and all are saved together
        found = [paths.get(each.partition("-")[2], "") for each in keys]
        if key not in (keys, keys[0]) or not all(found):
            continue
        together = len(keys) > 1

        def loading(value: Any, shapes: list[_Shape], key: Any = key, keys: Any = keys, split: bool = split) -> Any:
            if split:
                whole = _hooked(load.get(key), value, shapes)
                return [whole[..., number] for number in range(len(keys))]
            return [_hooked(load.get(each), value, shape) for each, shape in zip(keys, shapes, strict=True)]

        def saving(values: list[Any], shape: Any, keys: Any = keys, together: bool = together) -> Any:
            return _hooked(save.get(keys if together else keys[0]), values if together else values[0], shape)

        yield _Parameter(keys, found, source, loading, saving)


def _hooked(hooks: Any, value: Any, shape: Any) -> Any:
    """The result of a hook, or of several. As with JAX' arrays, `x + 1.0` has the dtype of x: NumPy's is wider."""
    for hook in hooks if isinstance(hooks, list) else [hooks] if hooks else []:
        made, dtype = hook(value, shape), getattr(value, "dtype", None)
        made = made.value if isinstance(made, _Zeros) else made
        value = made if dtype is None or isinstance(made, tuple) else made.astype(dtype)
    return value


def _layers(source: Any) -> tuple[list[tuple[str, ...]], list[int]]:
    """The names of each layer, and the number of layers along each stacked axis."""
    if not isinstance(source, list):
        return [source if isinstance(source, tuple) else (source,)], []
    parts = [_layers(part) for part in source]
    return [names for part, _ in parts for names in part], [len(parts), *parts[0][1]]


def _numbered(names: list[tuple[str, ...]]) -> tuple[list[str], list[str]]:
    """The names with `{layer}` in place of what differs between layers, and its text for each layer."""
    split = [[re.split(r"(\d+)", name) for name in group] for group in names]
    differing = [n for n, tokens in enumerate(zip(*(group[0] for group in split), strict=True)) if len({*tokens}) > 1]
    first, *_, last = [*differing, *differing] or [1, 1]
    template = ["".join([*tokens[:first], "{layer}", *tokens[last + 1 :]]) for tokens in split[0]]
    return template, ["".join(group[0][first : last + 1]) for group in split]


def _stacked(entry: From, texts: list[str], counts: list[int], axes: tuple[int, ...], ndim: int) -> From:
    """Stacks all layers; those of a nested list along one axis, which is then split and moved."""
    if len(counts) == 1:
        return entry.stack("layer", axes[0], values=texts)
    stacked, rest = [f"stack{n}" for n in range(len(counts))], [f"axis{n}" for n in range(ndim)]
    after = iter(rest)
    order = [stacked[axes.index(axis)] if axis in axes else next(after) for axis in range(len(counts) + ndim)]
    pattern = f"({' '.join(stacked)}) {' '.join(rest)} -> {' '.join(order)}"
    return entry.stack("layer", values=texts).rearrange(pattern, **dict(zip(stacked, counts, strict=True)))


# Hooks on lazy tensors ------------------------------------------------------------------------------------------------


def _on_lazy_tensors(hooks: Any) -> Any:
    """A function of MaxText's that makes hooks, with NumPy in place of `jax.numpy`: both then take lazy tensors."""
    namespace = dict(hooks.__globals__)
    for name, value in hooks.__globals__.items():
        if value is np or value is jax.numpy:
            namespace[name] = _NUMPY
        elif value is jax:
            namespace[name] = types.SimpleNamespace(numpy=_NUMPY, Array=jax.Array)
        elif isinstance(value, types.FunctionType) and value.__globals__ is hooks.__globals__:
            namespace[name] = _in(namespace, value)
    return _in(namespace, hooks)


def _in(namespace: dict[str, Any], function: types.FunctionType) -> types.FunctionType:
    return types.FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__
    )


class _Zeros:
    """Zeros of which a hook sets the beginning of each axis, or all interleaved parts of the last."""

    def __init__(self, shape: Any, dtype: Any = float) -> None:
        self.value, self._columns = lazy(np.broadcast_to(np.zeros((), dtype), tuple(shape))), dict[int, Any]()
        self.at, self.dtype = self, self.value.dtype

    def __setitem__(self, index: Any, value: Any) -> None:
        if self.value[index].shape != value.shape:
            raise ValueError(f"a tensor of shape {list(value.shape)} does not fit in {list(self.value.shape)}")
        for axis, extent in enumerate(self.value.shape):
            if missing := extent - value.shape[axis]:
                shape = (*value.shape[:axis], missing, *value.shape[axis + 1 :])
                value = np.concatenate([value, np.broadcast_to(np.zeros((), value.dtype), shape)], axis)
        self.value = value

    def __getitem__(self, index: Any) -> Any:
        """What `array.at[..., number::count]` is; `set` of it returns the whole."""

        def set(value: Any) -> _Zeros:
            self._columns[index[-1].start or 0] = value
            if len(self._columns) == index[-1].step:
                parts = [self._columns[number] for number in sorted(self._columns)]
                self.value = np.reshape(np.stack(parts, -1), self.value.shape)
            return self

        return types.SimpleNamespace(set=set)

    def __mul__(self, factor: Any) -> Any:
        return self.value * factor


class _Numpy:
    """NumPy, in which new arrays and conversions are lazy."""

    zeros = empty = _Zeros

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def concatenate(self, arrays: Any, axis: int = 0) -> Any:
        return np.concatenate([each.value if isinstance(each, _Zeros) else each for each in arrays], axis)

    def asarray(self, value: Any, dtype: Any = None) -> Any:
        return value if dtype is None else value.astype(dtype)


_NUMPY = _Numpy()
