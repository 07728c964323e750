"""The stream's programs for TPUs, which are not here: large shards are updated in place, bit for bit."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import lazymodel as lm
from lazymodel._materialize import stream
from lazymodel._tensors.boxes import box_shape
from tests.conftest import needs_libtpu
from tests.large import mostly_large

DTYPES = ["bfloat16", "int8", "float8_e4m3fn"]
MORE = ["float32", "float16", "float8_e5m2", "uint8", "bool", "int32", "int4"]


@needs_libtpu
@pytest.mark.parametrize("dtype", mostly_large([*DTYPES, *MORE], ["bfloat16"]))
@pytest.mark.parametrize("start", [(1280, 0), (0, 1280)], ids=["rows", "columns"])
def test_a_chunk_is_written_in_place(dtype: str, start: tuple[int, int]) -> None:
    place = SingleDeviceSharding(lm.topology("v5e-1").devices.flat[0])
    shape = (262_144, 8192)
    rows, columns = (shape[0], 128) if start[1] else (2048, shape[1])

    def struct(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    corner = [jax.ShapeDtypeStruct((), "int32", sharding=place)] * 2
    program = stream.update.lower(struct(shape), struct((rows, columns)), corner, stream.TILE).compile()
    memory, nbytes = program.memory_analysis(), shape[0] * shape[1] * np.dtype(jax.numpy.dtype(dtype)).itemsize
    assert memory.alias_size_in_bytes == memory.output_size_in_bytes >= nbytes // (2 if dtype == "int4" else 1)
    assert memory.temp_size_in_bytes <= struct((rows, columns)).size * 4
    assert " convert(" not in program.as_text()  # through a wider float, signalling NaNs would change


@pytest.mark.parametrize("most", [1 << 13, 1 << 16, 1 << 20])
@pytest.mark.parametrize("shape", [(300, 4096), (200, 131_072), (5, 200, 3000), (3, 70, 20_000), (70_000,)], ids=str)
def test_chunks_begin_at_tiles(shape: tuple[int, ...], most: int) -> None:
    """Of any width, in the order of the file, each element once."""
    tiles = [1, 64, 128][-len(shape) :]
    chunks = list(stream._chunks(shape, most, tiles))
    assert all(part.start % tile == 0 for chunk in chunks for part, tile in zip(chunk, tiles, strict=True))
    assert all(math.prod(box_shape(chunk)) <= most for chunk in chunks)
    assert len(chunks) <= 4 * (math.prod(shape) // most + 1) + math.prod(shape[:-2]) * 4
    seen = np.zeros(shape, np.int8)
    for chunk in chunks:
        seen[chunk] += 1
    assert (seen == 1).all()
