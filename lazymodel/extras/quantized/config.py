"""The quantization that a `config.json` declares, and the contents of a quantized checkpoint.

Finds the quantization, the dtype of decoded tensors, and the modules that were not converted; the methods interpret
all other entries. Each method takes the tensors that it knows, and makes plain tensors of them: here are the stored
tensors that no method has taken yet, the plain ones that were made, and the errors for contradictions.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import reprlib
from collections.abc import Callable, KeysView, Mapping, Sequence
from typing import Any, NoReturn, Protocol, cast

import ml_dtypes
import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._tensors.lazy import LazyTensor
from lazymodel.checkpoints._hugging_face import Plain

ADVICE = (
    "This quantized form is not read: load a dequantized copy, such as the original model. Where transformers "
    "computes with it, `layer(torch.eye(inputs, dtype=model.dtype))`, less the bias, is the weight of a linear layer, "
    "transposed"
)
_KEYS = ("quantization_config", "compression_config", "quantization")
_MLX = ("bits", "group_size")  # entries of `quantization`, which other tools may use for something else
_IGNORED = ("modules_to_not_convert", "ignored_layers", "ignore", "llm_int8_skip_modules", "exclude_modules")
DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
_MOST_WAYS = 10**7  # takes a tenth of a second; four wildcards have two millions for names of 80 characters
_MOST_PARTS = 32  # of a name for which all ranges of parts are looked up
_LONGEST = 1000  # characters of a regular expression
_TOKEN = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?(?:[:=!]|<[=!]|P<\w+>)|\(\??|(?:[*+]|\{\d*,?\d*\})[?+]?|\)[?*+{]?|[?|]", re.S
)


@dataclasses.dataclass(frozen=True)
class Config:
    """The quantization of a checkpoint.

    Attributes:
        method: The name of the form, `quant_method`.
        options: All of its entries.
        dtype: The dtype to which decoded tensors are rounded: the model's own dtype, or bfloat16 if none is declared.
        file: The path of the configuration, and the key in it that has the quantization.
        model_type: The kind of model, if it is stated.
    """

    method: str
    options: Mapping[str, Any]
    dtype: np.dtype[Any]
    file: str
    _ignored: tuple[str, ...] = ()
    model_type: str = ""

    def ignores(self, module: str) -> bool:
        """Returns True if a module, or one that contains it, was not converted."""
        # Lists of hundreds of entries are searched for tens of thousands of modules.
        names, patterns = self._entries
        parts = module.split(".")
        if len(parts) > _MOST_PARTS:
            return any(matches(entry, module) for entry in self._ignored)
        ranges = itertools.combinations(range(len(parts) + 1), 2)
        return any(".".join(parts[i:j]) in names for i, j in ranges) or any(matches(each, module) for each in patterns)

    @functools.cached_property
    def _entries(self) -> tuple[set[str], list[str]]:
        """The entries that are names or parts of names, and the regular expressions."""
        patterns = [entry for entry in self._ignored if entry.startswith("re:")]
        return {_name(entry) for entry in self._ignored if not entry.startswith("re:")} - {""}, patterns

    def get(self, key: str, default: Any = None) -> Any:
        return self.options.get(key, default)

    def count(self, key: str, default: int | None = None) -> int:
        """Returns an entry that has to be a positive integer."""
        value = self.options.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.reject(f"a positive integer as {key}", repr(value))
        return value

    def reject(self, expected: str, found: str) -> NoReturn:
        raise CheckpointError(f"{self.file}: expected {expected}, found {found}. {ADVICE}.")


def matches(entry: str, module: str) -> bool:
    """Returns True if an entry of a list of modules matches one: its name, a part of it between dots, or, after `re:`,
    a regex.

    As in transformers and compressed-tensors, except that no part of a name between dots is divided.
    """
    if entry.startswith("re:"):
        try:
            quantifiers, ways = _ways(entry[3:])
            if math.comb(len(module) + quantifiers, quantifiers) * ways > _MOST_WAYS:
                raise OverflowError("matching it could take forever")
            return _compiled(entry[3:]).match(module) is not None
        except (re.error, OverflowError, RecursionError) as error:
            raise CheckpointError(
                f"module {reprlib.repr(module)}: expected a regular expression to match it with, found "
                f"{reprlib.repr(entry)} ({error}). Write it with fewer wildcards and no repeated groups, or list names"
            ) from error
    return bool(name := _name(entry)) and f".{name}." in f".{module}."


def _name(entry: str) -> str:
    """The module that an entry names; the entry is not a regular expression."""
    return entry.removesuffix("*").removesuffix(".").removeprefix("*").removeprefix(".")


# A configuration may have a pattern for each of thousands of modules, more than `re` keeps.
_compiled = functools.lru_cache(1 << 14)(re.compile)


@functools.lru_cache(1 << 14)
def _ways(pattern: str) -> tuple[int, float]:
    """The number of a pattern's quantifiers, each of which may match any part of a name, and an upper limit of the
    number of ways to choose its alternatives. The limit is infinite if groups repeat, or if the pattern is long or has
    flags.
    """
    if len(pattern) > _LONGEST:
        return 0, math.inf
    quantifiers, ways, alternatives = 0, 1, [1]
    for token in _TOKEN.findall(pattern):
        if token in (")", ")?"):
            ways *= alternatives.pop() if len(alternatives) > 1 else 1  # else it is not a valid expression
        if token in ("?", ")?"):
            ways *= 2
        elif token[0] in "*+{":
            quantifiers += 1
        elif token in ("(?", ")*", ")+", "){"):
            return 0, math.inf
        elif token[0] == "(":
            alternatives.append(1)
        elif token == "|":
            alternatives[-1] += 1
    return quantifiers, ways * math.prod(alternatives)


def find_config(config: Mapping[str, Any], file: str) -> Config | None:
    """The quantization of the weights that a configuration declares; None if they are not quantized."""
    found: list[tuple[str, dict[str, Any]]] = []
    for holder in (config, config.get("text_config")):
        for key in _KEYS:
            value = cast("dict[str, Any]", holder).get(key) if isinstance(holder, dict) else None
            if key == "quantization" and not (isinstance(value, dict) and all(each in value for each in _MLX)):
                continue
            if value and not isinstance(value, dict):
                raise CheckpointError(f"{file}: expected an object as {key}, found a {type(value).__name__}")
            if value and value not in [other for _, other in found]:
                found.append((key, cast("dict[str, Any]", value)))
    if not found:
        return None
    if len(found) > 1:
        raise CheckpointError(
            f"{file}: expected one quantization, found {len(found)} that differ: {', '.join(key for key, _ in found)}"
        )
    key, options = found[0]
    inner = options.get("quantization_config")
    if isinstance(inner, dict):  # older versions of compressed-tensors
        options = {**cast("dict[str, Any]", inner), **{k: v for k, v in options.items() if k != "quantization_config"}}
    method = options.get("quant_method") or (
        "bitsandbytes" if "load_in_8bit" in options
        else "mlx" if all(each in options for each in _MLX)
        else "an unknown method"
    )  # fmt: skip
    if method == "bitsandbytes" and options.get("load_in_8bit") is options.get("load_in_4bit") is False:
        return None
    ignored, kind = _ignored(options, file), str(config.get("model_type") or "")
    return Config(str(method), options, _dtype(config), f"{file}: {key}", ignored, kind)


def _ignored(options: Mapping[str, Any], file: str) -> tuple[str, ...]:
    entries: list[str] = []
    for key in _IGNORED:
        value = options.get(key) or []
        if not isinstance(value, list) or not all(isinstance(each, str) for each in cast("list[Any]", value)):
            raise CheckpointError(f"{file}: expected a list of modules as {key}, found {value!r}")
        entries += cast("list[str]", value)
    return tuple(entries)


def _dtype(config: Mapping[str, Any]) -> np.dtype[Any]:
    for holder in (config, config.get("text_config")):
        for key in ("dtype", "torch_dtype"):
            value = cast("dict[str, Any]", holder).get(key) if isinstance(holder, dict) else None
            if isinstance(value, str) and (name := value.removeprefix("torch.")) in DTYPES:
                return DTYPES[name]
    return DTYPES["bfloat16"]


class StoredTensors(Protocol):
    """A checkpoint as it is stored; `describe` gives the dtype, shape and file of a tensor before it is read."""

    @property
    def metadata(self) -> Mapping[str, Any] | None: ...
    def keys(self) -> KeysView[str]: ...
    def __getitem__(self, name: str, /) -> LazyTensor: ...
    def describe(self, name: str) -> Any: ...


class Contents:
    """A quantized checkpoint, while methods take the tensors that they know.

    Attributes:
        config: Its quantization.
        left: The names of tensors that no method has taken.
        plain: The tensors made of the others; a name that is also in `left` belongs to a tensor that is plain already.
    """

    def __init__(self, stored: StoredTensors, config: Config) -> None:
        self.config, self._stored = config, stored
        self.left = dict.fromkeys(stored.keys())
        self.plain: dict[str, Plain] = {}

    def names(self, ending: str) -> list[str]:
        """The names in `left` that end in this, without the ending."""
        return [name.removesuffix(ending) for name in self.left if name.endswith(ending)]

    def has(self, name: str) -> bool:
        return name in self.left

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._stored.metadata or {}

    def header(self, name: str) -> Any:
        return self._stored.describe(name)

    def tensor(self, name: str) -> LazyTensor:
        return self._stored[name]

    def require(self, name: str, *names: str) -> None:
        """Raises CheckpointError if tensors that belong to this one are missing."""
        if missing := [other for other in names if other not in self.left]:
            self.reject(name, f"{', '.join(map(repr, missing))} alongside", "none; open all shards of the checkpoint")

    def expect(self, name: str, shape: Sequence[int], *kinds: str) -> None:
        """Raises CheckpointError if a stored tensor has another shape, or a dtype that is not one of these."""
        header = self.header(name)
        if kinds and header.dtype.name not in kinds:
            self.reject(name, " or ".join(kinds), header.dtype.name)
        if tuple(header.shape) != tuple(shape):
            self.reject(name, f"shape {tuple(shape)}", str(tuple(header.shape)))

    def matrix(self, name: str, *kinds: str) -> tuple[int, int]:
        """Returns the shape of a stored matrix. Raises CheckpointError if it is not a matrix, is empty, or has a dtype
        that is not one of these.
        """
        shape = self.header(name).shape
        if len(shape) != 2 or 0 in shape:
            self.reject(name, "a matrix that is not empty", f"shape {tuple(shape)}")
        self.expect(name, shape, *kinds)
        return shape[0], shape[1]

    def add(self, name: str, parts: Sequence[str], shape: Sequence[int], make: Callable[[], Any]) -> None:
        """Records a plain tensor that is made of stored ones, the first of which is the largest. `make` returns it in
        float32, or in a narrower dtype to which it is rounded first.
        """
        module = name.rpartition(".")[0]
        if self.config.ignores(module):
            self.reject(parts[0], "a plain tensor, as the configuration lists the module as not converted", "parts")
        if name in self.plain or (name in self._stored.keys() and name not in parts):  # noqa: SIM118
            self.reject(parts[0], f"parts of {name!r}, or the tensor itself", "both")
        if not math.prod(shape):
            self.reject(parts[0], "elements", f"a tensor of shape {tuple(shape)}")
        file, target = self.header(parts[0]).file, self.config.dtype
        self.plain[name] = Plain(lambda: make().astype(target), file, target, tuple(shape))
        self.drop(*parts)

    def add_unread(self, name: str, parts: Sequence[str], make: Callable[[], LazyTensor]) -> None:
        """Records a plain tensor whose dtype and shape are known only after reading."""
        self.add(name, parts, (1,), make)
        self.plain[name] = Plain(make, self.plain[name].file)

    def drop(self, *names: str) -> None:
        """Removes the names of tensors that were interpreted."""
        for name in names:
            self.left.pop(name, None)

    def reject(self, name: str, expected: str, found: str) -> NoReturn:
        file = self._stored.describe(name).file if name in self._stored.keys() else self.config.file  # noqa: SIM118
        raise CheckpointError(
            f"tensor {name!r} of {file}: expected {expected}, found {found}; {self.config.file} states that the "
            f"weights are quantized with {self.config.method!r}"
        )
