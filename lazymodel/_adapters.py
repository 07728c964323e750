"""LoRA adapters of PEFT, merged into a checkpoint while it is read: `open_adapter` and `merge`.

An adapter is a folder with `adapter_config.json` and `adapter_model.safetensors`. For each adapted weight W it has two
small matrices, and the merged weight is `W + scale * B @ A`: Hu et al. 2021, arXiv 2106.09685. The scale is `lora_alpha
/ r`, or with rsLoRA `lora_alpha / sqrt(r)`. DoRA (Liu et al. 2024, arXiv 2402.09353) then gives each output of W the
norm that the adapter states. PEFT calculates this in float32 and rounds the result once, as is done here.

A merged tensor is lazy: only the boxes that are read are computed (`_tensors/low_rank`).
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections import ChainMap, Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import jax.numpy as jnp
import numpy as np

from lazymodel._devices.collective import opening
from lazymodel._errors import CheckpointError
from lazymodel._mapping.match import described, given_checkpoint
from lazymodel._mapping.pairs import LowRank
from lazymodel._show.text import closest, grouped_by, listed, plural
from lazymodel._tensors.lazy import LazyTensor, lazy
from lazymodel._tensors.low_rank import LowRankSum
from lazymodel.checkpoints._checkpoint import Checkpoint, TensorHeader
from lazymodel.checkpoints._open import located, open_located
from lazymodel.checkpoints._untrusted import read_json_file

CONFIG = "adapter_config.json"
FILES = ("adapter_model.safetensors", "adapter_model.bin")
PREFIX = "base_model.model."  # of all names, for PEFT's two wrappers around the model
_PEFT = "merge it with PEFT: `model.merge_and_unload().save_pretrained(folder)`"
_MERGE = "merge it instead: lm.merge(checkpoint, adapter)"
_PART = re.compile(r"(.+)\.(lora_(?:embedding_)?[AB]|lora_magnitude_vector)(?:\.(weight|bias))?", re.DOTALL)
_NUMBER = re.compile(r"(?:^|\.)\d+(?:\.|$)")
# Embeddings that PEFT saves whole if they are adapted or were resized.
EMBEDDINGS = ("embed_tokens", "lm_head", "wte", "word_embeddings", "embed_in", "embed_out", "shared")
# Options with which an adapter is more than a sum, or depends on the input.
_UNSUPPORTED = (
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "monteclora_config"),
    *("trainable_token_indices", "use_bdlora", "use_qalora", "velora_config"),
)
_CHANGES_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")  # initializations that subtract from the base


@dataclasses.dataclass(frozen=True)
class _Pair:
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


@dataclasses.dataclass(frozen=True, repr=False)
class Adapter:
    """A LoRA adapter that `open_adapter` opened; `merge` adds it to a checkpoint.

    Attributes:
        path: Path or URL of its tensors.
        base: The name of the model that it was trained for, if it is stated.
        rank: `r` of its configuration.
        alpha: `lora_alpha` of its configuration.
        ranks: Module → its rank.
        scales: Module → the factor of `B @ A`.
        replaced: Names of tensors that replace those of the base, such as those of `modules_to_save`.
        config: All of `adapter_config.json`.

    Example:
        >>> import json, os
        >>> os.makedirs("adapter")
        >>> pair = {"lora_A": np.ones((4, 64), "float32"), "lora_B": np.ones((256, 4), "float32")}
        >>> pair = {f"base_model.model.up.{name}.weight": array for name, array in pair.items()}
        >>> lm.save(pair, "adapter/adapter_model.safetensors")
        >>> with open("adapter/adapter_config.json", "w") as file:
        ...     json.dump({"peft_type": "LORA", "r": 4, "lora_alpha": 8}, file)
        >>> lm.open_adapter("adapter").scales
        {'up': 2.0}
    """

    path: str
    base: str | None
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    scales: Mapping[str, float]
    replaced: tuple[str, ...]
    config: Mapping[str, Any]
    source: Checkpoint = dataclasses.field(compare=False)
    pairs: tuple[_Pair, ...] = dataclasses.field(compare=False)

    @property
    def targets(self) -> tuple[str, ...]:
        """The adapted modules, as the base model names them."""
        return tuple(self.ranks)

    def __repr__(self) -> str:
        kind = "DoRA" if self.config.get("use_dora") else "rsLoRA" if self.config.get("use_rslora") else "LoRA"
        kinds = Counter(module.rpartition(".")[2] for module in self.targets)
        ranks = sorted(set(self.ranks.values())) or [self.rank]
        rank = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        texts = [f"{kind} of {rank}, alpha {self.alpha:g}", f"{plural(len(self.targets), 'module')} ({listed(kinds)})"]
        if self.replaced:
            texts.append(f"{plural(len(self.replaced), 'replaced tensor')}")
        return f"Adapter({self.path!r}: {', '.join(texts)}{f', for {self.base}' if self.base else ''})"

    def close(self) -> None:
        """Releases file descriptors."""
        self.source.close()

    def fit(self, checkpoint: Mapping[str, Any]) -> tuple[Checkpoint, dict[str, LowRank]]:
        """The checkpoint with the tensors that the adapter replaces, and what it adds to others, by their names there;
        for `WeightMap.adapters`. Raises CheckpointError if it has more than products, or fits another base.
        """
        made, added = _Merging(checkpoint, self, 1.0).kept()
        return MergedCheckpoint(checkpoint, self, made), added


def open_adapter(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Adapter:
    """Opens a LoRA adapter of PEFT without reading its tensors.

    Supported are LoRA, rsLoRA and DoRA with `rank_pattern`, `alpha_pattern`, `fan_in_fan_out`, `modules_to_save`,
    biases, embeddings, convolutions, and experts (`target_parameters`).

    Args:
        path: The folder, or its URL, with `adapter_config.json` and `adapter_model.safetensors`.
        storage_options: For a URL: as for `open_checkpoint`.

    Raises:
        CheckpointError: Nothing is there; the folder has several adapters, which are then listed; it is an adapter of
            another kind, or has tensors whose meaning is unknown.

    Example:
        >>> lm.open_adapter("adapter")
        Adapter('adapter/adapter_model.safetensors': LoRA of rank 4, alpha 8, 1 module (up))
    """
    with opening():
        folder = located(path, storage_options)
        if not (folder / CONFIG).exists():
            raise CheckpointError(f"{folder}: expected {CONFIG} of a PEFT adapter, found none{_others(folder)}")
        config = read_json_file(folder / CONFIG)
        file = next((folder / name for name in FILES if (folder / name).exists()), None)
        if file is None:
            raise CheckpointError(f"{folder}: expected {FILES[0]} next to {CONFIG}, found none; download it as well")
        _check_config(config, str(folder / CONFIG))
        source = open_located(file, as_stored=True)
        try:
            pairs, replaced = _parse(source, config)
        except BaseException:
            source.close()
            raise
    names = {pair.module if pair.parameters == ("weight",) else _first(pair): pair for pair in pairs}
    base = config.get("base_model_name_or_path")
    return Adapter(
        source.path,
        base if isinstance(base, str) and base else None,
        int(config["r"]),
        float(config["lora_alpha"]),
        {name: pair.rank for name, pair in names.items()},
        {name: pair.scale for name, pair in names.items()},
        replaced,
        config,
        source,
        pairs,
    )


def is_adapter(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> bool:
    """Returns True for a folder of PEFT's."""
    where = located(path, storage_options)
    return where.is_dir() and (where / CONFIG).exists()


