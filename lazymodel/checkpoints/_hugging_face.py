"""What `config.json` of a Hugging Face folder says: the plain checkpoint that a quantized one encodes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from lazymodel._extras import extra
from lazymodel._remote.path import Location
from lazymodel._tensors.lazy import LazyTensor
from lazymodel.checkpoints._checkpoint import Checkpoint, TensorHeader
from lazymodel.checkpoints._untrusted import read_json_file

CONFIG = "config.json"
_MODELOPT = "hf_quant_config.json"


@dataclasses.dataclass(frozen=True)
class Plain:
    """A tensor of the plain checkpoint.

    Attributes:
        make: Makes the tensor, as a lazy tensor.
        file: The file that has most of it.
        dtype: Its dtype; None if the headers do not contain its dtype and shape.
        shape: Its shape.
    """

    make: Callable[[], LazyTensor]
    file: str
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] = ()


class DecodedCheckpoint(Checkpoint):
    """A quantized checkpoint with the names and shapes of the plain one, decoded while it is read.

    Attributes:
        stored: The checkpoint as it is stored.
        config: The path of the configuration that says how.
    """

    def __init__(self, stored: Checkpoint, plain: dict[str, Plain], left: dict[str, None], config: str) -> None:
        super().__init__(stored.path, [*left, *plain], stored._sources)
        self.stored, self.config, self._plain = stored, config, plain
        self.format, self.metadata, self.aliases = stored.format, stored.metadata, stored.aliases

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


def is_hugging_face(config: Mapping[str, Any]) -> bool:
    """Returns True if a configuration is one of transformers or timm, or declares a quantization."""
    kinds = ("model_type", "architectures", "architecture", "quantization_config", "compression_config")
    return any(config.get(kind) for kind in kinds)


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
        plain, left = extra("plain_tensors")(stored, config, str(folder / CONFIG))
    except BaseException:
        stored.close()
        raise
    return DecodedCheckpoint(stored, plain, left, str(folder / CONFIG)) if plain else stored
