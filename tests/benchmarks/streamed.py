"""What models and checkpoints larger than the machine take: statistics one variable at a time, and `lazymodel diff`.

    python tests/benchmarks/streamed.py [initialized] [folder] [diff] [save] [--gib 4] [--layers 42] [--folder FOLDER]

`initialized` measures Gemma2-9B in float32, 34 GiB of initial values that are never there at once; `folder` a Hugging
Face folder of bfloat16 of twice `--gib`, of which all but every eighth tensor are holes in the files; `diff` compares
two checkpoints of `--gib`, once equal and once not, against a plain read of both by as many threads; `save` initializes
a model of `--gib` straight into files. Peaks are of private memory over what the process held before, beside the bytes
of the largest variable. The disk is given back.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import _measure
from build_abstract import MODELS

GIB = 1 << 30
SHAPES = {"up": (14336, 3584), "down": (3584, 14336), "query": (3584, 4096), "output": (4096, 3584)}
EMBEDDING = (256000, 3584)


def shapes(nbytes: int, itemsize: int) -> dict[str, tuple[int, ...]]:
    """An embedding and as many layers as make a checkpoint of so many bytes."""
    found: dict[str, tuple[int, ...]] = {"embedding": EMBEDDING} if nbytes >= 4 * GIB else {}
    layer = 0
    while sum(map(math.prod, found.values())) * itemsize < nbytes:
        found |= {f"layers.{layer}.{name}.weight": shape for name, shape in SHAPES.items()}
        layer += 1
    return found


def write_folder(folder: Path, nbytes: int) -> None:
    """A sharded safetensors folder of bfloat16, most of it holes."""
    import numpy as np

    weights: dict[str, str] = {}
    tensors = list(shapes(nbytes, 2).items())
    for shard in range(0, len(tensors), 16):
        header, end = {}, 0
        for name, shape in tensors[shard : shard + 16]:
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end := end + 2 * math.prod(shape)]}
        text = json.dumps(header).encode()
        file = folder / f"model-{shard // 16 + 1:05}-of-{-(-len(tensors) // 16):05}.safetensors"
        with file.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for name, entry in list(header.items())[::8]:
                values = np.random.default_rng(len(name)).standard_normal(math.prod(entry["shape"]), dtype=np.float32)
                out.seek(8 + len(text) + entry["data_offsets"][0])
                out.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
            out.truncate(8 + len(text) + end)
        weights |= dict.fromkeys(header, file.name)
    index = {"metadata": {"total_size": nbytes}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def plain_read(paths: list[Path]) -> None:
    """Reads files by as many threads as there are cores, in pieces, into memory that was touched before."""
    files = [path.open("rb", buffering=0) for path in paths]
    pieces = [(file, start) for file in files for start in range(0, os.fstat(file.fileno()).st_size, 4 << 20)]
    local = threading.local()

    def one(piece: tuple[Any, int]) -> None:
        local.buffer = getattr(local, "buffer", None) or bytearray(4 << 20)
        os.preadv(piece[0].fileno(), [local.buffer], piece[1])

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(one, pieces))
    for file in files:
        file.close()


def child(what: str, where: str, gib: str, layers: str) -> dict[str, Any]:
    """One measurement, in a process of its own."""
    folder = Path(where)
    if what == "initialized":
        import keras_hub

        import lazymodel as lm

        config = MODELS["Gemma2-9B"][1] | {"num_layers": int(layers)}
        model: Any = lm.build_abstract(keras_hub.models.GemmaBackbone, **config, dtype="float32")
    else:
        import jax

        import lazymodel as lm

        if what == "save":
            sizes = shapes(int(float(gib) * GIB), 4)
            model = lm.build_abstract(
                lambda key: {name: jax.random.normal(key, shape) for name, shape in sizes.items()}, jax.random.key(0)
            )
        else:
            model = lm.open_checkpoint(folder if what == "folder" else folder / "a.safetensors")
    if what in ("initialized", "save"):
        _measure.backend()
    with _measure.measured() as report:
        if what in ("initialized", "folder"):
            found = lm.statistics(model, progress=False)
            report["std"] = {path: row.std for path, row in list(found.items())[:2]}
        elif what == "save":
            lm.save(model, folder / "saved", progress=False)
        elif what == "read":
            plain_read([folder / "a.safetensors", folder / "b.safetensors"])
        else:
            other = lm.open_checkpoint(folder / ("b.safetensors" if what == "equal" else "c.safetensors"))
            report["same"] = not lm.diff(model, other, progress=False)
    report["nbytes"] = model.nbytes
    report["largest"] = max(value.nbytes for value in model.values())
    return report


def show(what: str, m: _measure.Measurement, factor: int = 1) -> None:
    nbytes, largest = m.result["nbytes"] * factor, m.result["largest"]
    print(
        f"{what}: {nbytes / GIB:.2f} GiB in {m.seconds:.1f} s ({nbytes / 1e9 / m.seconds:.2f} GB/s; "
        f"{m.result['cpu']:.1f} s of CPU), largest {largest / GIB:.2f} GiB, peak {m.peak_nbytes / GIB:.2f} GiB",
        flush=True,
    )


def measure(what: str, folder: Path, options: argparse.Namespace) -> _measure.Measurement:
    return _measure.child(what, folder, options.gib, options.layers, devices=None)


def diffs(folder: Path, options: argparse.Namespace) -> None:
    """Writes two equal checkpoints and another one, and compares, in turn with plain reading."""
    import numpy as np

    import lazymodel as lm

    generator = np.random.default_rng(0)
    tensors = {
        name: (generator.integers(0, 2**32, shape, np.uint32) >> np.uint32(2)).view(np.float32)
        for name, shape in shapes(GIB // 4, 4).items()
    }
    nbytes = sum(array.nbytes for array in tensors.values())
    # The same random floats again and again, which no reader can know.
    copies = range(round(options.gib * GIB / nbytes))
    named = dict(lm.map_checkpoint(tensors, lambda t: {f"{n}.{name}": t[name] for n in copies for name in tensors}))
    for name in ("a", "b"):
        lm.save(named, folder / f"{name}.safetensors", progress=False)
    lm.save({name: array * 1.001 for name, array in named.items()}, folder / "c.safetensors", progress=False)
    for _ in range(3):
        for what in ("read", "equal", "unequal"):
            show(f"diff: {what}", measure(what, folder, options), 2)


def main() -> None:
    os.environ.update({"JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax"})
    _measure.in_child(child)
    parser = _measure.arguments(__doc__)
    parser.add_argument("what", nargs="*", default=["initialized", "folder", "diff", "save"])
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--layers", type=int, default=MODELS["Gemma2-9B"][1]["num_layers"], help="fewer, for a trial")
    parser.add_argument("--folder", help="where files go for the while; by default with other temporary files")
    options = parser.parse_args()
    for what in options.what:
        with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
            if what == "folder":
                write_folder(Path(temporary), int(2 * options.gib * GIB))
            if what == "diff":
                diffs(Path(temporary), options)
            else:
                show(what, measure(what, Path(temporary), options))


if __name__ == "__main__":
    main()
