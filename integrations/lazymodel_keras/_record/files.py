"""The files that Keras and KerasHub open: at URLs as on disks, weights as lazy tensors.

Code that only takes paths gets them for URLs as well. Small files (configurations, vocabularies, indexes of shards) are
fetched into a temporary folder on request. Weight files are never fetched: each has a placeholder path in that folder,
without a file, for which `RemoteFiles` has the object. If all weights of a folder are in the local cache of the Hugging
Face hub, they are used from there.

Keras reads `.weights.h5` through its `H5IOStore`, legacy HDF5 files layer by layer and Orbax checkpoints with Orbax;
KerasHub's Hugging Face and timm converters read through `safetensors.safe_open`. While a recording runs, these return
lazy tensors; everything else is as upstream, errors included, because loaders probe.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import itertools
import operator
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import h5py
import keras
import numpy as np

from lazymodel import Checkpoint, CheckpointError, LazyTensor, open_checkpoint
from lazymodel._errors import warn
from lazymodel._remote.path import LocalPath, Location, RemoteFile, RemotePath, location, matching
from lazymodel._remote.url import is_supported, is_url, shown
from lazymodel._show.text import format_bytes, listed
from lazymodel.checkpoints import SafetensorsFile
from lazymodel.checkpoints._hugging_face import CONFIG, DecodedCheckpoint, read_config
from lazymodel.checkpoints._open import CachedCopy, cached_copy, content_files, located, model_weights, open_located
from lazymodel.checkpoints._safetensors import is_numbered, loose_files
from lazymodel.checkpoints._untrusted import indexed_shards, require_shards
from lazymodel.extras.formats.archive import member_start
from lazymodel.extras.formats.hdf5 import H5File
from lazymodel.extras.quantized.config import find_config
from lazymodel.extras.quantized.methods import require_known
from lazymodel.extras.quantized.mlx import EXPERTS
from lazymodel.extras.quantized.scaled import CODES, Float4Tensor, scaled_pairs
from lazymodel_keras import _upstream
from lazymodel_keras._record.configuration import Noting, differences, passed_on
from lazymodel_keras._record.phi3 import phi3_converter
from lazymodel_keras._record.transformers_5 import MODEL_TYPES, other_names, with_expected_keys

_MOST = 256 << 20  # bytes of all small files of a preset; the largest vocabularies have a tenth of it
_WEIGHTS = (".h5", ".hdf5", ".safetensors", ".keras", ".npz", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".msgpack")
_TORCH = (".bin", ".bin.index.json")  # what PyTorch's files, which KerasHub does not read, are called by Hugging Face
_GGUF = "lazymodel_keras._gguf"  # loaded when the first GGUF file is opened
_STOCK = ("hf", "gs")  # schemes that KerasHub reads by itself, with a download


class StandIn(RemoteFile):
    """An object as an open file; its name is its placeholder path, since wrappers identify it by name."""

    def __init__(self, where: RemotePath, path: str) -> None:
        super().__init__(where.store, where.key)
        self.name = path

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__  # HDF5 uses this as the name of a file object


class _Folder:
    """A folder at a URL, and the local folder of its small files."""

    def __init__(self, where: RemotePath, own: Path, cached: CachedCopy | None) -> None:
        self.where, self.own, self.cached = where, own, cached
        self.nbytes = 0  # fetched so far

    def file(self, name: str) -> str:
        """The path of a file in it; raises FileNotFoundError if there is none."""
        if name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/"):
            raise CheckpointError(
                f"{self.where}: expected files inside it, found {name!r}; do not trust this checkpoint"
            )
        if self.cached is not None and (path := self.cached.path / name).is_file():
            return str(path)
        path, where = self.own / name, self.where / name
        offline = self.cached is not None and self.cached.offline
        if not path.exists():
            if offline or not where.is_file():
                if file := _in_place_of(name, self.where if self.cached is None else self.cached.path):
                    return self.file(file.name)
                raise FileNotFoundError(f"there is no {name} at {self.where}")
            if not name.endswith(_WEIGHTS):
                self._fetch(where, path)
        return str(path)

    def location(self, path: str) -> RemotePath:
        """Returns the object for a path in it."""
        return self.where / Path(path).relative_to(self.own).as_posix()

    def saved_model(self) -> str:
        """A folder as `model.save(path, zipped=False)` writes it; the weights are only an empty file."""
        names = [CONFIG, *(name for name in self.where.files_below() if name.startswith("assets/"))]
        for name in names:
            self.file(name)
        Path(self.file("model.weights.h5")).touch()
        return str(self.own)

    def _fetch(self, where: RemotePath, path: Path) -> None:
        with where.open() as file:
            self.nbytes += (size := where.stat().st_size)
            if self.nbytes > _MOST:
                raise CheckpointError(
                    f"{where}: expected at most {format_bytes(_MOST)} of configurations and vocabularies besides the "
                    f"weights, found {format_bytes(self.nbytes)} with this file of {format_bytes(size)}. Copy the "
                    "folder without its weights to a disk to look at it."
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.read() or b"")


class RemoteFiles:
    """The files at URLs that one recording, and those that repeat it, have requested.

    Attributes:
        options: As `storage_options` in `lazymodel.open_checkpoint`, for all URLs.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = options
        # By URL or path, as given and as displayed; for a GGUF file its `GgufFolder`.
        self._folders: dict[str, Any] = {}
        self._located: dict[str, Location] = {}
        self._own: str | None = None

    def serves(self, path: Any) -> bool:
        """Returns True for a URL that is read here.

        Without obstore, KerasHub reads what it can by itself, and always repositories of the hub without an owner.
        """
        if not is_supported(path):
            return False
        scheme, _, rest = path.partition("://")
        stock = scheme.lower() in _STOCK and not has_obstore()
        return not stock and (scheme.lower() != "hf" or "/" in rest.strip("/"))

    def holds(self, preset: Any) -> bool:
        """Returns True for a preset that is read here, at a URL or in a GGUF file."""
        return self.serves(preset) or (is_gguf(preset) and not is_url(preset))

    def folder(self, url: str, cls: Any = None) -> str:
        """Registers a folder at a URL; returns the URL as displayed in messages, which `file` also takes.

        Does the same for the URL or path of a GGUF file, from which `cls` is to be built.
        """
        name = shown(url)
        if is_gguf(url):
            if (folder := self._folders.get(url)) is None:
                where = located(url, self.options if is_url(url) else None)
                folder = importlib.import_module(_GGUF).GgufFolder(where, self._own_folder())
                self._folders[url] = self._folders[name] = folder
            if cls is not None:
                folder.choose(cls)
        elif url not in self._folders:
            where = location(url, self.options)
            assert isinstance(where, RemotePath)
            self._folders[url] = self._folders[name] = _Folder(where, self._own_folder(), cached_copy(where))
        return name

    def file(self, folder: str, name: str) -> str:
        """The path of a file in the folder at a URL: a copy of a small file, or the placeholder of a weight file.

        Raises:
            FileNotFoundError: There is no such file.
            CheckpointError: It cannot be read, or is too large for a small file.
        """
        return self._folders[self.folder(folder)].file(name)

    def location(self, path: str) -> str | RemotePath:
        """The object for a placeholder path; other paths unchanged."""
        folder = self._holding(path)
        return path if folder is None else folder.location(path)

    def gguf(self, path: str) -> Any:
        """The GGUF file for a placeholder path or a registered preset; None for others."""
        folder = self._folders.get(path) or self._holding(path)
        return None if isinstance(folder, _Folder) else folder

    def located(self, path: Any) -> Any:
        """The location of a URL (raises CheckpointError if nothing is there); paths are returned unchanged."""
        if not self.serves(path):
            return path
        if path not in self._located:
            self._located[path] = located(path, self.options)
        return self._located[path]

    def for_keras(self, where: Any) -> Any:
        """Returns what Keras can open for a result of `located`, which may be a saved model in a folder.

        A path, or a file object for a file that Keras would open by itself.
        """
        if not isinstance(where, RemotePath):
            return where
        is_folder = (where / CONFIG).is_file()
        folder = where if is_folder else where.parent
        known = next((f for f in self._folders.values() if isinstance(f, _Folder) and f.where == folder), None)
        if known is None:
            known = self._folders[f"{folder}#{id(where.store)}"] = _Folder(folder, self._own_folder(), None)
        try:
            if is_folder:
                return known.saved_model()
            path = known.file(where.name)
        except FileNotFoundError:
            raise CheckpointError(f"there is no checkpoint at {where}: the store has nothing there") from None
        return path if path.endswith((".weights.h5", ".weights.json")) else StandIn(where, path)

    def _holding(self, path: str) -> Any:
        """The folder that contains a path."""
        folders = self._folders.values() if os.path.isabs(path) else ()
        return next((folder for folder in folders if Path(path).is_relative_to(folder.own)), None)

    def _own_folder(self) -> Path:
        if self._own is None:
            self._own = tempfile.mkdtemp(prefix="lazymodel-")
            weakref.finalize(self, shutil.rmtree, self._own, ignore_errors=True)
        return Path(tempfile.mkdtemp(dir=self._own))


