"""Quantization and LoRA pairs of NNX modules, by Qwix: which variables change, and how their values are computed.

Qwix finds the kernels of a module and how to quantize each by calling it. Here it calls a module of traced arrays, so
nothing is allocated. A quantized kernel is two or three variables, computed from the kernel once it is on its devices;
LoRA pairs are traced like any initial values. Qwix is imported in functions only.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from lazymodel import AbstractVariable, LazyModelError
from lazymodel._abstract.framework import Conversion, ModelSpec
from lazymodel._abstract.pairs import LoraPair
from lazymodel._abstract.variable import automatic
from lazymodel._errors import required
from lazymodel._show.text import closest

_TYPES = {"int8": "int8", "int4": "int4", "float8": "float8_e4m3fn"}
# The projections that get a pair by default.
_USUAL = r"(.*[/_])?(w?[qv]|query|value|to_[qv])(_?(proj|projection|dense|linear|einsum))?/(kernel|weight|w)"
# What Qwix can quantize without also quantizing activations: convolutions need both.
_OPERATIONS = ("dot_general", "einsum")


def qwix() -> Any:
    """The package; raises LazyModelError if it is not installed."""
    return required("qwix", "quantize or lora of a Flax module", "qwix")


def quantization(how: Any, filters: Any) -> tuple[Any, tuple[Any, ...]]:
    """The provider for an argument of `quantize`, and its rules if they are known."""
    package = qwix()
    if isinstance(how, package.QuantizationProvider):
        if filters is not None:
            raise LazyModelError("filters select layers for 'int8' and the like; a provider of Qwix has rules for that")
        return how, ()
    if isinstance(how, str) and how in _TYPES:
        patterns = [filters] if isinstance(filters, str) else [".*"] if filters is None else filters
        if callable(patterns) or not all(isinstance(pattern, str) for pattern in patterns):
            raise LazyModelError(f"for NNX, filters are a regex of module paths or a list of them; got {filters!r}")
        _check_regex("filters", path := "|".join(f"(?:{pattern})" for pattern in patterns))
        rules = (package.QuantizationRule(module_path=path, weight_qtype=_TYPES[how], op_names=_OPERATIONS),)
    elif isinstance(how, Sequence) and how and all(isinstance(rule, package.QuantizationRule) for rule in how):
        rules = tuple(how)
    else:
        raise LazyModelError(
            f"quantize takes {', '.join(map(repr, _TYPES))}, a list of qwix.QuantizationRule or a provider such as "
            f"qwix.PtqProvider(rules); got {how!r}"
        )
    return package.PtqProvider(rules), rules


def excluding(rules: Sequence[Any], kernels: Sequence[str]) -> tuple[Any, tuple[Any, ...]]:
    """The provider of the rules for all modules but those of these kernels, and its rules."""
    path = "|".join(re.escape(kernel.rpartition("/")[0]) for kernel in kernels)
    kept = (qwix().QuantizationRule(module_path=path), *rules)
    return qwix().PtqProvider(kept), kept


def pairs(model: ModelSpec, rank: Any, targets: str | None, rules: Sequence[Any]) -> Any:
    """The provider for arguments of `lora`; `rules` are those that the model was quantized with."""
    package = qwix()
    if isinstance(rank, package.LoraProvider):
        if targets is not None:
            raise LazyModelError("targets select layers for a rank; a qwix.LoraProvider has rules for that")
        return rank
    if model.conversions and not rules:
        raise LazyModelError(
            f"{model.name} is quantized by a provider, whose rules its operations need: give quantize a list of rules, "
            "or lora a qwix.LoraProvider with rules for the quantized modules, too"
        )
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise LazyModelError(f"the rank of a LoRA is a positive integer, or a qwix.LoraProvider; got {rank!r}")
    pattern = _USUAL if targets is None else targets
    _check_regex("targets", pattern)
    weights = list(model.as_read())
    modules = dict.fromkeys(path.rpartition("/")[0] for path in weights if re.fullmatch(pattern, path))
    if not modules:
        what = "query and value projections" if targets is None else f"kernels that match {targets!r}"
        near = "" if targets is None else closest(targets, weights)
        raise LazyModelError(
            f"{model.name} has no LoRA targets: expected {what}{near}. Set the targets to a path regex"
        )
    path = "|".join(map(re.escape, modules))
    options = {"rank": rank, "alpha": float(rank)}
    # In a quantized module, Qwix' operations take the same rules as before, and then add the pairs.
    both = [
        package.LoraRule(**{**vars(rule), "module_path": f"(?=(?:{rule.module_path})$)(?:{path})"}, **options)
        for rule in rules
    ]
    return package.LoraProvider([*both, package.LoraRule(module_path=path, **options), *rules])


def _check_regex(what: str, pattern: Any) -> None:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise LazyModelError(f"{what}: {pattern!r} is not a regular expression: {error}") from error


class Call(NamedTuple):
    """The arguments of a call of the module, with structs in place of arrays."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rngs: nnx.Rngs

    @classmethod
    def of(cls, model: ModelSpec, module: Any, inputs: Any) -> Call:
        """From the argument `inputs`; for None, from the module's own `get_model_input`, as Tunix' models have it."""
        if inputs is None and callable(found := getattr(module, "get_model_input", None)):
            inputs = found()
        if isinstance(inputs, Mapping):
            args, kwargs = (), dict(inputs)
        elif isinstance(inputs, tuple) and inputs:
            args, kwargs = inputs, {}
        else:
            raise LazyModelError(
                f"Qwix finds the kernels of {model.name} by tracing a call. Give its arguments, arrays or "
                f"jax.ShapeDtypeStruct: inputs=(tokens,), or a dict of keyword arguments; got {inputs!r}"
            )
        rngs = kwargs.pop("rngs", None)
        if rngs is not None and not isinstance(rngs, nnx.Rngs):
            raise LazyModelError(f"rngs among the inputs are an nnx.Rngs; got {rngs!r}")
        # Qwix' own default, with which it warns. Keys are constants of the trace, which is under no mesh.
        graphdef, keys = nnx.split(nnx.Rngs(10003) if rngs is None else rngs)
        return cls(args, kwargs, nnx.merge(graphdef, jax.tree.map(automatic, keys)))


