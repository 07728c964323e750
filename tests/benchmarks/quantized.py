"""Quantized checkpoints onto 8 devices, decoded: lazymodel against plain NumPy, a GiB of result each.

    python tests/benchmarks/quantized.py [--runs 3] [--forms fp8 gptq ...] [--gib 1] [--json]

A Hugging Face folder, or a GGUF file, of square matrices in each form is opened and materialized, every other matrix
split by rows and by columns. Beside it, plain NumPy reads each tensor whole, decodes it as the form's reference does,
in a few vectorized lines (of GGUF the package `gguf` itself), and puts it onto the same devices. Both take turns, each
in its own process, with the page cache warm; values are equal bit for bit. Seconds are from opening until every array
is ready, GB/s are of the result; memory is the peak of private memory over what the process held before, as a multiple
of the result's bytes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _measure
import ml_dtypes
import numpy as np

WIDTH = 4096
BF16 = np.dtype(ml_dtypes.bfloat16)
Read = Callable[[str], np.ndarray]


def spread(scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    return np.repeat(np.repeat(scale, block[0], 0), block[1], 1)


def nibbles(packed: np.ndarray, axis: int = -1) -> np.ndarray:
    """Codes of four bits in words or bytes, the first in the lowest bits."""
    bits = packed.view(f"u{packed.itemsize}")
    codes = np.stack([bits >> 4 * k & 15 for k in range(2 * bits.itemsize)], -1 if axis == -1 else axis + 1)
    shape = list(bits.shape)
    shape[axis] *= 2 * bits.itemsize
    return codes.reshape(shape).astype(np.int32)


def fp8(read: Read) -> np.ndarray:
    return (read("weight").astype(np.float32) * spread(read("weight_scale_inv"), (128, 128))).astype(BF16)


def per_channel(read: Read) -> np.ndarray:
    return (read("weight").astype(np.float32) * read("weight_scale").astype(np.float32)).astype(BF16)


def packed(read: Read) -> np.ndarray:
    codes = nibbles(read("weight_packed")) - 8
    return (codes.astype(np.float32) * spread(read("weight_scale").astype(np.float32), (1, 128))).astype(BF16)


def gptq(read: Read) -> np.ndarray:
    group = read("g_idx")
    zeros = (nibbles(read("qzeros")) + 1 & 15)[group]
    return ((nibbles(read("qweight"), 0) - zeros).astype(np.float16) * read("scales")[group]).T


def awq(read: Read) -> np.ndarray:
    order = np.arange(WIDTH).reshape(-1, 8)[:, [0, 4, 1, 5, 2, 6, 3, 7]].reshape(-1)
    codes, zeros = nibbles(read("qweight"))[:, order], nibbles(read("qzeros"))[:, order]
    return ((codes - np.repeat(zeros, 128, 0)).astype(np.float16) * np.repeat(read("scales"), 128, 0)).T


def nf4(read: Read) -> np.ndarray:
    codes = read("weight").reshape(-1)
    values = read("weight.quant_map")[np.stack([codes >> 4, codes & 15], -1).reshape(-1)]
    absmax = read("weight.nested_quant_map")[read("weight.absmax")]
    absmax = absmax * np.repeat(read("weight.nested_absmax"), 256)[: absmax.size] + np.float32(0.0361)
    return (values * np.repeat(absmax, 64)).astype(BF16).reshape(WIDTH, WIDTH)


def int8(read: Read) -> np.ndarray:
    scale = read("SCB")[:, None]
    return (read("weight").astype(np.float32) * scale * np.float32(7.874015718698502e-3)).astype(BF16)


def mxfp4(read: Read) -> np.ndarray:
    scale = np.exp2(read("weight_scale").astype(np.float32) - 127)
    return (E2M1[nibbles(read("weight_packed"))] * np.repeat(scale, 32, 1)).astype(BF16)


def nvfp4(read: Read) -> np.ndarray:
    scale = read("weight_scale").astype(np.float32) / read("weight_global_scale")
    return (E2M1[nibbles(read("weight_packed"))] * np.repeat(scale, 16, 1)).astype(BF16)


def mlx(read: Read) -> np.ndarray:
    scale, bias = (spread(read(part).astype(np.float32), (1, 64)) for part in ("scales", "biases"))
    product = (nibbles(read("weight")).astype(np.float32) * scale).astype(BF16)
    return (product.astype(np.float32) + bias).astype(BF16)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
DECODE = {
    "fp8": fp8, "float-quantized": per_channel, "int-quantized": per_channel, "pack-quantized": packed, "gptq": gptq,
    "awq": awq, "nf4": nf4, "int8": int8, "mxfp4": mxfp4, "nvfp4": nvfp4, "mlx": mlx,
}  # fmt: skip
GGUF = ("Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ3_S")


def forms() -> dict[str, Any]:
    """The forms as tests make them, with the groups that people publish."""
    from tests.quantized import BF16, F16, FORMS, Form, awq, float8, gptq, groups, integers, mlx

    of_groups = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
    return {
        "fp8": Form(
            {"quant_method": "fp8", "weight_block_size": [128, 128]}, float8((128, 128), "weight_scale_inv"), BF16
        ),
        "pack-quantized": Form(groups("pack-quantized", **of_groups), integers(4, 128, zero=False, packed=True), BF16),
        "gptq": Form({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}, gptq(4, 128), F16),
        "awq": Form({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, awq(128), F16),
        "nf4": FORMS["nf4-nested"],
        "mlx": Form({"bits": 4, "group_size": 64}, mlx(4, 64)),
        **{name: FORMS[name] for name in ("float-quantized", "int-quantized", "int8", "mxfp4", "nvfp4")},
    }


def write(folder: Path, form: Any, count: int) -> None:
    """One matrix under many names: how fast it is decoded does not depend on its values."""
    from tests.quantized import settings, write_folder

    parts, _ = form.make(np.random.default_rng(0), WIDTH, WIDTH)
    tensors = {f"layers.{k}.{ending}": part for k in range(count) for ending, part in parts.items()}
    write_folder(folder, settings(form), tensors, shards=4)


def write_gguf(folder: Path, type: str, nbytes: int) -> None:
    import gguf

    from tests.gguf_files import NUMBERS, random_tensor

    writer = gguf.GGUFWriter(folder, "llama")
    blocks = np.frombuffer(random_tensor(np.random.default_rng(0), type, WIDTH, WIDTH).data, np.uint8)
    blocks = np.where(blocks & 0x7C == 0x7C, 0, blocks)  # no scale is an infinity or no number
    for k in range(max(nbytes // (WIDTH * WIDTH * 4), 1)):
        writer.add_tensor(f"{k}.weight", blocks.reshape(WIDTH, -1), raw_dtype=gguf.GGMLQuantizationType(NUMBERS[type]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def plain_values(name: str, folder: str, paths: list[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Each tensor's path and values, without lazymodel's decoding."""
    if name not in DECODE:
        import gguf

        for tensor in gguf.GGUFReader(folder).tensors:
            yield tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type)
        return
    from lazymodel._remote.path import location
    from lazymodel.checkpoints._open import open_located

    stored = open_located(location(folder), as_stored=True)
    for path in paths:
        module = path.removesuffix("weight")
        yield path, DECODE[name](lambda ending, module=module: stored[f"{module}{ending}"].read())