def is_gguf(preset: Any) -> bool:
    """Returns True if a preset is a GGUF file, its URL, or a folder of such files without a configuration."""
    if not isinstance(preset, str):
        return False
    if (urlsplit(preset).path if is_url(preset) else preset).endswith(".gguf"):
        return True
    return os.path.isdir(preset) and not (Path(preset) / CONFIG).exists() and any(Path(preset).glob("*.gguf"))


def check_storage_options(path: Any, options: Mapping[str, Any] | None) -> None:
    """Raises CheckpointError if options of a store were given for a path that is not a URL."""
    if options and not is_url(path):
        raise CheckpointError(f"{os.fspath(path)}: storage_options are for URLs, found a path or a preset's name")


def has_obstore() -> bool:
    """Returns True if URLs can be reached."""
    return importlib.util.find_spec("obstore") is not None


# Whole checkpoints ---------------------------------------------------------------------------------------------------

# (model type, quantization method) for which KerasHub's own converter requests the parts.
_BY_CONVERTER = frozenset({("gpt_oss", "mxfp4")})


def folder_config(folder: Location) -> dict[str, Any]:
    """The configuration in a folder; empty if unreadable, since KerasHub raises itself where it needs it."""
    try:
        return read_config(folder)
    except CheckpointError:
        return {}