class Changed(NamedTuple):
    """What Qwix has made of a traced module."""

    module: Any
    weights: dict[str, Any]  # path of a quantized kernel → the object in its place, with structs
    dims: dict[str, tuple[int | None, ...]]  # path of a new variable → dimensions of its kernel, if they are known


def change(provider: Any, module: Any, call: Call, *, labelled: bool) -> Changed:
    """Lets Qwix change a module whose arrays are traced.

    Qwix permutes the names of a kernel's dimensions for those of its LoRA pair. If `labelled`, the names are numbers
    meanwhile, from which the dimensions of pairs are known.
    """
    names: dict[str, Any] = {}
    for path, variable in _params(module):
        names[path] = variable.get_metadata("out_sharding", _ABSENT)
        if labelled and (ndim := len(variable.get_value().shape)):
            variable.set_metadata("out_sharding", tuple(map(str, range(ndim))))
    for _, each in nnx.iter_modules(module):
        if hasattr(each, "qwix_rngs"):  # None, and static, since it was quantized; Qwix could set no generators
            del each.qwix_rngs
    # A copy of the generators, which can count in this trace; they cannot be scanned, and are only for pairs.
    rngs = {"rngs": nnx.clone(call.rngs)} if isinstance(provider, qwix().LoraProvider) else {}
    changed = qwix().quantize_model(module, provider, *call.args, **call.kwargs, **rngs)
    dims: dict[str, tuple[int | None, ...]] = {}
    for path, variable in _params(changed) if labelled else ():
        labels = variable.get_metadata("out_sharding", None) or ()
        if path not in names:
            kernel = re.sub(r"/array/\w+$|_lora_[ab]$", "", path)
            dims[path] = tuple(None if label is None else int(label) for label in labels)
            names[path] = _permuted(names.get(kernel, names.get(f"{kernel}/array/qvalue", _ABSENT)), dims[path])
        if names[path] is not _ABSENT:
            variable.set_metadata("out_sharding", names[path])
        elif variable.has_metadata("out_sharding"):
            variable.del_metadata("out_sharding")
    return Changed(changed, dict(_quantized(changed)), dims)


