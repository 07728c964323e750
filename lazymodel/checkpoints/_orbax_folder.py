"""Orbax checkpoints on disk: which step a folder means, which item of it, and which leaves that has.

Layouts, as Orbax 0.11 and newer write them through its `ocp.*` and `ocp.v1` interfaces:

- A *root* holds steps: `12`, `step_12`, `checkpoint_0012`. Names with `.orbax-checkpoint-tmp` were never committed, and
  neither was a step whose `_CHECKPOINT_METADATA` has no commit time.
- A *step* holds items: `default`, `state`, `pytree`, or whatever the writer called them.
- An *item* holds a tree of arrays. `_METADATA` (JSON) lists the tree's leaves, `_strings.json` has those that are text,
  and every array is a zarr array, of version 2 or 3, named by its path joined with dots: folders in the item, or keys
  of the OCDBT database at `manifest.ocdbt` (https://google.github.io/tensorstore/kvstore/ocdbt/), into which the
  databases of several writers (`ocdbt.process_0`, …) are merged.

Orbax refuses to save arrays without elements. The tree has None where such an array belongs, which Orbax restores as
None, and the custom metadata of the tree says what is there: path, keys joined by `/` → dtype and shape.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from lazymodel._errors import CheckpointError
from lazymodel._remote.path import Location
from lazymodel._show.text import listed
from lazymodel._tensors.lazy import LazyTensor, lazy
from lazymodel.checkpoints._untrusted import counts, is_number, read_json_file, reading

METADATA = "_METADATA"
MANIFEST = "manifest.ocdbt"
DRIVERS = {".zarray": "zarr", "zarr.json": "zarr3"}  # the file that describes an array → tensorstore's driver for it
_PROCESS = "ocdbt.process_"  # what names of the databases of single writers begin with
_STEP_METADATA = "_CHECKPOINT_METADATA"
_V1_MARK = "orbax.checkpoint"
_COMMITTED = "commit_success.txt"
# Files that Orbax writes into an item or a step, in addition to arrays and named items.
_OWN = frozenset(
    (METADATA, _STEP_METADATA, MANIFEST, _V1_MARK, _COMMITTED, "_sharding", "_strings.json", "array_metadatas", "d")
)
_UNFINISHED = ".orbax-checkpoint-tmp"
_STEP = re.compile(r"(?:(.+)_)?(\d+)")
_ALONE = "value"  # the name of a tree that is one array, as in an abstract model
_ZERO_SIZE = "lazymodel_zero_size"

# Types of a tree's leaves: those that are zarr arrays, and those that are none. Others belong to a program's own
# handlers, and are tensors if they are stored as arrays.
_ARRAYS = frozenset(("jax.Array", "np.ndarray", "scalar"))
_TEXT_OR_EMPTY = frozenset(("string", "None", "Dict", "List", "Tuple", "NamedTuple"))


def find_item(folder: Location) -> Location | None:
    """The folder of arrays that a path means: itself, the only item of a step, or that of the newest committed step.

    None if this is nothing that Orbax wrote.
    """
    if not _is_item(folder) and not _is_step(folder):
        if steps := _steps(folder):
            folder = _newest(folder, steps)
        elif unfinished := [child.name for child in _folders(folder) if _UNFINISHED in child.name]:
            raise CheckpointError(
                f"{folder}: expected a committed Orbax checkpoint, found only unfinished ones "
                f"({listed(unfinished)}). Wait until saving has finished, or open another folder."
            )
    if _is_item(folder):
        _require_committed(folder)
        return folder
    items = [child for child in _folders(folder) if _is_item(child)]
    if not items and not _is_step(folder):
        return None
    _require_committed(folder)
    unfinished = [child.name for child in items if _UNFINISHED in child.name]
    arrays: list[Location] = []
    for child in items:
        if _UNFINISHED not in child.name:
            tree = read_tree(child)
            if tree is None or tree.stores_arrays or tree.empty:
                arrays.append(child)
    if len(arrays) > 1 and {child.name for child in arrays} == {"pytree", "assets"}:
        # Keras' callback keeps the model's files (vocabularies) as byte arrays alongside its variables.
        arrays = [child for child in arrays if child.name == "pytree"]
    if len(arrays) == 1:
        return arrays[0]
    if arrays:
        raise CheckpointError(
            f"{folder} has {len(arrays)} items that hold arrays; open one of "
            f"{', '.join(repr(str(child)) for child in arrays)}"
        )
    found = listed(sorted(child.name for child in _folders(folder)))
    hint = "Wait until saving has finished." if unfinished else "Copy the whole checkpoint again."
    raise CheckpointError(f"{folder}: expected an Orbax item that holds arrays, found {found or 'no folders'}. {hint}")


def foreign_entries(folder: Location) -> list[str]:
    """Names of the files and folders in a folder that are not part of the one Orbax item that it is or contains."""

    def own(path: Location) -> bool:
        if path.name in _OWN or path.name.startswith(_PROCESS):
            return True
        if not path.is_dir() or _STEP.fullmatch(path.name):  # a whole step is not a part of anything
            return False
        return _is_array(path) or (_is_item(path) and find_item(path.parent) == path)

    return sorted(child.name for child in folder.iterdir() if not own(child))


def _folders(folder: Location) -> list[Location]:
    """Folders in a folder, by name."""
    with reading(folder, "list"):
        return sorted(child for child in folder.iterdir() if child.is_dir())


def _is_array(folder: Location) -> bool:
    return any((folder / mark).exists() for mark in DRIVERS)


def _is_item(folder: Location) -> bool:
    """Returns True if a folder holds a tree of arrays, or the rest of one."""
    if (folder / METADATA).exists() or (folder / MANIFEST).exists():
        return True
    return any(child.name.startswith(_PROCESS) or _is_array(child) for child in _folders(folder))


def _is_step(folder: Location) -> bool:
    return (folder / _STEP_METADATA).exists() or (folder / _V1_MARK).exists()


def _steps(folder: Location) -> list[tuple[int, str, Location]]:
    """(number, prefix, folder) of every step in a folder, the newest first; unfinished ones are left out by name."""
    steps: list[tuple[int, str, Location]] = []
    for child in _folders(folder):
        match = _STEP.fullmatch(child.name)
        if match and (_is_step(child) or _is_item(child) or any(_is_item(inner) for inner in _folders(child))):
            steps.append((int(match[2]), match[1] or "", child))
    return sorted(steps, reverse=True)


def _newest(folder: Location, steps: list[tuple[int, str, Location]]) -> Location:
    prefixes = sorted({prefix for _, prefix, _ in steps})
    if len(prefixes) > 1:
        raise CheckpointError(
            f"{folder} has steps of several runs, with the prefixes {prefixes}; open one of "
            f"{listed(repr(str(path)) for *_, path in steps)}"
        )
    committed = [(number, path) for number, _, path in steps if _unfinished(path) is None]
    if not committed:
        raise CheckpointError(
            f"{folder}: expected a committed step, found {len(steps)} that were never committed, {steps[0][2].name} "
            "the newest. Wait until saving has finished, or open another folder."
        )
    same = [path.name for number, path in committed if number == committed[0][0]]
    if len(same) > 1:
        raise CheckpointError(f"{folder} has step {committed[0][0]} more than once: {same}; open one of these folders")
    return committed[0][1]


def _require_committed(folder: Location) -> None:
    if reason := _unfinished(folder):
        raise CheckpointError(
            f"{folder} is half written: expected a committed checkpoint, found that {reason}. Wait until saving has "
            "finished, or open another step."
        )


def _unfinished(folder: Location) -> str | None:
    """Why a folder is not a committed checkpoint, or None if it is."""
    if _UNFINISHED in folder.name:
        return f"its name has {_UNFINISHED!r}"
    metadata = folder / _STEP_METADATA
    if metadata.exists() and not (folder / _COMMITTED).exists():
        content = read_json_file(metadata)
        if "commit_timestamp_nsecs" in content and content["commit_timestamp_nsecs"] is None:
            return f"{_STEP_METADATA} has no commit time"
    return None


# What is in an item ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TreeLeaf:
    """A leaf of a tree: its path, and its type."""

    keys: tuple[str, ...]
    kind: str = "jax.Array"

    @property
    def name(self) -> str:
        """The name of its tensor."""
        return "/".join(self.keys) or _ALONE

    @property
    def stored_as(self) -> str:
        """The name of its array in the storage."""
        return ".".join(self.keys)


@dataclasses.dataclass(frozen=True)
class Tree:
    """The content of `_METADATA`: leaves, tensors without elements, and other fields."""

    leaves: list[TreeLeaf]
    empty: dict[str, LazyTensor]
    fields: dict[str, Any]

    @property
    def stores_arrays(self) -> bool:
        """True if any leaf is stored as an array, or may be."""
        return any(leaf.kind not in _TEXT_OR_EMPTY for leaf in self.leaves)

    def names(self, item: Location, arrays: Mapping[str, Any]) -> dict[str, str]:
        """Names of the tensors → names of their arrays in the storage, which are all of the arrays there must be."""
        names: dict[str, str] = {}
        owners: dict[str, tuple[str, ...]] = {}
        for leaf in self.leaves:
            if leaf.stored_as in arrays and leaf.kind not in _TEXT_OR_EMPTY:
                if leaf.stored_as in owners or leaf.name in names:
                    other = owners.get(leaf.stored_as) or owners[names[leaf.name]]
                    raise CheckpointError(
                        f"{item / METADATA}: expected paths that differ when their keys are joined by '.', as they are "
                        f"stored, and by '/', as they are named here; found {other} and {leaf.keys}. Rename one of "
                        "them and save again."
                    )
                names[leaf.name] = leaf.stored_as
                owners[leaf.stored_as] = leaf.keys
        if missing := [leaf.name for leaf in self.leaves if leaf.kind in _ARRAYS and leaf.stored_as not in arrays]:
            hint = "Copy the whole checkpoint again."
            if (item / "checkpoint").is_file():
                hint = "They are in the 'checkpoint' file of an old Orbax: restore it with Orbax and save it again."
            raise CheckpointError(
                f"{item}: expected {len(self.leaves)} arrays and values, found none stored for {len(missing)}: "
                f"{listed(missing)}. {hint}"
            )
        if twice := sorted(self.empty.keys() & names.keys()):
            raise CheckpointError(
                f"{item / METADATA}: expected each tensor once, found {twice[0]!r} twice; it is corrupt"
            )
        return names


def read_tree(item: Location) -> Tree | None:
    """The tree that `_METADATA` describes, if it is there."""
    file = item / METADATA
    if not file.exists():
        return None
    fields = read_json_file(file)
    tree = fields.pop("tree_metadata", None)
    if not isinstance(tree, dict):
        keys = listed(map(repr, sorted(fields)))
        raise CheckpointError(f"{file}: expected a 'tree_metadata' object, found keys {keys}")
    leaves: list[TreeLeaf] = []
    for path, entry in cast("dict[str, Any]", tree).items():
        try:
            keys = tuple(part["key"] for part in entry["key_metadata"])
            kind = entry["value_metadata"]["value_type"]
        except (TypeError, KeyError) as error:
            raise CheckpointError(
                f"{file}: expected 'key_metadata' and 'value_metadata' of leaf {path}, found {entry!r}; it is corrupt"
            ) from error
        if not isinstance(kind, str) or not all(isinstance(key, str) for key in keys):
            raise CheckpointError(f"{file}: expected text for keys and type of leaf {path}, found {entry!r}")
        leaves.append(TreeLeaf(keys, kind))
    return Tree(leaves, _zero_size_tensors(fields.get("custom_metadata"), file), fields)


def require_complete(item: Location, tree: Tree | None, files: list[str]) -> None:
    """Raises CheckpointError where an item has no arrays, or has lost the index of its arrays."""
    if tree is not None and not tree.stores_arrays:
        if not tree.empty:
            raise CheckpointError(
                f"{item}: expected arrays, found a tree of {len(tree.leaves)} leaves without any; open another item or "
                "step"
            )
        return
    ocdbt = (tree and tree.fields.get("use_ocdbt")) or any(name.startswith(_PROCESS) for name in files)
    if ocdbt and not (item / MANIFEST).exists():
        raise CheckpointError(
            f"{item}: expected {MANIFEST}, the index of its arrays, found none; the checkpoint was not copied "
            "completely, or saving it never finished. Copy it again, or open another step."
        )


def zero_size_metadata(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The custom metadata of a tree about its arrays without elements; empty if it has none."""
    found = {name: [np.dtype(array.dtype).name, list(array.shape)] for name, array in arrays.items() if not array.size}
    return {_ZERO_SIZE: found} if found else {}


def _zero_size_tensors(custom: Any, file: Location) -> dict[str, LazyTensor]:
    found: Any = cast("dict[str, Any]", custom).get(_ZERO_SIZE, {}) if isinstance(custom, dict) else {}
    try:
        return {name: lazy(_zero_size(*entry), name) for name, entry in found.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file}: expected dtypes and shapes of arrays without elements in {_ZERO_SIZE!r}, found {error}; it is "
            "corrupt"
        ) from error


def _zero_size(name: str, extents: Any) -> np.ndarray:
    dtype, shape = np.dtype(name), counts(extents)
    if dtype.name != name or not is_number(dtype):
        raise ValueError(f"dtype {name!r}")
    if shape is None or math.prod(shape) != 0:
        raise ValueError(f"shape {extents!r}"[:80])
    return np.empty(shape, dtype)
