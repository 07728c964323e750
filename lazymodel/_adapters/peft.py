"""Folders of adapters: their configuration, and what each tensor in them is for.

An adapter of PEFT is a folder with `adapter_config.json` and `adapter_model.safetensors`. What it means for a base is
found in `merge.py`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from lazymodel._errors import CheckpointError
from lazymodel._show.text import listed, plural
from lazymodel._tensors.lazy import LazyTensor
from lazymodel.checkpoints._checkpoint import Checkpoint

CONFIG = "adapter_config.json"
FILES = ("adapter_model.safetensors", "adapter_model.bin")
PREFIX = "base_model.model."  # of all names, for PEFT's two wrappers around the model
PEFT = "merge it with PEFT: `model.merge_and_unload().save_pretrained(folder)`"
_PART = re.compile(r"(.+)\.(lora_(?:embedding_)?[AB]|lora_magnitude_vector)(?:\.(weight|bias))?", re.DOTALL)
# Embeddings that PEFT saves whole if they are adapted or were resized.
EMBEDDINGS = ("embed_tokens", "lm_head", "wte", "word_embeddings", "embed_in", "embed_out", "shared")
# Options with which an adapter is more than a sum, or depends on the input.
_UNSUPPORTED = (
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "monteclora_config"),
    *("trainable_token_indices", "use_bdlora", "use_qalora", "velora_config"),
)
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
        raise CheckpointError(
            f"{file}: expected an adapter of the original weights, found init_lora_weights {start!r}, which changed "
            "them. Save it with PEFT's `path_initial_model_for_weight_conversion`, or, if the checkpoint to merge has "
            "the changed weights, set init_lora_weights to true"
        )
    for name in ("r", "lora_alpha"):
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or (name == "r" and value < 1):
            raise CheckpointError(f"{file}: expected a number {name!r}, found {value!r}; the file is corrupt")
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(name) or {}
        try:
            numbers = all(isinstance(value, int | float) and value > 0 for value in patterns.values())
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


def parse(source: Checkpoint, config: Mapping[str, Any]) -> tuple[tuple[Pair, ...], tuple[str, ...]]:
    """The pairs of an adapter, and the names of its tensors that replace those of the base.

    Raises CheckpointError for other tensors, and for pairs that are incomplete or not of the configured rank.
    """
    parts: dict[str, dict[str, LazyTensor]] = {}
    replaced: list[str] = []
    unknown: list[str] = []
    for name in source:
        if match := _PART.fullmatch(name.removeprefix(PREFIX)):
            module, part, leaf = match.groups()
            if leaf == "bias" and part != "lora_B":
                unknown.append(name)
            parts.setdefault(module, {})["bias" if leaf == "bias" else part] = source[name]
        elif _replaces(name.removeprefix(PREFIX), config):
            replaced.append(name)
        else:
            unknown.append(name)
    if unknown:
        raise CheckpointError(
            f"{source.path}: expected pairs of LoRA, biases and modules_to_save, found "
            f"{plural(len(unknown), 'tensor')} of unknown meaning: {listed(map(repr, unknown))}; {PEFT}"
        )
    if not parts and not replaced:
        raise CheckpointError(f"{source.path}: expected tensors of an adapter, found none; save the adapter again")
    return tuple(_pair(source, config, name, found) for name, found in parts.items()), tuple(replaced)


def _replaces(name: str, config: Mapping[str, Any]) -> bool:
    """Returns True if a tensor of this name replaces the base's."""
    module, _, leaf = name.replace(".base_layer.", ".").rpartition(".")
    # A module's name, or that of a module around it, ends with one of these, as PEFT compares them.
    if any(f"{each}." in f"{module}." for each in config.get("modules_to_save") or []):
        return True
    if leaf == "bias" and config.get("bias") in ("all", "lora_only"):
        return True
    return leaf == "weight" and module.rpartition(".")[2] in EMBEDDINGS


def _pair(source: Checkpoint, config: Mapping[str, Any], name: str, found: dict[str, LazyTensor]) -> Pair:
    module = name.replace(".base_layer", "")
    is_embedding = "lora_embedding_A" in found
    keys = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A", "lora_B")
    expected = {*keys, *(["lora_magnitude_vector"] if config.get("use_dora") else [])}
    if missing := expected - found.keys():
        first = sorted(missing)[0]
        raise CheckpointError(
            f"{source.path}: expected {first} of {name!r}, found {listed(sorted(found))}; it is incomplete"
        )
    if extra := found.keys() - expected - ({"bias"} if config.get("lora_bias") else set[str]()):
        raise CheckpointError(
            f"{source.path}: expected {listed(sorted(expected))} of {name!r}, found also {listed(sorted(extra))}, "
            f"which {CONFIG} does not mention; it is of another adapter, or {PEFT}"
        )
    parameters: list[str] = []
    for target in config.get("target_parameters") or []:
        owner, _, parameter = str(target).rpartition(".")
        if (module == owner or module.endswith(f".{owner}")) and parameter not in parameters:
            parameters.append(parameter)
    numbers = {
        (
            int(_pattern_value(config, "rank_pattern", "r", key)),
            float(_pattern_value(config, "alpha_pattern", "lora_alpha", key)),
        )
        for key in ([f"{module}.{parameter}" for parameter in parameters] or [module])
    }
    if len(numbers) > 1:
        raise CheckpointError(
            f"{source.path}: expected one rank and alpha for {listed(parameters)} of {module!r}, found "
            f"{sorted(numbers)}, and no statement whose tensors are whose; {PEFT}"
        )
    ((rank, alpha),) = numbers
    a, b = (found[key] for key in keys)
    experts = a.shape[0] // rank if parameters and a.ndim == 2 else 1
    inner = a.shape[0] if a.ndim else 0
    if min(a.ndim, b.ndim) < 2 or a.ndim != b.ndim or inner != b.shape[1] or inner != max(experts, 1) * rank:
        raise CheckpointError(
            f"{source.path}: tensors of {name!r}: expected rank {rank} of {CONFIG}, found {keys[0]} {list(a.shape)} "
            f"and {keys[1]} {list(b.shape)}; the files are of different adapters"
        )
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    bias, magnitude = found.get("bias"), found.get("lora_magnitude_vector")
    return Pair(module, tuple(parameters) or ("weight",), a, b, rank, scale, bias, magnitude, is_embedding)


def bare_name(name: str) -> str:
    """The base's name of a tensor that replaces it."""
    return name.removeprefix(PREFIX).replace(".base_layer.", ".").replace(".modules_to_save.", ".")
