"""A checkpoint into another one, of any format: `convert`; and what of two checkpoints differs."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from lazymodel._errors import CheckpointError, LazyModelError
from lazymodel._extras import extra
from lazymodel._mapping.table import WeightMap
from lazymodel._remote.path import LocalPath
from lazymodel._remote.url import is_url
from lazymodel._save.files import SaveOptions, in_threads
from lazymodel._save.safetensors import SINGLE
from lazymodel._save.save import WriteFunction, mapped, save
from lazymodel._show.progress import reported
from lazymodel._show.text import closest, listed
from lazymodel._tensors.boxes import Box, box_shape, slabs
from lazymodel._tensors.casting import converted, refusal
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.tensor_source import compared
from lazymodel.checkpoints._open import open_checkpoint, weight_files

_CHUNK = 8 << 20  # bytes of each side that are compared at a time
_LEAST = 64 << 10  # and at least, whatever the budget: a number at a time, each with its chunk, takes forever
_THREADS = 2  # that compare: reading and comparing overlap


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What of a checkpoint becomes another one, and how.

    Attributes:
        source_options: As `storage_options` of `open_checkpoint`.
        dtype: The dtype of all floating-point tensors, such as `"bfloat16"`; others stay as they are.
        include: Patterns of names as shells have them (`*`, `?`, `[…]`, case and all); nothing else is converted.
        exclude: Patterns of names that are not.
        mapping: As of `save`.
        adapters: LoRA adapters that `open_adapter` opened, to merge one after another.
        verify: Whether to read everything back and compare it with the source.
    """

    source_options: Mapping[str, Any] | None = None
    dtype: str | None = None
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    mapping: WeightMap | WriteFunction | None = None
    adapters: Sequence[Any] = ()
    verify: bool = False


def convert(source: str, destination: str, how: Conversion, **options: Any) -> list[str]:
    """Saves a checkpoint as another one; returns what was found different afterwards, which is nothing if all is well.

    Args:
        source: As for `open_checkpoint`; what is quantized is decoded.
        destination: As for `save`, as are further options.
        how: What is converted.

    Raises:
        LazyModelError: As `open_checkpoint` and `save`; a pattern matches nothing, or nothing is left; the dtype is
            none of floating point; source and destination are the same.
    """
    wanted = None if how.dtype is None else _floating(how.dtype)
    with contextlib.ExitStack() as stack:
        checkpoint = stack.enter_context(open_checkpoint(source, how.source_options))
        for adapter in how.adapters:
            checkpoint = stack.enter_context(extra("merge")(checkpoint, adapter))
        if not is_url(destination):
            _check_apart(destination, [source, *checkpoint.files], options.get("format"))
            _check_hidden(destination, source)
        names = selected(list(checkpoint), how.include, how.exclude)
        tensors = mapped({name: checkpoint[name] for name in names}, how.mapping)
        if wanted is not None:
            tensors = {name: _cast(name, tensor, wanted, checkpoint) for name, tensor in tensors.items()}
        # A safetensors file's metadata says whose names and layouts it has: still true. Other formats' is not copied.
        own = checkpoint.metadata if checkpoint.format == "safetensors" and how.mapping is None else None
        save(tensors, destination, metadata=own, **options)
        if not how.verify:
            return []
        with open_checkpoint(destination, options.get("storage_options")) as found:
            forget([] if is_url(destination) else found.files)
            return list(differences(tensors, found, options))


