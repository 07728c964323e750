"""Quantized checkpoints of Hugging Face as plain ones: `DecodedCheckpoint`, as `config.json` alongside says."""

from __future__ import annotations

import math
from typing import Any, cast

from lazymodel._quantized.contents import Plain
from lazymodel._quantized.plain import is_hugging_face, plain_tensors
from lazymodel._remote.path import Location
from lazymodel._tensors.lazy import LazyTensor
from lazymodel.checkpoints._checkpoint import Checkpoint, TensorHeader
from lazymodel.checkpoints._untrusted import read_json_file

CONFIG = "config.json"
_MODELOPT = "hf_quant_config.json"


class DecodedCheckpoint(Checkpoint):
    """A quantized checkpoint with the names and shapes of the plain one, decoded while it is read.

    Attributes:
        stored: The checkpoint as it is stored.
        config: The path of the configuration that says how.
    """

    def __init__(self, stored: Checkpoint, plain: dict[str, Plain], left: dict[str, None], config: str) -> None:
        super().__init__(stored.path, [*left, *plain], stored._sources)
        self.stored, self.config, self._plain = stored, config, plain
        self.format, self.metadata = stored.format, stored.metadata

    def _tensor(self, name: str) -> LazyTensor:
        return self._plain[name].make() if name in self._plain else self.stored[name]

    def describe(self, name: str) -> TensorHeader:
        plain = self._plain.get(name)
        if plain is None:
            return self.stored.describe(name)
        if plain.dtype is None:
            return super().describe(name)
        return TensorHeader(plain.dtype, plain.shape, math.prod(plain.shape) * plain.dtype.itemsize, plain.file)

    def close(self) -> None:
        self.stored.close()


def read_config(folder: Location) -> dict[str, Any]:
    """The configuration of a Hugging Face folder; an empty dict where there is none."""
    file = folder / CONFIG
    config = read_json_file(file) if file.exists() else {}
    if is_hugging_face(config) and not config.get("quantization_config") and (older := folder / _MODELOPT).exists():
        inner = read_json_file(older).get("quantization")
        if isinstance(inner, dict):
            return {**config, "quantization_config": {"quant_method": "modelopt", **cast("dict[str, Any]", inner)}}
    return config


def decoded(stored: Checkpoint, folder: Location) -> Checkpoint:
    """A safetensors checkpoint as the configuration alongside says that it is meant; the same where that says nothing.

    Raises CheckpointError where it is quantized in a way that is not known, or looks so and nothing says how.
    """
    config = read_config(folder)
    if not is_hugging_face(config):
        return stored
    try:
        plain, left = plain_tensors(stored, config, str(folder / CONFIG))
    except BaseException:
        stored.close()
        raise
    return DecodedCheckpoint(stored, plain, left, str(folder / CONFIG)) if plain else stored