def open_decoded(path: str | RemotePath) -> DecodedCheckpoint | None:
    """The checkpoint of a file, if the configuration in its folder shows that it is quantized, or if MLX joined its
    experts; otherwise None.

    Raises CheckpointError for an unknown kind of quantization.
    """
    where = location(path)
    config = folder_config(where.parent)
    found = find_config(config, str(where.parent / CONFIG))
    kind = str(config.get("model_type"))
    if (found is None and kind not in EXPERTS) or (found is not None and (kind, found.method) in _BY_CONVERTER):
        return None
    if found is not None:
        require_known(found)
    checkpoint = whole(path)
    if isinstance(checkpoint, DecodedCheckpoint):
        return checkpoint
    checkpoint.close()
    return None


def whole(path: str | RemotePath) -> Checkpoint:
    """The checkpoint in the folder of a file; that of the file if it does not belong to it."""
    where = location(path)
    checkpoint = open_located(where.parent)
    return checkpoint if str(where) in content_files(checkpoint) else open_located(where)


def checkpoint_files(path: str) -> list[str]:
    """The files that determine the content of a weight file's checkpoint: its index and all shards, or the file itself.

    Loaders open one shard after the other. Hashing all at the first takes as long as the slowest in several threads.
    Raises CheckpointError if an index in its folder cannot be read, or a shard is missing.
    """
    if path.endswith((".gguf", *_TORCH)) or _is_loose_shard(path):
        with whole(path) as checkpoint:
            return content_files(checkpoint)
    folder = LocalPath(path).parent
    for index in (*matching(folder, "*.safetensors.index.json"), *matching(folder, "*.weights.json")):
        shards = indexed_shards(index)
        if Path(path) in shards:
            require_shards(index, shards)
            return [str(index), *map(str, shards)]
    return [path]


