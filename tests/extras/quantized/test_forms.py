"""Every form of quantized weights, decoded: whole, in any box, and reading no more than the blocks that a box needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from lazymodel._tensors.convert import Convert
from lazymodel.checkpoints import SafetensorsFile
from tests import quantized
from tests.core.checkpoints._formats import called, torch_archive, torch_tensor
from tests.large import examples
from tests.quantized import FORMS, Tensors, same, write_folder
from tests.small import buffer_sizes

SHAPE = (96, 128)
# Forms in which a shape may have any extents: no words of whole rows, no whole blocks.
ODD = ["fp8-block", "fp8-tensor", "fbgemm", "int-quantized", "int-quantized-tensor", "pack-8", "pack-4-tensor"]
ODD += ["torchao-int8", "torchao-float8", "nf4", "nf4-nested", "fp4", "int8", "gptq-v2"]
ODD += ["hqq-8", "hqq-3", "hqq-4-down"]
CASES = [*FORMS, *(f"{name} odd" for name in ODD)]
NAME = "model.layers.0.mlp.up_proj.weight"


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
        shape = (37, 56 if name == "gptq-v2" or name.startswith("hqq") else 51)
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


SPECS = [P("x", "y"), P("x"), P(None, "y"), P(None, ("x", "y"))]


@examples(1, 6, data=st.data())
@pytest.mark.parametrize("form", CASES)
def test_any_box(form: str, checkpoints: Any, data: st.DataObject) -> None:
    """Read alone, in little memory or much, and as shards that are read together."""
    checkpoint, plain = checkpoints[form]
    tensor, array = checkpoint[NAME], plain[NAME]
    if data.draw(st.booleans()):
        tensor, array = tensor.T, array.T
    corners = [sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2))) for n in array.shape]
    box = tuple(slice(*ends) for ends in corners)
    with buffer_sizes(workspace=data.draw(st.sampled_from([1 << 12, 1 << 18, 1 << 24]))):
        same(tensor.read(box), array[box])
    shards = tuple(slice(start, stop - (stop - start) % 4) for start, stop in corners)
    part, expected = tensor[shards], array[shards]
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    model = lm.build_abstract(lambda: {"w": jnp.zeros(expected.shape, expected.dtype)})
    loaded = model.shard(mesh, {"w": data.draw(st.sampled_from(SPECS))}).materialize({"w": part})
    same(np.asarray(loaded["w"]), expected)


# Parts, or ends of their names, of which one is for the whole matrix.
ONCE = ("g_idx", "shape", "quant_map", "quant_state", "nested_absmax", "scale_2", "global_scale", "format")
ONCE += ("input_scale", "pre_quant_scale", "packing", "dtype")


@pytest.mark.parametrize("form", [form for form in FORMS if form != "fp8-block"])  # its blocks do not divide a shard
def test_reads_what_a_shard_needs(form: str, tmp_path: Path) -> None:
    """A quarter along either axis takes a quarter of the bytes, besides what is one for all."""
    folder, plain = folder_of(tmp_path / "folder", FORMS[form], (256, 512))
    stored = dict(SafetensorsFile(folder / "model.safetensors"))
    sizes = {name: tensor.nbytes for name, tensor in stored.items() if "norm" not in name}
    shared = sum(n for name, n in sizes.items() if any(end in name for end in ONCE) or n <= 4)
    rest = sum(sizes.values()) - shared
    # What is one for each row is for all of its columns.
    rows = sum(n for name, n in sizes.items() if per_row(stored[name].shape, name, form))
    columns = (rest - rows) / 4 + rows
    if form.endswith("order"):  # any group may be of any column
        columns += 0.75 * sum(n for name, n in sizes.items() if name.endswith(("qzeros", "scales", "weight_scale")))
    with lm.open_checkpoint(folder) as checkpoint:
        tensor, array = checkpoint[NAME], plain[NAME]
        needed = [rest / 4, columns]
        if form.startswith("hqq"):  # a word has numbers of distant rows; of 3 bits, none of whole rows
            needed = [2 * rest, 2 * rest] if "3" in form else [rest, columns]
        for axis, expected in enumerate(needed):
            box = [slice(0, extent) for extent in array.shape]
            box[axis] = slice(array.shape[axis] // 4, array.shape[axis] // 2)
            before = checkpoint.bytes_read
            same(tensor.read(tuple(box)), array[tuple(box)])
            assert checkpoint.bytes_read - before <= 1.02 * (expected + shared)


def per_row(shape: tuple[int, ...], name: str, form: str) -> bool:
    if name.endswith("SCB") or len(shape) < 2:
        return name.endswith("SCB")
    return shape[0 if form.startswith(("gptq", "awq", "auto-round")) else 1] == 1 and not name.endswith(".weight")


@pytest.mark.parametrize("normal", [True, False])
@pytest.mark.parametrize("dtype", [np.float16, quantized.BF16, np.float32])
def test_every_scale_of_float16(normal: bool, dtype: Any, tmp_path: Path) -> None:
    """Products are rounded as by a cast, of scales whose products all are normal numbers there, and of any."""
    scale = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    if normal:
        scale = scale[(scale >= 2.0**-14) & (scale <= 65504 / 512)]
    scale = scale[::7, None]
    codes = np.broadcast_to(np.arange(-126, 128, 2, dtype=np.int8), (scale.size, 127))
    parts = {"weight": codes, "weight_scale": scale, "weight_zero_point": np.full(scale.shape, -127, np.int8)}
    config = quantized.groups("int-quantized", num_bits=8, strategy="channel", symmetric=False)
    stored = {f"m.{name}": part for name, part in parts.items()}
    form = quantized.Form(config, lambda *_: (parts, codes), np.dtype(dtype))
    found = lm.open_checkpoint(write_folder(tmp_path / "folder", quantized.settings(form), stored))["m.weight"].read()
    with np.errstate(all="ignore"):
        exact = (codes.astype(np.float32) + np.float32(127)) * scale.astype(np.float32)
        same(found, exact.astype(np.float16).astype(dtype))


def loaded(tensor: Any, mesh: Mesh, spec: Any) -> tuple[np.ndarray, int]:
    """Its values as a load has them that compiles from the first number on, and how many results programs wrote."""
    model = lm.build_abstract(lambda: {"w": jnp.zeros(tensor.shape, tensor.dtype)}).shard(mesh, {"w": spec})
    with buffer_sizes(compiles=0, pays=0), pytest.MonkeyPatch.context() as patch:
        results: list[Any] = []
        whole = np.from_dlpack
        patch.setattr(np, "from_dlpack", lambda result: (results.append(result), whole(result))[1])
        return np.asarray(model.materialize({"w": tensor})["w"]), len(results)


COMPILED = ["gptq", "gptq-bf16", "gptq-v2", "awq", "auto-round-v2", "nf4", "nf4-nested", "fp4", "pack-4", "pack-4-zero"]
COMPILED += ["mlx-1", "mlx-2", "mlx-4", "mlx-8", "mlx-f16", "mlx-f16-small", "gptq-v2 odd"]


@pytest.mark.parametrize("form", [*COMPILED, "gptq-order", "nf4 odd", "mlx-3", "mlx-f32"])
def test_programs_decode_as_numpy_does(form: str, checkpoints: Any, mesh42: Mesh) -> None:
    """Whole groups; all others are left to NumPy."""
    tensor, array = (each[NAME] for each in checkpoints[form])
    box = tuple(slice(0, extent // 8 * 8) for extent in array.shape)
    axes, used = mesh42.axis_names, 0
    for spec in (P(), P(axes[0]), P(None, axes)):
        for dtype in (array.dtype, np.dtype(np.float32)):
            found, programs = loaded(tensor[box].astype(dtype), mesh42, spec)
            same(found, array[box].astype(dtype))
            used += programs
    assert (used > 0) == (form in COMPILED)


@pytest.mark.parametrize("kind", [np.dtype(np.float16), quantized.BF16])
@pytest.mark.parametrize("dtype", [np.dtype(np.float16), quantized.BF16, np.dtype(np.float32)])
@pytest.mark.parametrize("every", [False, True])
def test_programs_round_as_numpy_does(kind: Any, dtype: Any, every: bool, tmp_path: Path, mesh8: Mesh) -> None:
    """With scales that programs are used for, and, then by NumPy, with any, also infinities and NaN."""
    scale = np.arange(1 << 16, dtype=np.uint16).view(kind)
    sizes = np.abs(scale.astype(np.float32))
    scale = (scale if every else scale[(sizes == 0) | ((sizes >= 2.0**-60) & (sizes <= 2.0**60))])[::5]
    scale = scale[: scale.size // 8 * 8, None]
    codes = np.broadcast_to(np.arange(-8, 8), (scale.size, 16))
    parts = {
        "weight_packed": quantized.pack(codes + 8, 4, 1),
        "weight_scale": scale,
        "weight_shape": np.array(codes.shape, np.int64),
    }
    config = quantized.groups("pack-quantized", num_bits=4, strategy="group", group_size=16, symmetric=True, type="int")
    form = quantized.Form(config, lambda *_: (parts, codes), dtype)
    stored = {f"m.{name}": part for name, part in parts.items()}
    with lm.open_checkpoint(write_folder(tmp_path / "folder", quantized.settings(form), stored)) as checkpoint:
        found, programs = loaded(checkpoint["m.weight"], mesh8, P("model"))
        with np.errstate(all="ignore"):
            exact = codes.astype(np.float32) * scale.astype(np.float32)
            same(found, exact.astype(kind).astype(dtype))
        assert every or programs


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """Experts as GPT-OSS has them: blocks of 4-bit floats, transposed. Every byte there is, and every scale but the one
    that is no number, those that lead below the normal numbers or to infinity as well.
    """
    rng = np.random.default_rng(0)
    blocks, scales = rng.integers(0, 256, (8, 64, 3, 16), np.uint8), rng.integers(0, 255, (8, 64, 3), np.uint8)
    config = {"model_type": "gpt_oss", "torch_dtype": "float32", "quantization_config": {"quant_method": "mxfp4"}}
    folder = tmp_path_factory.mktemp("mxfp4") / "folder"
    write_folder(folder, config, {"up_blocks": blocks, "up_scales": scales})
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(8, 64, 3, 32)  # the lower half of a byte first
    with np.errstate(all="ignore"):
        values = quantized.E2M1[codes] * np.ldexp(np.float32(1), scales.astype(np.int32) - 127)[..., None]
    return folder, values.reshape(8, 64, 96).transpose(0, 2, 1)


def test_experts_read_their_blocks(experts: tuple[Path, np.ndarray]) -> None:
    folder, expected = experts
    with lm.open_checkpoint(folder) as checkpoint:
        for box, count in ((np.s_[3:4, :, :], 64 * 3), (np.s_[3:4, :, 8:24], 16 * 3), (np.s_[7:8, 40:41, 63:64], 1)):
            before = checkpoint.bytes_read
            same(checkpoint["up"][box].read(), expected[box])
            assert checkpoint.bytes_read - before == count * 17


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_box_of_any_view_of_experts(experts: tuple[Path, np.ndarray], data: st.DataObject) -> None:
    checkpoint, expected = lm.open_checkpoint(experts[0]), experts[1]
    axes, step = data.draw(st.permutations(range(3))), data.draw(st.sampled_from([1, 2]))
    dtype = data.draw(st.sampled_from(["float32", "float16", "float64"]))
    with np.errstate(all="ignore"):
        found, expected = (each.transpose(axes)[..., ::step].astype(dtype) for each in (checkpoint["up"], expected))
    box = tuple(slice(*sorted(data.draw(st.tuples(*[st.integers(0, extent)] * 2)))) for extent in expected.shape)
    assert found.read(box).tobytes() == np.ascontiguousarray(expected[box]).tobytes()


@pytest.mark.parametrize("budget", [40 << 10, 1 << 20, None])
def test_experts_within_the_budget(budget: int | None, experts: tuple[Path, np.ndarray], mesh8: Mesh) -> None:
    model = lm.build_abstract(lambda: {"up": jnp.zeros((8, 96, 64))}).shard(mesh8, {"up": P(None, "model")})
    loaded = model.materialize(lm.open_checkpoint(experts[0]), max_host_memory=budget)
    assert np.asarray(loaded["up"]).tobytes() == experts[1].tobytes()


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


_PACKAGES = "needs the packages compressed-tensors and torch"
# Without groups in any order, which the package reads no more.
NAMES = [n for n, f in FORMS.items() if f.config.get("quant_method") == "compressed-tensors" and n != "pack-4-order"]


@pytest.mark.large
@pytest.mark.parametrize("name", NAMES)
def test_as_compressed_tensors_decodes(tmp_path: Path, name: str) -> None:
    """Against what that package itself makes of its forms."""
    torch = pytest.importorskip("torch", reason=_PACKAGES)
    compressors = pytest.importorskip("compressed_tensors.compressors", reason=_PACKAGES)
    quantization = pytest.importorskip("compressed_tensors.quantization", reason=_PACKAGES)
    form = FORMS[name]
    parts, _ = form.make(np.random.default_rng(7), 64, 96)

    def tensor(array: np.ndarray) -> Any:
        for kind, of_torch in ((quantized.F8, torch.float8_e4m3fn), (form.dtype, torch.bfloat16)):
            if array.dtype == kind and array.dtype != np.float16:
                return torch.from_numpy(array.view(f"i{array.itemsize}").copy()).view(of_torch)
        return torch.from_numpy(array.copy())

    group = form.config["config_groups"]["group_0"]
    scheme = quantization.QuantizationScheme(**{**group, "weights": quantization.QuantizationArgs(**group["weights"])})
    compressor = compressors.BaseCompressor.get_value_from_registry(form.config["format"])
    state = {ending: tensor(part) for ending, part in parts.items()}
    expected = compressor.decompress(state, scheme)["weight"].to(torch.bfloat16).view(torch.int16).numpy()
    write_folder(tmp_path / "m", quantized.settings(form), {f"layer.{ending}": part for ending, part in parts.items()})
    found = lm.open_checkpoint(tmp_path / "m")["layer.weight"].read().astype("bfloat16")
    np.testing.assert_array_equal(found.view(np.int16), expected)


@pytest.mark.large
def test_as_modelopt_packs(tmp_path: Path) -> None:
    """Against the packer of nvidia-modelopt (0.47), which has no reader."""
    torch = pytest.importorskip("torch", reason="needs the packages nvidia-modelopt and torch")
    tool = pytest.importorskip("modelopt.torch.export.quant_utils", reason="needs the package nvidia-modelopt")
    parts, _ = FORMS["modelopt-awq"].make(np.random.default_rng(7), 64, 96)
    scale = torch.from_numpy(parts["weight_scale"])
    weight = torch.randint(-8, 8, (64, 96)) * scale.repeat_interleave(32, 1)
    stored = {"a.weight": tool.pack_int4_in_uint8(weight, scale, 32).numpy(), "a.weight_scale": scale.numpy()}
    config = {**quantized.settings(FORMS["modelopt-awq"]), "torch_dtype": "float32"}
    same(lm.open_checkpoint(write_folder(tmp_path / "m", config, stored))["a.weight"].read(), weight.numpy())


@pytest.mark.large
@pytest.mark.parametrize("name", [n for n in FORMS if n.startswith("gptq") and FORMS[n].dtype == np.float16])
def test_as_gptqmodel_decodes(tmp_path: Path, name: str) -> None:
    """Against the package gptqmodel (7.7), which reads whole folders."""
    torch = pytest.importorskip("torch", reason="needs the packages gptqmodel and torch")
    tool = pytest.importorskip("gptqmodel.utils.model_dequant", reason="needs the package gptqmodel")
    form = FORMS[name]
    config = {"group_size": 32, "checkpoint_format": "gptq", **form.config}
    if "dynamic" in config:
        pytest.skip("another number of bits for each module, which that function does not read")
    parts, _ = form.make(np.random.default_rng(7), 64, 128)
    stored = {f"{NAME.removesuffix('.weight')}.{end}": part for end, part in parts.items()}
    folder = write_folder(tmp_path / "m", {**quantized.settings(form), "quantization_config": config}, stored)
    tool.dequantize_model(folder, tmp_path / "plain", target_dtype=torch.float16)
    same(lm.open_checkpoint(folder)[NAME].read(), lm.open_checkpoint(tmp_path / "plain")[NAME].read())


@pytest.mark.large
@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_as_auto_round_packs(tmp_path: Path, bits: int) -> None:
    """Against the packer of auto-round (0.16.1)."""
    torch = pytest.importorskip("torch", reason="needs the packages auto-round and torch")
    tool = pytest.importorskip("auto_round.utils.bit_packing", reason="needs the package auto-round")
    codes, zeros = torch.randint(0, 1 << bits, (128, 64)), torch.randint(1, 1 << bits, (4, 64))
    scale = torch.rand(4, 64).half()
    parts = {"qweight": tool.pack_bitstream(codes, bits, 0), "qzeros": tool.pack_bitstream(zeros - 1, bits, 1)}
    stored = {f"a.{end}": part.numpy() for end, part in {**parts, "scales": scale}.items()}
    folder = write_folder(tmp_path / "m", quantized.settings(FORMS[f"auto-round-{bits}"]), stored)
    expected = scale.repeat_interleave(32, 0) * (codes - zeros.repeat_interleave(32, 0))
    same(lm.open_checkpoint(folder)["a.weight"].read(), expected.T.contiguous().numpy())


@pytest.mark.large
@pytest.mark.parametrize("name", ["quark-fp8", "quark-mxfp4"])
def test_as_quark_decodes(tmp_path: Path, name: str) -> None:
    """Against the package amd-quark (0.13)."""
    torch = pytest.importorskip("torch", reason="needs the packages amd-quark and torch")
    kernel = pytest.importorskip("quark.torch.kernel", reason="needs the package amd-quark")
    pack = pytest.importorskip("quark.torch.utils.pack")
    parts, _ = FORMS[name].make(np.random.default_rng(7), 64, 96)
    if name == "quark-fp8":
        weight = torch.from_numpy(parts["weight"].view(np.uint8)).view(torch.float8_e4m3fn)
        scale = torch.from_numpy(parts["weight_scale"].astype(np.float32)).reshape(-1)
        expected = kernel.dequantize("fp8_e4m3", weight, scale, None, 0, None, "per_channel")
    else:
        codes = pack.create_pack_method("per_group", "fp4").unpack(torch.from_numpy(parts["weight"]), False)
        scale = torch.from_numpy(np.exp2(parts["weight_scale"].astype(np.float32) - 127))
        expected = kernel.dequantize("fp4", codes, scale, None, -1, 32, "per_group")
    folder = write_folder(tmp_path / "m", quantized.settings(FORMS[name]), {f"a.{end}": p for end, p in parts.items()})
    found = lm.open_checkpoint(folder)["a.weight"].read().view(np.int16)
    np.testing.assert_array_equal(found, expected.to(torch.bfloat16).view(torch.int16).numpy())


HQQ = [name for name in FORMS if name.startswith("hqq")]


@pytest.mark.large
@pytest.mark.parametrize("name", HQQ)
def test_as_hqq_decodes(tmp_path: Path, name: str) -> None:
    """Against the package hqq itself (0.2.8.post1)."""
    torch = pytest.importorskip("torch", reason="needs the packages hqq and torch")
    quantizer = pytest.importorskip("hqq.core.quantize", reason="needs the packages hqq and torch").Quantizer
    parts, _ = FORMS[name].make(np.random.default_rng(7), 64, 96)
    kind = parts["scale"].dtype
    state = {key: torch.from_numpy(parts[key].astype(np.float32)) for key in ("scale", "zero")}
    state = {key: value.to(getattr(torch, kind.name)) for key, value in state.items()}
    words, packing, axis = torch.from_numpy(parts["W_q"]), parts["packing"].tobytes().decode(), int(parts["axis"])
    group = parts["scale"].size if axis == 0 else words.shape[1]
    state |= {"packing": packing, "nbits": int(packing[0]), "axis": axis, "shape": (64, 96), "view_as_float": False}
    state |= {"compute_dtype": getattr(torch, kind.name), "group_size": 64 * 96 // group if axis == 0 else group}
    expected = quantizer.dequantize(words, state).to(torch.bfloat16).view(torch.int16).numpy()
    folder = write_folder(tmp_path / "m", quantized.settings(FORMS[name]), {f"a.{end}": p for end, p in parts.items()})
    np.testing.assert_array_equal(lm.open_checkpoint(folder)["a.weight"].read().view(np.int16), expected)


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("name", ["hqq-2", "hqq-3-down"])
def test_files_of_hqq_itself(name: str, old: bool, tmp_path: Path) -> None:
    """Neither qmodel.pt nor the folders of `save_to_safetensors` state the method."""
    parts, expected = FORMS[name].make(np.random.default_rng(7), 64, 96)
    config = {"model_type": "llama", "torch_dtype": "bfloat16"}
    module = NAME.removesuffix(".weight")
    folder = write_folder(tmp_path / "a", config, {f"{module}.{end}": part for end, part in parts.items()})
    same(lm.open_checkpoint(folder)[NAME].read(), expected)
    arrays = {end: parts[end] for end in ("W_q", "scale", "zero")}
    state: dict[str, Any] = {
        end: torch_tensor(end, array.dtype.name, array.size, 0, array.shape, (array.shape[1], 1))
        for end, array in arrays.items()
    }
    state |= {"shape": called("torch.Size", (64, 96)), "packing": parts["packing"].tobytes().decode(), "nbits": 2}
    norm = {"weight": state["scale"]}
    if old:  # version 0.1.8
        state = {"W_q": state.pop("W_q"), "meta": state}
    content = {module: state, "model.norm": norm}
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    storages = {end: array.tobytes() for end, array in arrays.items()}
    (tmp_path / "b" / "qmodel.pt").write_bytes(torch_archive(content, storages))
    with lm.open_checkpoint(tmp_path / "b") as checkpoint:
        assert sorted(checkpoint) == [NAME, "model.norm.weight"]
        same(checkpoint[NAME].read(), expected)


@pytest.mark.parametrize("form", ["nf4", "nf4-nested", "int8"])
def test_weights_of_conv1d_are_as_transformers_has_them(form: str, tmp_path: Path) -> None:
    """bitsandbytes stores them as (out, in)."""
    names = ("transformer.h.0.attn.c_proj", "transformer.h.0.mlp.c_fc", "transformer.h.0.other")
    tensors = {f"{name}.weight": np.zeros((64, 128 if "fc" in name else 64), np.float32) for name in names}
    stored, plain = quantized.quantized(FORMS[form], tensors, lambda _: True)
    settings = quantized.settings(FORMS[form], model_type="gpt2")
    with lm.open_checkpoint(write_folder(tmp_path / "gpt2", settings, stored)) as checkpoint:
        for name, values in plain.items():
            expected = values if "other" in name else values.T
            same(checkpoint[name].read(), expected)
            same(checkpoint[name][3:9, 5:40].read(), expected[3:9, 5:40])
            assert checkpoint.describe(name).shape == expected.shape


@pytest.mark.parametrize("storage", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("form", ["nf4", "nf4-nested"])
def test_four_bits_may_be_stored_as_floats(form: str, storage: str, tmp_path: Path) -> None:
    """With `bnb_4bit_quant_storage`, as FSDP needs it; the bytes are the same."""
    stored, plain = quantized.quantized(FORMS[form], {NAME: np.zeros(SHAPE, np.float32)}, lambda _: True)
    stored[NAME] = stored[NAME].reshape(-1).view(jnp.dtype(storage))[:, None]
    with lm.open_checkpoint(write_folder(tmp_path / "a", quantized.settings(FORMS[form]), stored)) as checkpoint:
        same(checkpoint[NAME].read(), plain[NAME])
        before = checkpoint.bytes_read
        same(checkpoint[NAME][2:3].read(), plain[NAME][2:3])
        assert checkpoint.bytes_read - before <= SHAPE[1]  # a row, and its scales


@pytest.mark.large
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("storage", ["uint8", "bfloat16", "float16", "float32"])
def test_as_bitsandbytes_decodes(storage: str, nested: bool, tmp_path: Path) -> None:
    """Against that package (0.50), whose code for CPUs decodes rows of whole blocks."""
    torch = pytest.importorskip("torch", reason="needs the packages bitsandbytes and torch")
    tool = pytest.importorskip("bitsandbytes.functional", reason="needs the packages bitsandbytes and torch")
    safetensors = pytest.importorskip("safetensors.torch")
    weight, options = torch.randn(64, 128).bfloat16(), {"quant_type": "nf4", "compress_statistics": nested}
    codes, state = tool.quantize_4bit(weight, **options, quant_storage=getattr(torch, storage))
    parts = {f"a.weight.{key}": part for key, part in state.as_dict(packed=True).items()}
    (tmp_path / "config.json").write_text(json.dumps(quantized.settings(FORMS["nf4"])))
    safetensors.save_file({"a.weight": codes, **parts}, tmp_path / "model.safetensors")
    expected = tool.dequantize_4bit(codes, state).view(torch.int16).numpy()
    np.testing.assert_array_equal(lm.open_checkpoint(tmp_path)["a.weight"].read().view(np.int16), expected)


def test_four_bits_that_were_merged_are_of_the_model_s_dtype(tmp_path: Path) -> None:
    """PEFT merges in float32, and the state then says so."""
    form = quantized.Form(FORMS["nf4"].config, quantized.four_bits("nf4", nested=False, dtype="float32"))
    stored, plain = quantized.quantized(form, {NAME: np.zeros(SHAPE, np.float32)}, lambda _: True)
    with lm.open_checkpoint(write_folder(tmp_path / "a", quantized.settings(form), stored)) as checkpoint:
        same(checkpoint[NAME].read(), plain[NAME].astype(form.dtype))
        same(checkpoint[NAME].astype(np.float32).read(), plain[NAME])


def test_a_part_that_is_released_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    """Two variables may have parts of one tensor; a load releases it after each, while it reads the other."""
    form, shape = FORMS["gptq-order"], (1024, 2048)
    stored, plain = quantized.quantized(form, {NAME: np.zeros(shape, np.float32)}, lambda _: True)
    with lm.open_checkpoint(write_folder(tmp_path / "a", quantized.settings(form), stored)) as checkpoint:
        tensor = checkpoint[NAME]

        def release(values: np.ndarray) -> np.ndarray:
            tensor.source.release()
            return values

        same(tensor.converted((Convert(tensor.dtype, function=release),)).read(), plain[NAME])


@pytest.mark.parametrize(
    ("model_type", "name"), [("qwen3_moe", "mlp.{}.gate_proj"), ("mixtral", "block_sparse_moe.{}.w1")]
)
@pytest.mark.parametrize("form", ["mlx-4", "mlx-5", "mlx-mxfp8", "mlx-nvfp4", None])
def test_experts_that_mlx_joined_have_their_own_names(
    form: str | None, model_type: str, name: str, tmp_path: Path
) -> None:
    """And modules with bits of their own, in `quantization` as well as in `quantization_config`."""
    rng = np.random.default_rng(0)
    layer = "model.layers.0." + name.split(".")[0]
    if form is None:
        values = rng.standard_normal((3, 8, 64)).astype(np.float16)
        write_folder(tmp_path / "folder", {"model_type": model_type}, {f"{layer}.switch_mlp.gate_proj.weight": values})
        stored = values.nbytes
    else:
        parts, flat = FORMS[form].make(rng, 24, 64)
        values = flat.reshape(3, 8, 64)
        tensors = {f"{layer}.switch_mlp.gate_proj.{end}": part.reshape(3, 8, -1) for end, part in parts.items()}
        stored = sum(part.nbytes for part in parts.values())
        options = {
            "group_size": 128,
            "bits": 2,
            f"{layer}.switch_mlp.gate_proj": {**FORMS[form].config, "group_size": None},
        }
        config = {"model_type": model_type, "quantization": options, "quantization_config": options}
        write_folder(tmp_path / "folder", config, tensors)
    with lm.open_checkpoint(tmp_path / "folder") as checkpoint:
        names = [f"model.layers.0.{name.format(f'experts.{index}')}.weight" for index in range(3)]
        assert sorted(checkpoint) == names
        for each, array in zip(names, values, strict=True):
            before = checkpoint.bytes_read
            assert checkpoint.describe(each).shape == array.shape
            same(checkpoint[each].read(), array)
            assert checkpoint.bytes_read - before == stored // 3
