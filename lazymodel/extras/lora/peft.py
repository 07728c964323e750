"""Folders of adapters: their configuration, and what each tensor in them is for.

An adapter of PEFT is a folder with `adapter_config.json` and `adapter_model.safetensors`. What it means for a base is
found in `merge.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from lazymodel._errors import CheckpointError
from lazymodel._show.text import grouped_by, listed, plural
from lazymodel._tensors.lazy import LazyTensor
from lazymodel.checkpoints._untrusted import is_finite

CONFIG = "adapter_config.json"
FILES = ("adapter_model.safetensors", "adapter_model.bin")
MLX = "adapters.safetensors"  # of mlx-lm
PREFIX = "base_model.model."  # of all names, for PEFT's two wrappers around the model
PEFT = "merge it with PEFT: `model.merge_and_unload().save_pretrained(folder)`"
_PART = re.compile(r"(.+)\.(lora_(?:embedding_)?[AB]|lora_magnitude_vector)(?:\.(weight|bias))?", re.DOTALL)
# Embeddings that PEFT saves whole if they are adapted or were resized.
EMBEDDINGS = ("embed_tokens", "lm_head", "wte", "word_embeddings", "embed_in", "embed_out", "shared")
# Options with which an adapter is more than a sum, or depends on the input.
_UNSUPPORTED = (
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "monteclora_config"),
    *("use_bdlora", "use_qalora", "velora_config"),
)
_TOKENS = ".token_adapter.trainable_tokens_delta"
_PATTERNS = (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
_CHANGES_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")  # initializations that subtract from the base


@dataclasses.dataclass(frozen=True)
class Pair:
    """The tensors that adapt one weight.

    `parameters` are the names of the weight in its module; several if the adapter does not say which is meant.
    """

    module: str
    parameters: tuple[str, ...]
    a: LazyTensor
    b: LazyTensor
    rank: int
    scale: float
    bias: LazyTensor | None
    magnitude: LazyTensor | None
    is_embedding: bool


def check_config(config: Mapping[str, Any], file: str) -> None:
    """Raises CheckpointError for adapters that are not a sum of low rank."""
    if (kind := config.get("peft_type")) != "LORA":
        raise CheckpointError(f"{file}: expected peft_type LORA, found {kind!r}; {PEFT}")
    if unsupported := [name for name in _UNSUPPORTED if config.get(name)]:
        raise CheckpointError(f"{file}: expected plain LoRA, rsLoRA or DoRA, found {listed(unsupported)}; {PEFT}")
    start = str(config.get("init_lora_weights", True)).lower()
    if start.startswith(_CHANGES_BASE):
        # The pair that LoftQ begins with is not what it subtracts, which includes the error of the quantization.
        convert = (
            "Save it with PEFT's `path_initial_model_for_weight_conversion`, or merge" if start != "loftq" else "Merge"
        )
        raise CheckpointError(
            f"{file}: expected an adapter of the original weights, found init_lora_weights {start!r}, which changed "
            f"them. {convert} it into a checkpoint of the changed weights, with init_lora_weights set to true"
        )
    for name in ("r", "lora_alpha"):
        value = config.get(name)
        if not is_finite(value) or (name == "r" and value < 1):
            raise CheckpointError(f"{file}: expected a finite number {name!r}, found {value!r}; the file is corrupt")
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(name) or {}
        try:
            numbers = all(is_finite(value) and value > 0 for value in patterns.values())
            for pattern in patterns:
                re.compile(pattern)
        except (AttributeError, TypeError, re.error):
            numbers = False
        if not numbers:
            raise CheckpointError(
                f"{file}: expected {name!r} of regular expressions and numbers, found {patterns!r}; it is corrupt"
            )


def _pattern_value(config: Mapping[str, Any], patterns: str, default: str, key: str) -> Any:
    """A module's own value: of the first pattern that matches its name or the end of it, as in PEFT."""
    for pattern, value in (config.get(patterns) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", key):
            return value
    return config[default]


# What an adapter's tensors are for: pairs; names of those that replace the base's; module → rows, and their values.
Content: TypeAlias = "tuple[tuple[Pair, ...], tuple[str, ...], dict[str, tuple[list[int], LazyTensor]]]"


def of_mlx(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], file: str) -> tuple[dict[str, Any], ...]:
    """The tensors and the configuration of an adapter of mlx-lm, as PEFT would have them.

    Its factors are `lora_a` (in, r) and `lora_b` (r, out), and its `scale` is the factor of their product.
    """
    given: Any = config.get("lora_parameters")
    given = given if isinstance(given, dict) and config.get("fine_tune_type", "lora") == "lora" else {}
    rank, scale = given.get("rank"), given.get("scale")
    if not (is_finite(rank) and is_finite(scale)):
        raise CheckpointError(
            f"{file}: expected lora_parameters with rank and scale, as mlx-lm writes for its type 'lora', found "
            f"{config.get('fine_tune_type')!r} with {given!r}; merge it with mlx-lm: `mlx_lm.fuse`"
        )
    ends = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        found[f"{PREFIX}{module}.{ends.get(part, part)}"] = tensor.T
    tied = {"ensure_weight_tying": True}  # the head has the pair of the embedding
    return found, {**config, **tied, "peft_type": "LORA", "r": rank, "lora_alpha": scale * rank}