# Weight files ---------------------------------------------------------------------------------------------------------


class LazySafeOpen(contextlib.AbstractContextManager["LazySafeOpen"]):
    """The result of `safetensors.safe_open(path, framework="np")`, with lazy tensors."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __exit__(self, *exception: object) -> None:
        pass  # returned tensors keep the file open as long as they exist

    def keys(self) -> list[str]:
        return list(self._file.tensors.keys())

    offset_keys = keys  # safetensors orders them by offset

    def metadata(self) -> dict[str, str]:
        return dict(self._file.tensors.metadata or {})

    def aliases(self) -> Iterable[str]:
        return self._file.tensors.aliases

    def get_tensor(self, name: str) -> LazyTensor:
        if name not in self._file.tensors:
            # Like safetensors: converters probe for names and catch this.
            raise CheckpointError(f"{self._file.tensors.path} has no tensor {name!r}{known_layers(name, self.keys())}")
        return self._file[name]

    # A slice of a lazy tensor is a lazy tensor.
    get_slice = get_tensor


def known_layers(name: str, names: Iterable[str]) -> str:
    """Returns a hint that layers are missing, if tensors like a missing one exist for lower numbers only."""
    stored = list(names)
    for number in re.finditer(r"(?<![0-9])[0-9]{1,9}(?![0-9])", name):
        before, after = re.escape(name[: number.start()]), re.escape(name[number.end() :])
        like = re.compile(rf"(?:.*\.)?{before}([0-9]{{1,9}}){after}")
        found = sorted(int(match[1]) for match in map(like.fullmatch, stored) if match)
        if found and int(number[0]) > found[-1]:
            return (
                f", nor any like it from number {number[0]} on: it has those of {found[0]} to {found[-1]}. Does the "
                "configuration have more layers than the checkpoint?"
            )
    return ""


@_upstream.while_recording(_upstream.WeightsStore, "__getitem__")
def _get(recording: Any, original: Any, self: Any, key: str) -> Any:
    if self.mode != "r":
        return original(self, key)
    name = _upstream.stored_name(self, key)
    if self.archive is None:
        path = str(recording.remote.location(os.fsdecode(self.h5_file.filename)))
        if path in recording.files:
            return recording.files[path][name]
        recording.refuse_unverified(f"{name!r} of {path}")  # anything but a file on disk is held in memory
        return original(self, key)
    # An archive is read in place; one with compressed members is read as stock Keras does.
    path = recording.remote.location(os.fspath(self.archive.filename))
    with contextlib.suppress(*() if isinstance(path, RemotePath) else (CheckpointError,)):
        return recording.open(path, open_checkpoint)[name]
    return original(self, key)


@_upstream.while_recording(_upstream.WeightsStore, _upstream.WEIGHTS_STORE_OPEN)
def _open(recording: Any, original: Any, self: Any, path_or_io: Any, mode: str | None = None) -> Any:
    if (mode or self.mode) == "r":
        # We check the file first: our errors describe the problem.
        if self.archive:
            where = recording.remote.location(os.fspath(self.archive.filename))
            recording.check_content(where)
            if isinstance(where, RemotePath):
                # Python's own reading of a member reads everything before a position in it.
                recording.open(where, open_checkpoint)
                info = self.archive.getinfo(str(path_or_io))
                return H5File(where, member_start(where, info), info.file_size).open()
        elif not hasattr(path_or_io, "read"):
            path = os.fspath(path_or_io)
            where = recording.remote.location(path)
            recording.open(where, open_checkpoint)
            if isinstance(where, RemotePath):
                return h5py.File(StandIn(where, path), "r")
    return original(self, path_or_io, mode)


@_upstream.while_recording(_upstream.AssetStore, "__init__")
def _extract_assets(
    recording: Any, original: Any, self: Any, root_path: Any, archive: Any = None, **options: Any
) -> Any:
    """Makes Keras extract only the assets of an archive; it would extract the weights as well."""
    if archive is None or archive.mode != "r":
        return original(self, root_path, archive=archive, **options)
    everything = archive.filelist
    archive.filelist = [info for info in everything if "/" in info.filename]  # the weights are at the top level
    try:
        return original(self, root_path, archive=archive, **options)
    finally:
        archive.filelist = everything


@_upstream.while_recording(_upstream.safetensors, "safe_open")
def _safe_open(recording: Any, original: Any, filename: Any, *_: Any, **__: Any) -> LazySafeOpen:
    name = os.fspath(filename)
    if (gguf := recording.remote.gguf(name)) is not None:
        fresh = recording.options.verify is not False
        return LazySafeOpen(recording.open(name, lambda _: gguf.tensors(fresh=fresh)))
    path = recording.remote.location(name)
    if (decoded := recording.decoded(path)) is not None:
        recording.check_content(path)
        return LazySafeOpen(recording.open(path, lambda _: decoded, decoded.path))  # any shard stands for the whole
    opener = whole if _is_loose_shard(path) else open_checkpoint if name.endswith(_TORCH) else SafetensorsFile
    return LazySafeOpen(recording.open(path, opener))


@_upstream.while_recording(_upstream.safetensors_loader, "__init__")
def _list_tensors(recording: Any, original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Makes KerasHub look for the tensors of a decoded or merged folder by their names, not by those of the index."""
    original(self, *args, **kwargs)
    if (index := self.safetensor_config) is None:
        return
    path = recording.remote.location(os.fspath(_upstream.index_of(self)))
    if (whole := recording.decoded(path)) is not None:
        any_shard = next(iter(index["weight_map"].values()))
        self.safetensor_config = {**index, "weight_map": dict.fromkeys(whole, any_shard)}