_ABSENT = object()


def _permuted(names: Any, dims: Sequence[int | None]) -> Any:
    """The names of a kernel's dimensions for a variable with these of them, as Qwix permutes them."""
    if not isinstance(names, Sequence):
        return names  # none
    found = (None if dim is None or dim >= len(names) else names[dim] for dim in dims)
    return PartitionSpec(*found) if isinstance(names, PartitionSpec) else tuple(found)


def _params(module: Any) -> Iterator[tuple[str, Any]]:
    """The parameters of a module by path, quantized kernels in their parts."""
    for path, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Param):
            yield "/".join(map(str, path)), node


def _quantized(module: Any) -> Iterator[tuple[str, Any]]:
    """Path of each kernel that is quantized → Qwix' object in its place, with structs."""
    for path, each in nnx.iter_modules(module):
        for name, value in vars(each).items():
            if type(value).__name__ == "WithAux" and isinstance(value.array, qwix().QArray):
                found = jax.tree.map(_struct, value, is_leaf=lambda x: isinstance(x, nnx.Variable))
                yield "/".join(map(str, (*path, name))), found


def _struct(value: Any) -> jax.ShapeDtypeStruct:
    value = value.get_value() if isinstance(value, nnx.Variable) else value
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def conversions(model: ModelSpec, weights: Mapping[str, Any]) -> tuple[list[Conversion], dict[str, AbstractVariable]]:
    """How the quantized kernels of a model are computed, and the variables that take their place."""
    functions: dict[Any, Callable[[jax.Array], Sequence[jax.Array]]] = {}
    found: list[Conversion] = []
    variables: dict[str, AbstractVariable] = {}
    for path, weight in weights.items():
        if path not in model:
            continue  # quantized before
        kernel, shape = model[path], tuple(weight.shape)
        dims = _dims(shape, kernel.shape)
        key = (kernel.shape, kernel.dtype, shape, weight.dtype, repr(weight.how))
        if key not in functions:
            functions[key] = _quantizing(path, kernel, weight)
        function = functions[key]
        parts = jax.eval_shape(function, jax.ShapeDtypeStruct(kernel.shape, kernel.dtype))
        names = [name for name in ("qvalue", "scale", "zero_point") if getattr(weight.array, name, None) is not None]
        paths = tuple(f"{path}/array/{name}" for name in names)
        for part_path, part in zip(paths, parts, strict=True):
            variables[part_path] = AbstractVariable(
                part_path, part.shape, part.dtype, origin=kernel.origin, trainable=False, weight=(path, dims)
            )
        found.append(Conversion(kernel, paths, function))
    return found, variables


def _dims(shape: tuple[int, ...], kernel: tuple[int, ...]) -> tuple[int | None, ...]:
    """For each dimension of a kernel's shape in a computation, the equal one of its own shape, or None."""
    more = len(kernel) - len(shape)
    left = {dim: dim for dim in range(len(shape)) if shape[: dim + 1] == kernel[: dim + 1]}
    right = {dim: dim + more for dim in range(len(shape)) if dim + more >= 0 and shape[dim:] == kernel[dim + more :]}
    return tuple(left.get(dim, right.get(dim)) for dim in range(len(shape)))


def transposed(model: ModelSpec, weights: Mapping[str, Any]) -> list[str]:
    """The paths of kernels that Qwix quantizes transposed, such as an embedding table that is also the output head.

    Such a module cannot be called again: its other uses of the kernel expect it as it was. Qwix leaves them alone if it
    is given values, since it only finds in a trace where they come from.
    """
    pairs = {path: (tuple(weight.shape), model[path].shape) for path, weight in weights.items() if path in model}
    return [path for path, (shape, own) in pairs.items() if shape != own and sorted(shape) == sorted(own)]


