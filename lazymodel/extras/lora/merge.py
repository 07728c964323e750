"""LoRA adapters, merged into a checkpoint while it is read: `open_adapter` and `merge`.

For each adapted weight W an adapter has two small matrices, and the merged weight is `W + scale * B @ A`: Hu et al.
2021, arXiv 2106.09685. The scale is `lora_alpha / r`, or with rsLoRA `lora_alpha / sqrt(r)`. DoRA (Liu et al. 2024,
arXiv 2402.09353) then gives each output of W the norm that the adapter states. PEFT calculates this in float32 and
rounds the result once, as is done here.

A merged tensor is lazy: only the boxes that are read are computed (`low_rank`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from collections import ChainMap, Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, cast

import jax.numpy as jnp
import numpy as np

from lazymodel._devices.collective import opening
from lazymodel._errors import CheckpointError, warn
from lazymodel._mapping.resolve import given_checkpoint
from lazymodel._mapping.source import described
from lazymodel._remote.path import Location
from lazymodel._show.text import closest, grouped_by, listed, plural
from lazymodel._tensors.lazy import LazyTensor, lazy
from lazymodel.checkpoints._checkpoint import Checkpoint, TensorHeader
from lazymodel.checkpoints._open import located, open_located
from lazymodel.checkpoints._untrusted import read_json_file
from lazymodel.extras.lora.low_rank import LowRankSum
from lazymodel.extras.lora.names import BaseNames
from lazymodel.extras.lora.pairs import LowRank
from lazymodel.extras.lora.peft import CONFIG, FILES, MLX, PEFT, Pair, bare_name, check_config, of_mlx, parse

_MERGE = "merge it instead: lm.merge(checkpoint, adapter)"
# Of language models; other models have embeddings of other names, or no output projection.
_EMBEDDING = re.compile(r"(?:.*\.)?(?:embed_tokens|embed_in|shared|wte)\.weight|transformer\.word_embeddings\.weight")


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
    pairs: tuple[Pair, ...] = dataclasses.field(compare=False)
    tokens: Mapping[str, tuple[list[int], LazyTensor]] = dataclasses.field(compare=False)

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
        file = next((folder / name for name in (*FILES, MLX) if (folder / name).exists()), None)
        if file is None:
            raise CheckpointError(f"{folder}: expected {FILES[0]} next to {CONFIG}, found none; download it as well")
        source = open_located(file, as_stored=True)
        try:
            tensors: Mapping[str, LazyTensor] = source
            if file.name == MLX:
                tensors, config = of_mlx(source, config, str(folder / CONFIG))
            check_config(config, str(folder / CONFIG))
            pairs, replaced, tokens = parse(tensors, source.path, config)
        except BaseException:
            source.close()
            raise
    weight = ("weight",)
    names = {p.module if p.parameters == weight else f"{p.module}.{'|'.join(p.parameters)}": p for p in pairs}
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
        tokens,
    )


def is_adapter(where: Location) -> bool:
    """Returns True for a folder of PEFT's."""
    return where.is_dir() and (where / CONFIG).exists()


def _others(folder: Any) -> str:
    """Names the adapters in a folder."""
    try:
        found = sorted(child.name for child in folder.iterdir() if (child / CONFIG).exists())
    except (OSError, CheckpointError):
        found = []
    if not found:
        return "; give the folder that PEFT's save_pretrained wrote"
    return f", but {plural(len(found), 'adapter')} in {listed(map(repr, found))}; open one: {str(folder / found[0])!r}"


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
    def changed(self) -> list[str]:
        """The names of tensors that are not the base's; the Keras adapter looks for those that no variable takes."""
        return list(self._made)

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
    return MergedCheckpoint(base, adapter, merging.merged())


