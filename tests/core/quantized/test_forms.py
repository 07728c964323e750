"""Every form of quantized weights, decoded: whole, in any box, and reading no more than the blocks that a box needs."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lazymodel as lm
from lazymodel._quantized.scales import scaled_integers
from lazymodel._tensors.buffers import Workspace
from lazymodel._tensors.fill import fill
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.leaves import ArrayLeaf
from lazymodel._tensors.scaled import stored
from tests import quantized
from tests.quantized import FORMS, Tensors, write_folder

SHAPE = (96, 128)
# Forms in which a shape may have any extents: no words of whole rows, no whole blocks.
ODD = ["fp8-block", "fp8-tensor", "fbgemm", "int-quantized", "int-quantized-tensor", "pack-8", "pack-4-tensor"]
ODD += ["nf4", "nf4-nested", "fp4", "int8", "gptq-v2"]
CASES = [*FORMS, *(f"{name} odd" for name in ODD)]
NAME = "model.layers.0.mlp.up_proj.weight"


def same(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(
        found.view(f"u{found.itemsize}"), np.ascontiguousarray(expected).view(f"u{found.itemsize}")
    )


def folder_of(
    folder: Path, form: quantized.Form, shape: tuple[int, int] = SHAPE, shards: int = 1
) -> tuple[Path, Tensors]:
    tensors = {NAME: np.zeros(shape, np.float32), "model.norm.weight": np.arange(7, dtype=np.float32)}
    stored, plain = quantized.quantized(form, tensors, lambda module: "norm" not in module)
    return write_folder(folder, quantized.settings(form), stored, shards=shards), plain


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[lm.Checkpoint, Tensors]]:
    folder = tmp_path_factory.mktemp("forms")
    made = {name: folder_of(folder / name, form, shards=2) for name, form in FORMS.items()}
    for name in ODD:
        shape = (37, 56 if name == "gptq-v2" else 51)
        made[f"{name} odd"] = folder_of(folder / f"{name} odd", FORMS[name], shape)
    return {name: (lm.open_checkpoint(path), plain) for name, (path, plain) in made.items()}


@pytest.mark.parametrize("form", CASES)
def test_is_the_plain_checkpoint(form: str, checkpoints: Any) -> None:
    checkpoint, plain = checkpoints[form]
    assert sorted(checkpoint) == sorted(plain)
    assert checkpoint.nbytes == sum(array.nbytes for array in plain.values())
    for name, array in plain.items():
        header, tensor = checkpoint.describe(name), checkpoint[name]
        assert (header.dtype, header.shape) == (tensor.dtype, tensor.shape) == (array.dtype, array.shape)
        same(tensor.read(), array)
        same(tensor.T.astype(np.float32).read(), array.T.astype(np.float32))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("form", CASES)
def test_any_box(form: str, checkpoints: Any, data: st.DataObject) -> None:
    """Of boxes that are read together, in little memory or much."""
    checkpoint, plain = checkpoints[form]
    array = plain[NAME]
    tensor = checkpoint[NAME].T if data.draw(st.booleans()) else checkpoint[NAME]
    array = array if tensor.shape == array.shape else array.T

    def part(extent: int) -> tuple[int, ...]:
        return tuple(sorted(data.draw(st.lists(st.integers(0, extent), min_size=3, max_size=3, unique=True))))

    rows, columns = part(array.shape[0]), part(array.shape[1])
    boxes = [(slice(a, b), slice(*columns[:2])) for a, b in itertools.pairwise(rows)]
    boxes += [(slice(*rows[:2]), slice(*columns[1:]))]
    outs = [np.empty([s.stop - s.start for s in box], array.dtype) for box in boxes]
    fill(tensor, boxes, outs, Workspace(data.draw(st.sampled_from([1 << 12, 1 << 18, 1 << 24]))))
    for box, out in zip(boxes, outs, strict=True):
        same(out, array[box])


@pytest.mark.parametrize("form", [form for form in FORMS if form != "fp8-block"])  # its blocks do not divide a shard
@pytest.mark.parametrize("axis", [0, 1])
def test_reads_what_a_shard_needs(form: str, axis: int, tmp_path: Path) -> None:
    """A quarter along either axis takes a quarter of the bytes, besides what is one for all."""
    folder, plain = folder_of(tmp_path / "folder", FORMS[form], (256, 512))
    sizes = {name: tensor.nbytes for name, tensor in raw(folder).items() if "norm" not in name}
    once = (
        "g_idx",
        "shape",
        "quant_map",
        "quant_state",
        "nested_absmax",
        "scale_2",
        "global_scale",
        "format",
        "input_scale",
    )
    shared = {name: n for name, n in sizes.items() if any(end in name for end in once) or n <= 4}
    rest = sum(sizes.values()) - sum(shared.values())
    if axis == 0:
        expected = rest / 4
    else:  # what is one for each row is for all of its columns
        per_row = [name for name, t in raw(folder).items() if name in sizes and per_channel(t.shape, name, form)]
        expected = (rest - sum(sizes[name] for name in per_row)) / 4 + sum(sizes[name] for name in per_row)
        if form == "pack-4-order":  # any group may be of any column
            expected += 0.75 * sizes[NAME + "_scale"]
    if axis == 1 and form in ("gptq-order",):
        expected += 0.75 * sum(sizes[name] for name in sizes if name.endswith(("qzeros", "scales")))
    with lm.open_checkpoint(folder) as checkpoint:
        tensor = checkpoint[NAME]
        box = [slice(0, extent) for extent in tensor.shape]
        box[axis] = slice(tensor.shape[axis] // 4, tensor.shape[axis] // 2)
        same(tensor.read(tuple(box)), plain[NAME][tuple(box)])
        assert checkpoint.bytes_read <= 1.02 * (expected + sum(shared.values()))


def raw(folder: Path) -> lm.Checkpoint:
    from lazymodel.checkpoints import SafetensorsFile

    return SafetensorsFile(folder / "model.safetensors")


def per_channel(shape: tuple[int, ...], name: str, form: str) -> bool:
    if name.endswith("SCB") or len(shape) < 2:
        return name.endswith("SCB")
    return shape[0 if form.startswith(("gptq", "awq")) else 1] == 1 and not name.endswith(".weight")


@pytest.mark.parametrize("normal", [True, False])
@pytest.mark.parametrize("dtype", [np.float16, quantized.BF16, np.float32])
def test_every_scale_of_float16(normal: bool, dtype: Any) -> None:
    """Products are rounded as by a cast, of scales whose products all are normal numbers there, and of any."""
    scale = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    if normal:
        scale = scale[(scale >= 2.0**-14) & (scale <= 65504 / 512)]
    scale = scale[::7, None]
    codes, zero = (
        np.broadcast_to(np.arange(-126, 128, 2, dtype=np.int8), (scale.size, 127)),
        np.full((1, 1), -127, np.int8),
    )
    views = [LazyTensor(ArrayLeaf(array)) for array in (codes, scale, zero)]
    blocks = (1, 1), (1, 127), (scale.size, 127)
    found = scaled_integers(codes.shape, *map(stored, views, blocks)).astype(np.float16).astype(np.dtype(dtype)).read()
    with np.errstate(all="ignore"):
        exact = (codes.astype(np.float32) + np.float32(127)) * scale.astype(np.float32)
        same(found, exact.astype(np.float16).astype(dtype))


def test_the_older_file_of_modelopt(tmp_path: Path) -> None:
    form = FORMS["modelopt-fp8"]
    folder, plain = folder_of(tmp_path / "folder", form)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16"}))
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    same(lm.open_checkpoint(folder)[NAME].read(), plain[NAME])


def test_what_only_some_configurations_have(tmp_path: Path) -> None:
    """A group of activations alone, and a block as text; a scale that is the model's own stays."""
    form = quantized.Form(
        quantized.groups("float-quantized", num_bits=8, strategy="block", block_structure="24x16"),
        quantized.float8((24, 16), "weight_scale"),
    )
    form.config["config_groups"]["group_1"] = {"targets": ["LlamaAttention"], "weights": None}
    stored, plain = quantized.quantized(form, {NAME: np.zeros(SHAPE, np.float32)}, lambda module: True)
    own, dropped = "model.layers.0.altup.correct_output_scale", "model.layers.0.mlp.up_proj.input_scale"
    stored |= dict.fromkeys([own, dropped], np.ones(4, quantized.BF16))
    checkpoint = lm.open_checkpoint(write_folder(tmp_path / "folder", quantized.settings(form), stored))
    assert sorted(checkpoint) == sorted([own, NAME])
    same(checkpoint[NAME].read(), plain[NAME])
