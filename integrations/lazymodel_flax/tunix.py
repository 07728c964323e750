"""Hugging Face checkpoints in Tunix' models, read by Tunix' own tables (google-tunix 0.1.7).

A table of Tunix maps a regular expression to (name, (axes, shape)); a function that stacks tensors then runs on whole
arrays. Here both run without values: the tensors stay lazy, every device reads its own shards, from checkpoints in any
format that lazymodel opens, and the same steps are a `WeightMap`, which also saves.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Container, Mapping
from typing import Any

import jax
from flax import nnx

from lazymodel import CheckpointError, LazyModelError, LazyTensor, WeightMap, build_abstract, open_checkpoint
from lazymodel._abstract.framework import ModelSpec
from lazymodel._errors import required
from lazymodel._mapping.resolve import given_checkpoint, given_tensors
from lazymodel._mapping.source import MappedCheckpoint, described
from lazymodel._show.text import listed
from lazymodel._tensors.stored import stored_tensors
from lazymodel.extras.tables.recorded import recorded
from lazymodel.extras.tables.traced import traced_result

__all__ = ["from_key_mapping", "gemma", "gemma3", "gemma4", "llama3", "load_and_create_model", "qwen2", "qwen3"]

# Regular expression of a tensor's name → name of the variable, and None or (axes or None, shape or None).
_KeyMapping = Mapping[str, tuple[str, tuple[Any, Any] | None]]
_Preprocess = Callable[[dict[str, Any]], dict[str, Any]]


def load_and_create_model(
    file_dir: str,
    model_class: Callable[..., Any],
    config: Any,
    key_mapping: Callable[[Any], _KeyMapping],
    mesh: jax.sharding.Mesh | None = None,
    preprocess_fn: _Preprocess | None = None,
    dtype: Any = None,
    mode: str = "auto",
) -> Any:
    """Replaces `tunix.models.safetensors_loader.load_and_create_model`: the same arguments, the same model bit for bit.

    Assigned there, it also loads for Tunix' `create_model_from_safe_tensors` and `AutoModel`.

    Args:
        file_dir: A folder, file or URL for `open_checkpoint`.
        model_class: Called as `model_class(config, rngs=nnx.Rngs(params=0))`.
        config: Its configuration.
        key_mapping: A function of the configuration that returns a table.
        mesh: Variables are sharded by the mesh axes in their metadata; without a mesh, all are on the first device.
        preprocess_fn: As for `from_key_mapping`.
        dtype: That of all variables; None keeps the checkpoint's.
        mode: Has no effect.

    Raises:
        CheckpointError: A tensor is missing, or does not fit; two tensors become one variable.
        LazyModelError: `preprocess_fn` computes values.

    Example:
        >>> table = {r"up\\.weight": ("kernel", ((1, 0), None)), r"up\\.bias": ("bias", None)}
        >>> lm.save({"up.weight": np.ones((16, 8)), "up.bias": np.ones(16)}, "hf/model.safetensors")
        >>> build = lambda config, rngs: nnx.Linear(8, config, rngs=rngs)
        >>> tunix.load_and_create_model("hf", build, 16, lambda config: table).kernel.shape
        (8, 16)
    """
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        graphdef, state = nnx.split(nnx.eval_shape(lambda: model_class(config, rngs=nnx.Rngs(params=0))))
    flat = {"/".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
    with open_checkpoint(file_dir) as checkpoint:
        found, unused = _values(key_mapping(config), checkpoint, flat, preprocess_fn)
        found = {path: value.astype(_canonical(dtype or value.dtype)) for path, value in found.items()}

        def zeros() -> Any:
            """The model without its initial values, in the dtypes of the checkpoint."""
            arrays = [
                jax.numpy.zeros(each.shape, getattr(found.get(path), "dtype", None)) for path, each in flat.items()
            ]
            return nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(state), arrays))

        zeros.__name__ = getattr(model_class, "__name__", "model")  # in messages
        abstract = build_abstract(zeros)
        abstract = abstract if mesh is None else abstract.shard(mesh)
        return abstract.materialize(MappedCheckpoint(found, checkpoint, unused), initialize="nothing")


def from_key_mapping(
    key_mapping: _KeyMapping, checkpoint: Any, model: Any, preprocess_fn: _Preprocess | None = None
) -> WeightMap:
    """The `WeightMap` of a table of Tunix, to load with, and to save a model under the names of a checkpoint.

    Args:
        key_mapping: Regular expression of a tensor's name → (name of the variable, None or (axes, shape)). The tensor
            is transposed to these axes, then reshaped; either may be None. As in Tunix, an expression matches at the
            beginning of a name, and a name that not exactly one of them matches is ignored.
        checkpoint: Has names and shapes, as for `map_checkpoint`; nothing is read.
        model: Abstract or live. Tensors for which it has no variable are ignored.
        preprocess_fn: A function of all tensors by the names of the table. It is traced, so it must only move elements,
            such as `jnp.stack` and `jnp.transpose`.

    Raises:
        CheckpointError: A tensor does not have the elements of its shape; two tensors become one variable.
        LazyModelError: `preprocess_fn` computes values, or no entry of a `WeightMap` makes a variable as it does.

    Example:
        >>> table = {r"h\\.([0-9]+)\\.up": (r"layers.\\1.kernel", ((1, 0), (8, 2, 4)))}
        >>> model = {"layers": [{"kernel": jax.numpy.ones((8, 2, 4))}]}
        >>> print(tunix.from_key_mapping(table, {"h.0.up": np.ones((8, 8))}, model))
        lm.WeightMap(
            {
                "layers/0/kernel": lm.From("h.0.up").rearrange("(axis0 axis1) axis2 -> axis2 axis0 axis1"),
            }
        )
    """
    tensors = given_tensors(checkpoint)
    paths = model if isinstance(model, ModelSpec) else given_checkpoint(model)
    values, unused = _values(key_mapping, tensors, paths, preprocess_fn)
    entries, left = recorded(values, tensors, paths)
    if left:
        raise LazyModelError(
            f"no entry of a WeightMap makes {listed(map(repr, left))} as the table and preprocess_fn do; "
            "tunix.load_and_create_model loads such a model, and it cannot be saved under these names"
        )
    return WeightMap(entries, ignore=unused)


def _values(
    key_mapping: _KeyMapping, checkpoint: Mapping[str, Any], paths: Container[str], preprocess_fn: _Preprocess | None
) -> tuple[dict[str, LazyTensor], list[str]]:
    """The value of each variable, by path, and the tensors of which there is none."""
    named: dict[str, LazyTensor] = {}
    origins: dict[str, list[str]] = {}
    for name, tensor in checkpoint.items():
        matches = [(re.sub(regex, *(to[0], name)), to[1]) for regex, to in key_mapping.items() if re.match(regex, name)]
        if len(matches) == 1:
            ((key, (axes, shape)),) = [(key, moves or (None, None)) for key, moves in matches]
            try:
                moved = tensor.transpose(axes) if axes else tensor
                named[key] = moved.reshape(shape) if shape else moved
            except ValueError as error:
                raise CheckpointError(
                    f"{described(checkpoint)}: the table makes {key!r} of {name!r}, {list(tensor.shape)}, with axes "
                    f"{axes} and shape {shape}: {error}; is this the checkpoint of another configuration?"
                ) from error
            origins.setdefault(key, []).append(name)
    changed = named if preprocess_fn is None else traced_result(preprocess_fn, named, "preprocess_fn")[0]
    values: dict[str, LazyTensor] = {}
    for key, value in changed.items():
        if (path := key.removesuffix(".value").replace(".", "/")) not in paths:
            continue
        if len(both := origins.get(key, [])) > 1:
            raise CheckpointError(f"{described(checkpoint)}: the table makes {path!r} of {listed(map(repr, both))}")
        values[path] = value
    used = {tensor.name for path, value in values.items() for tensor in stored_tensors(value, path)}
    return values, [name for name in checkpoint if name not in used]


def _canonical(dtype: Any) -> Any:
    """The dtype of a JAX array of these values, with 32 bits unless `jax_enable_x64` is set."""
    return jax.dtypes.canonicalize_dtype(dtype)


def _family(name: str, model: str, params: str = "params", preprocess: str = "") -> Callable[[Any, Any], WeightMap]:
    """The function that makes the table for models of a family, from private functions of Tunix."""

    def table(config: Any, checkpoint: Any) -> WeightMap:
        module, models = (
            required(f"tunix.models.{name}.{part}", "a table of Tunix", "google-tunix") for part in (params, "model")
        )
        build = getattr(models, model)
        abstract = build_abstract(build, config, rngs=nnx.Rngs(params=0))
        change = getattr(module, preprocess) if preprocess else None
        change = change(config) if change and preprocess == _MAKES else change
        return from_key_mapping(module._get_key_and_transform_mapping(config), checkpoint, abstract, change)

    table.__name__ = table.__qualname__ = name
    table.__doc__ = f"""The table for `tunix.models.{name}.model.{model}(config)`: Tunix' own, by `from_key_mapping`.

    Args:
        config: Its `ModelConfig`.
        checkpoint: Has Hugging Face's names and shapes, as for `map_checkpoint`; nothing is read.

    Raises:
        LazyModelError: Tunix is not installed.
        CheckpointError: A tensor does not fit the configuration.

    Example:
        >>> table = tunix.{name}(config, lm.open_checkpoint("hf"))  # doctest: +SKIP
        >>> lm.save(model, "trained", mapping=table)  # doctest: +SKIP
    """
    return table


_MAKES = "_make_preprocess_fn"
llama3 = _family("llama3", "Llama3")
qwen2 = _family("qwen2", "Qwen2")
qwen3 = _family("qwen3", "Qwen3", preprocess="_stack_experts")
gemma = _family("gemma", "Gemma", "params_safetensors", _MAKES)
gemma3 = _family("gemma3", "Gemma3", "params_safetensors", _MAKES)
gemma4 = _family("gemma4", "Gemma4", "params_safetensors", _MAKES)
