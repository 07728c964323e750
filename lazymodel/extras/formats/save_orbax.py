"""An Orbax item to write without Orbax: plain zarr arrays in folders of their own, and the `_METADATA` of their tree.

A chunk is a file of a tensor's bytes, not compressed, since weights hardly can be; so chunks are written like files of
any other format, by the process that holds their bytes and within the budget. Format: zarr version 2, as Orbax writes
with `use_ocdbt=False` (https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sized
from typing import Any, TypeAlias, cast

import jax
import numpy as np

from lazymodel._abstract.adapters import adapters
from lazymodel._abstract.framework import ModelSpec
from lazymodel._abstract.variable import ARRAYS, NUMBERS, as_array, path_text
from lazymodel._errors import LazyModelError
from lazymodel._remote.path import LocalPath
from lazymodel._save.disk import WholeFolder
from lazymodel._save.files import SavedFile, SaveOptions
from lazymodel._show.text import listed
from lazymodel._tensors.boxes import grid, whole_box
from lazymodel._tensors.lazy import LazyTensor
from lazymodel.checkpoints._untrusted import is_numpys
from lazymodel.extras.formats.orbax import METADATA, ZARR_DTYPES, foreign_entries

_CHUNK = 8 << 20  # bytes: reading a part of a chunk reads all of it, and some hundred files a second cost nothing
_SEQUENCE, _DICT = 1, 2  # Orbax' types of keys: of a list or tuple, and of a dict or a field

_ALONE = (("value", _DICT),)  # of a tree that is one array

Keys: TypeAlias = "tuple[tuple[str, int], ...]"  # of a leaf, each with its type


class _Path(str):
    """A variable's path in place of its value."""


def by_keys(model: Any, arrays: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[Keys, Any] | None]:
    """Arrays under the names that Orbax gives to the leaves of a tree, and the leaves by their keys, empty containers
    among them; the arrays as they are, and None, for what is not a tree.

    Objects of frameworks are their states, which are what their users restore into.
    """
    if isinstance(model, ModelSpec):
        model = model.framework.structure({path: _Path(path) for path in arrays})
    for adapter in adapters():
        states = getattr(adapter, "states", None)  # adapters elsewhere may not have it
        model = model if states is None else states(model)

    def is_leaf(node: Any) -> bool:
        return bool(_empty(node))

    leaves = jax.tree_util.tree_flatten_with_path(model, is_leaf=is_leaf)[0]
    tree = {tuple(key for part in keys for key in _keys(part)) or _ALONE: leaf for keys, leaf in leaves}
    kept = {keys: leaf for keys, leaf in tree.items() if isinstance(leaf, (_Path, *ARRAYS, *NUMBERS))}
    found = {
        "/".join(key for key, _ in keys): arrays[leaf] if isinstance(leaf, _Path) else as_array(leaf)
        for keys, leaf in kept.items()
    }
    return (found, tree) if len(found) == len(kept) >= len(arrays) else (arrays, None)


def _keys(part: Any) -> Iterator[tuple[str, int]]:
    if isinstance(part, jax.tree_util.SequenceKey):
        yield str(part.idx), _SEQUENCE
    else:
        yield from ((key, _DICT) for key in path_text([part]).split("/"))


def _empty(node: Any) -> str:
    """Orbax' type of an empty container, or of None; an empty string for anything else."""
    if node is None:
        return "None"
    if not isinstance(node, (Mapping, list, tuple)) or len(cast("Sized", node)):
        return ""
    if isinstance(node, tuple):
        return "None" if hasattr(cast(Any, node), "_fields") else "Tuple"
    return "List" if isinstance(node, list) else "Dict"