def parse(tensors: Mapping[str, LazyTensor], path: str, config: Mapping[str, Any]) -> Content:
    """What an adapter's tensors are for.

    Raises CheckpointError for other tensors, and for pairs that are incomplete or not of the configured rank.
    """
    parts: dict[str, dict[str, LazyTensor]] = {}
    tokens: dict[str, tuple[list[int], LazyTensor]] = {}
    replaced: list[str] = []
    unknown: list[str] = []
    for name, tensor in tensors.items():
        bare = name.removeprefix(PREFIX)
        if match := _PART.fullmatch(bare):
            module, part, leaf = match.groups()
            if leaf == "bias" and part != "lora_B":
                unknown.append(name)
            parts.setdefault(module, {})["bias" if leaf == "bias" else part] = tensor
        elif bare.endswith(_TOKENS) and (rows := _rows(config, module := bare.removesuffix(_TOKENS))) is not None:
            tokens[module] = rows, tensor
        elif ".original_module." in bare:
            continue  # as it was before `modules_to_save` was trained
        elif _replaces(bare, config):
            replaced.append(name)
        else:
            unknown.append(name)
    if unknown:
        raise CheckpointError(
            f"{path}: expected pairs of LoRA, biases and modules_to_save, found "
            f"{plural(len(unknown), 'tensor')} of unknown meaning: {listed(map(repr, unknown))}; {PEFT}"
        )
    if not parts and not replaced and not tokens:
        raise CheckpointError(f"{path}: expected tensors of an adapter, found none; save the adapter again")
    pairs: list[Pair] = []
    for module, names in grouped_by(parts, lambda name: name.replace(".base_layer", "")).items():
        factors = [_factors(path, config, name, parts[name]) for name in names]
        numbers = _parameters(path, config, module, [a.shape[0] if a.ndim else 0 for a, _ in factors])
        for name, (a, b), (parameters, rank, alpha) in zip(names, factors, numbers, strict=True):
            _check_rank(path, name, a, b, rank, fused=parameters != ("weight",))
            scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
            found = parts[name]
            others = found.get("bias"), found.get("lora_magnitude_vector"), "lora_embedding_A" in found
            pairs.append(Pair(module, parameters, a, b, rank, scale, *others))
    return tuple(pairs), tuple(replaced), tokens


def _rows(config: Mapping[str, Any], module: str) -> list[int] | None:
    """The rows of a module that `trainable_token_indices` states; None if it does not state any."""
    stated = config.get("trainable_token_indices")
    if isinstance(stated, dict):
        stated = next((rows for key, rows in stated.items() if f".{module}".endswith(f".{key}")), None)
    return stated if isinstance(stated, list) else None