def _first(pair: _Pair) -> str:
    return f"{pair.module}.{'|'.join(pair.parameters)}"


def _others(folder: Any) -> str:
    """Names the adapters in a folder."""
    try:
        found = sorted(child.name for child in folder.iterdir() if (child / CONFIG).exists())
    except (OSError, CheckpointError):
        found = []
    if not found:
        return "; give the folder that PEFT's save_pretrained wrote"
    return f", but {plural(len(found), 'adapter')} in {listed(map(repr, found))}; open one: {str(folder / found[0])!r}"


def _check_config(config: Mapping[str, Any], file: str) -> None:
    """Raises CheckpointError for adapters that are not a sum of low rank."""
    if (kind := config.get("peft_type")) != "LORA":
        raise CheckpointError(f"{file}: expected peft_type LORA, found {kind!r}; {_PEFT}")
    if unsupported := [name for name in _UNSUPPORTED if config.get(name)]:
        raise CheckpointError(f"{file}: expected plain LoRA, rsLoRA or DoRA, found {listed(unsupported)}; {_PEFT}")
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


def _parse(source: Checkpoint, config: Mapping[str, Any]) -> tuple[tuple[_Pair, ...], tuple[str, ...]]:
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
            f"{plural(len(unknown), 'tensor')} of unknown meaning: {listed(map(repr, unknown))}; {_PEFT}"
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


