"""Quantized checkpoints of Hugging Face as plain ones: `DecodedCheckpoint`, of what `config.json` beside them says."""

from __future__ import annotations

import math
from typing import Any

from lazymodel._quantized.contents import Plain
from lazymodel._quantized.plain import is_hugging_face, plain_tensors, with_older_modelopt
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

    def file_of(self, name: str) -> str:
        """The path of the file that has a tensor, or most of it."""
        return self._plain[name].file if name in self._plain else self.stored.describe(name).file

    def close(self) -> None:
        self.stored.close()


class DecodedFile(Checkpoint):
    """Of a decoded checkpoint the tensors that are in one of its files, or most of them; what they take of others too.

    Attributes:
        whole: The checkpoint.
    """

    def __init__(self, whole: DecodedCheckpoint, file: str) -> None:
        super().__init__(file, [name for name in whole if whole.file_of(name) == file], [])
        self.whole, self.format, self.metadata = whole, whole.format, whole.metadata

    def _tensor(self, name: str) -> LazyTensor:
        return self.whole[name]

    def describe(self, name: str) -> TensorHeader:
        return self.whole.describe(name)

    def close(self) -> None:
        self.whole.close()


def read_config(folder: Location) -> dict[str, Any]:
    """What the configuration of a Hugging Face folder says; an empty dict where there is none."""
    file = folder / CONFIG
    config = read_json_file(file) if file.exists() else {}
    if is_hugging_face(config) and not config.get("quantization_config") and (older := folder / _MODELOPT).exists():
        return with_older_modelopt(config, read_json_file(older))
    return config


def decoded(stored: Checkpoint, folder: Location) -> Checkpoint:
    """A safetensors checkpoint as what the configuration beside it says it is; the same where that says nothing.

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
