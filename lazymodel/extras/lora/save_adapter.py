"""A model's LoRA pairs into a folder as PEFT writes it: `save_adapter`.

The factors go the way of `save`, and the folder is replaced as a whole. What a pair adds to which tensor is calculated
in `extras/lora/pairs`; `extras/lora/` reads such folders.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, cast

import jax
import numpy as np

from lazymodel._abstract.framework import ModelSpec
from lazymodel._abstract.pairs import lora_pairs
from lazymodel._abstract.variable import lazy_array
from lazymodel._devices.collective import agreement
from lazymodel._errors import LazyModelError, warn
from lazymodel._mapping.table import WeightMap
from lazymodel._remote.path import LocalPath
from lazymodel._remote.url import is_url
from lazymodel._save.atomic import carry_over, writing
from lazymodel._save.disk import WholeFolder
from lazymodel._save.files import SavedFile, SaveOptions
from lazymodel._save.safetensors import layout
from lazymodel._save.save import TERMS, values_of, write_to
from lazymodel._show.progress import Progress
from lazymodel._show.text import listed
from lazymodel._tensors.lazy import LazyTensor
from lazymodel.checkpoints._safetensors import OWN_DTYPES
from lazymodel.extras.lora.pairs import LowRank, of_rank, pair_products, with_scale
from lazymodel.extras.lora.peft import CONFIG, EMBEDDINGS, FILES, PREFIX

_FAR = 0.1  # relative error of a product from which outputs of a model visibly change


def save_adapter(
    model: Any,
    folder: str | os.PathLike[str],
    *,
    mapping: WeightMap | None = None,
    base: str | None = None,
    scale: float | None = None,
    rank: int | None = None,
    max_host_memory: int | str | None = None,
    progress: bool | Progress | Callable[[int, int], object] | None = None,
    overwrite: bool = False,
) -> dict[str, float]:
    """Writes a model's LoRA pairs as an adapter that PEFT and vLLM load: `adapter_config.json` and its tensors.

    The base is not written. The factors are written with their own dtypes and bits; the model's factor of `a @ b`
    becomes `lora_alpha / r`. As with `save`, the folder is the complete old adapter or the complete new one at each
    instant, other files in it stay, and where several processes share the arrays, all call this.

    Args:
        model: As of `save`, with pairs as of `WeightMap.adapters`.
        folder: A folder on a disk.
        mapping: The `WeightMap` with which the base is loaded. It decides the adapter's names and the orientation of
            its factors. None if variables have the names and shapes of the base's tensors.
        base: The base model's name on a hub, or its path, for `base_model_name_or_path`.
        scale: As of `WeightMap.adapters`.
        rank: The highest rank of a product. One of a higher rank, such as the `heads * r` of KerasHub's queries, whose
            pair multiplies each head by itself, becomes the closest product of this rank. None writes all as they are.
        max_host_memory: As of `save`, in bytes or `"1GiB"`.
        progress: As of `save`.
        overwrite: Whether an adapter that is there already is replaced.

    Returns:
        Module → relative error of its product, for those that `rank` changed: the norm of the difference, divided by
            that of the product. Warns from 0.1.

    Raises:
        LazyModelError: The model has no pairs, their scale is unknown, the table has no entry for the base of one, or
            a pair cannot be written as factors of its tensors; or as `save`.
        CheckpointError: As `save`.

    Example:
        >>> weights = lm.WeightMap({"up/kernel": lm.From("up.weight").T})
        >>> up = {"kernel": np.zeros((64, 256)), "lora_a": np.ones((64, 4)), "lora_b": np.ones((4, 256))}
        >>> lm.save_adapter({"up": up}, "tuned", mapping=weights, base="example/base", scale=2.0)
        {}
        >>> lm.open_adapter("tuned")
        Adapter('tuned/adapter_model.safetensors': LoRA of rank 4, alpha 8, 1 module (up), for example/base)
    """
    if mapping is not None and not isinstance(cast(Any, mapping), WeightMap):
        raise LazyModelError(f"save_adapter: mapping is the WeightMap of the base, or None; got {mapping!r}")
    if is_url(folder):
        raise LazyModelError("save_adapter: expected a folder on a disk, found a URL; save it there, and copy it")
    found = model.framework.lora_pairs(model) if isinstance(model, ModelSpec) else lora_pairs(model)
    if not found:
        raise LazyModelError(f"save_adapter: {type(model).__name__} has no LoRA pairs; lm.save writes models without")
    pairs = with_scale(found, scale)
    values, held = values_of(model)
    with agreement(held, **TERMS):
        arrays = {path: lazy_array(path, values[path]) for pair in pairs for path in (pair.a, pair.b)}
        table = WeightMap({pair.base: pair.base for pair in pairs}) if mapping is None else mapping
        added = {name.replace("/", "."): low for name, low in pair_products(table, pairs, arrays).items()}
        errors = {} if rank is None else _limit(added, rank)
        if far := [f"{module} {error:.2g}" for module, error in errors.items() if error >= _FAR]:
            warn(
                f"save_adapter: rank {rank} changes products by a tenth or more of their norms, {listed(far)}; raise it"
            )
        others = {path: np.shape(array) for path, array in values.items() if path not in arrays}
        known = others if mapping is None else mapping.tensor_names(others)
        tensors, config = _adapter(added, {name.replace("/", ".") for name in known}, base)
        options = SaveOptions.given(tensors, max_host_memory, progress, metadata={"format": "pt"})
    if tied := [pair.base for pair in pairs if pair.tied]:
        config["ensure_weight_tying"] = True  # without, PEFT adds it to the embeddings only
        warn(
            f"save_adapter: {tied[0]!r} is also the output projection. PEFT's models compute with its pair in both "
            "places, but merge_and_unload adds it twice; lm.merge adds it once"
        )
    write_to(lambda: _AdapterFolder(LocalPath(folder), tensors, config, options), held, options, overwrite=overwrite)
    return errors


def _limit(added: dict[str, LowRank], rank: int) -> dict[str, float]:
    """Replaces products of a higher rank; returns the relative errors by module."""
    if isinstance(cast(Any, rank), bool) or not isinstance(cast(Any, rank), int) or rank < 1:
        raise LazyModelError(f"save_adapter: expected a positive integer as rank, found {rank!r}")
    if jax.process_count() > 1:
        raise LazyModelError("save_adapter: rank needs whole factors in one process; leave it out, or save in one")
    higher = [name for name, low in added.items() if low.a.shape[1] > rank]
    errors: dict[str, float] = {}
    for name in higher:
        added[name], errors[name.removesuffix(".weight")] = of_rank(added[name], rank)
    return errors


class _AdapterFolder(WholeFolder):
    """A folder with an adapter; its other files stay."""

    def __init__(
        self, path: LocalPath, tensors: dict[str, LazyTensor], config: Mapping[str, Any], options: SaveOptions
    ) -> None:
        (file,) = layout(tensors, options)
        text = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
        files = [dataclasses.replace(file, name=FILES[0]), SavedFile(CONFIG, text, (), len(text))]
        super().__init__(path, files, options)

    def _there(self) -> LocalPath | None:
        return next((self.path / name for name in (CONFIG, *FILES) if (self.path / name).exists()), None)

    def commit(self) -> None:
        with writing(self.path):
            if self.path.exists():
                carry_over(self.path, self._stage.new, leave=(CONFIG, *FILES))
        super().commit()


def _adapter(
    added: Mapping[str, LowRank], known: Collection[str], base: str | None
) -> tuple[dict[str, LazyTensor], dict[str, Any]]:
    """An adapter's tensors and its configuration, from what is added to the base's tensors, whose names are known."""
    tensors: dict[str, LazyTensor] = {}
    ranks, alphas, flipped = dict[str, int](), dict[str, float](), False
    for name, low in added.items():
        module = name.removesuffix(".weight")
        if module == name or len(low.shape) < 2:
            raise LazyModelError(
                f"save_adapter: expected the weight of a module, such as 'model.layers.0.self_attn.q_proj.weight', "
                f"found {name!r}; pass the WeightMap of the base as mapping"
            )
        rank = low.a.shape[1]
        a, b = low.a.T, low.b
        if module.rpartition(".")[2] in EMBEDDINGS and low.flipped:
            tensors |= {f"{PREFIX}{module}.lora_embedding_A": a, f"{PREFIX}{module}.lora_embedding_B": b}
        else:
            ones = (1,) * (len(low.shape) - 2)  # of a convolution
            tensors[f"{PREFIX}{module}.lora_A.weight"] = a.reshape(rank, *low.shape[1:]) if ones else a
            tensors[f"{PREFIX}{module}.lora_B.weight"] = b.reshape(*b.shape, *ones)
            flipped |= low.flipped
        ranks[module], alphas[module] = rank, low.scale * rank
    if strange := next((name for name, tensor in tensors.items() if tensor.dtype in OWN_DTYPES), None):
        raise LazyModelError(
            f"save_adapter: {strange!r}: safetensors has no dtype {tensors[strange].dtype.name}, so PEFT could not "
            "read it; cast the model's pairs first"
        )
    r, rank_pattern = _patterns(ranks)
    alpha, alpha_pattern = _patterns(alphas)
    modules = {name.removesuffix(".weight") for name in known if name.endswith(".weight")}
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": r,
        "lora_alpha": alpha,
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
        "target_modules": sorted({*_short(ranks, modules)}),
        "fan_in_fan_out": flipped,
        "lora_dropout": 0.0,
        "bias": "none",
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
        "task_type": None,
    }
    return tensors, config


def _patterns(values: Mapping[str, float]) -> tuple[float, dict[str, float]]:
    """The value of most modules, and patterns for the others."""
    numbers = {module: int(value) if value == int(value) else value for module, value in values.items()}
    ((most, _),) = Counter(numbers.values()).most_common(1)
    return most, {f"^{re.escape(module)}": value for module, value in numbers.items() if value != most}


def _short(modules: Collection[str], others: Collection[str]) -> Iterator[str]:
    """The targets: the last part of names, if all modules of the base with it are adapted; otherwise whole names."""
    partly = {name.rpartition(".")[2] for name in others if name not in modules}
    for module in modules:
        last = module.rpartition(".")[2]
        yield module if last in partly else last
