#!/usr/bin/env bash
# On CPU, JAX divides an array by a number with a product: 41 * k / 41 is often not k, also without jit.
#
# Versions: jax and jaxlib 0.10.2, numpy 2.4.6, ml_dtypes 0.6.0, on CPU (x86-64). No flag of XLA is set.
#
# One would guess: `x / 41` in float32 or float16 is one division, rounded once, as IEEE 754 and NumPy have it. So it is
# exact where the quotient is a whole number. A single operation gives the same in jit and outside, and it does not
# matter whether the divisor is a number, an argument or an array that is full of it. `optimization_barrier` around a
# divisor keeps the compiler from rewriting the division.
#
# Seen: XLA computes 1 / 41 once and multiplies. How many of the multiples of 41 have a quotient whose floor is one too
# low; with bfloat16 there is none among 6:
#                                              float32            float16
#   NumPy                                      0 of 24390         0 of 49
#   x / 41, no jit                             6561 of 24390      10 of 49
#   x / 41, jit                                6561 of 24390      10 of 49
#   x / y, jit, y an argument of shape ()      6561 of 24390      10 of 49
#   the same, barrier around y                 6561 of 24390      10 of 49
#   the same, no excess precision              6561 of 24390      10 of 49
#   x / jnp.full, jit                          6561 of 24390      10 of 49
#   x / y, no jit, y an array of 41s           0 of 24390         0 of 49
#   x / barrier(jnp.full), jit                 0 of 24390         0 of 49
#   x // 41, no jit                            0 of 24390         0 of 49
# So the divisor's shape decides, not jit; and a barrier helps only behind the broadcast of the divisor.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset PYTHONPATH XLA_FLAGS
export JAX_PLATFORMS=cpu
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 ml_dtypes==0.6.0
"$folder/env/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np

barrier = jax.lax.optimization_barrier


def measure(dtype, count):
    """For each way to divide: how many of 41, 82, ... 41 * count have a quotient whose floor is one too low."""
    quotients = np.arange(1, count + 1)
    x = (41 * quotients).astype(dtype)
    assert np.array_equal(x.astype(np.int64), 41 * quotients)  # the input is exact
    y = np.asarray(41, dtype)

    def divide(a, b):
        return a / b

    exact = {"xla_allow_excess_precision": False}
    ways = {
        "NumPy": x / y,
        "x / 41, no jit": jnp.asarray(x) / 41,
        "x / 41, jit": jax.jit(lambda a: a / 41)(x),
        "x / y, jit, y an argument of shape ()": jax.jit(divide)(x, y),
        "the same, barrier around y": jax.jit(lambda a, b: a / barrier(b))(x, y),
        "the same, no excess precision": jax.jit(divide).lower(x, y).compile(compiler_options=exact)(x, y),
        "x / jnp.full, jit": jax.jit(lambda a: a / jnp.full(a.shape, y))(x),
        "x / y, no jit, y an array of 41s": jnp.asarray(x) / jnp.full(x.shape, y),
        "x / barrier(jnp.full), jit": jax.jit(lambda a: a / barrier(jnp.full(a.shape, y)))(x),
        "x // 41, no jit": jnp.asarray(x) // 41,
    }
    assert all(result.dtype == dtype for result in ways.values())
    floors = {way: np.floor(np.asarray(result, np.float64)) for way, result in ways.items()}
    assert all(np.isin(quotients - floor, (0, 1)).all() for floor in floors.values())
    return {way: int((floor != quotients).sum()) for way, floor in floors.items()}


single, half, brain = measure(np.float32, 24390), measure(np.float16, 49), measure(jnp.bfloat16, 6)
for way in single:
    print(f"{way:42} float32 {single[way]:4} of 24390   float16 {half[way]:2} of 49   bfloat16 {brain[way]} of 6")
assert list(single.values()) == [0, 6561, 6561, 6561, 6561, 6561, 6561, 0, 0, 0], single
assert list(half.values()) == [0, 10, 10, 10, 10, 10, 10, 0, 0, 0], half
assert not any(brain.values()), brain
PY
echo "as written"
