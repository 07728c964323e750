"""PRNG keys as data, and the way out of a trace."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lazymodel._programs.keys import as_keys, is_key, key_data, pack_keys, stored_as, unpack_keys
from lazymodel._trace.leaving import WayOut


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


def test_leaving_a_trace() -> None:
    values: list[Any] = []

    def leaves() -> jax.Array:
        with WayOut() as way_out:
            assert way_out.take() and way_out.left and way_out.take()
            values.append(float(jnp.linspace(0.0, 1.0, 3)[1]))
        return jnp.ones(3)

    jaxpr = jax.make_jaxpr(leaves)()
    assert values == [0.5]
    assert [eqn.primitive.name for eqn in jaxpr.jaxpr.eqns] == ["broadcast_in_dim"]


def test_nothing_that_was_traced_is_left_behind() -> None:
    def stays() -> jax.Array:
        with WayOut() as way_out:
            traced = jnp.sin(jnp.ones(3))
            assert not way_out.take() and not way_out.left
        return traced

    assert len(jax.make_jaxpr(stays)().jaxpr.eqns) == 2


def test_a_trace_inside_is_not_left() -> None:
    def outer() -> jax.Array:
        with WayOut() as way_out:

            def inner() -> jax.Array:
                assert way_out.take() and not way_out.left
                return jnp.ones(2)

            return jnp.zeros(jax.eval_shape(inner).shape)

    assert jax.make_jaxpr(outer)().out_avals[0].shape == (2,)
