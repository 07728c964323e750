"""What contradicts itself, is not known, or looks quantized and is nobody's: one error that names it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import lazymodel as lm
from tests import quantized
from tests.quantized import BF16, F8, FORMS, Tensors, write_folder

M = "model.layers.0.mlp.up_proj"


def parts(form: str, shape: tuple[int, int] = (64, 64)) -> tuple[Tensors, dict[str, Any]]:
    stored, _ = quantized.quantized(FORMS[form], {f"{M}.weight": np.zeros(shape, np.float32)}, lambda module: True)
    return stored, quantized.settings(FORMS[form])


def read_all(folder: Path) -> None:
    with lm.open_checkpoint(folder) as checkpoint:
        for name in checkpoint:
            checkpoint.describe(name)
            checkpoint[name].read()


def refused(folder: Path, stored: Tensors, config: dict[str, Any]) -> str:
    write_folder(folder / "folder", config, stored)
    with pytest.raises(lm.CheckpointError) as caught:
        read_all(folder / "folder")
    return str(caught.value)


@pytest.mark.parametrize("method", ["quanto", "aqlm", ""])
def test_unknown_methods(method: str, tmp_path: Path) -> None:
    """Even where every tensor is plain: what says that it is quantized may be, in a way that shows nowhere."""
    text = refused(
        tmp_path,
        {f"{M}.weight": np.zeros((4, 4), np.float32)},
        {"quantization_config": {"bits": 4, "quant_method": method}},
    )
    assert "states that the weights are quantized with" in text and "load a dequantized copy" in text


@pytest.mark.parametrize(
    ("form", "change", "words"),
    [
        ("gptq", {"bits": 5}, "expected one of (2, 3, 4, 8) as bits, found 5"),
        (
            "gptq-3",
            {"checkpoint_format": "gptq_p", "bits": 1},
            "expected one of (2, 3, 4, 5, 6, 7, 8) as bits, found 1",
        ),
        ("gptq", {"bits": 3}, "expected blocks of 32 rows and columns, found 85 and 64"),
        ("gptq", {"bits": "4"}, "expected a positive integer as bits"),
        ("gptq", {"checkpoint_format": "marlin"}, "as checkpoint_format, found 'marlin'"),
        ("gptq", {"group_size": 16}, f"'{M}.qzeros'"),
        ("awq", {"version": "gemv"}, "version gemv"),
        ("gptq-dynamic", {"dynamic": {"-:.*mlp": {}}}, "as dynamic leaves the module out, found parts"),
        ("gptq-dynamic", {"dynamic": {"+:.*up_proj": {"bits": 6}}}, "expected one of (2, 3, 4, 8) as bits, found 6"),
        ("gptq-dynamic", {"dynamic": {"+:.*up_proj": 8}}, "an object for it in dynamic, found 8"),
        ("gptq-dynamic", {"dynamic": {"+:.*down_proj": {"bits": 8}}}, f"'{M}.g_idx'"),
        ("gptq-dynamic", {"dynamic": {"+:(a+)+$": {"bits": 8}}}, "expected a regular expression"),
        ("gptq-dynamic", {"dynamic": [8]}, "an object as dynamic, found [8]"),
        ("auto-round", {"extra_config": {M: {"bits": 16}}}, "as extra_config leaves the module out, found parts"),
        ("auto-round", {"extra_config": {".*(up": {"bits": 4}}}, "expected a regular expression"),
        ("auto-round", {"packing_format": "auto_round:llm_compressor"}, "found 'auto_round:llm_compressor'"),
        ("auto-round", {"data_type": "mx_fp"}, "data_type 'mx_fp'"),
        ("auto-round-awq", {"bits": 8}, "8 bits in version gemm"),
        ("mlx-4", {"bits": 7}, "mxfp8 of 8 bits, found 'affine' of 7"),
        ("mlx-4", {"mode": "mxfp3"}, "found 'mxfp3' of 4"),
        ("mlx-4", {"mode": "mxfp4"}, f"'{M}.scales'"),
        ("mlx-4", {"bits": 2}, "expected a scale for each group of 32 of 128 numbers, found shape (64, 2)"),
        ("mlx-4", {"group_size": 64}, "expected a scale for each group of 64 of 64 numbers, found shape (64, 2)"),
        ("pack-4", {"format": "marlin-24"}, "found 'marlin-24'"),
        ("pack-4", {"config_groups": {}}, "expected config_groups"),
        ("pack-4", {"transform_config": {"config_groups": {"u": {}}}}, "which rotates weights"),
        ("pack-4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "found sparsity_config"),
        ("pack-4", {"ignore": ["re:.*up_proj"]}, "as not converted"),
        ("pack-4", {"ignore": "up_proj"}, "expected a list of modules as ignore"),
        ("fp8-block", {"weight_block_size": [0, 16]}, "expected two positive integers"),
        ("fp8-block", {"weight_block_size": [16, 16]}, "a scale for each block of [16, 16]"),
        (
            "modelopt-awq",
            {"group_size": 64},
            "scales for groups of 64 rows and 64 columns, found shape (64, 2)",
        ),
        ("modelopt-fp8", {"quant_algo": "W4A8_AWQ"}, "found 'W4A8_AWQ'"),
    ],
)
def test_configurations(form: str, change: dict[str, Any], words: str, tmp_path: Path) -> None:
    stored, config = parts(form)
    assert words in refused(tmp_path, stored, {**config, "quantization_config": config["quantization_config"] | change})


@pytest.mark.parametrize(
    ("form", "lost", "words"),
    [
        ("fp8-block", "weight_scale_inv", f"'{M}.weight' (float8_e4m3fn)"),
        ("fbgemm", "weight", f"'{M}.weight_scale' (float32)"),
        ("gptq", "scales", f"expected '{M}.scales' alongside"),
        ("gptq-order", "g_idx", f"expected '{M}.g_idx' alongside"),
        ("awq", "qweight", f"expected '{M}.qweight' alongside"),
        ("pack-4-zero", "weight_zero_point", f"expected '{M}.weight_zero_point' alongside"),
        ("nf4-nested", "weight.nested_absmax", f"expected '{M}.weight.nested_absmax' alongside"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", f"'{M}.weight' (uint8)"),
        ("int8", "SCB", f"'{M}.weight' (int8)"),
        ("hqq-4", "zero", f"expected '{M}.zero' alongside"),
        ("hqq-4", "W_q", f"expected '{M}.W_q' alongside"),
        ("hqq-4", "shape", "expected codes and scales of a matrix None, found shapes (32, 64) and (64, 1)"),
        ("hqq-3", "packing", "expected one of 8bit_u8, 4bit_u8, 2bit_u8, 1bit_u8, 3bit_32, found None in int32"),
        ("mxfp4", "weight_scale", f"expected '{M}.weight_scale' alongside"),
        ("torchao-int8", "_weight_scale", f"expected '{M}._weight_scale' alongside"),
        ("torchao-float8", "_weight_qdata", f"expected '{M}._weight_qdata' alongside"),
        ("modelopt-nvfp4", "weight_scale_2", f"'{M}.weight'"),
    ],
)
def test_parts_that_lack(form: str, lost: str, words: str, tmp_path: Path) -> None:
    """Beside a module that has all of them."""
    stored, config = parts(form)
    other = {name.replace(".0.", ".1."): array for name, array in stored.items()}
    del stored[f"{M}.{lost}"]
    assert words in refused(tmp_path, stored | other, config)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"_type": "NVFP4Tensor"}, "expected one of Int8Tensor, IntxUnpackedToInt8Tensor, Float8Tensor as its type"),
        ({"_type": "Float8Tensor"}, "expected float8_e4m3fn or float8_e5m2, found int8"),
        ({"_tensor_data_names": ["qdata", "scale", "act_pre_scale"]}, "found ['act_pre_scale']"),
        ({"_data": {"block_size": [0, 64], "dtype": {"_data": "bfloat16"}}}, "positive integers as block_size"),
        ({"_data": {"block_size": [1, 64], "dtype": {"_data": ["bfloat16"]}}}, "as dtype, found"),
        ({"_data": {"block_size": [1, 16], "dtype": {"_data": "bfloat16"}}}, "a scale for each block of [1, 16]"),
        (None, f"expected JSON under '{M}.weight' in the metadata of the file's header, found 'x'"),
    ],
)
def test_types_of_torchao(change: dict[str, Any] | None, words: str, tmp_path: Path) -> None:
    """Which its files state in their headers."""
    stored, config = parts("torchao-int8")
    said = quantized.of_torchao(config, stored)
    text = json.dumps(json.loads(said[f"{M}.weight"]) | change) if change else "x"
    write_folder(tmp_path / "folder", config, stored)
    save_file(stored, tmp_path / "folder" / "model.safetensors", {f"{M}.weight": text})
    with pytest.raises(lm.CheckpointError) as caught:
        read_all(tmp_path / "folder")
    assert words in str(caught.value)


@pytest.mark.parametrize("form", ["gptq", "gptq-order", "pack-4-order"])
@pytest.mark.parametrize("group", [-1, 2, 99, None])
def test_groups_that_are_none(form: str, group: int | None, tmp_path: Path) -> None:
    """None is -1 throughout, by which compressed-tensors alone says that columns are in order."""
    stored, config = parts(form)
    (name,) = [name for name in stored if name.endswith("g_idx")]
    stored[name][5 if group is not None else slice(None)] = -1 if group is None else group
    if form == "pack-4-order" and group is None:
        read_all(write_folder(tmp_path / "folder", config, stored))
    else:
        found = "" if group == -1 or group is None else f"1, found 0 to {group}; it is corrupt"
        assert f"{name!r}: expected groups of 0 to {found}" in refused(tmp_path, stored, config)


@pytest.mark.parametrize(
    ("left", "words"),
    [
        ({f"{M}.weight": np.zeros((4, 4), F8)}, "(float8_e4m3fn)"),
        ({f"{M}.weight": np.zeros((4, 4), np.int8), f"{M}.scales": np.ones(4, np.float32)}, f"'{M}.weight' (int8)"),
        ({f"{M}.weight": np.zeros((4, 4), np.float32), f"{M}.weight_scale": np.ones(4, np.float32)}, "weight_scale'"),
        ({f"{M}.qzeros": np.zeros((1, 4), np.int32)}, "qzeros' (int32)"),
        ({f"{M}.weight": np.zeros((4, 4), np.float32), f"{M}.pre_quant_scale": np.ones(4, BF16)}, "pre_quant_scale'"),
    ],
)
def test_what_no_configuration_tells_of(left: Tensors, words: str, tmp_path: Path) -> None:
    text = refused(tmp_path / "hugging_face", left, {"model_type": "llama"})
    assert words in text and "does not state the method" in text
    folder = write_folder(tmp_path / "own", {"name": "of one's own"}, left)
    assert sorted(lm.open_checkpoint(folder)) == sorted(left)  # as stored; mapping it to floats is refused


@pytest.mark.parametrize("offset", [math.nan, -math.inf, 10**400, True, "0"])
def test_an_offset_that_is_no_finite_number(offset: Any, tmp_path: Path) -> None:
    """JSON of Python has all of them."""
    stored, config = parts("nf4-nested")
    name = f"{M}.weight.quant_state.bitsandbytes__nf4"
    said = json.dumps(json.loads(stored[name].tobytes()) | {"nested_offset": offset})
    stored[name] = np.frombuffer(said.encode(), np.uint8).copy()
    assert "a finite number as nested_offset, found" in refused(tmp_path, stored, config)


def test_scales_of_hqq_that_are_quantized(tmp_path: Path) -> None:
    stored, config = parts("hqq-4")
    stored[f"{M}.scale_q"] = stored.pop(f"{M}.scale").astype(np.uint8)
    assert "expected scales and zero points that are not quantized, found some" in refused(tmp_path, stored, config)


def test_an_empty_module(tmp_path: Path) -> None:
    stored, config = parts("gptq")
    empty = {
        f"empty.{part}": np.zeros((0, 64), stored[f"{M}.{part}"].dtype) for part in ("qweight", "qzeros", "scales")
    }
    assert "'empty.qweight'" in refused(tmp_path, stored | empty, config)


def test_names_twice(tmp_path: Path) -> None:
    stored, config = parts("gptq")
    stored[f"{M}.weight"] = np.zeros((64, 64), np.float16)
    assert f"parts of '{M}.weight', or the tensor itself" in refused(tmp_path, stored, config)


def survives(folder: Path) -> None:
    """One error that names it, or tensors."""
    try:
        read_all(folder)
    except lm.CheckpointError as error:
        assert str(folder) in str(error) or M in str(error)  # noqa: PT017


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_hostile_parts(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A part of another shape or dtype, or what a state says."""
    stored, config = parts(data.draw(st.sampled_from(sorted(FORMS))), (32, 64))
    name = data.draw(st.sampled_from(sorted(stored)))
    shape = data.draw(st.lists(st.integers(0, 5), max_size=4).map(tuple) | st.just(stored[name].shape))
    dtype = data.draw(st.sampled_from(["uint8", "int8", "int32", "int64", "float16", "float32", F8]))
    stored[name] = np.ones(shape, dtype)
    if "quant_state" in name and data.draw(st.booleans()):
        values = st.sampled_from(
            [0, -1, 1, 2**60, 1.5, None, "x", [], [0, 4], [2**40, 2**40], [32, 64], 64, "float16", math.nan, 10**400]
        )
        keys = ("shape", "blocksize", "nested_blocksize", "nested_offset", "dtype")
        said = json.dumps({key: data.draw(values) for key in keys})
        stored[name] = np.frombuffer(said.encode(), np.uint8).copy()
    survives(write_folder(tmp_path_factory.mktemp("hostile") / "folder", config, stored))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_hostile_configurations(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """An entry of it that is anything."""
    stored, config = parts(data.draw(st.sampled_from(sorted(FORMS))), (32, 64))
    holder = config = json.loads(json.dumps(config))
    while True:
        key = data.draw(st.sampled_from(sorted(holder)))
        if not isinstance(holder[key], dict) or not holder[key] or data.draw(st.integers(0, 3)) == 0:
            break
        holder = holder[key]
    holder[key] = data.draw(
        st.sampled_from([None, 0, -1, 7, 2**70, 1.5, "x", "re:(", [], [1], ["re:("], {}, {"x": 1}, True])
    )
    survives(write_folder(tmp_path_factory.mktemp("hostile") / "folder", config, stored))


@pytest.mark.parametrize(
    ("entry", "module", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", True),
        ("mlp.gate", "model.layers.0.mlp.gate", True),
        ("mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("model.layers.1", "model.layers.10.mlp", False),
        ("model.layers.1", "model.layers.1.mlp", True),
        ("re:.*gate$", "model.layers.0.mlp.gate", True),
        ("re:.*gate$", "model.layers.0.mlp.gate_proj", False),
        (
            r"re:^(?!.*lm_head)(?:model\.)?.*\.layers\.[0-9]+\.(mlp|self_attn).*_proj$",
            f"{'m.' * 26}layers.31.mlp.up_proj",
            True,
        ),
        (r"re:model[](*+?|].x\(\*{1,2}", "model(.x(**", True),
        ("*.visual.*", "model.visual.blocks", True),
        ("mlp.gate", f"{'m.' * 99}mlp.gate", True),
        ("", "model", False),
    ],
)
def test_which_modules_are_meant(entry: str, module: str, expected: bool, tmp_path: Path) -> None:
    """A module that is not converted has no parts."""
    stored, config = parts("float-quantized")
    stored = {name.replace(M, module): array for name, array in stored.items()}
    config["quantization_config"] = config["quantization_config"] | {"ignore": [entry]}
    if expected:
        assert f"'{module}.weight'" in refused(tmp_path, stored, config)
    else:
        read_all(write_folder(tmp_path / "folder", config, stored))


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+$", "(?:a|a)*$", "(a|b?){9,}$", ".*" * 9 + "x", "a?" * 40 + "a" * 40, "(a|a)" * 40 + "$",
     "(?x)#[\n(a+)+$#]", "[(](a+)+$", r"\((a+)+$", "[]](a*)*$", "a" * 10**5, "(" * 999, "a{1,99}" * 9 + "$"],
)  # fmt: skip
def test_a_pattern_that_would_match_forever_is_refused(pattern: str, tmp_path: Path) -> None:
    stored, config = parts("float-quantized")
    stored = {name.replace(M, "a" * 60): array for name, array in stored.items()}
    config["quantization_config"] = config["quantization_config"] | {"ignore": [f"re:{pattern}"]}
    assert "expected a regular expression" in refused(tmp_path, stored, config)