def _layout(tensors: Mapping[str, LazyTensor], tree: Mapping[Keys, Any] | None) -> list[SavedFile]:
    """The files of an item: those that describe it, and one for each chunk of a tensor.

    `tree` has the tensors' keys, joined by `/` in their names, and empty containers; without it they are of dicts.
    """
    typed = {"/".join(key for key, _ in keys): keys for keys in tree or ()}
    inner = {name[:end] for name in tensors for end in range(len(name)) if name[end] == "/"}
    if both := sorted(inner & tensors.keys()):
        raise LazyModelError(f"{both[0]!r}: Orbax saves a tree, and this path is also the beginning of another")
    described: dict[str, Any] = {}
    for name in tensors:
        keys = typed.get(name, tuple((key, _DICT) for key in name.split("/")))
        described |= _leaf(keys, "np.ndarray")
    for keys, leaf in (tree or {}).items():
        described |= _leaf(keys, kind) if (kind := _empty(leaf)) else {}
    stored: dict[str, str] = {}
    files: list[SavedFile] = []
    for name, tensor in tensors.items():
        if not is_numpys(tensor.dtype) and tensor.dtype.name not in ZARR_DTYPES:
            raise LazyModelError(
                f"{name!r}: Orbax' arrays have no dtype {tensor.dtype.name}; cast it, or save as safetensors"
            )
        folder = name.replace("/", ".")
        if folder in stored:
            raise LazyModelError(
                f"{name!r} and {stored[folder]!r} would be one array, {folder!r}, in Orbax' folder; rename one"
            )
        if len(folder.encode()) > 255 or "\0" in folder:
            raise LazyModelError(f"{name[:80]!r} cannot be the name of a folder; rename it with a mapping")
        stored[folder] = name
        files += _array(folder, name, tensor)
    about = {
        "tree_metadata": described,
        "use_ocdbt": False,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    now = time.time_ns()
    step = {"item_handlers": None, "init_timestamp_nsecs": now, "commit_timestamp_nsecs": now, "custom_metadata": {}}
    return [_text(METADATA, about), _text("_CHECKPOINT_METADATA", step), *files]


class OrbaxDestination(WholeFolder):
    """A folder of Orbax; `tree` is as of `by_keys`, or None for a dict of dicts."""

    def __init__(
        self, path: LocalPath, tensors: Mapping[str, LazyTensor], tree: Mapping[Keys, Any] | None, options: SaveOptions
    ) -> None:
        super().__init__(path, _layout(tensors, tree), options)

    def _there(self) -> LocalPath | None:
        if not self.path.exists():
            return None
        if foreign := foreign_entries(self.path):
            raise LazyModelError(
                f"{self.path} holds files that are not part of an Orbax checkpoint and would be removed with it: "
                f"{listed(foreign)}. Save to another folder, or move these away"
            )
        return self.path


def _leaf(keys: Keys, kind: str) -> dict[str, Any]:
    entry = {
        "key_metadata": [{"key": key, "key_type": key_type} for key, key_type in keys],
        "value_metadata": {"value_type": kind, "skip_deserialize": kind != "np.ndarray"},
    }
    return {str(tuple(key for key, _ in keys)): entry}


def _text(name: str, content: Any) -> SavedFile:
    text = json.dumps(content).encode()
    return SavedFile(name, text, (), len(text))


def _array(folder: str, name: str, tensor: LazyTensor) -> list[SavedFile]:
    """A tensor's description and chunks, each of which is a range of its elements in C order."""
    chunk, limit = list(tensor.shape), _CHUNK // tensor.itemsize
    for axis in range(tensor.ndim):
        inner = max(math.prod(tensor.shape[axis + 1 :]), 1)
        chunk[axis] = max(min(tensor.shape[axis], limit // inner), 1)
        if chunk[axis] > 1:
            break
    described = {
        "chunks": chunk,
        "compressor": None,
        "dimension_separator": ".",
        "dtype": np.lib.format.dtype_to_descr(tensor.dtype) if is_numpys(tensor.dtype) else tensor.dtype.name,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(tensor.shape),
        "zarr_format": 2,
    }
    nbytes = math.prod(chunk) * tensor.itemsize  # of the last one, too, which is filled up with zeros
    files = [_text(f"{folder}/.zarray", described)]
    for box in grid(whole_box(tensor.shape), chunk) if tensor.size else ():
        index = ".".join(str(part.start // step) for part, step in zip(box, chunk, strict=True)) or "0"
        files.append(SavedFile(f"{folder}/{index}", b"", ((name, tensor.box(box), 0),), nbytes))
    return files
