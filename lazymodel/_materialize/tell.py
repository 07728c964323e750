"""What a process says that it is about to do, in words that differ from another's where what they would do differs."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import jax
import numpy as np

from lazymodel._devices.agreement import Stage
from lazymodel._mapping.match import Choice

_SMALL = 64 * 2**10  # bytes of an array in memory that are compared: states of generators, tables, steps


def tell(stage: Stage, choice: Choice, programs: Iterable[str] = (), details: Iterable[str] = ()) -> None:
    """Says what is initialized, of which keys and seeds, and what the tensors are that are loaded.

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
    loaded = [
        f"{path} {getattr(source, 'dtype', '')} {np.shape(source)} {_content(source).hex()}"
        for path, source in sorted(choice.sources.items())
    ]
    stage.outcome += "".join(f", compile {program}" for program in programs)
    stage.details = "\n".join([*loaded, *details])


def _content(value: object) -> bytes:
    """What tells a small array in memory from another one."""
    if not isinstance(value, np.ndarray) or value.nbytes > _SMALL or value.dtype.hasobject:
        return b""
    return zlib.crc32(np.ascontiguousarray(value).tobytes()).to_bytes(4)
