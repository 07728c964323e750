"""What a process says that it is about to do, in words that differ from another's where what they would do differs."""

from __future__ import annotations

import hashlib
import random
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import methodcaller
from typing import Any

import jax
import numpy as np

from lazymodel._devices.agreement import Stage
from lazymodel._mapping.match import Choice
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.leaves import ArrayLeaf, DividedLeaf, Leaf
from lazymodel._tensors.source import SAMPLE, SAMPLES, Source

_SMALL = 64 * 2**10  # bytes of an array in memory that are all compared: states of generators, tables, steps
_READERS = 8  # files that are sampled at a time: it is waiting for a disk


def tell(stage: Stage, choice: Choice, programs: Iterable[str] = (), details: Iterable[str] = ()) -> None:
    """Says what is initialized, of which keys and seeds, and what the tensors are that are loaded, and of which files.

    Args:
        programs: What is compiled meanwhile, for people.
        details: More that must be the same in all processes, in order; where there is one, nobody asks for it.
    """
    initialized = [path for recipe in choice.recipes for path in recipe.paths]
    stage.outcome = f"load {len(choice.sources)} variables and initialize {len(initialized)}"
    if initialized:
        drawn = zlib.crc32(b"".join(_content(each) for recipe in choice.recipes for each in recipe.inputs))
        stage.outcome += f" (of keys and seeds {drawn:08x}): {', '.join(initialized)}"
    if jax.process_count() == 1:
        return
    loaded: list[str] = []
    files: dict[Source, None] = {}
    for path, value in sorted(choice.sources.items()):
        parts = [value] if not isinstance(value, LazyTensor) else [*_origins(value.leaf)]
        files |= dict.fromkeys(part.origin for part in parts if isinstance(part, Source))
        content = b"".join(map(_content, parts)).hex()
        loaded.append(f"{path} {getattr(value, 'dtype', '')} {np.shape(value)} {getattr(value, 'offset', 0)} {content}")
    with ThreadPoolExecutor(_READERS) as readers:
        contents = readers.map(methodcaller("fingerprint"), files)
        stage.files = [(file.path, content) for file, content in zip(files, contents, strict=True)]
    stage.outcome += "".join(f", compile {program}" for program in programs)
    stage.details = "\n".join([*loaded, *details])


def _origins(leaf: Leaf) -> Iterator[Any]:
    """The files and arrays in memory that a leaf is made of."""
    if isinstance(leaf, ArrayLeaf):
        yield leaf.array
    elif isinstance(leaf, DividedLeaf):
        for piece in leaf.pieces:
            yield from _origins(piece.leaf)
    else:
        yield from leaf.sources()


def _content(value: object) -> bytes:
    """What tells an array in memory from another one; of a large one, samples do."""
    if not isinstance(value, np.ndarray) or value.dtype.hasobject:
        return b""
    if value.nbytes <= _SMALL:
        return zlib.crc32(np.ascontiguousarray(value).tobytes()).to_bytes(4)
    digest, somewhere = hashlib.blake2b(digest_size=8), random.Random(value.size)
    length = max(SAMPLE // value.itemsize, 1)
    for _ in range(SAMPLES):
        *index, last = (somewhere.randrange(extent) for extent in value.shape)
        digest.update(value[(*index, slice(last, last + length))].tobytes())
    return digest.digest()
