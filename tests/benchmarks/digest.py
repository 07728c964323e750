"""Digests against what they cannot beat: on devices a sum of the same words, from files a plain read.

    python tests/benchmarks/digest.py [--runs 5] [--gib 1] [--devices 8] [--json]

A GiB in float32, and one in bfloat16, in matrices of 16 MiB, split over 8 virtual devices, or over those of an
accelerator. There `digest_arrays` and a jitted sum of the arrays' bits, as integers of their size in words of 32 bits,
take turns. Of the same matrices in a safetensors file, warm in the page cache and cold, `lm.digest` and threads that
only read, as many and in pieces of the same size into memory of their own, take turns. Medians of GB/s, and of the
ratio of a pair, after one round that does not count.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import _measure

PIECE = 4 << 20  # bytes


def in_turns(nbytes: int, runs: int, ours: Callable[[], Any], other: Callable[[], Any]) -> dict[str, float]:
    """GB/s of both, and how fast ours is by the other's measure."""
    seconds: list[tuple[float, float]] = []
    for number in range(runs + 1):
        pair: dict[bool, float] = {}
        for mine in (True, False) if number % 2 else (False, True):
            begin = time.perf_counter()
            (ours if mine else other)()
            pair[mine] = time.perf_counter() - begin
        seconds.append((pair[True], pair[False]))
    mine, theirs = (nbytes / 1e9 / statistics.median(each) for each in zip(*seconds[1:], strict=True))
    return {"ours": mine, "other": theirs, "ratio": statistics.median(b / a for a, b in seconds[1:])}


def on_devices(values: dict[str, Any], runs: int) -> dict[str, float]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from lazymodel.extras.sync.digest import digest_arrays

    place = NamedSharding(Mesh(np.array(jax.devices()), ("model",)), P("model"))
    arrays = {name: jax.device_put(value, place) for name, value in values.items()}

    @jax.jit
    def total(array: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}"), dtype=np.uint32)

    nbytes = sum(array.nbytes for array in arrays.values())
    return in_turns(
        nbytes,
        runs,
        lambda: digest_arrays(arrays),
        lambda: [np.asarray(each) for each in [total(array) for array in arrays.values()]],
    )


def from_file(path: Path, runs: int, *, cold: bool) -> dict[str, float]:
    import lazymodel as lm
    from lazymodel._tensors.buffers import Scratch, cores, parallel

    size, scratch = path.stat().st_size, Scratch(0)

    def ready() -> int:
        file = os.open(path, os.O_RDONLY)
        if cold:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        return file

    def plain() -> None:
        file = ready()

        def read(start: int) -> None:
            piece = memoryview(cast(Any, scratch.buffer(min(PIECE, size - start))))
            while piece:
                count = os.preadv(file, [piece], start)
                piece, start = piece[count:], start + count

        with parallel(read, range(0, size, PIECE), cores(), "read") as done:
            for _ in done:
                pass
        os.close(file)

    def ours() -> None:
        os.close(ready())
        with lm.open_checkpoint(path) as checkpoint:
            lm.digest(checkpoint)

    return in_turns(size, runs, ours, plain)


def work(gib: str, runs: str) -> dict[str, Any]:
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    _measure.backend()
    rng, found = np.random.default_rng(0), dict[str, Any]()
    for dtype in (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)):
        shape = (16 << 20) // 4096 // dtype.itemsize, 4096
        raw = (rng.integers(0, 256, 16 << 20, np.uint8).view(dtype) for _ in range(int(64 * float(gib))))
        values = {f"w{number}": value.reshape(shape) for number, value in enumerate(raw)}
        found[f"{dtype.name}, on devices"] = on_devices(values, int(runs))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.safetensors")
            save_file(values, path)
            os.sync()
            for cold in (False, True):
                name = f"{dtype.name}, from a {'cold' if cold else 'warm'} file"
                found[name] = from_file(path, int(runs), cold=cold)
    return found


def main() -> None:
    parser = _measure.arguments(__doc__, runs=5)
    parser.add_argument("--gib", type=float, default=1)
    parser.add_argument("--devices", type=int, default=8, help="virtual devices; 0 takes what there is")
    given = parser.parse_args()
    result = _measure.child(given.gib, given.runs, devices=given.devices or None).result
    found = {name: figures for name, figures in result.items() if isinstance(figures, dict)}
    if given.json:
        print(json.dumps(found))
        return
    print(f"{given.gib:g} GiB of each dtype, {given.runs} runs, medians")
    for name, figures in found.items():
        other = "sum" if "devices" in name else "read"
        print(
            f"  {name:28} digest {figures['ours']:5.1f} GB/s, {other:4} {figures['other']:5.1f} GB/s, "
            f"{figures['ratio']:.2f} ×"
        )


if __name__ == "__main__":
    _measure.in_child(work)
    main()
