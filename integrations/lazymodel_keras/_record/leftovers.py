"""Tensors in weight files that nothing requested.

Tensors that converters omit on purpose are known by name: buffers that every model computes itself, tied weights that
are stored twice, heads of other tasks, and parts of a model that KerasHub does not have. Any other tensor that was
not requested is most likely a mistake: layers beyond those of the configuration, another configuration, adapters.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from lazymodel import CheckpointError, LazyTensor
from lazymodel._remote.path import Location
from lazymodel._show.text import listed, plural
from lazymodel._tensors.boxes import slabs
from lazymodel._tensors.casting import is_marker, scales_beside, weights
from lazymodel._tensors.stored import StoredTensor, unused_tensors
from lazymodel.checkpoints import SafetensorsFile
from lazymodel.checkpoints._untrusted import read_json_file, shard_path, weight_map
from lazymodel.extras.quantized.config import ADVICE
from lazymodel_keras._record.files import folder_config

# For any model: buffers, parts trained for speculative decoding, and value heads.
_ANY = (
    r"(?:.*\.)?rotary_?(?:pos_)?emb\w*\.(?:inv_freq|cos_cached|sin_cached)",
    r"(?:.*\.)?h\.\d+\.(?:attn|crossattention)\.(?:masked_)?bias",
    r"(?:.*\.)?(?:position_ids|token_type_ids|num_batches_tracked|relative_position_index|relative_coords_table)",
    r"(?:.*\.)?(?:attn_mask|embed_positions\.(?:weights|_float_tensor))",
    r"(?:.*\.)?mtp\..*",
    r"v_head\..*",
)
# Heads of tasks, at the top of a checkpoint or of its only model.
_HEADS = (
    r"(?:\w+\.)?pooler\..*",
    r"(?:cls|cls_classifier|classifier|classification_head|distillation_classifier|pre_classifier|score|qa_outputs"
    r"|predictions|sop_classifier|contact_head|multiple_choice_head|sequence_summary|head|conv_head|fc|pre_logits"
    r"|vocab_(?:layer_norm|projector|transform))\..*",
)
# The head of a vision transformer whose last layer the tower uses: KerasHub has none.
_TOWER_HEAD = (r"(?:.*\.)?vision_tower\.(?:vision_model\.)?head\..*",)
_MASKED_HEAD = (r"lm_head\..*",)
_MASKED_IMAGE = (r"decoder\..*", r"(?:\w+\.)?embeddings\.mask_token")

_BY_TYPE: Mapping[str, tuple[str, ...]] = {
    "bart": (r"final_logits_bias", r"(?:model\.)?(?:encoder|decoder)\.version"),
    "blip-2": (r"language_model\.decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    "deit": _MASKED_IMAGE,
    "dinov2": _MASKED_IMAGE,
    "dinov2_with_registers": _MASKED_IMAGE,
    "dinov3_vit": _MASKED_IMAGE,
    # The positions of tables that rotary embeddings replaced.
    "esm": (*_MASKED_HEAD, r"(?:esm\.)?contact_head\..*", r"(?:esm\.)?embeddings\.position_embeddings\.weight"),
    "gemma3": _TOWER_HEAD,
    # The assistant's own projections belong to its task.
    "gemma4_assistant": (r"(?:pre|post)_projection\.weight", r"masked_embedding\..*"),
    "modernbert": (r"decoder\.(?:weight|bias)",),  # of its task; the rest is named like other heads
    "paligemma": _TOWER_HEAD,
    # There is one token type, which KerasHub omits.
    "roberta": (*_MASKED_HEAD, r"(?:roberta\.)?embeddings\.token_type_embeddings\.weight"),
    # KerasHub has the detector without its tracker.
    "sam3_video": (
        r"tracker_(?:model|neck)\..*",
        r"detector_model\.text_encoder\.text_projection\.weight",
        r"detector_model\.mask_decoder\.pixel_decoder\.(?:conv_layers|norms)\.\d+\.(?:weight|bias)",
    ),
    "swin": _MASKED_IMAGE,
    "t5gemma2": _TOWER_HEAD,
    "vit": _MASKED_IMAGE,
    "xlm-roberta": _MASKED_HEAD,
}

# Tensors that are the embedding once more, in models that tie them.
_TIED_HEAD = r"(?:.*\.)?(?:lm_head(?:\.out_proj)?\.weight|embed_out\.weight)"
_TIED_INPUTS = r"(?:model\.|language_model\.)?(?:encoder|decoder)\.embed_tokens\.weight"
_WITH_TIED_INPUTS = ("bart", "blip-2")

_CHUNK = 4 << 20  # elements that are compared at a time


class Leftovers:
    """Tensors in the folders of the opened files that nothing requested, also in shards that were not opened."""

    def __init__(self, files: Mapping[str, Any]) -> None:  # path to `OpenedFile`
        kinds = ("safetensors", "pytorch", "gguf")
        self._files: dict[Location, Any] = {f.where: f for f in files.values() if f.tensors.format in kinds}
        self._by_folder: dict[Location, dict[Location, list[str]]] = {}  # folder, or GGUF file → file → names
        for path, file in self._files.items():
            folder = path if file.tensors.format == "gguf" else path.parent
            self._by_folder.setdefault(folder, {})[path] = file.unused
        for folder, unused in self._by_folder.items():
            if all(isinstance(self._files[path].tensors, SafetensorsFile) for path in unused):
                for shard, names in _by_shard(folder, list(unused)).items():
                    unused.setdefault(shard, names)

    @property
    def unopened(self) -> tuple[StoredTensor, ...]:
        """Tensors in shards that were not opened."""
        found: list[StoredTensor] = []
        for path, names in (item for unused in self._by_folder.values() for item in unused.items()):
            if path in self._files:
                continue
            try:
                with contextlib.closing(SafetensorsFile(path)) as file:
                    found += unused_tensors(file, [name for name in names if name in file])
            except CheckpointError:  # not downloaded, and not needed
                found += [StoredTensor(name, str(path), "", None) for name in names]
        return tuple(found)

    def quantized(self) -> list[str]:
        """Messages about tensors that are only useful together with others that nothing requested."""
        messages: list[str] = []
        for folder, unused in self._by_folder.items():
            left = {name for names in unused.values() for name in names}
            found = [f"{name!r}, which nothing uses" for name in sorted(left) if is_marker(name)]
            files = [self._files[path] for path in unused if path in self._files]
            requested = ((name, file.tensors.get(name)) for file in files for name in file.requested)
            for name, tensor in requested:
                if tensor is None or not weights(tensor):
                    continue
                scales = scales_beside(name, left)
                if scales or tensor.dtype.kind not in "iu":
                    with_scales = f" with {scales[0]!r}, which nothing uses" if scales else ""
                    found.append(f"{name!r} ({tensor.dtype.name}){with_scales}")
            if found:
                messages.append(f"{folder} holds quantized weights: {listed(found)}. {ADVICE}")
        return messages

    def unexpected(self) -> list[str]:
        """Messages about tensors that nothing requested and no converter omits on purpose."""
        messages: list[str] = []
        for folder, unused in self._by_folder.items():
            gguf = self._files[folder].tensors if folder in self._files else None
            config = folder_config(folder) if gguf is None else gguf.settings
            if not (config.get("model_type") or config.get("architecture")):
                continue  # a file that the user's own code reads in part
            on_purpose, tied = _on_purpose(config), _tied(config)
            names = [
                name
                for path, names in unused.items()
                for name in names
                if not on_purpose.fullmatch(name)
                and (path not in self._files or self._files[path].tensors[name].size)  # or it is empty
                and not (tied.fullmatch(name) and self._is_copy(folder, path, name))
            ]
            if names:
                hint = ". Is its config.json that of another model?" if gguf is None else ""
                if untied := next(filter(tied.fullmatch, names), None):
                    hint = (
                        f". By its configuration {untied!r} is tied to the embedding, and it differs from it: to load "
                        'it, set "tie_word_embeddings": false in its config.json, if KerasHub can untie this model'
                    )
                messages.append(
                    f"{folder} holds {plural(len(names), 'tensor')} that KerasHub's converter did not request: "
                    f"{listed(names)}{hint}"
                )
        return messages

    def _is_copy(self, folder: Location, path: Location, name: str) -> bool:
        """Returns True if a tensor that nothing requested equals a requested one of its folder, bit for bit."""
        try:
            copy = (self._files[path].tensors if path in self._files else SafetensorsFile(path))[name]
        except CheckpointError:  # not downloaded
            return False
        files = [self._files[each] for each in self._by_folder[folder] if each in self._files]
        return any(_equal(copy, file.tensors[other]) for file in files for other in file.requested)


def _equal(one: LazyTensor, two: LazyTensor) -> bool:
    if (one.shape, one.dtype) != (two.shape, two.dtype):
        return False
    boxes = slabs(one.shape, _CHUNK)
    pairs = ([np.asarray(each[box]).reshape(-1).view(np.uint8) for each in (one, two)] for box in boxes)
    return all(np.array_equal(first, second) for first, second in pairs)


def _tied(config: Mapping[str, Any]) -> re.Pattern[str]:
    """Matches the names of tensors that are the embedding in a model with this configuration."""
    holders = (config, _text_config(config))
    tied = [holder["tie_word_embeddings"] for holder in holders if "tie_word_embeddings" in holder]
    patterns = [_TIED_HEAD] if any(tied) or not tied else []
    patterns += [_TIED_INPUTS] if config.get("model_type") in _WITH_TIED_INPUTS else []
    return _compiled("|".join(patterns) or "(?!)")


def _on_purpose(config: Mapping[str, Any]) -> re.Pattern[str]:
    """Matches the names of tensors that converters omit for a model with this configuration."""
    kind = str(config.get("model_type", ""))
    patterns = [*_ANY, *_HEADS, *_BY_TYPE.get(kind, ())]
    text = _text_config(config)
    # Layers that share the keys and values of an earlier one have none, but files contain them.
    shared, layers = (text.get(key, config.get(key)) for key in ("num_kv_shared_layers", "num_hidden_layers"))
    if kind.startswith(("gemma3n", "gemma4")) and isinstance(shared, int) and isinstance(layers, int):
        numbers = "|".join(map(str, range(max(layers - shared, 0), layers)))
        if numbers:
            patterns.append(rf"(?:.*\.)?layers\.(?:{numbers})\.self_attn\.(?:k_proj|v_proj|k_norm|v_norm)\.weight")
    return _compiled("|".join(f"(?:{pattern})" for pattern in patterns))


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, dict) else {}


_compiled = functools.lru_cache(maxsize=16)(re.compile)


def _by_shard(folder: Location, opened: Iterable[Location]) -> dict[Location, list[str]]:
    """File → names of its tensors, according to an index that names one of the opened files."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return {}
    shards: dict[Location, list[str]] = {}
    for name, shard in weight_map(read_json_file(index), index).items():
        shards.setdefault(shard_path(index, shard), []).append(name)
    return shards if set(opened).intersection(shards) else {}
