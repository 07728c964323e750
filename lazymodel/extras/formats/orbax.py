"""Orbax checkpoints on disk: which step a folder means, which item of it, and its arrays, read with tensorstore alone.

Nothing is read through Orbax, whose checkpointers restore whole trees. tensorstore is imported on first use.
Layouts, as Orbax 0.11 and newer write them through its `ocp.*` and `ocp.v1` interfaces:

- A *root* holds steps: `12`, `step_12`, `checkpoint_0012`. Names with `.orbax-checkpoint-tmp` were never committed, and
  neither was a step whose `_CHECKPOINT_METADATA` has no commit time.
- A *step* holds items: `default`, `state`, `pytree`, or whatever the writer called them.
- An *item* holds a tree of arrays. `_METADATA` (JSON) lists the tree's leaves, `_strings.json` has those that are text,
  and every array is a zarr array, of version 2 or 3, named by its path joined with dots: folders in the item, or keys
  of the OCDBT database at `manifest.ocdbt` (https://google.github.io/tensorstore/kvstore/ocdbt/), into which the
  databases of several writers (`ocdbt.process_0`, …) are merged.

A chunk of an array that was never stored means zeros. Orbax says in `_METADATA` that it stores those too; then a chunk
that is not there was lost, and is an error here rather than a weight of zeros. Orbax refuses to save arrays without
elements, and reads them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import ml_dtypes
import numpy as np

from lazymodel._errors import CheckpointError, required, warn
from lazymodel._remote.path import Location, RemotePath
from lazymodel._remote.url import quoted
from lazymodel._show.text import listed
from lazymodel._tensors.boxes import Box, box_shape, shift
from lazymodel._tensors.buffers import Workspace
from lazymodel._tensors.byte_reader import SAMPLES, ByteReader, reading
from lazymodel._tensors.convert import Steps, assign
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.tensor_source import ArrayTensor, TensorSource
from lazymodel.checkpoints._checkpoint import Checkpoint
from lazymodel.checkpoints._untrusted import (
    HOSTILE,
    check_pointer,
    is_numpys,
    mismatch,
    read_at_most,
    read_json_file,
)

T = TypeVar("T")

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
_AGGREGATE = "checkpoint"  # a file of a tree in msgpack, in which Orbax before 0.5 also put small arrays
_ARRAY = re.compile(rb"(?:\xc7.|\xc8..|\xc9....)\x01\x93", re.DOTALL)  # an extension of type 1: shape, dtype, bytes
_MAX_AGGREGATE = 1 << 30  # bytes
_OLD = "they are in the 'checkpoint' file of an old Orbax: restore it with Orbax and save it again"
_WAIT = "wait until saving has finished, or open another folder"
_UNFINISHED = ".orbax-checkpoint-tmp"
_STEP = re.compile(r"(?:(.+)_)?(\d+)")
_ALONE = "value"  # the name of a tree that is one array, as in an abstract model

# Numbers of zarr arrays that are not NumPy's own, by name; tensorstore 0.1.84 has no others.
ZARR_DTYPES = frozenset(
    (
        "bfloat16",
        "int2",
        "int4",
        "float8_e3m4",
        "float8_e4m3b11fnuz",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
)

# Types of a tree's leaves: those that are zarr arrays, and those that are none. Others belong to a program's own
# handlers, and are tensors if they are stored as arrays.
_ARRAYS = frozenset(("jax.Array", "np.ndarray", "scalar"))
_TEXT_OR_EMPTY = frozenset(("string", "None", "Dict", "List", "Tuple", "NamedTuple"))


def open_orbax(path: Location) -> Checkpoint | None:
    """What Orbax wrote at a path: an item, or the items of a step, where each name begins with its item's.

    None if Orbax wrote nothing there.
    """
    items = find_items(path)
    opened = [OrbaxCheckpoint(path, item) for item in items]
    return OrbaxItems(path, opened) if len(items) > 1 else opened[0] if items else None


def find_items(folder: Location) -> list[Location]:
    """The folders of arrays that a path means: itself, those in a step, or those in the newest committed step.

    Empty if this is nothing that Orbax wrote.
    """
    if not _is_item(folder) and not _is_step(folder):
        if steps := _steps(folder):
            folder = _newest(folder, steps)
        elif unfinished := [child.name for child in _folders(folder) if _UNFINISHED in child.name]:
            found = f"only unfinished ones ({listed(unfinished)})"
            raise mismatch(folder, "a committed Orbax checkpoint", found, _WAIT)
    if _is_item(folder):
        _require_committed(folder)
        return [folder]
    items = [child for child in _folders(folder) if _is_item(child)]
    if not items and not _is_step(folder):
        return []
    _require_committed(folder)
    unfinished = [child.name for child in items if _UNFINISHED in child.name]
    arrays: list[Location] = []
    for child in items:
        if _UNFINISHED not in child.name:
            tree = read_tree(child)
            if tree is None or tree.stores_arrays:
                arrays.append(child)
    if len(arrays) > 1 and {child.name for child in arrays} == {"pytree", "assets"}:
        # Keras' callback keeps the model's files (vocabularies) as byte arrays alongside its variables.
        arrays = [child for child in arrays if child.name == "pytree"]
    if arrays:
        return arrays
    found = listed(sorted(child.name for child in _folders(folder)))
    fix = _WAIT if unfinished else "copy the whole checkpoint again"
    raise mismatch(folder, "an Orbax item that holds arrays", found or "no folders", fix)


def foreign_entries(folder: Location) -> list[str]:
    """Names of the files and folders in a folder that are not part of the one Orbax item that it is or contains."""

    def own(path: Location) -> bool:
        if path.name in _OWN or path.name.startswith(_PROCESS):
            return True
        if not path.is_dir() or _STEP.fullmatch(path.name):  # a whole step is not a part of anything
            return False
        return _is_array(path) or (_is_item(path) and find_items(path.parent) == [path])

    return sorted(child.name for child in folder.iterdir() if not own(child))


def _folders(folder: Location) -> list[Location]:
    """Folders in a folder, by name; none if a saver has removed it meanwhile."""
    with reading(folder, "list"), contextlib.suppress(FileNotFoundError):
        return sorted(child for child in folder.iterdir() if child.is_dir())
    return []


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
        paths = listed(repr(str(path)) for *_, path in steps)
        raise CheckpointError(f"{folder} has steps of several runs, with the prefixes {prefixes}; open one of {paths}")
    committed = [(number, path) for number, _, path in steps if _unfinished(path) is None]
    if not committed:
        found = f"{len(steps)} that were never committed, {steps[0][2].name} the newest"
        raise mismatch(folder, "a committed step", found, _WAIT)
    same = [path.name for number, path in committed if number == committed[0][0]]
    if len(same) > 1:
        raise CheckpointError(f"{folder} has step {committed[0][0]} more than once: {same}; open one of these folders")
    return committed[0][1]


def _require_committed(folder: Location) -> None:
    if reason := _unfinished(folder):
        raise mismatch(f"{folder} is half written", "a committed checkpoint", f"that {reason}", _WAIT)


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
class Tree:
    """The content of `_METADATA`: leaves by path with the types of their values, and more."""

    leaves: list[tuple[tuple[str, ...], str]]
    fields: dict[str, Any]

    @property
    def stores_arrays(self) -> bool:
        """True if any leaf is stored as an array, or may be."""
        return any(kind not in _TEXT_OR_EMPTY for _, kind in self.leaves)

    def names(self, item: Location, arrays: Mapping[str, Any]) -> dict[str, str]:
        """Names of the tensors → names of their arrays in the storage, which are all of the arrays there must be."""
        names: dict[str, str] = {}
        owners: dict[str, tuple[str, ...]] = {}
        missing: list[str] = []
        for keys, kind in self.leaves:
            name, stored_as = "/".join(keys) or _ALONE, ".".join(keys)
            if stored_as not in arrays:
                missing += [name] * (kind in _ARRAYS)
            elif kind not in _TEXT_OR_EMPTY:
                if stored_as in owners or name in names:
                    expected = "paths that differ when their keys are joined by '.', and by '/'"
                    found = f"{owners.get(stored_as) or owners[names[name]]} and {keys}"
                    raise mismatch(item / METADATA, expected, found, "rename one of them and save again")
                names[name], owners[stored_as] = stored_as, keys
        if missing:
            fix = "copy the whole checkpoint again"
            if (item / _AGGREGATE).is_file():
                fix = _OLD
            expected = f"{len(self.leaves)} arrays and values"
            raise mismatch(item, expected, f"none stored for {len(missing)}: {listed(missing)}", fix)
        return names


def read_tree(item: Location) -> Tree | None:
    """The tree that `_METADATA` describes, if it is there."""
    file = item / METADATA
    if not file.exists():
        return None
    fields = read_json_file(file)
    tree = fields.pop("tree_metadata", None)
    if not isinstance(tree, dict):
        raise mismatch(file, "a 'tree_metadata' object", f"keys {listed(map(repr, sorted(fields)))}")
    leaves: list[tuple[tuple[str, ...], str]] = []
    for path, entry in cast("dict[str, Any]", tree).items():
        try:
            keys = tuple(part["key"] for part in entry["key_metadata"])
            kind = entry["value_metadata"]["value_type"]
            if not all(isinstance(text, str) for text in (kind, *keys)):
                raise TypeError("keys and types are text")
        except (TypeError, KeyError) as error:
            expected = f"'key_metadata' and 'value_metadata' of leaf {path}, as text"
            raise mismatch(file, expected, repr(entry)) from error
        leaves.append((keys, kind))
    return Tree(leaves, fields)


# A chunk is in memory up to three times: as stored (at worst as large as decoded), decoded, and as the copy that is
# converted or rearranged on its way into the array that is filled.
_COPIES = 3
# Bytes that one read may decode at once where the budget allows more: enough to keep all of tensorstore's threads busy.
_BATCH = 64 << 20
# Bytes of a chunk from which it is kept for the next box that needs a part of it. Below, the pieces that streams ask
# for are larger than the chunk, and most of each chunk is used the first time.
_KEEP = 4 << 20
_KEPT = 2  # arrays with a kept chunk: the one that is being read, and the next, which other threads have begun
_LOOK = 0.1  # seconds between two looks at whether what is read is still waited for
_FILE_THREADS = 8  # reads in flight in tensorstore; streams come with threads of their own
_TREE_CACHE = 16 << 20  # bytes for nodes of an OCDBT database, which would otherwise be read once a chunk

# The exceptions that tensorstore raises for its status codes.
_FAILURES = (ValueError, OSError, RuntimeError, LookupError, TypeError)


def _tensorstore() -> Any:
    return required("tensorstore", "reading Orbax checkpoints", "'lazymodel[orbax]'", CheckpointError)


def _attempt(function: Callable[[], T], failed: str, remote: bool) -> T:
    """The result of a function of tensorstore's; CheckpointError if that fails."""
    try:
        return function()
    except _FAILURES as error:
        text, fix = str(error).partition(" [tensorstore_spec")[0], "It is truncated or corrupt; copy it again."
        if re.search('"(?:dtype|data_type)"', text):
            fix = "tensorstore has no such dtype; save it as another one."
        if not remote:
            raise CheckpointError(f"{failed}: {text}. {fix}") from error
        # Its text has URLs with signatures, and the server's text: only its code is shown.
        code = found[0] if (found := re.match("[A-Z_]+(?=:)", text)) else type(error).__name__
    raise CheckpointError(f"{failed}: {code}. {fix} Or the store refuses access.")


