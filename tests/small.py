"""Sizes and times of the library that tests make small, so that small arrays show what large ones would.

Nothing else of them is public: they are named here, and nowhere else.
"""

from __future__ import annotations

import contextlib
import tracemalloc
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import lazymodel as lm

_PLACES = {
    "large": ["lazymodel._sharding.shard.LARGE"],  # bytes of a variable that needs a rule
    "list_seconds": ["lazymodel._remote.store.LIST_SECONDS"],
    "longest_retry_after": ["lazymodel._remote.requests.LONGEST_RETRY_AFTER"],
    "orbax_chunk": ["lazymodel.extras.formats.save_orbax._CHUNK"],
    "read_request": ["lazymodel._remote.prefetch.REQUEST"],
    "silence": ["lazymodel._devices.collective.SILENCE"],
    "least_upload_part": ["lazymodel._remote.upload.LEAST_PART"],
    "upload_part": ["lazymodel._remote.upload.PART"],
    "saved_chunk": ["lazymodel_keras._train.saving._CHUNK"],  # bytes that Keras' weights are written at a time
    "write_chunk": ["lazymodel._save.write._CHUNK"],
    "staging": [
        "lazymodel._tensors.byte_reader.STAGING",
        "lazymodel._tensors.tensor_source.STAGING",
    ],  # bytes that are read before they are placed
    "ahead": ["lazymodel._materialize.load.AHEAD"],  # bytes of values that are not kept
    "part": ["lazymodel._tensors.tensor_source.PART"],  # bytes that one thread fills at a time
    "run": ["lazymodel._tensors.tensor_source.RUN"],  # bytes from which a row is spread straight over shards
    "runs": ["lazymodel._tensors.tensor_source.RUNS"],  # rows that are spread at a time
    "row_gap": ["lazymodel._tensors.byte_reader.FileReader.row_gap"],  # bytes between rows that are read one by one
    "row_call": ["lazymodel._tensors.byte_reader.FileReader.row_call"],  # bytes of a row that is worth a call
    "call": ["lazymodel._tensors.byte_reader.READ"],  # bytes that one call reads
    "map_block": ["lazymodel._tensors.byte_reader.MAP_BLOCK"],  # bytes that are copied out of a map at a time
    "workspace": ["lazymodel._tensors.lazy.READ_WORKSPACE"],  # bytes of temporaries of `LazyTensor.read`
    "compiles": ["lazymodel._materialize.stream.COMPILES"],  # bytes of a load in which decoding may be compiled
    "pays": ["lazymodel.extras.quantized.compiled.PAYS"],  # numbers that are decoded before it is
    "tried": ["lazymodel._tensors.casting.SMALL"],  # integers that are tried one by one
    "slab": ["lazymodel._tensors.decoded.COMPUTED_CHUNK"],  # bytes that are computed at a time
    "deflated": ["lazymodel.extras.formats.numpy._PIECE"],  # bytes that are decompressed at a time
    "kept_chunk": ["lazymodel.extras.formats.orbax._KEEP"],  # bytes of a chunk that is kept for the next box
}


def make_small(patch: pytest.MonkeyPatch | None = None, **values: float) -> None:
    """Sets some of them by name, until the patch is undone; without one, for the rest of a worker's life."""
    patch = patch or pytest.MonkeyPatch()
    for name, value in values.items():
        for place in _PLACES[name]:
            patch.setattr(place, value)


@contextlib.contextmanager
def buffer_sizes(**sizes: int) -> Iterator[None]:
    """Sizes of these buffers until the end of the `with` block."""
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch, **sizes)
        yield


def shard_small(abstract: Any, *given: Any, large: int = 1 << 20, on_unmatched: str = "warn") -> Any:
    """`abstract.shard(…)`, with other bytes from which variables are large; with "ignore" without its warnings."""
    with buffer_sizes(large=large), warnings.catch_warnings():
        if on_unmatched == "ignore":
            warnings.simplefilter("ignore", lm.LazyModelWarning)
        return abstract.shard(*given, on_unmatched="warn" if on_unmatched == "ignore" else on_unmatched)


def read_within(tensor: lm.LazyTensor, workspace: int) -> tuple[np.ndarray, int]:
    """Reads a tensor with so many bytes for temporaries. Returns it, and the bytes that it took at most beyond its own.

    It is less than 1 MiB: larger arrays and temporaries are in maps, of which Python knows nothing.
    """
    assert tensor.nbytes < 1 << 20
    with buffer_sizes(workspace=workspace):
        tracemalloc.start()
        values = tensor.read()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return values, peak - values.nbytes
