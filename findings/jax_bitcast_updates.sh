#!/usr/bin/env bash
# On CPU, a `bitcast_convert_type` around many `dynamic_update_slice` makes JAX take some 50 times as long.
#
# Versions: jax and jaxlib 0.10.2, numpy 2.4.6, on CPU (x86-64). No flag of XLA is set.
#
# One would guess: to put pieces of bits into a bfloat16 array that is donated, one takes it as uint16, updates it piece
# by piece, and takes the result as bfloat16 again. Neither costs anything, as it does not without the pieces; so it is
# as fast as with an array that is uint16 from the beginning, and 80 pieces take about as long as 10 larger ones.
#
# Seen: with the two bitcasts, XLA makes one loop over the whole array, in which every element is asked for each piece
# whether it is in it, where the places of the pieces are not constants. Medians of five, 10 MiB in shape (10, 1024, 512),
# on two cores that did other work as well:
#                                              10 pieces    80 pieces
#   uint16 throughout                          0.3 ms       0.5 ms
#   bfloat16, as uint16 in between             0.4 ms       38 ms
#   the same, places are constants             0.4 ms       1.7 ms
#   the same, places are arguments, with
#   xla_cpu_use_fusion_emitters=False          2.6 ms       0.6 ms
# The script requires that 80 pieces with bitcasts take 10 × as long as without, and less than 5 × with the option.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset PYTHONPATH XLA_FLAGS
export JAX_PLATFORMS=cpu
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
"$folder/env/bin/python" - <<'PY'
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LAYERS, ROWS, WIDTH = 10, 1024, 512
OLDER = {"xla_cpu_use_fusion_emitters": False}


def milliseconds(parts, dtype, constant=False, options=None):
    """Of a call that fills an array with LAYERS × parts pieces."""
    size = ROWS // parts

    def fill(array, pieces, starts):
        array = lax.bitcast_convert_type(array, jnp.uint16) if dtype == jnp.bfloat16 else array
        for part in range(parts):
            start = jnp.int32(part * size) if constant else starts[part]
            for layer in range(LAYERS):
                piece = pieces[part * LAYERS + layer]
                array = lax.dynamic_update_slice(array, piece, (jnp.int32(layer), start, jnp.int32(0)))
        return lax.bitcast_convert_type(array, dtype) if dtype == jnp.bfloat16 else array

    function = jax.jit(fill, donate_argnums=0, compiler_options=options)
    pieces = [jnp.full((1, size, WIDTH), number, jnp.uint16) for number in range(parts * LAYERS)]
    starts = jnp.arange(parts, dtype=jnp.int32) * size
    array, times = jnp.zeros((LAYERS, ROWS, WIDTH), dtype), []
    for _ in range(6):
        began = time.perf_counter()
        array = jax.block_until_ready(function(array, pieces, starts))
        times.append(time.perf_counter() - began)
    numbers = np.asarray(array).view(np.uint16)[:, :, 0]
    expected = np.arange(parts * LAYERS).reshape(parts, LAYERS).T.repeat(size, axis=1)
    assert np.array_equal(numbers, expected)
    return statistics.median(times[1:]) * 1e3


plain = [milliseconds(parts, jnp.uint16) for parts in (1, 8)]
bitcast = [milliseconds(parts, jnp.bfloat16) for parts in (1, 8)]
constant = [milliseconds(parts, jnp.bfloat16, constant=True) for parts in (1, 8)]
older = [milliseconds(parts, jnp.bfloat16, options=OLDER) for parts in (1, 8)]
for name, (few, many) in {"uint16": plain, "bitcasts": bitcast, "constants": constant, "older": older}.items():
    print(f"{name:10} 10 pieces {few:6.2f} ms   80 pieces {many:6.2f} ms")
assert bitcast[1] > 10 * plain[1], (bitcast, plain)
assert older[1] < 5 * plain[1], (older, plain)
PY
echo "as written"
