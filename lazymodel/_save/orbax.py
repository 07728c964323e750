"""An Orbax item to write without Orbax: plain zarr arrays in folders of their own, and the `_METADATA` of their tree.

A chunk is a file of a tensor's bytes, not compressed, since weights hardly can be; so chunks are written like files of
any other format, by the process that holds their bytes and within the budget. Format: zarr version 2, as Orbax writes
with `use_ocdbt=False` (https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lazymodel._errors import LazyModelError
from lazymodel._save.destination import SavedFile, WholeFolder
from lazymodel._show.text import listed
from lazymodel._tensors.boxes import grid, whole_box
from lazymodel._tensors.lazy import LazyTensor
from lazymodel.checkpoints._orbax import METADATA, foreign_entries, zero_size_metadata
from lazymodel.checkpoints._safetensors import FLOAT4
from lazymodel.checkpoints._untrusted import is_numpys

_CHUNK = 8 << 20  # bytes: reading a part of a chunk reads all of it, and some hundred files a second cost nothing
_DICT = 2  # Orbax' type of a key of a dict


def layout(tensors: Mapping[str, LazyTensor]) -> list[SavedFile]:
    """The files of an item: those that describe it, and one for each chunk of a tensor."""
    inner = {name[:end] for name in tensors for end in range(len(name)) if name[end] == "/"}
    if both := sorted(inner & tensors.keys()):
        raise LazyModelError(f"{both[0]!r}: Orbax saves a tree, and this path is also the beginning of another")
    leaves: dict[str, Any] = {}
    stored: dict[str, str] = {}
    files: list[SavedFile] = []
    for name, tensor in tensors.items():
        keys = tuple(name.split("/"))
        if tensor.dtype == FLOAT4:
            raise LazyModelError(f"{name!r}: Orbax has no 4-bit floats as safetensors packs them; cast it")
        kind = "np.ndarray" if tensor.size else "None"  # Orbax saves no arrays without elements
        leaves[str(keys)] = {
            "key_metadata": [{"key": key, "key_type": _DICT} for key in keys],
            "value_metadata": {"value_type": kind, "skip_deserialize": not tensor.size},
        }
        if not tensor.size:
            continue
        folder = ".".join(keys)
        if folder in stored:
            raise LazyModelError(
                f"{name!r} and {stored[folder]!r} would be one array, {folder!r}, in Orbax' folder; rename one"
            )
        if len(folder.encode()) > 255 or "\0" in folder:
            raise LazyModelError(f"{name[:80]!r} cannot be the name of a folder; rename it with a mapping")
        stored[folder] = name
        files += _array(folder, name, tensor)
    about = {
        "tree_metadata": leaves,
        "use_ocdbt": False,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": zero_size_metadata(tensors) or None,
    }
    now = time.time_ns()
    step = {"item_handlers": None, "init_timestamp_nsecs": now, "commit_timestamp_nsecs": now, "custom_metadata": {}}
    return [_text(METADATA, about), _text("_CHECKPOINT_METADATA", step), *files]


class OrbaxDestination(WholeFolder):
    """A folder of Orbax."""

    def _there(self) -> Path | None:
        if not self.path.exists():
            return None
        if foreign := foreign_entries(self.path):
            raise LazyModelError(
                f"{self.path} holds files that are not part of an Orbax checkpoint and would be removed with it: "
                f"{listed(foreign)}. Save to another folder, or move these away"
            )
        return self.path


def _text(name: str, content: Any) -> SavedFile:
    text = json.dumps(content).encode()
    return SavedFile(name, text, (), len(text))


def _array(folder: str, name: str, tensor: LazyTensor) -> list[SavedFile]:
    """A tensor's description and chunks, each of which is a range of its elements in C order."""
    chunk, limit = list(tensor.shape), _CHUNK // tensor.itemsize
    for axis in range(tensor.ndim):
        inner = math.prod(tensor.shape[axis + 1 :])
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
    for box in grid(whole_box(tensor.shape), chunk):
        index = ".".join(str(part.start // step) for part, step in zip(box, chunk, strict=True)) or "0"
        files.append(SavedFile(f"{folder}/{index}", b"", ((name, tensor.box(box), 0),), nbytes))
    return files