def _kvstore(folder: Location) -> dict[str, Any]:
    """The specification of TensorStore's store of the files in a folder.

    Raises CheckpointError if TensorStore has no driver for it, or none that accepts the given credentials.
    """
    if not isinstance(folder, RemotePath):
        return {"driver": "file", "path": f"{folder.resolve()}/"}
    store = folder.store
    path = f"{folder.key}/" if folder.key else ""
    options = {**store.options, **store.options.get("config", {})}
    options = {str(name).lower().removeprefix("aws_"): value for name, value in options.items()}
    kind = store.url.kind
    if kind == "s3":
        if "access_key_id" in options or "credential_provider" in options:
            raise CheckpointError(
                f"{folder}: Orbax checkpoints are read by TensorStore, which takes no keys from storage_options; set "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile, in the environment"
            )
        spec: dict[str, Any] = {"driver": "s3", "bucket": store.url.root.partition("://")[2], "path": path}
        endpoint = options.get("endpoint") or options.get("endpoint_url")
        spec |= {"endpoint": endpoint} if endpoint else {}
        region = options.get("region") or options.get("default_region")
        spec |= {"aws_region": region} if region else {}
        return spec | ({"aws_credentials": {"type": "anonymous"}} if options.get("skip_signature") else {})
    if kind == "gs":
        return {"driver": "gcs", "bucket": store.url.root.partition("://")[2], "path": path}
    if kind in ("http", "https", "hf"):
        base, headers = store.http()
        root, mark, query = base.partition("?")
        names = [f"{name}: {value}" for name, value in headers.items()]
        url = f"{root.rstrip('/')}/{quoted(folder.key)}{mark}{query}"
        return {"driver": "http", "base_url": url, "path": "/", "headers": names}
    raise CheckpointError(
        f"{folder}: TensorStore, which reads Orbax checkpoints, has no driver for {kind}://; copy it to a disk first"
    )