def _replaces(name: str, config: Mapping[str, Any]) -> bool:
    """Returns True if a tensor of this name replaces the base's."""
    module, _, leaf = bare_name(name).rpartition(".")
    # A module's name, or that of a module around it, ends with one of these, as PEFT compares them.
    if any(f"{each}." in f"{module}." for each in config.get("modules_to_save") or []):
        return True
    if leaf == "bias" and config.get("bias") in ("all", "lora_only"):
        return True
    return leaf == "weight" and module.rpartition(".")[2] in EMBEDDINGS


def _factors(
    path: str, config: Mapping[str, Any], name: str, found: dict[str, LazyTensor]
) -> tuple[LazyTensor, LazyTensor]:
    """A and B of a pair, of which nothing else may be missing or be there."""
    keys = ("lora_embedding_A", "lora_embedding_B") if "lora_embedding_A" in found else ("lora_A", "lora_B")
    expected = {*keys, *(["lora_magnitude_vector"] if config.get("use_dora") else [])}
    if missing := expected - found.keys():
        first = sorted(missing)[0]
        raise CheckpointError(f"{path}: expected {first} of {name!r}, found {listed(sorted(found))}; it is incomplete")
    if extra := found.keys() - expected - ({"bias"} if config.get("lora_bias") else set[str]()):
        raise CheckpointError(
            f"{path}: expected {listed(sorted(expected))} of {name!r}, found also {listed(sorted(extra))}, "
            f"which {CONFIG} does not mention; it is of another adapter, or {PEFT}"
        )
    return found[keys[0]], found[keys[1]]


def _parameters(
    path: str, config: Mapping[str, Any], module: str, firsts: list[int]
) -> list[tuple[tuple[str, ...], int, float]]:
    """For each pair of a module, whose A have so many rows: the parameters that it may adapt, its rank and alpha."""

    def numbers(key: str) -> tuple[int, float]:
        rank, alpha = (_pattern_value(config, *each, key) for each in _PATTERNS)
        return int(rank), float(alpha)

    own = numbers(module)
    parameters: dict[str, tuple[int, float]] = {}
    for target in config.get("target_parameters") or []:
        owner, _, parameter = str(target).rpartition(".")
        # Without a module, it is of any that has it; such as experts, which have more rows than their rank.
        if f".{module}".endswith(f".{owner}") if owner else any(first != own[0] for first in firsts):
            parameters[parameter] = numbers(f"{module}.{parameter}")
    if len({*parameters.values()}) < 2:
        return [(tuple(parameters) or ("weight",), *next(iter(parameters.values()), own))] * len(firsts)
    orders = [
        order
        for order in itertools.permutations(parameters, len(firsts))
        if len({first / parameters[each][0] for first, each in zip(firsts, order, strict=True)}) == 1  # of experts
    ]
    if len(orders) != 1:
        raise CheckpointError(
            f"{path}: expected one rank and alpha for {listed(parameters)} of {module!r}, found "
            f"{sorted(parameters.values())}, and no statement whose tensors are whose; {PEFT}"
        )
    return [((each,), *parameters[each]) for each in orders[0]]


def _check_rank(path: str, name: str, a: LazyTensor, b: LazyTensor, rank: int, *, fused: bool) -> None:
    experts = a.shape[0] // rank if fused and a.ndim == 2 else 1
    inner = a.shape[0] if a.ndim else 0
    if min(a.ndim, b.ndim) < 2 or a.ndim != b.ndim or inner != b.shape[1] or inner != max(experts, 1) * rank:
        raise CheckpointError(
            f"{path}: tensors of {name!r}: expected rank {rank} of {CONFIG}, found lora_A {list(a.shape)} "
            f"and lora_B {list(b.shape)}; the files are of different adapters"
        )


def bare_name(name: str) -> str:
    """The base's name of a tensor that replaces it."""
    return (
        name.removeprefix(PREFIX)
        .replace(".base_layer.", ".")
        .replace(".modules_to_save.", ".")
        .replace(".token_adapter.", ".")
    )