def _pair(source: Checkpoint, config: Mapping[str, Any], name: str, found: dict[str, LazyTensor]) -> _Pair:
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
            f"which {CONFIG} does not mention; it is of another adapter, or {_PEFT}"
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
            f"{sorted(numbers)}, and no statement whose tensors are whose; {_PEFT}"
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
    return _Pair(module, tuple(parameters) or ("weight",), a, b, rank, scale, bias, magnitude, is_embedding)


class MergedCheckpoint(Checkpoint):
    """A checkpoint with an adapter merged into it; `merge` makes it."""

    def __init__(self, base: Mapping[str, Any], adapter: Adapter, made: Mapping[str, Callable[[], LazyTensor]]) -> None:
        super().__init__(getattr(base, "path", None) or "the checkpoint", [*dict.fromkeys([*base, *made])], [])
        self._base, self._adapter, self._made = base, adapter, made
        self.format, self.metadata = getattr(base, "format", "unknown"), getattr(base, "metadata", None)
        self.aliases = getattr(base, "aliases", {})

    def _tensor(self, name: str) -> LazyTensor:
        return self._made[name]() if name in self._made else lazy(self._base[name], name)

    def describe(self, name: str) -> TensorHeader:
        if isinstance(self._base, Checkpoint) and name not in self._made:
            return self._base.describe(name)
        return super().describe(name)

    @property
    def files(self) -> list[str]:
        return sorted({*getattr(self._base, "files", ()), *self._adapter.source.files})

    @property
    def bytes_read(self) -> int:
        return getattr(self._base, "bytes_read", 0) + self._adapter.source.bytes_read

    def close(self) -> None:
        if isinstance(self._base, Checkpoint):
            self._base.close()
        self._adapter.close()


def merge(checkpoint: Any, adapter: Adapter, scale: float = 1.0) -> Checkpoint:
    """A checkpoint with a LoRA adapter merged into it; nothing is read before a device requests it.

    The values are those of PEFT's `merge_and_unload`: the update is computed in float32, added, and rounded once to the
    dtype of the base's tensor. Several adapters are merged one after another: `merge(merge(base, a), b)`.

    Args:
        checkpoint: As for `map_checkpoint`, with the tensor names of the adapter's base model; a prefix such as
            `model.` may be missing or be added. It may be quantized; its tensors are then decoded.
        adapter: What `open_adapter` returned.
        scale: A further factor of every update `B @ A`. Tensors that the adapter replaces are replaced whole.

    Returns:
        A checkpoint for `materialize`, `map_checkpoint`, `save` and the like, with all tensors of `checkpoint` and
            those of `modules_to_save` that it does not have. Closing it closes both.

    Raises:
        CheckpointError: A tensor is missing in the checkpoint, or its shape does not fit: the adapter is of another
            base model.

    Example:
        >>> weights = {"up.weight": np.ones((256, 64), "float32"), "down.weight": np.ones((64, 256), "float32")}
        >>> merged = lm.merge(weights, lm.open_adapter("adapter"))
        >>> merged["up.weight"]
        LazyTensor('up.weight', float32[256, 64])
    """
    base = given_checkpoint(checkpoint)
    if not isinstance(cast(Any, adapter), Adapter):
        raise CheckpointError(f"expected an adapter, found {adapter!r}; open one: lm.open_adapter(folder)")
    if not math.isfinite(scale):
        raise CheckpointError(f"{adapter.path}: expected a finite scale, found {scale!r}; 1.0 merges it as trained")
    merging = _Merging(base, adapter, float(scale))
    return MergedCheckpoint(base, adapter, merging.made())