class OrbaxCheckpoint(Checkpoint):
    """An Orbax item: the path of a leaf in the saved tree, its keys joined by `/`, → its tensor.

    Lists and tuples have their positions as keys: `layers/0/kernel`. A tree that is one array is named `value`.
    Numbers are tensors without dimensions; text, None and empty containers have no tensor. A `jax.random.key` is its
    key data, uint32. Where `_METADATA` is missing, names are those of the storage, with every dot read as a `/`.

    Reading decodes whole chunks; of the last two arrays whose large chunks are needed in parts, one is kept until the
    stream has what it wants of the tensor, or `close`. A tensor that was saved in shards across those that it is read
    in is decoded more than once.

    `item` is the folder that the tensors are in, which `find_items` found: `path`, or somewhere inside.
    """

    format = "orbax"

    def __init__(self, path: Location, item: Location) -> None:
        tree, files = read_tree(item), _files_inside(item)
        self.item, self._places = str(item), [item / name for name in files]
        self._remote, ocdbt = item.remote, (item / MANIFEST).exists()
        needs_index = (tree and tree.fields.get("use_ocdbt")) or any(name.startswith(_PROCESS) for name in files)
        if tree is not None and not tree.stores_arrays:
            found = f"a tree of {len(tree.leaves)} leaves without any"
            raise mismatch(item, "arrays", found, "open another item or step")
        if needs_index and not ocdbt:
            fix = "saving never finished, or not all was copied. Copy it again, or open another step"
            raise mismatch(item, f"{MANIFEST}, the index of its arrays,", "none", fix)
        if ocdbt:
            check_pointer(item / MANIFEST)
        ts, base = _tensorstore(), _kvstore(item)
        # Nothing is cached but OCDBT's own nodes: every decoded chunk is the memory of the read that needs it.
        self._context = ts.Context(
            {
                "cache_pool": {"total_bytes_limit": 0},
                "cache_pool#ocdbt": {"total_bytes_limit": _TREE_CACHE},
                "data_copy_concurrency": {"limit": min(os.cpu_count() or 1, _FILE_THREADS)},
                "file_io_concurrency": {"limit": _FILE_THREADS},
            }
        )
        self._kvstore = {"driver": "ocdbt", "base": base, "cache_pool": "cache_pool#ocdbt"} if ocdbt else base
        self._keys = frozenset(files)
        if ocdbt:
            keys = _attempt(
                lambda: ts.KvStore.open(self._kvstore, context=self._context).result().list().result(),
                f"{item / MANIFEST}: expected the index of an OCDBT database, found one that cannot be read",
                self._remote,
            )
            self._keys = frozenset(key.decode() for key in keys)
        # Name in the storage → the file or key that describes the array.
        parts = (key.rpartition("/") for key in sorted(self._keys))
        arrays = {stored: mark for stored, _, mark in parts if mark in DRIVERS}
        if tree is None:
            # The only names are those of the storage, in which a dot of a key looks like a step into the tree.
            tree = Tree([(tuple(name.split(".")) if name else (), "jax.Array") for name in arrays], {})
            aggregate = item / _AGGREGATE
            if aggregate.is_file() and _ARRAY.search(read_at_most(aggregate, _MAX_AGGREGATE, "a tree in msgpack")):
                raise mismatch(item, "every array in a file of its own", f"some in {_AGGREGATE!r}", _OLD)
        self._stored = {name: (stored, arrays[stored]) for name, stored in tree.names(item, arrays).items()}
        self._complete = bool(tree.fields.get("store_array_data_equal_to_fill_value", False))
        first = [item / MANIFEST, item / METADATA, *self._places]
        self._source = next(file for file in first if file.exists()).reader()
        if not ocdbt:  # whose manifest names files that are written once
            self._source.fingerprint = self._fingerprint
        super().__init__(path, list(self._stored), [self._source])
        self._order = {name: index for index, name in enumerate(self._stored)}
        self._kept = _Kept()
        self._warned = False

    @property
    def files(self) -> list[str]:
        """Paths of the item's files."""
        return sorted(map(str, self._places))

    def _open(self, name: str, cached: int = 0) -> Any:
        """An array as a `tensorstore.TensorStore`, for reading, with a cache of so many bytes for its chunks."""
        ts, (stored_as, mark) = _tensorstore(), self._stored[name]
        store = dict(self._kvstore)
        prefix = f"{stored_as}/" if stored_as else ""
        store["path"] = cast(str, store.get("path", "")) + prefix
        spec = {"driver": DRIVERS[mark], "kvstore": store, "fill_missing_data_reads": not self._complete}
        context = self._context
        if cached:
            spec["recheck_cached_data"] = False
            context = ts.Context({"cache_pool": {"total_bytes_limit": cached}}, context)
        return _attempt(
            lambda: ts.open(spec, context=context, open=True, read=True).result(),
            f"{self.item}: expected an array that {prefix}{mark} describes, found one that cannot be opened",
            self._remote,
        )

    def _tensor(self, name: str) -> LazyTensor:
        what, array = f"{self.item}: array {name!r}", self._open(name)
        shape = tuple(int(extent) for extent in array.shape)
        try:
            dtype = np.dtype(array.dtype.numpy_dtype)
        except _FAILURES:
            dtype = np.dtype(object)
        if not _is_number(dtype):
            raise mismatch(what, "numbers", array.dtype.name, "they cannot be weights")
        if not math.prod(shape):
            return LazyTensor(ArrayTensor(np.empty(shape, dtype), name))
        chunk = tuple(array.chunk_layout.read_chunk.shape or ())
        if any(step > extent for step, extent in zip(chunk, shape, strict=True)):
            raise mismatch(what, f"chunks inside its shape {list(shape)}", f"chunks of {list(chunk)}")
        missing = self._missing_chunks(name, array)
        if missing and self._complete:
            found = f"at least {missing} missing, which would be read as zeros"
            raise mismatch(what, "every chunk to be stored", found, "copy the checkpoint again")
        if missing and not self._warned:
            self._warned = True
            warn(
                f"{what} is missing {missing} of its chunks, which are read as zeros. The Orbax that wrote it left out "
                "chunks of zeros, so lost ones look the same; save it with a newer Orbax to be sure."
            )
        leaf = ChunkedTensor(name, array, dtype, chunk, self._source, self._kept, functools.partial(self._open, name))
        leaf.file, leaf.offset = self.item, self._order[name]
        return LazyTensor(leaf)

    def _missing_chunks(self, name: str, array: Any) -> int:
        """How many chunks of an array are not stored (zarr 2: "Storage"; zarr 3: "chunk key encoding")."""
        stored_as, metadata = self._stored[name][0], array.spec().to_json()["metadata"]
        prefix = f"{stored_as}/" if stored_as else ""
        steps = tuple(array.chunk_layout.write_chunk.shape or ())
        counts = [-(-extent // step) for extent, step in zip(array.shape, steps, strict=True)]
        total = math.prod(counts)
        if total > len(self._keys):
            return total - len(self._keys)  # at least; nothing that is declared is enumerated before it is plausible
        if metadata["zarr_format"] == 2:
            head, separator = "", metadata.get("dimension_separator", ".")
        else:
            encoding = metadata["chunk_key_encoding"]
            default = encoding["name"] == "default"
            separator = encoding.get("configuration", {}).get("separator", "/" if default else ".")
            head = "c" + separator if default else ""
        if not counts:
            return int(f"{prefix}{'c' if head else '0'}" not in self._keys)
        grid = itertools.product(*(range(count) for count in counts))
        return sum(f"{prefix}{head}{separator.join(map(str, index))}" not in self._keys for index in grid)

    def _fingerprint(self, count: int = SAMPLES) -> str:
        """A fingerprint of the files, as `ByteReader.fingerprint`."""
        digest = hashlib.blake2b(digest_size=8)
        for place in self._places:
            digest.update(f"{place.fingerprint(max(count // len(self._places), 1))}\0".encode())
        return f"{len(self._places)} files, sampled content {digest.hexdigest()}"

    def close(self) -> None:
        self._kept.clear()
        super().close()


class OrbaxItems(Checkpoint):
    """The items of a step as one: `params/dense/kernel` is `dense/kernel` of the item `params`."""

    format = "orbax"

    def __init__(self, path: Location, items: Sequence[OrbaxCheckpoint]) -> None:
        self._items = {item.item.rpartition("/")[2]: item for item in items}
        names = [f"{item}/{name}" for item, of in self._items.items() for name in of]
        super().__init__(path, names, [source for item in items for source in item._sources])

    @property
    def files(self) -> list[str]:
        return [file for item in self._items.values() for file in item.files]

    def _tensor(self, name: str) -> LazyTensor:
        item, _, own = name.partition("/")
        return self._items[item][own]

    def close(self) -> None:
        for item in self._items.values():
            item.close()


class ChunkedTensor(TensorSource):
    """A zarr array, read through tensorstore in boxes made of whole chunks.

    `chunk` is the smallest box that can be decoded alone (in zarr 3, an inner chunk of a shard). `reopen` opens the
    array with a cache of some bytes.
    """

    def __init__(
        self,
        name: str,
        array: Any,
        dtype: np.dtype[Any],
        chunk: tuple[int, ...],
        source: ByteReader,
        kept: _Kept,
        reopen: Callable[[int], Any],
    ) -> None:
        self.name, self.file, self.shape, self.dtype, self.chunk = name, source.path, tuple(array.shape), dtype, chunk
        self.offset, self.origin = 0, source
        self._nbytes = math.prod(chunk) * dtype.itemsize
        self._keep = self._nbytes >= _KEEP
        self.min_scratch_nbytes = (_COPIES + (_KEPT - 1 if self._keep else 0)) * self._nbytes
        # Kept chunks of whole rows are as good in small pieces; others are needed all at once.
        self.row_step = 1 if not chunk or (self._keep and chunk[1:] == self.shape[1:]) else chunk[0]
        self._array, self._source, self._kept, self._reopen = array, source, kept, reopen

    def readers(self) -> tuple[ByteReader, ...]:
        return (self._source,)

    def fill_box(self, box: Box, out: np.ndarray, steps: Steps, workspace: Workspace) -> None:
        limit = 0 if self._keep else max(min(workspace.available, _COPIES * _BATCH), self.min_scratch_nbytes) // _COPIES
        for piece in _whole_chunks(box, self.chunk, limit // self.dtype.itemsize):
            target = out[(*shift(piece, box), ...)]
            if not steps and out.dtype == self.dtype:
                self._read(piece, target)
            else:
                with workspace.array(box_shape(piece), self.dtype) as values:
                    self._read(piece, values)
                    assign(target, values, steps)
            self._source.count(target.size * self.dtype.itemsize)
        self._source.check_unchanged()

    def release(self) -> None:
        self._kept.clear(self.name)

    def _read(self, box: Box, out: np.ndarray) -> None:
        def read() -> None:
            array = self._array
            if self._keep:  # with a cache for a chunk and a half: one, what tensorstore notes of it, and no second one
                array = self._kept.array(self.name, lambda: self._reopen(3 * self._nbytes // 2))
            source = array[box]
            if box:
                source = source.translate_to[(0,) * len(box)]
            self._wait(_tensorstore().array(out, copy=False, write=True).write(source))

        try:
            _attempt(read, f"cannot read array {self.name!r} of {self.file}", self._source.remote)
        except CheckpointError:
            self._source.check_unchanged()
            raise

    def _wait(self, future: Any) -> None:
        while self._source.remote:
            try:
                return future.result(timeout=_LOOK)
            except TimeoutError:
                if self._source.given_up():
                    future.cancel()
                    raise CheckpointError("reading was stopped") from None
        future.result()


class _Kept:
    """The last few arrays of which tensorstore caches a chunk. Thread-safe.

    A tensor that one device saved is often one chunk, and each of the devices that it is loaded to wants a part.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrays: dict[str, Any] = {}

    def array(self, name: str, open: Callable[[], Any]) -> Any:
        """An array with its cache, which is now the newest."""
        with self._lock:
            array = self._arrays.pop(name, None) or open()
            self._arrays[name] = array
            if len(self._arrays) > _KEPT:
                del self._arrays[next(iter(self._arrays))]
        return array

    def clear(self, name: str | None = None) -> None:
        """Gives up the chunk of an array, or all."""
        with self._lock:
            self._arrays = {key: array for key, array in self._arrays.items() if name not in (None, key)}


def _whole_chunks(box: Box, chunk: tuple[int, ...], limit: int) -> Iterator[Box]:
    """Splits a box at borders of chunks; the chunks that a piece touches hold `limit` elements at most, or are one."""
    first = [part.start // step for part, step in zip(box, chunk, strict=True)]
    counts = [-(-part.stop // step) - start for part, step, start in zip(box, chunk, first, strict=True)]
    taken = [1] * len(box)
    left = limit // math.prod(chunk)
    for axis in reversed(range(len(box))):
        taken[axis] = max(min(counts[axis], left), 1)
        left //= taken[axis]
        if taken[axis] < counts[axis]:
            break
    for index in itertools.product(*(range(0, count, take) for count, take in zip(counts, taken, strict=True))):
        yield tuple(
            slice(max((f + i) * step, part.start), min((f + i + take) * step, part.stop))
            for f, i, step, take, part in zip(first, index, chunk, taken, box, strict=True)
        )


def _files_inside(folder: Location) -> list[str]:
    """Paths in a folder of all its files, with slashes; raises for anything but files, and for links that lead out."""
    files = folder.files_below()
    for path in (folder / name for name in files):
        try:
            is_link = path.is_symlink()
            target = is_link and path.leads_out(folder)
            found = f"a symbolic link to {target}" if target else path.irregular()
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"cannot read {path}: {getattr(error, 'strerror', error)}") from error
        if found and is_link:
            raise mismatch(path, "a file in the checkpoint's folder", found, "copy what it links to if meant")
        if found:
            raise mismatch(path, "a file", found, HOSTILE)
    return files


def _is_number(dtype: np.dtype[Any]) -> bool:
    """Returns True if arrays of a dtype can be weights: NumPy's numbers, and those of ml_dtypes."""
    return is_numpys(dtype) or dtype.type.__module__ == ml_dtypes.bfloat16.__module__