@_upstream.while_recording(_upstream.safetensors_loader, "get_tensor")
def _find_alias(recording: Any, original: Any, self: Any, name: str) -> Any:
    """Finds a tensor that has another name: by transformers 5, or an alias that only a shard says, not the index."""
    weights = self.safetensor_config["weight_map"] if self.safetensor_config else {}
    names = name, *other_names(name)
    if weights and not any(key.endswith(names) for key in weights):
        for shard in dict.fromkeys(weights.values()):
            file = _upstream.shard_of(self, shard)
            weights |= dict.fromkeys(set(file.aliases()) - set(weights), shard)
    missing = KeyError, CheckpointError  # of an index, and of a file
    try:
        return original(self, name)
    except missing:
        for other in names[1:]:
            with contextlib.suppress(*missing):
                return original(self, other)
        raise


@_upstream.while_recording(_upstream.preset_utils, "get_file")
def _get_file(recording: Any, original: Any, preset: Any, path: Any) -> Any:
    if recording.remote.holds(preset):
        return recording.remote.file(preset, path)
    file = _in_place_of(path, LocalPath(preset)) if os.path.isdir(preset) else None
    return original(preset, path) if file is None else str(file)


# Files of whole models, `.keras` and legacy HDF5. Keras before 3.15 follows any link in a legacy file;
# `open_checkpoint` checks the files that we read.
_LEGACY = _upstream.LEGACY_H5
_dataset_of: Callable[[Any, str], Any] = getattr(_LEGACY, "safe_get_h5_dataset", operator.getitem)
_group_of: Callable[[Any, str], Any] = getattr(_LEGACY, "safe_get_h5_group", operator.getitem)


@_upstream.while_recording(_upstream.SAVING_LIB, "is_memory_sufficient")
def _is_memory_sufficient(recording: Any, original: Any, model: Any) -> Any:
    # Keras would copy the weights of a `.keras` file into memory or to a file next to it; it reads them in place if
    # neither works.
    raise MemoryError("weights are read in place")


@_upstream.while_recording(_LEGACY, "load_subset_weights_from_hdf5_group")
@_upstream.while_recording(_LEGACY, "load_optimizer_weights_from_hdf5_group")
def _read_legacy(recording: Any, original: Any, group: Any) -> Any:
    holder = _group_of(group, "optimizer_weights") if "optimizer" in original.__name__ else group
    names = _LEGACY.load_attributes_from_hdf5_group(holder, "weight_names")
    path = recording.remote.location(os.fsdecode(holder.file.filename))
    if isinstance(path, str) and not os.path.isfile(path):
        return original(group)
    file = recording.open(path, open_checkpoint)
    return [file[_dataset_of(holder, name).name.lstrip("/")] for name in names]


