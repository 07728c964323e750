"""From one checkpoint to another, on a machine without devices: which tensors, as what, and whether they arrived.

How they are written is `save`'s matter, whose formats and guarantees are this one's.
"""

from __future__ import annotations

import fnmatch
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from lazymodel._errors import CheckpointError, LazyModelError
from lazymodel._mapping.table import WeightMap
from lazymodel._remote.url import is_url
from lazymodel._save.destination import SINGLE
from lazymodel._save.save import DEFAULT_BUDGET, WriteFunction, mapped, save
from lazymodel._show.progress import Progress, ProgressTo, progress_for
from lazymodel._show.text import closest, listed, parse_budget
from lazymodel._tensors.boxes import Box, box_shape, slabs
from lazymodel._tensors.casting import converted, refusal
from lazymodel._tensors.fill import fill
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.threads import Scratch, parallel
from lazymodel.checkpoints._open import open_checkpoint, weight_files

_CHUNK = 8 << 20  # bytes of each side that are compared at a time
_LEAST = 64 << 10  # and at least, whatever the budget: a number at a time, each with its chunk, takes forever
_THREADS = 2  # that compare: reading and comparing overlap


def convert(
    source: str,
    destination: str,
    *,
    format: str | None = None,
    dtype: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    mapping: WeightMap | WriteFunction | None = None,
    verify: bool = False,
    max_host_memory: int | str | None = None,
    progress: ProgressTo = None,
    source_options: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[str]:
    """Saves a checkpoint as another one; returns what `verify` found different, which is nothing where all is well.

    Args:
        source: As for `open_checkpoint`, with `source_options`; what is quantized is decoded.
        destination: As for `save`, as are `format`, `mapping`, `max_host_memory` (bytes), `progress`,
            `storage_options` and further options.
        dtype: The dtype of all floating-point tensors, such as `"bfloat16"`; others stay as they are.
        include: Patterns of names as shells have them (`*`, `?`, `[…]`, case and all); nothing else is converted.
        exclude: Patterns of names that are not.
        verify: Whether to read everything back and compare it with the source.

    Raises:
        LazyModelError: As `open_checkpoint` and `save`; a pattern matches nothing, or nothing is left; the dtype is
            none of floating point; source and destination are the same.
    """
    wanted = None if dtype is None else _floating(dtype)
    with open_checkpoint(source, source_options) as checkpoint:
        if not is_url(destination):
            _check_apart(destination, [source, *checkpoint.files], format)
            _check_hidden(destination, source, format)
        names = _selected(list(checkpoint), include, exclude)
        tensors = mapped({name: checkpoint[name] for name in names}, mapping)
        if wanted is not None:
            tensors = {name: _cast(name, tensor, wanted, checkpoint) for name, tensor in tensors.items()}
        # A safetensors file's metadata says whose names and layouts it has: still true. Other formats' is not copied.
        own = checkpoint.metadata if checkpoint.format == "safetensors" and mapping is None else None
        save(
            tensors,
            destination,
            format=format,
            metadata=own,
            max_host_memory=max_host_memory,
            progress=progress,
            storage_options=storage_options,
            **options,
        )
        if not verify:
            return []
        with open_checkpoint(destination, storage_options) as found:
            forget([] if is_url(destination) else found.files)
            budget = parse_budget(max_host_memory, DEFAULT_BUDGET)
            return list(differences(tensors, found, progress_for(progress), budget))


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
        raise CheckpointError(why.partition("cast='unsafe'")[0].rstrip("; "))
    return converted(tensor, dtype)


def _selected(names: list[str], include: Sequence[str], exclude: Sequence[str]) -> list[str]:
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
        below = where + os.sep if format in ("npy", "orbax") else None  # folders that are replaced as a whole
        if where.endswith(".weights.json"):
            below = f"{where.removesuffix('.weights.json')}_"  # what its shards' names begin with
        if where in (file, os.path.dirname(file)) or (below is not None and file.startswith(below)):
            raise LazyModelError(f"{destination} is what is converted, or its folder; convert to another path")


def _check_hidden(destination: str, source: str, format: str | None) -> None:
    """Raises LazyModelError where a folder that is converted would be another checkpoint with the new one in it."""
    if is_url(source) or not os.path.isdir(source):
        return
    where, folder = os.path.realpath(destination), os.path.realpath(source)
    files = weight_files(Path(folder))
    loose = bool(files) and files[0].suffix == ".safetensors" and files[0].name != SINGLE
    hidden = loose and os.path.dirname(where) == folder and where.endswith(".safetensors")
    if hidden or (not files and format == "npy" and where.startswith(folder + os.sep)):
        raise LazyModelError(
            f"{destination} would be a part of {source}, which is what is converted; convert to another path"
        )


def forget(files: Sequence[str]) -> None:
    """Has the system read files from the disk again rather than from memory, if it can."""
    for file in files if hasattr(os, "posix_fadvise") else ():
        if os.path.isfile(file):
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def differences(
    expected: Mapping[str, LazyTensor],
    found: Mapping[str, LazyTensor],
    bar: Progress,
    budget: int,
) -> Iterator[str]:
    """Yields a text for each tensor that differs, bit for bit, between two checkpoints."""
    for name in [*expected, *(name for name in found if name not in expected)]:
        if name not in found or name not in expected:
            yield f"{name!r} is {'missing' if name in expected else 'unexpected'}"
    common = {name: (tensor, found[name]) for name, tensor in expected.items() if name in found}
    unit = max(
        (one.source.min_scratch_nbytes + two.source.min_scratch_nbytes for one, two in common.values()), default=0
    )
    threads = max(min(_THREADS, budget // (unit + 4 * _CHUNK)), 1)
    chunk = max(min(_CHUNK, (budget // threads - unit) // 4), _LEAST)
    scratch = Scratch(chunk + unit)
    bar.start(sum(one.nbytes for one, _ in common.values()), "verifying")
    jobs, different = list[tuple[str, Box]](), set[str]()
    for name, (one, two) in common.items():
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            yield f"{name!r}: expected {_described(one)}, found {_described(two)}"
        elif one.size:
            jobs += [(name, box) for box in slabs(one.shape, max(chunk // one.itemsize, 1))]

    def equal(job: tuple[str, Box]) -> bool:
        name, box = job
        if name in different:
            return True
        one, two = (_bits(tensor, box, scratch, number) for number, tensor in enumerate(common[name]))
        return np.array_equal(one, two)

    try:
        with parallel(equal, jobs, threads, "verify") as results:
            for number, ((name, box), same) in enumerate(zip(jobs, results, strict=True)):
                one, two = common[name]
                bar.advance(math.prod(box_shape(box)) * one.itemsize, name)
                if not same and name not in different:
                    different.add(name)
                    yield f"{name!r}: expected other bytes in {_shown(box)}"
                if number + 1 == len(jobs) or jobs[number + 1][0] != name:
                    one.source.release()
                    two.source.release()
    finally:
        bar.finish()


def _bits(tensor: LazyTensor, box: Box, scratch: Scratch, number: int) -> np.ndarray:
    nbytes = tensor.box(box).nbytes
    bits = scratch.buffer(nbytes, number)
    fill(tensor, [box], [bits.view(tensor.dtype).reshape(box_shape(box))], scratch.workspace)
    return bits


def _described(tensor: LazyTensor) -> str:
    return f"{tensor.dtype.name}{list(tensor.shape)}"


def _shown(box: Box) -> str:
    return f"[{', '.join(f'{part.start}:{part.stop}' for part in box)}]"
