"""What a GGUF file says of itself, read with its type checked: hostile or odd entries are one error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from lazymodel import CheckpointError

_ARCHITECTURE = "general.architecture"
_REQUIRED: Any = object()
_KINDS = {int: "a whole number", float: "a number", str: "a text", list: "a list"}


class Metadata:
    """The metadata of a file, by keys that leave out the architecture's name.

    Attributes:
        file: The path of the file, for messages.
        architecture: llama.cpp's name of it.
    """

    def __init__(self, file: str, entries: Mapping[str, Any]) -> None:
        self.file, self._entries = file, entries
        self.architecture: str = self._checked(_ARCHITECTURE, str, _REQUIRED)

    def of_model(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        """An entry of the architecture: `block_count` for `llama.block_count`."""
        return self._checked(f"{self.architecture}.{key}", kind, default)

    def of_tokenizer(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        """An entry of the tokenizer: `tokens` for `tokenizer.ggml.tokens`."""
        return self._checked(f"tokenizer.ggml.{key}", kind, default)

    def refuse(self, key: str, expected: str, found: Any) -> NoReturn:
        """Raises CheckpointError for an entry that is not what it must be."""
        raise CheckpointError(f"{self.file}: expected {key} of its metadata to be {expected}, found {found}")

    def _checked(self, key: str, kind: type, default: Any) -> Any:
        value = self._entries.get(key, default)
        if value is _REQUIRED:
            self.refuse(key, _KINDS[kind], "no such entry")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind is float and number:
            # What was 1e-6 before it was stored as a float32 is that again.
            return float(str(np.float32(value)) if np.float32(value) == value else value)
        if value is default or (isinstance(value, kind) and (number or kind not in (int, float))):
            return value
        found = f"a list of {len(value)}" if isinstance(value, list) else repr(value)
        self.refuse(key, _KINDS.get(kind, "true or false"), found)