# KerasHub's loaders and converters -----------------------------------------------------------------------------------


@_upstream.while_recording(lambda: _upstream.classes_defining("from_preset"), "from_preset")
def _from_preset(recording: Any, original: Any, cls: Any, preset: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes KerasHub's messages show a URL without its secrets, and reads a GGUF file for this class."""
    if recording.remote.holds(preset):
        preset = recording.remote.folder(preset, cls)
    return original(cls, preset, *args, **kwargs)


@_upstream.while_recording(_upstream.transformers_loader, "__init__")
def _convert_otherwise(recording: Any, original: Any, self: Any, preset: Any, config: Any) -> None:
    """Makes one of our converters convert a model that KerasHub has none for, and reads what transformers 5 writes."""
    folder = recording.remote.gguf(preset)
    if folder is None:
        config = with_expected_keys(config, f"{CONFIG} of {shown(preset)}")
    ours = None if folder is None else folder.converter()
    try:
        original(self, preset, config if ours is None else {**config, "model_type": "llama"})
    except ValueError:
        kind = str(config.get("model_type"))
        if kind not in MODEL_TYPES and kind != "phi3":
            raise
        original(self, preset, {**config, "model_type": MODEL_TYPES.get(kind, "llama")})
        ours = phi3_converter() if kind == "phi3" else None
    if ours is not None:
        self.config, self.converter = config, ours


class _Converter:
    """A converter of KerasHub with functions in place of some of its own."""

    def __init__(self, own: Any, **functions: Any) -> None:
        self._own = own
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


# RoBERTa's only token type, which KerasHub's class has no variable for; it is added at every position.
_TYPES = "embeddings.token_type_embeddings.weight"


@_upstream.while_recording(_upstream.transformers_loader, "load_backbone")
def _build_as_configured(recording: Any, original: Any, self: Any, cls: Any, load_weights: Any, **given: Any) -> Any:
    """Passes on what a converter ignores of a configuration, and compares the built model with it."""
    config, converter, read = self.config, self.converter, set[str]()
    checked = False

    @functools.wraps(converter.convert_backbone_config)  # KerasHub counts its parameters
    def convert_config(*args: Any, **kwargs: Any) -> Any:
        found = converter.convert_backbone_config(*args, **kwargs)
        parameters = inspect.signature(cls).parameters
        more = passed_on(config, read, found, parameters)
        if changed := [
            f"{key}={more[key]!r}" for key in more if key not in given and more[key] != parameters[key].default
        ]:
            recording.notes.append(f"{listed(changed)} from {CONFIG}, which from_preset of KerasHub leaves out")
        return {**more, **found}

    def check(backbone: Any) -> None:
        nonlocal checked
        wrong = [] if checked else differences(config, read, backbone, given)
        checked = True
        if not wrong:
            return
        message = (
            f"{shown(self.preset)}: KerasHub's {type(backbone).__name__} computes otherwise than {CONFIG} says: "
            f"{listed(wrong, most=8, separator='; ')}"
        )
        if recording.options.strict:
            fix = "Pass strict=False to lazymodel_keras.from_preset to load it all the same; its outputs then differ"
            recording.refuse(CheckpointError(f"{message}. {fix} from those of the model that was trained."))
        warn(f"{message}. Its outputs differ from those of the model that was trained.")

    def convert_weights(backbone: Any, loader: Any, *args: Any) -> Any:
        check(backbone)  # before weights that do not fit are an error of their own
        result = converter.convert_weights(backbone, loader, *args)
        names = (name for file in recording.files.values() for name in file.requested)
        if config.get("model_type") == "roberta" and not any(name.endswith(_TYPES) for name in names):
            with contextlib.suppress(KeyError, CheckpointError):  # it has none
                row = loader.get_tensor(_TYPES)[0]
                positions = backbone.embeddings.position_embedding.position_embeddings
                positions.assign(positions + row)
                recording.notes.append(f"{_TYPES} was added to the positions; from_preset of KerasHub leaves it out")
        return result

    self.config = Noting(config, read)
    self.converter = _Converter(converter, convert_backbone_config=convert_config, convert_weights=convert_weights)
    try:
        backbone = original(self, cls, load_weights, **given)
    finally:
        self.config, self.converter = config, converter
    check(backbone)
    return backbone


@_upstream.while_recording(_upstream.preset_loader_class, "get_backbone_kwargs")
def _keep_saved_policies(recording: Any, original: Any, self: Any, **kwargs: Any) -> Any:
    """Keeps the dtype policies of a quantized preset, which its loader would overwrite with None."""
    own, others = original(self, **kwargs)
    saved = (self.config.get("config") or {}).get("dtype")
    if own.get("dtype") is None and isinstance(saved, dict):
        policy = keras.dtype_policies.get(saved)
        policies = policy.values() if isinstance(policy, keras.dtype_policies.DTypePolicyMap) else [policy]
        if any(policy.quantization_mode is not None for policy in policies):
            own["dtype"] = saved
    return own, others


_EXPERTS = ("gate_up_proj", "down_proj")


class _WithoutExperts:
    """A loader of a GPT-OSS folder that returns one block of zeros in place of the numbers of all experts."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def get_tensor(self, name: str) -> Any:
        shapes = {"blocks": (1, 1, 1, CODES), "scales": (1, 1, 1)}
        shape = shapes.get(name.rpartition("_")[2])
        return self._loader.get_tensor(name) if shape is None else np.zeros(shape, np.uint8)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _pairs() -> np.ndarray[Any, Any]:
    """The values of two numbers and their scale as KerasHub computes them: the largest scale is infinite, not NaN."""
    with np.errstate(over="ignore"):
        return scaled_pairs(2.0 ** (np.arange(256).astype(np.float32) - 127.0))


@_upstream.while_recording(_upstream.gpt_oss_converter, "convert_weights")
def _decode_lazily(recording: Any, original: Any, backbone: Any, loader: Any, config: Any) -> None:
    """Makes the experts decode when they are read: KerasHub's converter holds all of them on the host, in float32."""
    experts = [layer.sparse_moe_block.experts for layer in backbone.transformer_layers]
    with contextlib.ExitStack() as undo:
        for of, name in itertools.product(experts, _EXPERTS):
            _upstream.replace(undo, getattr(of, name), "assign", lambda value: None)
        original(backbone, _WithoutExperts(loader), config)
    for (index, of), name in itertools.product(enumerate(experts), _EXPERTS):
        stored = f"model.layers.{index}.mlp.experts.{name}"
        try:
            blocks, scales = (loader.get_tensor(f"{stored}_{kind}") for kind in ("blocks", "scales"))
        except (KeyError, CheckpointError):  # it is not quantized
            getattr(of, name).assign(loader.get_tensor(stored))
            continue
        if (blocks.dtype, scales.dtype, blocks.shape) != (np.uint8, np.uint8, (*scales.shape, CODES)):
            raise CheckpointError(
                f"{stored}_blocks: expected uint8 of shape {(*scales.shape, CODES)}, like its scales, found "
                f"{blocks.dtype} {blocks.shape} and {scales.dtype} scales"
            )
        getattr(of, name).assign(np.transpose(LazyTensor(Float4Tensor(blocks, scales, _pairs)), (0, 2, 1)))


def _in_place_of(name: str, folder: Location) -> Location | None:
    """What a folder has in place of `model.safetensors`: the first of its numbered files, also those of ranks of
    torch.distributed, an index or a file of PyTorch's. None for other names."""
    if name != "model.safetensors" or (folder / name).exists():
        return None
    files = [file for file in loose_files(folder) if is_numbered(file.name)] or model_weights(folder)
    return next(iter(files), None)


def _is_loose_shard(path: str | Location) -> bool:
    """Returns True for a numbered file of a folder without an index."""
    file = location(path)
    return is_numbered(file.name) and not any(True for _ in file.parent.glob("*.index.json"))
