"""Flax' msgpack: what Flax writes is read back; what is damaged is refused by name."""

from __future__ import annotations

import collections
import struct
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lazymodel as lm
from tests.core.checkpoints._formats import msgpack_file, refused

Pair = collections.namedtuple("Pair", "first second")
ARRAYS = {
    "params/dense/kernel": np.arange(12, dtype=np.float32).reshape(3, 4),
    "params/dense/bias": np.ones(4, ml_dtypes.bfloat16),
    "params/large": np.arange(3000, dtype=np.int32).reshape(10, 300),
    "params/empty": np.zeros((0, 3), np.float16),
    "opt_state/0/first": np.ones(3, ml_dtypes.float8_e4m3fn),
    "opt_state/0/second": np.array(4, np.int64),
    "opt_state/1": np.full((2, 2), 1 + 2j, np.complex64),
    "step": np.array(70_000, np.int64),
    "rate": np.array(0.1),
    "scale": np.array(2.5, np.float32),
    "on": np.array(True),
}
TREE = {
    "params": {
        "dense": {"kernel": ARRAYS["params/dense/kernel"], "bias": jnp.ones(4, jnp.bfloat16)},
        "large": ARRAYS["params/large"],
        "empty": ARRAYS["params/empty"],
    },
    "opt_state": [Pair(ARRAYS["opt_state/0/first"], 4), ARRAYS["opt_state/1"]],
    "step": 70_000, "rate": 0.1, "scale": np.float32(2.5), "on": True, "name": "text", "none": None, "complex": 1 + 2j,
}  # fmt: skip


@pytest.mark.parametrize("chunk", [2**30, 1000])
def test_what_flax_writes(tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays above a limit, which Flax has at 1 GiB, are in chunks."""
    flax: Any = pytest.importorskip("flax.serialization")
    monkeypatch.setattr(flax, "MAX_CHUNK_SIZE", chunk)
    (tmp_path / "checkpoint_3").write_bytes(flax.to_bytes(TREE))
    with lm.open_checkpoint(tmp_path) as checkpoint:
        assert sorted(checkpoint) == sorted(ARRAYS)
        assert checkpoint.nbytes == sum(array.nbytes for array in ARRAYS.values())
        for name, array in ARRAYS.items():
            header, found = checkpoint.describe(name), checkpoint[name].read()
            assert (header.shape, header.dtype) == (found.shape, found.dtype) == (array.shape, array.dtype), name
            assert found.tobytes() == array.tobytes(), name
        before = checkpoint.bytes_read
        np.testing.assert_array_equal(
            checkpoint["params/large"].read(np.s_[2:4, 5:7]), ARRAYS["params/large"][2:4, 5:7]
        )
        assert checkpoint.bytes_read - before <= 1208


KEY = b"\xa1w"


def extension(inner: bytes) -> bytes:
    return b"\x81" + KEY + b"\xc9" + struct.pack(">Ib", len(inner), 1) + inner


WHOLE = b"\x93\x91\x02\xa7float32\xc4\x08" + bytes(8)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (extension(WHOLE)[:-3], "30 bytes"),
        (extension(WHOLE) + b"x", "expected the end of the file at byte 30, found 1 more bytes"),
        (extension(WHOLE.replace(b"\x91\x02", b"\x91\x03")), "the bytes of 'w', float32"),
        (extension(WHOLE.replace(b"float32", b"object_")), "an array 'w' of numbers at byte .*, found object_"),
        (extension(WHOLE + b"\x01"), "'w' to end at byte"),
        (b"\x82" + KEY + b"\x01" + KEY + b"\x02", "each key once"),
        (b"\x81\x01\x01", "no known format"),
        (b"\x81" + KEY + b"\xc1", "a value of 'w' at byte 4, found the byte 0xc1"),
        (b"\x81" + KEY + b"\x91" * 99 + b"\x01", "at most 64 lists in each other"),
        (b"\x81" + KEY + b"\xdf\xff\xff\xff\xff", "truncated|expected"),
    ],
)
def test_damaged(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "weights").write_bytes(data)
    refused(tmp_path / "weights", words)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_file_is_refused_or_read(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(msgpack_file({"a/b": np.arange(3.0), "c": np.ones((2, 2), np.int8)}))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "m.msgpack").write_bytes(content[: data.draw(st.integers(1, len(content)))])
    try:
        with lm.open_checkpoint(tmp_path / "m.msgpack") as checkpoint:
            for name in checkpoint:
                assert checkpoint[name].read().nbytes == checkpoint.describe(name).nbytes <= len(content)
    except lm.CheckpointError as error:
        assert "m.msgpack" in str(error)  # noqa: PT017
