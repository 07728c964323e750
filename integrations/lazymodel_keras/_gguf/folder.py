"""A GGUF file as the Hugging Face folder of its model: what KerasHub's loaders and converters ask a folder for.

Configuration and vocabulary are written into a temporary folder when they are asked for. Weights never are: what is
handed out for them is a path in that folder at which nothing is, and `tensors` are what stands there.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from lazymodel import Checkpoint, open_checkpoint
from lazymodel._quantized.contents import Plain
from lazymodel._remote.path import Location, RemotePath
from lazymodel._remote.url import is_url
from lazymodel.checkpoints._decoded import CONFIG, DecodedCheckpoint
from lazymodel_keras import _upstream
from lazymodel_keras._gguf.architectures import Architecture, Settings, architecture, plain_tensors, settings
from lazymodel_keras._gguf.metadata import Metadata
from lazymodel_keras._gguf.vocabulary import vocabulary_files

_SUFFIX = ".gguf"
_WEIGHTS = "model.safetensors"


def is_gguf(preset: Any) -> bool:
    """Whether a preset is a GGUF file, its URL, or a folder of such files and of nothing else that says what it is."""
    if not isinstance(preset, str):
        return False
    if (urlsplit(preset).path if is_url(preset) else preset).endswith(_SUFFIX):
        return True
    return os.path.isdir(preset) and not (Path(preset) / CONFIG).exists() and any(Path(preset).glob(f"*{_SUFFIX}"))


class GgufModel(DecodedCheckpoint):
    """The tensors of a GGUF file by their names on Hugging Face, and those that have none by their own.

    Attributes:
        settings: The model's configuration.
    """

    def __init__(self, stored: Checkpoint, plain: dict[str, Plain], left: dict[str, None], settings: Settings) -> None:
        super().__init__(stored, plain, left, stored.path)
        self.settings = settings


class GgufFolder:
    """A GGUF file, in one part or several, and the folder in which its small files are.

    Attributes:
        where: The file, or the first part.
        row: The kind of model.
    """

    def __init__(self, where: Location, own: Path) -> None:
        self.own, self._given = own, where
        self._stored = open_checkpoint(cast(Any, where))
        self.where = self._stored.files[0]
        self._metadata = Metadata(self.where, self._stored.metadata or {})
        self.choose(_upstream.hub_models().Backbone)

    def choose(self, cls: Any) -> None:
        """Takes the file for the model that a class of KerasHub is for, as far as it says that of several."""
        self.row: Architecture = architecture(self._metadata, cls, _upstream.hub_models())

    def file(self, name: str) -> str:
        """The path of a file in the folder, which is written there; FileNotFoundError where there is none."""
        path = self.own / name
        if name == CONFIG:
            path.write_text(json.dumps(self._settings()))
        elif name in (files := vocabulary_files(self.row)):
            path.write_bytes(files[name](self._metadata, self.row))
        elif name != _WEIGHTS:
            raise FileNotFoundError(f"there is no {name} in {self.where}")
        return str(path)

    def location(self, _: str) -> str | RemotePath:
        """What a path in the folder stands for."""
        return self._given if isinstance(self._given, RemotePath) else self.where

    def tensors(self, *, fresh: bool) -> GgufModel:
        """The weights; `fresh` opens the file once more."""
        stored = open_checkpoint(cast(Any, self._given)) if fresh else self._stored
        found = self._settings()
        return GgufModel(stored, *plain_tensors(self.row, found, stored), found)

    def _settings(self) -> Settings:
        return settings(self.row, self._metadata, self._stored)