class _Merging:
    """Finds the tensors of a base that an adapter changes, and checks their shapes."""

    def __init__(self, base: Mapping[str, Any], adapter: Adapter, scale: float) -> None:
        self.adapter, self.scale = adapter, scale
        self.base: ChainMap[str, Any] = ChainMap({}, cast("dict[str, Any]", base))  # first what is replaced
        self.index = BaseNames(base)
        self.made: dict[str, Callable[[], LazyTensor]] = {}
        self.pairs = list(adapter.pairs)
        self.replaced = {bare_name(name): adapter.source[name] for name in adapter.replaced}
        self._untie()
        required = [f"{pair.module}.{parameter}" for pair in self.pairs for parameter in pair.parameters]
        required += [f"{module}.weight" for module in adapter.tokens]
        self.found = self.index.find(required, self.replaced, self._reject)
        self._replace()

    def _reject(self, name: str, expected: str = "", found: str = "", fix: str = "") -> NoReturn:
        if not expected:
            stated = f" ({self.adapter.base})" if self.adapter.base else ""
            expected = f"this tensor in {described(self.base.maps[-1])}"
            found = f"none{closest(name, self.index.names)}"
            fix = (
                f"open the checkpoint of the adapter's base model{stated}, and merge before mapping. If it is that, "
                "its files have other names than the model: save it with transformers, `save_pretrained(folder, "
                "save_original_format=False)`"
            )
        raise CheckpointError(f"adapter {self.adapter.path}: {name!r}: expected {expected}, found {found}; {fix}")

    def _untie(self) -> None:
        """An adapter that changes only one of two tied embeddings unties them, as in the model that was trained."""
        config = self.adapter.config
        names = list(filter(_EMBEDDING.fullmatch, self.index.names))
        if not names:
            return
        embedding = next((name for name in names if name.endswith("shared.weight")), names[0])  # of its copies
        ours, head = embedding.split(".")[-2], "embed_out" if "embed_in" in embedding else "lm_head"
        saved = {str(name).rpartition(".")[2] for name in config.get("modules_to_save") or []}
        changed = {pair.module.rpartition(".")[2] for pair in self.pairs} | saved
        there = next((name for name in self.index.names if f".{name}".endswith(f".{head}.weight")), "")
        kind = f"{config.get('task_type') or ''}{(config.get('auto_mapping') or {}).get('base_model_class', '')}"
        has_head = head in changed or re.search("LM|Generation", kind)
        if ours == "shared" and ours in changed:
            changed.remove(ours)
            self._leave_out(ours)
            warn(
                f"adapter {self.adapter.path}: leaves {embedding!r} as it is: PEFT trained a copy of it that its model "
                "does not compute with, as encoder and decoder have their own. Name embed_tokens to train these"
            )
        if config.get("ensure_weight_tying") or not changed & {ours, head} or not has_head:
            if not there:  # its head is the embedding's
                self._leave_out(head)
            return
        name = there or f"{'language_model.' * embedding.startswith('language_model.')}{head}.weight"
        stored = self.index.names.setdefault(name, name)
        if not there:
            self.base[stored] = self.base[self.index.names[embedding]]
            warn(
                f"adapter {self.adapter.path}: the base ties {embedding!r} and the output projection, and the adapter "
                f"changes them apart: the merged checkpoint also has {name!r}, as the model that was trained. Load it "
                'into a model that does not tie them, with "tie_word_embeddings": false in config.json'
            )
        self.made[stored] = lambda: lazy(self.base[stored], stored)

    def _leave_out(self, word: str) -> None:
        self.pairs = [pair for pair in self.pairs if pair.module.rpartition(".")[2] != word]
        self.replaced = {name: value for name, value in self.replaced.items() if f".{word}." not in f".{name}"}

    def _name(self, found: str) -> str:
        """The base's name of a tensor of the adapter."""
        return self.index.names[self.found[found]]

    def merged(self) -> dict[str, Callable[[], LazyTensor]]:
        """Tensors by name, to be made when they are looked up."""
        fan_in_first = self._orientation()
        for name, pair in self._named():
            if name in self.base:
                self.made[name] = self._merged(name, pair, fan_in_first)
            else:
                self.made |= self._parts(name, pair)
            if pair.bias is not None:
                self.made |= self._with_bias(pair, pair.bias)
        return self.made

    def _parts(self, name: str, pair: Pair) -> dict[str, Callable[[], LazyTensor]]:
        """The parts of fused experts, (out, in), each with its rows of the update."""
        experts = self.index.fused[name]
        shape, factor = self._shape_of(name), self.scale * pair.scale
        if self._experts(pair, shape) is not False:
            found = f"parts of {list(shape)}"
            self._reject(name, f"a product {list(pair.b.shape)} @ {list(pair.a.shape)} for each expert", found, PEFT)
        a, b = self._by_expert(pair, len(experts))
        made: dict[str, Callable[[], LazyTensor]] = {}
        for expert, parts in enumerate(experts):
            start = 0
            for part in parts:
                tensor = self._floating(part)
                rows = slice(start, start := start + len(tensor))
                sides = b[rows, :, expert], a[expert]
                made[part] = functools.partial(_sum, tensor, *sides, factor)
        return made

    def kept(self) -> tuple[dict[str, Callable[[], LazyTensor]], dict[str, LowRank]]:
        """Like `merged` without the products, which are returned by name. Biases are merged."""
        added = dict[str, LowRank]()
        fan_in_first = self._orientation()
        for name, pair in self._named():
            what = "DoRA" if pair.magnitude is not None else "experts" if pair.parameters != ("weight",) else ""
            if what:
                self._reject(name, "a product, to be kept as a pair", what, _MERGE)
            left, right, flipped = self._factors(name, pair, fan_in_first)
            a, b = (left, right.T) if flipped else (right.T, left)
            added[name] = LowRank(a, b, pair.scale, flipped, tuple(np.shape(self.base[name])))
            if pair.bias is not None:
                self.made |= self._with_bias(pair, pair.bias)
        return self.made, added

    def _replace(self) -> None:
        """Adds the tensors, and rows of tensors, that replace those of the base; later steps find them in it."""
        for stored, tensor in self.replaced.items():
            name = stored
            if stored in self.found:
                name = self._name(stored)
                tensor = tensor.rounded(lazy(self.base[name], name).dtype)
            self.base[name], self.made[name] = tensor, lambda tensor=tensor: tensor
        for module, (rows, values) in self.adapter.tokens.items():
            name = self._name(f"{module}.weight")
            tensor = self._floating(name)
            if not all(type(row) is int and 0 <= row < len(tensor) for row in rows) or len({*rows}) < len(rows):
                self._reject(name, f"different rows below {len(tensor)} as trainable_token_indices", repr(rows), PEFT)
            if values.shape != (len(rows), *tensor.shape[1:]):
                expected = f"values {[len(rows), *tensor.shape[1:]]} for the rows of trainable_token_indices"
                self._reject(name, expected, str(list(values.shape)), "the adapter is corrupt")
            pieces: list[LazyTensor] = []
            start = 0
            for row, number in sorted(zip(rows, range(len(rows)), strict=True)):
                pieces += [tensor[start:row], values[number : number + 1].rounded(tensor.dtype)]
                start = row + 1
            joined = cast(LazyTensor, np.concatenate(cast(Any, [*pieces, tensor[start:]])))
            self.base[name], self.made[name] = joined, lambda joined=joined: joined

    def _named(self) -> Iterator[tuple[str, Pair]]:
        """Each pair with the name of the tensor that it adapts."""
        for pairs in grouped_by(self.pairs, lambda pair: pair.module).values():
            for pair, parameter in self._assigned(pairs):
                yield self._name(f"{pair.module}.{parameter}"), pair

    def _assigned(self, pairs: list[Pair]) -> list[tuple[Pair, str]]:
        """Each pair of a module with the parameter that it adapts: names do not say it, shapes do."""
        found: list[tuple[Pair, str]] = []
        for pair in pairs:
            fitting = [each for each in pair.parameters if each not in {taken for _, taken in found}]
            if len(pair.parameters) > 1:
                fitting = [each for each in fitting if self._experts(pair, self._shape(pair, each)) is not None]
            if len(fitting) != 1:
                self._reject(
                    pair.module,
                    f"one of {listed(pair.parameters)} that fits {list(pair.b.shape)} @ {list(pair.a.shape)}",
                    listed(fitting) if fitting else "none",
                    PEFT,
                )
            found.append((pair, fitting[0]))
        return found

    def _shape(self, pair: Pair, parameter: str = "weight") -> tuple[int, ...]:
        return self._shape_of(self._name(f"{pair.module}.{parameter}"))

    def _shape_of(self, name: str) -> tuple[int, ...]:
        if name in self.base:
            return tuple(np.shape(self.base[name]))
        experts = self.index.fused[name]
        shapes = [np.shape(self.base[part]) for part in experts[0]]
        return len(experts), sum(shape[0] for shape in shapes), *shapes[0][1:]

    @staticmethod
    def _experts(pair: Pair, shape: tuple[int, ...]) -> bool | None:
        """Whether experts are stored as (experts, in, out) rather than (experts, out, in); None if they do not fit."""
        count, ends = pair.a.shape[0] // pair.rank, (pair.b.shape[0], pair.a.shape[1])
        if len(shape) != 3 or shape[0] != count or shape[1:] not in (ends, ends[::-1]):
            return None
        return shape[1:] != ends

    def _orientation(self) -> bool:
        """Whether square matrices are stored as (in, out): as the others are, by default as the configuration says.

        Others are those that are adapted, or else those of the same layer, if their biases show it.
        """
        seen: set[bool] = set()
        square = ""
        for pair in self.pairs:
            ends = (pair.b.shape[0], pair.a.shape[1])
            if pair.is_embedding or pair.a.ndim > 2 or pair.parameters != ("weight",):
                continue
            if ends[0] == ends[1]:
                square = square or pair.module
            elif (shape := self._shape(pair)) in (ends, ends[::-1]):
                seen.add(shape == ends[::-1])
        if square and len(seen) > 1:
            self._reject(square, "all matrices as (out, in) or all as (in, out)", "both, and this one is square", PEFT)
        if square and not seen:
            layer = re.match(r"(?:.*?\.)??\d+\.|", self._name(f"{square}.weight"))
            for name in self.base:
                bias = f"{name.removesuffix('weight')}bias"
                if layer and name.startswith(layer[0]) and name.endswith("weight") and bias in self.base:
                    shape, outputs = (np.shape(self.base[each]) for each in (name, bias))
                    if len(shape) == 2 and shape[0] != shape[1] and len(outputs) == 1:
                        seen.add(shape[1] == outputs[0])
        return seen.pop() if len(seen) == 1 else bool(self.adapter.config.get("fan_in_fan_out"))

    def _merged(self, name: str, pair: Pair, fan_in_first: bool) -> Callable[[], LazyTensor]:
        """Checks a pair against its base, and returns a function that makes the merged tensor."""
        shape, factor, magnitude = tuple(np.shape(self.base[name])), self.scale * pair.scale, pair.magnitude
        if len(shape) == 3 and pair.parameters != ("weight",) and (swapped := self._experts(pair, shape)) is not None:
            if shape[1] == shape[2]:
                self._reject(name, "experts whose inputs and outputs differ in number", str(list(shape)), PEFT)
            return lambda: self._stacked(name, pair, factor, swapped)
        left, right, flipped = self._factors(name, pair, fan_in_first)
        axis = int(flipped)
        tensor = self._floating(name)
        if magnitude is not None:
            magnitude = magnitude.reshape(-1)
            if magnitude.shape[0] != (count := math.prod((left, right.T)[axis].shape[:1])):
                self._reject(name, f"{count} magnitudes", str(magnitude.shape[0]), "the adapter is corrupt")

        def make() -> LazyTensor:
            return _sum(tensor.reshape(shape[0], -1), left, right, factor, magnitude, axis).reshape(shape)

        return make

    def _factors(self, name: str, pair: Pair, fan_in_first: bool) -> tuple[LazyTensor, LazyTensor, bool]:
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

    def _stacked(self, name: str, pair: Pair, factor: float, swapped: bool) -> LazyTensor:
        """Experts `(experts, out, in)`, or (in, out) if swapped."""
        tensor = self._floating(name)
        a, b = self._by_expert(pair, len(tensor))
        merged: list[LazyTensor] = []
        for expert, base in enumerate(tensor):
            left, right = b[:, :, expert], a[expert]
            sides = (right.T, left.T) if swapped else (left, right)
            merged.append(_sum(base, *sides, factor))
        return cast(LazyTensor, np.stack(cast(Any, merged)))

    @staticmethod
    def _by_expert(pair: Pair, count: int) -> tuple[LazyTensor, LazyTensor]:
        """A `(experts, rank, in)` and B `(out, rank, experts)`: in the file they are one matrix each."""
        return pair.a.reshape(count, pair.rank, -1), pair.b.reshape(pair.b.shape[0], pair.rank, count)

    def _with_bias(self, pair: Pair, bias: LazyTensor) -> dict[str, Callable[[], LazyTensor]]:
        names, name = self.index.names, f"{self.found[f'{pair.module}.weight'].removesuffix('weight')}bias"
        shape = tuple(np.shape(self.base[names[name]])) if name in names else None
        if shape != bias.shape:
            found = "none" if shape is None else str(list(shape))
            self._reject(name, f"a bias of shape {list(bias.shape)}", found, "open the adapter's base model")
        name = names[name]
        tensor = self._floating(name)

        def make() -> LazyTensor:
            one = lazy(np.ones((1, 1), np.float32))
            return _sum(tensor[:, None], bias[:, None], one, self.scale * pair.scale).reshape(-1)

        return {name: make}

    def _floating(self, name: str) -> LazyTensor:
        tensor = lazy(self.base[name], name)
        if not jnp.issubdtype(tensor.dtype, jnp.floating):
            self._reject(
                name, "floating-point numbers", tensor.dtype.name, "open a checkpoint whose numbers are decoded"
            )
        return tensor


def _sum(tensor: LazyTensor, left: LazyTensor, right: LazyTensor, scale: float, *norms: Any) -> LazyTensor:
    """`tensor + scale * left @ right`, a matrix, rounded to the dtype in which it is read."""
    return LazyTensor(LowRankSum(tensor.before_rounding()[0], left, right, scale, *norms)).rounded(tensor.dtype)
