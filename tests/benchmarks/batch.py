"""What `lm.pin_batch` saves: bytes sent and temporaries of steps of training under data axes, against pins by hand.

    python tests/benchmarks/batch.py [--json] [--tpu]

Eight steps are compiled, not run, for 8 virtual CPU devices (with --tpu for 8 chips of v5e, which need not be here):
layers one after the other, the same with positions and segments of packed sequences, in a scan, and in a scan with
remat; each on a mesh `data` of 8 and on `fsdp` × `model` of 4 × 2. Tables are split by features over the data axis, as
published layouts do. `plain` is the step as it is, `hand` has `with_sharding_constraint` behind the lookups and behind
each layer. The script fails if `pinned` sends more than 1.3 × of what `hand` sends, or takes more than 1.1 × its
temporaries.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import _measure
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.collectives import sent_nbytes

ROWS, LENGTH, WIDTH, WORDS, LAYERS, HEADS = 64, 128, 256, 4096, 3, 4
MOST_SENT, MOST_TEMP = 1.3, 1.1
KINDS = {
    "unrolled": {},
    "positions": {"packed": True},
    "scan": {"stacked": True},
    "remat": {"stacked": True, "remat": True},
}
Pin = Callable[[Any], Any]


def init(key: jax.Array, *, stacked: bool) -> dict[str, Any]:
    def normal(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape) * shape[0] ** -0.5

    def layer(key: jax.Array) -> dict[str, jax.Array]:
        shapes = {
            "qkv": (WIDTH, 3 * WIDTH),
            "out": (WIDTH, WIDTH),
            "up": (WIDTH, 4 * WIDTH),
            "down": (4 * WIDTH, WIDTH),
        }
        keys = jax.random.split(key, len(shapes))
        return {name: normal(key, *shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}

    token, position, rest = jax.random.split(key, 3)
    keys = jax.random.split(rest, LAYERS)
    layers = jax.vmap(layer)(keys) if stacked else [layer(key) for key in keys]
    return {"embed": normal(token, WORDS, WIDTH), "position": normal(position, LENGTH, WIDTH), "layers": layers}


def loss(params: Any, tokens: Any, positions: Any, segments: Any, *, pin: Pin, remat: bool) -> Any:
    mask = segments[:, None, :, None] == segments[:, None, None, :]

    def block(x: Any, layer: Any) -> tuple[Any, None]:
        q, k, v = jnp.split((x @ layer["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, -1)
        scores = jnp.where(mask, jnp.einsum("bthd,bshd->bhts", q, k), -1e9)
        mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v).reshape(x.shape)
        x = pin(x + mixed @ layer["out"])
        return pin(x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]), None

    block = jax.checkpoint(block) if remat else block
    x = pin(pin(params["embed"][tokens]) + pin(params["position"][positions]))
    if isinstance(params["layers"], list):
        for layer in params["layers"]:
            x, _ = block(x, layer)
    else:
        x, _ = jax.lax.scan(block, x, params["layers"])
    logits = jax.nn.log_softmax(x @ params["embed"].T)
    return -jnp.take_along_axis(logits, tokens[..., None], -1).mean()


def training(*, pin: Pin = lambda x: x, packed: bool, remat: bool) -> Callable[..., Any]:
    def step(params: Any, tokens: Any, positions: Any, segments: Any) -> Any:
        if not packed:
            positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
            segments = jnp.zeros_like(tokens)
        gradients = jax.grad(functools.partial(loss, pin=pin, remat=remat))(params, tokens, positions, segments)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    return step


def measure(kind: str, axes: dict[str, int], *, tpu: bool) -> dict[str, Any]:
    devices = np.array(jax.devices("cpu")).reshape(*axes.values())
    mesh = lm.topology("v5e:2x4", axes) if tpu else Mesh(devices, tuple(axes))
    data, model = (*mesh.axis_names, None)[:2]
    options: dict[str, Any] = {"packed": False, "stacked": False, "remat": False, **KINDS[kind]}
    stack = (None,) if options["stacked"] else ()
    rules = {
        "embed|position": P(model, data),
        "layers/.*(qkv|up)": P(*stack, data, model),
        "layers/.*(out|down)": P(*stack, model, data),
    }
    build = functools.partial(init, stacked=options.pop("stacked"))
    abstract = lm.build_abstract(build, jax.random.key(0)).shard(mesh, rules)
    batch = NamedSharding(mesh, P(data))
    x = jax.ShapeDtypeStruct((ROWS, LENGTH), "int32", sharding=batch)
    steps = {
        "plain": training(**options),
        "hand": training(pin=lambda x: jax.lax.with_sharding_constraint(x, batch), **options),
        "pinned": lm.pin_batch(training(**options), abstract),
    }
    placed = jax.tree.map(lambda leaf: leaf.sharding, abstract.tree)
    row: dict[str, Any] = {"step": kind, "mesh": " × ".join(f"{name} {size}" for name, size in axes.items())}
    for name, step in steps.items():
        compiled = jax.jit(step, donate_argnums=0, out_shardings=placed).lower(abstract.tree, x, x, x).compile()
        row[name] = {"sent": sent_nbytes(compiled), "temp": compiled.memory_analysis().temp_size_in_bytes}
    return row


def main() -> None:
    parser = _measure.arguments(__doc__)
    parser.add_argument("--tpu", action="store_true")
    options = parser.parse_args()
    if not options.json:
        print("| step | mesh | sent, MB: plain, by hand, pinned | temporaries, MB: plain, by hand, pinned |")
        print("|---" * 4 + "|")
    too_much: list[str] = []
    for axes in ({"data": 8}, {"fsdp": 4, "model": 2}):
        for kind in KINDS:
            row = measure(kind, axes, tpu=options.tpu)
            cells = [
                ", ".join(f"{row[way][of] / 1e6:.1f}" for way in ("plain", "hand", "pinned")) for of in ("sent", "temp")
            ]
            print(json.dumps(row) if options.json else f"| {kind} | {row['mesh']} | {' | '.join(cells)} |", flush=True)
            for of, most in (("sent", MOST_SENT), ("temp", MOST_TEMP)):
                if row["pinned"][of] > most * row["hand"][of]:
                    too_much.append(f"{kind}, {row['mesh']}: {of}")
    sys.exit("more than by hand: " + "; ".join(too_much) if too_much else 0)


if __name__ == "__main__":
    main()