class _Merging:
    """Finds the tensors of a base that an adapter changes, and checks their shapes."""

    def __init__(self, base: Mapping[str, Any], adapter: Adapter, scale: float) -> None:
        self.base, self.adapter, self.scale = base, adapter, scale
        self.names = {name.replace("/", "."): name for name in base}
        self.rename = self._renamed()

    def _renamed(self) -> Callable[[str], str]:
        """Finds what is removed from the beginning of the adapter's names, or added there, so that all are found."""
        required = [f"{pair.module}.{parameter}" for pair in self.adapter.pairs for parameter in pair.parameters]
        required = required or [_bare(name) for name in self.adapter.replaced]

        def renaming(removed: str, added: str) -> Callable[[str], str]:
            def rename(name: str) -> str:
                changed = added + name.removeprefix(removed) if name.startswith(removed) else name
                return changed if changed in self.names or name not in self.names else name

            return rename

        def missing(rename: Callable[[str], str]) -> list[str]:
            if len({rename(name) for name in required}) < len(set(required)):
                return required  # two of them would be one
            return [name for name in required if rename(name) not in self.names]

        same = renaming("", "")
        if not (lacking := missing(same)):
            return same
        # A number states which layer it is: neither a number nor the word before it is removed, and no number is added.
        first = next((name for name in required if _NUMBER.search(name)), required[0])
        words = first.split(".")
        count_of_prefix = next((index - 1 for index, word in enumerate(words) if word.isdecimal()), len(words) - 2)
        for count in range(count_of_prefix + 1):
            removed, rest = ".".join(words[:count]), ".".join(words[count:])
            begins = [name.removesuffix(rest) for name in self.names if name == rest or name.endswith(f".{rest}")]
            begins = [begin for begin in begins if not _NUMBER.search(begin)]
            removed = f"{removed}." if removed else ""
            fitting = [begin for begin in begins if not missing(renaming(removed, begin))]
            if len(fitting) == 1:
                return renaming(removed, fitting[0])
            if fitting:
                self._reject(
                    first,
                    "one tensor of this name",
                    listed(repr(begin + rest) for begin in fitting),
                    "merge into a checkpoint with the part that is meant",
                )
        found = f"none for {len(lacking)} of {len(required)}{closest(lacking[0], self.names)}"
        stated = f"; it was trained for {self.adapter.base}" if self.adapter.base else ""
        self._reject(
            lacking[0],
            f"this tensor in {described(self.base)}",
            found,
            f"open the checkpoint of the adapter's base model, and merge before mapping{stated}",
        )
        raise AssertionError

    def _reject(self, name: str, expected: str, found: str, fix: str) -> None:
        raise CheckpointError(f"adapter {self.adapter.path}: {name!r}: expected {expected}, found {found}; {fix}")

    def made(self) -> dict[str, Callable[[], LazyTensor]]:
        """Tensors by name, to be made when they are looked up."""
        made = self._replaced()
        fan_in_first = self._orientation()
        for name, pair in self._named():
            made[name] = self._merged(name, pair, fan_in_first)
            if pair.bias is not None:
                made |= self._with_bias(pair, pair.bias)
        return made

    def kept(self) -> tuple[dict[str, Callable[[], LazyTensor]], dict[str, LowRank]]:
        """Like `made` without the products, which are returned by name. Biases are merged."""
        made, added = self._replaced(), dict[str, LowRank]()
        fan_in_first = self._orientation()
        for name, pair in self._named():
            what = "DoRA" if pair.magnitude is not None else "experts" if pair.parameters != ("weight",) else ""
            if what:
                self._reject(name, "a product, to be kept as a pair", what, _MERGE)
            left, right, flipped = self._factors(name, pair, fan_in_first)
            a, b = (left, right.T) if flipped else (right.T, left)
            added[name] = LowRank(a, b, pair.scale, flipped, tuple(np.shape(self.base[name])))
            if pair.bias is not None:
                made |= self._with_bias(pair, pair.bias)
        return made, added

    def _replaced(self) -> dict[str, Callable[[], LazyTensor]]:
        """The tensors that replace those of the base, in which later steps find them."""
        made: dict[str, Callable[[], LazyTensor]] = {}
        replaced: dict[str, LazyTensor] = {}
        for stored in self.adapter.replaced:
            name = self.rename(_bare(stored))
            tensor = self.adapter.source[stored]
            if name in self.names:
                name = self.names[name]
                tensor = tensor.astype(lazy(self.base[name], name).dtype)
            replaced[name], made[name] = tensor, lambda tensor=tensor: tensor
        self.base = ChainMap(cast("dict[str, Any]", replaced), cast("dict[str, Any]", self.base))
        return made

    def _named(self) -> Iterator[tuple[str, _Pair]]:
        """Each pair with the name of the tensor that it adapts."""
        for pairs in grouped_by(self.adapter.pairs, lambda pair: pair.module).values():
            for pair, parameter in self._assigned(pairs):
                yield self.names[self.rename(f"{pair.module}.{parameter}")], pair

    def _assigned(self, pairs: list[_Pair]) -> list[tuple[_Pair, str]]:
        """Each pair of a module with the parameter that it adapts: names do not say it, shapes do."""
        open_, found = list(pairs[0].parameters), list[tuple[_Pair, str]]()
        if len(open_) == len(pairs) == 1:
            return [(pairs[0], open_[0])]
        for pair in pairs:
            fitting = [each for each in open_ if self._experts(pair, self._shape(pair, each)) is not None]
            if len(fitting) != 1:
                self._reject(
                    pair.module,
                    f"one of {listed(pair.parameters)} that fits {list(pair.b.shape)} @ {list(pair.a.shape)}",
                    listed(fitting) if fitting else "none",
                    _PEFT,
                )
            open_.remove(fitting[0])
            found.append((pair, fitting[0]))
        return found

    def _shape(self, pair: _Pair, parameter: str = "weight") -> tuple[int, ...]:
        return tuple(np.shape(self.base[self.names[self.rename(f"{pair.module}.{parameter}")]]))

    @staticmethod
    def _experts(pair: _Pair, shape: tuple[int, ...]) -> bool | None:
        """Whether experts are stored as (experts, in, out) rather than (experts, out, in); None if they do not fit."""
        count, ends = pair.a.shape[0] // pair.rank, (pair.b.shape[0], pair.a.shape[1])
        if len(shape) != 3 or shape[0] != count or shape[1:] not in (ends, ends[::-1]):
            return None
        return shape[1:] != ends

    def _orientation(self) -> bool:
        """Whether square matrices are stored as (in, out): as the others are, by default as the configuration says."""
        seen: set[bool] = set()
        square = ""
        for pair in self.adapter.pairs:
            ends = (pair.b.shape[0], pair.a.shape[1])
            if pair.is_embedding or pair.a.ndim > 2 or pair.parameters != ("weight",):
                continue
            if ends[0] == ends[1]:
                square = square or pair.module
            elif (shape := self._shape(pair)) in (ends, ends[::-1]):
                seen.add(shape == ends[::-1])
        if square and len(seen) > 1:
            self._reject(square, "all matrices as (out, in) or all as (in, out)", "both, and this one is square", _PEFT)
        return next(iter(seen)) if seen else bool(self.adapter.config.get("fan_in_fan_out"))

    def _merged(self, name: str, pair: _Pair, fan_in_first: bool) -> Callable[[], LazyTensor]:
        """Checks a pair against its base, and returns a function that makes the merged tensor."""
        shape, factor, magnitude = tuple(np.shape(self.base[name])), self.scale * pair.scale, pair.magnitude
        if len(shape) == 3 and pair.parameters != ("weight",) and (swapped := self._experts(pair, shape)) is not None:
            if shape[1] == shape[2]:
                self._reject(name, "experts whose inputs and outputs differ in number", str(list(shape)), _PEFT)
            return lambda: self._stacked(name, pair, factor, swapped)
        left, right, flipped = self._factors(name, pair, fan_in_first)
        axis = int(flipped)
        tensor = self._floating(name)
        if magnitude is not None:
            magnitude = magnitude.reshape(-1)
            if magnitude.shape[0] != (count := math.prod((left, right.T)[axis].shape[:1])):
                self._reject(name, f"{count} magnitudes", str(magnitude.shape[0]), "the adapter is corrupt")

        def make() -> LazyTensor:
            matrix = tensor.reshape(shape[0], -1)
            summed = LazyTensor(LowRankSum(matrix, left, right, factor, magnitude, axis))
            return summed.astype(tensor.dtype).reshape(shape)

        return make

    def _factors(self, name: str, pair: _Pair, fan_in_first: bool) -> tuple[LazyTensor, LazyTensor, bool]:
        """The matrices whose product is added to a tensor, and whether that is stored as (in, out); checks shapes."""
        shape, a, b, flipped = tuple(np.shape(self.base[name])), pair.a, pair.b, pair.is_embedding
        if pair.is_embedding:
            expected, left, right = (a.shape[1], b.shape[0]), a.T, b.T
        elif a.ndim > 2:
            out, inner = b.shape[0], a.shape[0]
            expected = (out, *a.shape[1:])
            left = b.reshape(out, inner) if math.prod(b.shape[2:]) == 1 else b
            right = a.reshape(inner, -1)
        else:
            expected, left, right = (b.shape[0], a.shape[1]), b, a
            if shape == expected[::-1] and (fan_in_first or shape != expected):
                expected, left, right, flipped = shape, a.T, b.T, True
        if shape != expected or left.ndim != 2:
            self._reject(
                name,
                f"shape {list(expected)} for a product {list(b.shape)} @ {list(a.shape)}",
                str(list(shape)),
                "the adapter is of another base model" + (f" ({self.adapter.base})" if self.adapter.base else ""),
            )
        return left, right, flipped

    def _stacked(self, name: str, pair: _Pair, factor: float, swapped: bool) -> LazyTensor:
        """Experts `(experts, out, in)`, or (in, out) if swapped; all of their A are one matrix, and all of their B."""
        tensor = self._floating(name)
        count = tensor.shape[0]
        a = pair.a.reshape(count, pair.rank, -1)
        b = pair.b.reshape(pair.b.shape[0], pair.rank, count)
        merged: list[LazyTensor] = []
        for expert in range(count):
            left, right = b[:, :, expert], a[expert]
            sides = (right.T, left.T) if swapped else (left, right)
            merged.append(LazyTensor(LowRankSum(tensor[expert], *sides, factor)).astype(tensor.dtype))
        return cast(LazyTensor, np.stack(cast(Any, merged)))

    def _with_bias(self, pair: _Pair, bias: LazyTensor) -> dict[str, Callable[[], LazyTensor]]:
        name = self.rename(f"{pair.module}.bias")
        if name not in self.names or tuple(np.shape(self.base[self.names[name]])) != bias.shape:
            found = str(list(np.shape(self.base[self.names[name]]))) if name in self.names else "none"
            self._reject(name, f"a bias of shape {list(bias.shape)}", found, "open the adapter's base model")
        name = self.names[name]
        tensor = self._floating(name)

        def make() -> LazyTensor:
            one = lazy(np.ones((1, 1), np.float32))
            summed = LazyTensor(LowRankSum(tensor[:, None], bias[:, None], one, self.scale * pair.scale))
            return summed.astype(tensor.dtype).reshape(-1)

        return {name: make}

    def _floating(self, name: str) -> LazyTensor:
        tensor = lazy(self.base[name], name)
        if not jnp.issubdtype(tensor.dtype, jnp.floating):
            self._reject(
                name, "floating-point numbers", tensor.dtype.name, "open a checkpoint whose numbers are decoded"
            )
        return tensor


def _bare(name: str) -> str:
    """The base's name of a tensor that replaces it."""
    return name.removeprefix(PREFIX).replace(".base_layer.", ".").replace(".modules_to_save.", ".")