def _floating(name: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype(jnp.dtype(name))
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise LazyModelError(f"expected a floating-point dtype such as bfloat16, float16 or float32, found {name!r}")
    return dtype


def _cast(name: str, tensor: LazyTensor, dtype: np.dtype[Any], names: Mapping[str, Any]) -> LazyTensor:
    if not jnp.issubdtype(tensor.dtype, jnp.floating):
        return tensor
    if why := refusal(name, tensor, dtype, tensor.file, names):
        raise CheckpointError(why)
    return converted(tensor, dtype)


def selected(names: list[str], include: Sequence[str], exclude: Sequence[str]) -> list[str]:
    for pattern in (*include, *exclude):
        if not fnmatch.filter(names, pattern):
            raise LazyModelError(f"pattern {pattern!r} matches no tensor{closest(pattern, names)}")

    def fits(name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    left = [name for name in names if (not include or fits(name, include)) and not fits(name, exclude)]
    if not left:
        raise LazyModelError(f"no tensor is left of {listed(map(repr, names))}; give other patterns")
    return left


def _check_apart(destination: str, files: Sequence[str], format: str | None) -> None:
    """Raises LazyModelError if the source is the destination, or inside it."""
    where = os.path.realpath(destination)
    here = [file for file in files if not is_url(file)]
    for file in (*map(os.path.abspath, here), *map(os.path.realpath, here)):
        below = where + os.sep if format == "orbax" else None  # a folder that is replaced as a whole
        if where.endswith(".weights.json"):
            below = f"{where.removesuffix('.weights.json')}_"  # what its shards' names begin with
        if where in (file, os.path.dirname(file)) or (below is not None and file.startswith(below)):
            raise LazyModelError(f"{destination} is what is converted, or its folder; convert to another path")


def _check_hidden(destination: str, source: str) -> None:
    """Raises LazyModelError where a folder that is converted would be another checkpoint with the new one in it."""
    if is_url(source) or not os.path.isdir(source):
        return
    where, folder = os.path.realpath(destination), os.path.realpath(source)
    files = weight_files(LocalPath(folder))
    loose = bool(files) and files[0].suffix == ".safetensors" and files[0].name != SINGLE
    if loose and os.path.dirname(where) == folder and where.endswith(".safetensors"):
        raise LazyModelError(
            f"{destination} would be a part of {source}, which is what is converted; convert to another path"
        )


def forget(files: Sequence[str]) -> None:
    """Has the system read files from the disk again rather than from memory, if it can."""
    for file in files if hasattr(os, "posix_fadvise") else ():
        if os.path.isfile(file):
            with open(file, "rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def differences(
    expected: Mapping[str, LazyTensor], found: Mapping[str, LazyTensor], options: Mapping[str, Any]
) -> Iterator[str]:
    """Yields a text for each tensor that differs, bit for bit, between two checkpoints.

    Of the options of `save`, `max_host_memory` and `progress` are used.
    """
    how = SaveOptions.given({}, options.get("max_host_memory"), options.get("progress"))
    for name in [*expected, *(name for name in found if name not in expected)]:
        if name not in found or name not in expected:
            yield f"{name!r} is {'missing' if name in expected else 'unexpected'}"
    common = {name: (tensor, found[name]) for name, tensor in expected.items() if name in found}
    unit = max(
        (one.source.min_scratch_nbytes + two.source.min_scratch_nbytes for one, two in common.values()), default=0
    )
    threads, chunk = in_threads(how.budget, unit, _THREADS, _CHUNK, 4)
    chunk = max(chunk, _LEAST)
    jobs, different = list[tuple[str, Box]](), set[str]()
    for name, (one, two) in common.items():
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            yield f"{name!r}: expected {_described(one)}, found {_described(two)}"
        elif one.size:
            jobs += [(name, box) for box in slabs(one.shape, max(chunk // one.itemsize, 1))]

    def equal(one: np.ndarray, two: np.ndarray) -> bool:
        return np.array_equal(one.reshape(-1).view(np.uint8), two.reshape(-1).view(np.uint8))

    total = sum(one.nbytes for one, _ in common.values())
    with reported(how.bar, total, "verifying"), compared(common, jobs, equal, threads, chunk + unit) as results:
        for (name, box), same in zip(jobs, results, strict=True):
            how.bar.advance(math.prod(box_shape(box)) * common[name][0].itemsize, name)
            if not same and name not in different:
                different.add(name)
                ranges = ", ".join(f"{part.start}:{part.stop}" for part in box)
                yield f"{name!r}: expected other bytes in [{ranges}]"


def _described(tensor: LazyTensor) -> str:
    return f"{tensor.dtype.name}{list(tensor.shape)}"
