"""PRNG keys as data."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lazymodel._programs.keys import as_keys, is_key, key_data, pack_keys, stored_as, unpack_keys


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_are_data_and_back(impl: str) -> None:
    keys = jax.random.split(jax.random.key(3, impl=impl), (2, 3))
    data = key_data(keys)
    stored = stored_as(keys.shape, keys.dtype)
    assert is_key(keys.dtype) and not is_key(data.dtype)
    assert stored == (data.shape, np.uint32)
    packed = pack_keys(data)
    assert packed.shape == keys.shape
    np.testing.assert_array_equal(unpack_keys(packed.T), data.transpose(1, 0, 2))
    assert bool(jnp.all(as_keys(data, keys.dtype) == keys))
    assert jax.jit(lambda raw: as_keys(raw, keys.dtype))(data).dtype == keys.dtype


def test_what_is_no_key_is_stored_as_it_is() -> None:
    assert stored_as((2, 3), np.dtype(np.float64)) == ((2, 3), np.float64)  # whatever jax_enable_x64 says
    array = np.ones(2)
    assert as_keys(array, array.dtype) is array and as_keys(array, None) is array
