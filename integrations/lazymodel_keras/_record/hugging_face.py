"""Hugging Face and timm folders: tensors, in all shards, that KerasHub's converters do not request.

Tensors that converters omit on purpose are known by name: buffers that every model computes itself, tied weights that
are stored twice, heads of other tasks, and parts of a model that KerasHub does not have. Any other tensor that was
not requested is most likely a mistake: layers beyond those of the configuration, another configuration, adapters.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from lazymodel import CheckpointError
from lazymodel._quantized.config import ADVICE, find_config
from lazymodel._quantized.families import require_known
from lazymodel._remote.path import Location, RemotePath
from lazymodel._show.text import listed
from lazymodel._tensors.casting import is_marker, scales_beside, weights
from lazymodel._tensors.shards import StoredTensor, unused_tensors
from lazymodel.checkpoints import SafetensorsFile
from lazymodel.checkpoints._checkpoint import CONFIG, DecodedCheckpoint, read_config
from lazymodel.checkpoints._open import content_files, open_located
from lazymodel.checkpoints._untrusted import read_json_file, require_shards, shard_path, weight_map
from lazymodel_keras._gguf.folder import GgufModel

# (model type, quantization method) for which KerasHub's own converter requests the parts.
_BY_CONVERTER = frozenset({("gpt_oss", "mxfp4")})

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
_TOWER_HEAD = (r"(?:.*\.)?vision_tower\.vision_model\.head\..*",)
_MASKED_HEAD = (r"lm_head\..*",)
_MASKED_IMAGE = (r"decoder\..*", r"(?:\w+\.)?embeddings\.mask_token")

_BY_TYPE: Mapping[str, tuple[str, ...]] = {
    "bart": (r"final_logits_bias", r"(?:model\.)?(?:encoder|decoder)\.(?:version|embed_tokens\.weight)"),
    "blip-2": (
        r"language_model\.(?:encoder|decoder)\.embed_tokens\.weight",
        r"language_model\.decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    ),
    "deit": _MASKED_IMAGE,
    "dinov2": _MASKED_IMAGE,
    "dinov2_with_registers": _MASKED_IMAGE,
    "dinov3_vit": _MASKED_IMAGE,
    # The positions of tables that rotary embeddings replaced.
    "esm": (*_MASKED_HEAD, r"(?:esm\.)?contact_head\..*", r"(?:esm\.)?embeddings\.position_embeddings\.weight"),
    "gemma3": _TOWER_HEAD,
    # The assistant's own projections belong to its task.
    "gemma4_assistant": (r"(?:pre|post)_projection\.weight", r"masked_embedding\..*"),
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


def open_decoded(path: str | RemotePath) -> DecodedCheckpoint | None:
    """The checkpoint of a file, if the configuration in its folder shows that it is quantized; otherwise None.

    Raises CheckpointError for an unknown kind of quantization.
    """
    where = Path(path) if isinstance(path, str) else path
    config = _config(where.parent)
    found = find_config(config, str(where.parent / CONFIG))
    if found is None or (config.get("model_type"), found.method) in _BY_CONVERTER:
        return None
    require_known(found)
    checkpoint = open_located(where.parent)
    if str(where) not in checkpoint.files:
        checkpoint = open_located(where)
    assert isinstance(checkpoint, DecodedCheckpoint)  # otherwise opening it would have raised
    return checkpoint


def checkpoint_files(path: str) -> list[str]:
    """The files that determine the content of a weight file's checkpoint: its index and all shards, or the file itself.

    Loaders open one shard after the other. Hashing all at the first takes as long as the slowest in several threads.
    Raises CheckpointError if an index in its folder cannot be read, or a shard is missing.
    """
    if path.endswith(".gguf"):
        with open_located(Path(path)) as checkpoint:
            return content_files(checkpoint)
    folder = Path(path).parent
    for index in sorted((*folder.glob("*.safetensors.index.json"), *folder.glob("*.weights.json"))):
        shards: dict[Location, None] = {}
        for names in weight_map(read_json_file(index), index).values():
            listed = cast("list[Any]", names) if isinstance(names, list) else [names]
            shards |= dict.fromkeys(shard_path(index, name) for name in listed)
        if Path(path) in shards:
            require_shards(index, list(shards))
            return [str(index), *map(str, shards)]
    return [path]


class Leftovers:
    """Tensors in the folders of the opened files that nothing requested, also in shards that were not opened."""

    def __init__(self, files: Mapping[str, Any]) -> None:  # path to `OpenedFile`
        kinds = SafetensorsFile | DecodedCheckpoint  # includes GGUF files
        self._files: dict[Location, Any] = {f.where: f for f in files.values() if isinstance(f.tensors, kinds)}
        self._by_folder: dict[Location, dict[Location, list[str]]] = {}  # folder, or GGUF file → file → names
        for path, file in self._files.items():
            folder = path if isinstance(file.tensors, GgufModel) else path.parent
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
            config = _config(folder) if gguf is None else gguf.settings
            if not (config.get("model_type") or config.get("architecture")):
                continue  # a file that the user's own code reads in part
            on_purpose = _on_purpose(config)
            names = [
                name
                for path, names in unused.items()
                for name in names
                if not on_purpose.fullmatch(name)
                and (path not in self._files or self._files[path].tensors[name].size)  # or it is empty
            ]
            if names:
                messages.append(
                    f"{folder} holds {len(names)} tensors that KerasHub's converter did not request: {listed(names)}"
                    + (". Is its config.json that of another model?" if gguf is None else "")
                )
        return messages


def _on_purpose(config: Mapping[str, Any]) -> re.Pattern[str]:
    """Matches the names of tensors that converters omit for a model with this configuration."""
    kind = str(config.get("model_type", ""))
    patterns = [*_ANY, *_HEADS, *_BY_TYPE.get(kind, ())]
    text = config.get("text_config")
    text = text if isinstance(text, dict) else {}
    tied = [holder["tie_word_embeddings"] for holder in (config, text) if "tie_word_embeddings" in holder]
    if any(tied) or not tied:
        patterns.append(r"(?:.*\.)?(?:lm_head(?:\.out_proj)?\.weight|embed_out\.weight)")
    # Layers that share the keys and values of an earlier one have none, but files contain them.
    shared, layers = (text.get(key, config.get(key)) for key in ("num_kv_shared_layers", "num_hidden_layers"))
    if kind.startswith(("gemma3n", "gemma4")) and isinstance(shared, int) and isinstance(layers, int):
        numbers = "|".join(map(str, range(max(layers - shared, 0), layers)))
        if numbers:
            patterns.append(rf"(?:.*\.)?layers\.(?:{numbers})\.self_attn\.(?:k_proj|v_proj|k_norm|v_norm)\.weight")
    return _compiled("|".join(f"(?:{pattern})" for pattern in patterns))


_compiled = functools.lru_cache(maxsize=16)(re.compile)


def _config(folder: Location) -> dict[str, Any]:
    """The configuration in a folder; empty if unreadable, since KerasHub raises itself where it needs it."""
    try:
        return read_config(folder)
    except CheckpointError:
        return {}


def _by_shard(folder: Location, opened: Iterable[Location]) -> dict[Location, list[str]]:
    """File → names of its tensors, according to an index that names one of the opened files."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return {}
    shards: dict[Location, list[str]] = {}
    for name, shard in weight_map(read_json_file(index), index).items():
        shards.setdefault(shard_path(index, shard), []).append(name)
    return shards if set(opened).intersection(shards) else {}