def _quantizing(path: str, kernel: AbstractVariable, weight: Any) -> Callable[[jax.Array], Sequence[jax.Array]]:
    """How a kernel is quantized: whole, or if it holds the kernels of layers that are scanned, each of these."""
    expected = [part.shape for part in jax.tree.leaves(weight)]
    sliced = jax.tree.map(lambda part: jax.ShapeDtypeStruct(part.shape[1:], part.dtype), weight)
    for function in (_quantized_as(weight), jax.vmap(_quantized_as(sliced))):
        try:
            parts = jax.eval_shape(function, jax.ShapeDtypeStruct(kernel.shape, kernel.dtype))
        except (TypeError, ValueError, IndexError):
            continue
        if [part.shape for part in parts] == expected:
            return function
    raise LazyModelError(
        f"{path!r} of shape {kernel.shape} is quantized in parts that are unknown, of shapes {expected}: exclude its "
        "module by a rule without weight_qtype, or load the model and call qwix.quantize_model"
    )


def _quantized_as(weight: Any) -> Callable[[jax.Array], Sequence[jax.Array]]:
    def quantized(kernel: jax.Array) -> Sequence[jax.Array]:
        # A layer casts its kernel to the dtype that it computes in, and Qwix quantizes the result.
        made = qwix().quantize_params({"kernel": kernel.astype(weight.dtype)}, {"kernel": weight})
        return jax.tree.leaves(made["kernel"])

    return quantized


def with_scales(pairs: list[LoraPair], nodes: Any, own: Callable[[str], str]) -> list[LoraPair]:
    """The pairs of NNX objects with the factors of their modules: `nnx.LoRA` has none, Qwix' rules have one each.

    Both multiply inputs with the first axes of a kernel, except in an einsum. `own` gives a variable's path in the
    model.
    """
    by_path = {pair.a: pair for pair in pairs}
    modules = [(path, node) for path, node in nnx.iter_graph(nodes) if isinstance(node, nnx.Module)]
    rules = [rule for _, module in modules for rule in _qwix_rules(type(module))]
    for path, module in modules:
        for name in vars(module):
            if (pair := by_path.get(own("/".join(map(str, (*path, name)))))) is None:
                continue
            if isinstance(module, nnx.LoRA):
                by_path[pair.a] = dataclasses.replace(pair, scale=1.0, axes=pair.axes[:1])
            elif hasattr(module, "qwix_path"):
                is_einsum = hasattr(module, name.replace("_lora_a", "_lora_einsum_str"))
                axes = pair.axes if is_einsum else pair.axes[:1]
                scale = _qwix_scale(rules, module, is_einsum=is_einsum)
                by_path[pair.a] = dataclasses.replace(pair, scale=scale, axes=axes)
    return list(by_path.values())


def _qwix_rules(kind: type) -> list[Any]:
    """The rules of Qwix' provider, which the methods of a class keep if Qwix replaced them."""
    if not hasattr(kind, "_unquantized_type"):
        return []
    cells = [
        cell.cell_contents for method in vars(kind).values() for cell in getattr(method, "__closure__", None) or ()
    ]
    given = [argument for cell in cells if isinstance(cell, functools.partial) for argument in cell.args]
    return [rule for provider in dict.fromkeys(given) for rule in getattr(provider, "_rules", ())]


def _qwix_scale(rules: list[Any], module: Any, *, is_einsum: bool) -> float | None:
    """The factor with which Qwix multiplies the pairs of a module: of the first rule for it, if that has one."""
    path = "/".join(map(str, module.qwix_path))
    for rule in rules:
        if re.fullmatch(rule.module_path, path) and (not rule.op_names or ("einsum" in rule.op_names) == is_einsum):
            return rule.alpha / rule.rank if hasattr(rule, "alpha") else None
    return None