def child(how: str, name: str, folder: str) -> dict[str, Any]:
    import jax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import lazymodel as lm

    mesh = Mesh(np.array(jax.devices()), ("model",))
    with lm.open_checkpoint(folder) as checkpoint:
        paths, dtype = sorted(checkpoint), checkpoint.describe(next(iter(checkpoint))).dtype
    nbytes = len(paths) * WIDTH * WIDTH * dtype.itemsize
    specs = {path: P("model") if index % 2 else P(None, "model") for index, path in enumerate(paths)}
    abstract = _measure.zeros(dict.fromkeys(paths, jax.ShapeDtypeStruct((WIDTH, WIDTH), dtype)))
    abstract = abstract.shard(mesh, {path.replace(".", r"\."): spec for path, spec in specs.items()})
    _measure.back_memory(nbytes * 5 // 4)
    with _measure.measured() as report:
        if how == "ours":
            with lm.open_checkpoint(folder) as checkpoint:
                arrays = abstract.materialize(checkpoint, progress=False)
        else:
            arrays = {}
            for path, value in plain_values(name, folder, paths):
                arrays[path] = jax.device_put(value, NamedSharding(mesh, specs[path]))
        jax.block_until_ready(arrays)
    shards = (shard.data for path in paths for shard in arrays[path].addressable_shards)
    return report | {"digest": _measure.digest(shards), "nbytes": nbytes}


def main() -> None:
    _measure.in_child(child)
    parser = _measure.arguments(__doc__, runs=3)
    parser.add_argument("--forms", nargs="+", choices=(*DECODE, *GGUF), default=[*DECODE, *GGUF])
    parser.add_argument("--gib", type=float, default=1.0, help="of result, in GiB")
    options = parser.parse_args()
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in options.forms:
        with tempfile.TemporaryDirectory() as folder:
            path, nbytes = Path(folder, "folder" if name in DECODE else "m.gguf"), int(options.gib * 2**30)
            if name not in DECODE:
                write_gguf(path, name, nbytes)
            else:
                form = forms()[name]
                write(path, form, max(nbytes // (WIDTH * WIDTH * form.dtype.itemsize), 1))
            given = name, path
            results = _measure.in_turns(
                ("ours", "numpy"), options.runs, lambda how, given=given: _measure.child(how, *given)
            )
        _measure.require_equal(results)
        nbytes = results["ours"][0].result["nbytes"]
        found[name] = {how: _measure.medians(runs) for how, runs in results.items()}
        if not options.json:
            each = "; ".join(
                f"{how} {figures['gigabytes_per_second']:5.2f} GB/s, {figures['cpu']:5.2f} s of CPU, "
                f"peak {figures['peak']:.2f} ×"
                for how, figures in found[name].items()
            )
            print(f"{name:16} {nbytes / 2**30:.1f} GiB: {each}", flush=True)
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
