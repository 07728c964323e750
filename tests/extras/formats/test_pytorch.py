"""PyTorch's files: every tensor bit for bit at its place in the archive, and nothing in them is ever run."""

from __future__ import annotations

import argparse
import collections
import importlib.util
import io
import json
import pickle
import random
import re
import sys
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.command import command, inspected
from tests.core.checkpoints._formats import (
    Opcodes,
    called,
    named,
    numbers,
    pickled,
    refused,
    torch_archive,
    torch_file,
    torch_tensor,
)
from tests.large import mostly_large

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch: pip install torch")
DTYPES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16"),
    *("float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
    *("float8_e5m2fnuz", "float8_e8m0fnu"),
)


def bits(tensor: Any) -> bytes:
    """The bytes of a tensor of torch, in the order of its elements."""
    import torch

    return bytes(torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8).numpy())


def assert_equal(found: Any, tensor: Any) -> None:
    """A lazy tensor has the dtype, the shape and the bits of one of torch."""
    values = found.read()
    assert (values.dtype.name, values.shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    assert values.tobytes() == bits(tensor)


# What torch writes ----------------------------------------------------------------------------------------------------


@needs_torch
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(tmp_path, dtype):
    import torch

    kind = getattr(torch, dtype)
    most = 2 if dtype == "bool" else 256
    data = np.random.default_rng(0).integers(0, most, 240 * kind.itemsize, np.uint8)
    tensor = torch.from_numpy(data).view(kind).reshape(12, 20)
    torch.save({"w": tensor, "part": tensor[2:5, ::2]}, tmp_path / "m.pt")
    found = lm.open_checkpoint(tmp_path / "m.pt")
    assert_equal(found["w"], tensor)
    assert_equal(found["part"], tensor[2:5, ::2])


@needs_torch
def test_views_of_storages(tmp_path):
    """Strides, offsets, shared and repeated elements: whatever torch can view."""
    import torch

    base, rng = torch.arange(200, dtype=torch.float32), random.Random(0)
    tensors = {
        "transposed": base[:60].view(5, 12).T,
        "window": base.unfold(0, 6, 2),
        "repeated": base[7].expand(3, 4),
        "scalar": base[9],
        "empty": base[:0].view(0, 3),
        "one": base[5:6].view(1, 1, 1),
        "whole": base,
        "tied": base,
    }
    for number in range(100):
        shape = [rng.randrange(1, 5) for _ in range(rng.randrange(5))]
        strides = [rng.choice((0, 1, 2, 3, 5, 12)) for _ in shape]
        tensors[f"{number}"] = base.as_strided(shape, strides, rng.randrange(20))
    torch.save(tensors, tmp_path / "m.pt")
    with lm.open_checkpoint(tmp_path / "m.pt") as found:
        assert list(found) == list(tensors)
        for name, tensor in tensors.items():
            assert_equal(found[name], tensor)
            if tensor.ndim and tensor.numel():
                half = found[name].T[tensor.shape[-1] // 2 :].astype(np.float64).read()
                np.testing.assert_array_equal(half, tensor.numpy().T[tensor.shape[-1] // 2 :])
        assert found["whole"].offset == found["tied"].offset == found["transposed"].offset
        assert found.describe("whole").offset == found["whole"].offset
        assert found.describe("transposed").offset is None


@needs_torch
@pytest.mark.parametrize("protocol", mostly_large([2, 3, 4, 5], [2, 5]))
def test_names(tmp_path, protocol):
    import torch

    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    content = {
        "model": layer.state_dict(),
        "parameter": layer.weight,
        "optimizer": optimizer.state_dict(),
        "ema": [torch.ones(2), (torch.zeros(3), {"x": torch.ones(1, dtype=torch.int8)})],
        "step": 7, "loss": 0.5, "text": "words", "nothing": None, "flags": [True, False, 2**70, -1],
        "sizes": torch.Size([1, 2]), "device": torch.device("cpu"), 3: {"w": torch.tensor(5)},
    }  # fmt: skip
    torch.save(content, tmp_path / "m.ckpt", pickle_protocol=protocol)
    found = lm.open_checkpoint(tmp_path / "m.ckpt")
    state = [f"optimizer.state.{index}.{name}" for index in (0, 1) for name in ("step", "exp_avg", "exp_avg_sq")]
    expected = ["model.weight", "model.bias", "parameter", *state, "ema.0", "ema.1.0", "ema.1.1.x", "3.w"]
    assert list(found) == expected
    for name, tensor in (("parameter", layer.weight.detach()), ("model.bias", layer.bias.detach())):
        assert_equal(found[name], tensor)
    assert_equal(found["optimizer.state.1.exp_avg"], optimizer.state_dict()["state"][1]["exp_avg"])
    torch.save(torch.ones(3), tmp_path / "embedding.pt")
    assert list(lm.open_checkpoint(tmp_path / "embedding.pt")) == ["embedding"]


@needs_torch
def test_what_a_refusal_says_to_do_works(tmp_path, monkeypatch):
    """Of files that are older or compressed, with tied weights, numbers, and tensors that are not contiguous."""
    import torch

    monkeypatch.chdir(tmp_path)
    tied, turned = torch.ones(2), torch.arange(6.0).reshape(2, 3).T
    state = {"a": tied, "b": tied, "c": turned, "step": 3}
    torch.save(state, "old.pt", _use_new_zipfile_serialization=False)
    torch.save(state, "new.pt")
    with zipfile.ZipFile("new.pt") as new, zipfile.ZipFile("packed.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        for name in new.namelist():
            packed.writestr(name, new.read(name))
    for path, words in (("old.pt", "since PyTorch 1.6, found a pickle alone"), ("packed.pt", "found it compressed")):
        with pytest.raises(lm.CheckpointError) as caught:
            lm.open_checkpoint(path)
        assert words in str(caught.value)
        (advice,) = re.findall("`(.*)`", str(caught.value))
        exec(advice, {"torch": torch, "path": path})
        found = lm.open_checkpoint("model.pt")
        assert sorted(found) == ["a", "b", "c"]
        np.testing.assert_array_equal(found["c"].read(), turned)


@needs_torch
def test_objects_are_searched_for_tensors(tmp_path):
    """What is not known is inert: it refuses nothing, and the tensors in it are found."""
    import torch

    weight = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    marked, module = weight.clone(), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    marked.note = "attribute"
    default = collections.defaultdict(list, a=weight)
    content = {
        "buffer": torch.nn.Buffer(weight), "marked": marked, "parameter": torch.nn.Parameter(marked),
        "options": argparse.Namespace(lr=0.1, w=weight), "default": default, "queue": collections.deque([weight]),
        "scalar": np.float64(3), "array": np.ones(3), "path": PurePosixPath("a"), "layout": torch.strided,
        "keys": {(1, 2): weight, None: 4}, "module": module,
    }  # fmt: skip
    torch.save(content, tmp_path / "m.pt")
    with lm.open_checkpoint(tmp_path / "m.pt") as found:
        parts = [f"module.{name}" for name in module.state_dict()]
        weights = ["buffer", "marked", "parameter", "options.w", "default.a", "queue.0", "keys.(1, 2)"]
        assert list(found) == [*weights, *parts]
        for name in weights:
            assert_equal(found[name], weight)
        for name in parts:
            assert_equal(found[name], module.state_dict()[name.removeprefix("module.")])
    module.itself = content["options"].itself = content["options"]
    torch.save(module, tmp_path / "m.pt")
    assert list(lm.open_checkpoint(tmp_path / "m.pt")) == [*module.state_dict(), "itself.w"]
    torch.save({"array": np.ones(3)}, tmp_path / "m.pt")
    refused(tmp_path / "m.pt", r"expected tensors, found none, but .*_reconstruct', .*weights_only=False")


@needs_torch
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_tensors_that_are_not_stored_as_values_are_refused_with_advice_that_is_right(tmp_path):
    import torch
    from safetensors.torch import save_file

    weight = torch.arange(4, dtype=torch.float32).reshape(2, 2)
    path, imaginary = tmp_path / "m.pt", torch.full((2,), 2j)
    cases = {
        "'w' made by 'torch._utils._rebuild_sparse_tensor'": (weight.to_sparse(), torch.Tensor.to_dense),
        "conjugated": (imaginary.conj(), torch.Tensor.resolve_conj),
        "negated": (imaginary.conj().imag, torch.Tensor.resolve_neg),
        "one of the dtypes .* found torch.complex32": (
            torch.ones(2, dtype=torch.complex32),
            lambda t: t.to(torch.complex64),
        ),
    }
    for message, (value, plain) in cases.items():
        torch.save({"w": value}, path)
        text = refused(path, message)
        assert all(part in text for part in (".to_dense()", ".resolve_conj().resolve_neg()", ".to(dtype)"))
        expected = plain(torch.load(path, weights_only=True)["w"])
        save_file({"w": expected}, tmp_path / "m.safetensors")
        assert_equal(lm.open_checkpoint(tmp_path / "m.safetensors")["w"], expected)


@needs_torch
def test_a_quantized_folder_is_decoded(tmp_path):
    import torch
    from safetensors.torch import save_file

    weights = torch.arange(64, dtype=torch.float32).reshape(8, 8).to(torch.float8_e4m3fn)
    state = {"layer.weight": weights, "layer.weight_scale_inv": torch.rand(2, 2)}
    config = {"model_type": "llama", "quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]}}
    for name in ("torch", "safetensors"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    torch.save(state, tmp_path / "torch" / "pytorch_model.bin")
    save_file(state, tmp_path / "safetensors" / "model.safetensors")
    found, expected = (lm.open_checkpoint(tmp_path / name) for name in ("torch", "safetensors"))
    assert list(found) == list(expected) == ["layer.weight"]
    assert found["layer.weight"].read().tobytes() == expected["layer.weight"].read().tobytes()


# Places ---------------------------------------------------------------------------------------------------------------


def test_folders(tmp_path, mesh8):
    halves = {"a": numbers((16, 8))}, {"b": numbers((8, 24), np.float16)}
    for number, half in enumerate(halves, 1):
        (tmp_path / f"pytorch_model-0000{number}-of-00002.bin").write_bytes(torch_file(half))
    for name in ("optimizer.pt", "training_args.bin"):  # which are not the model's
        (tmp_path / name).write_bytes(b"")
    index = tmp_path / "pytorch_model.bin.index.json"
    shards = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    for text in ("", json.dumps({"metadata": {"total_size": 896}, "weight_map": shards})):
        if text:
            index.write_text(text)
        found = lm.open_checkpoint(tmp_path)
        assert (found.format, sorted(found)) == ("pytorch", ["a", "b"])
        model = lm.build_abstract(lambda: {"a": jnp.zeros((16, 8)), "b": jnp.zeros((8, 24), jnp.float16)})
        loaded = model.shard(mesh8, {"a": P("model"), "b": P(None, "model")}).materialize(found)
        for half in halves:
            for name, array in half.items():
                np.testing.assert_array_equal(loaded[name], array)
    index.write_text(json.dumps({"weight_map": {**shards, "c": "pytorch_model-00002-of-00002.bin"}}))
    refused(tmp_path, r"is missing 1 tensor \('c'\)")
    index.unlink()
    (tmp_path / shards["b"]).unlink()
    refused(tmp_path, r"missing pytorch_model-00002-of-00002\.bin")
    (tmp_path / shards["a"]).unlink()
    refused(tmp_path, r"has 2 files of PyTorch's; open one of optimizer\.pt, training_args\.bin")
    (tmp_path / "pytorch_model.bin").write_bytes(torch_file(halves[0]))
    assert list(lm.open_checkpoint(tmp_path)) == ["a"]
    ran = command("convert", tmp_path, tmp_path / "model.safetensors")
    assert ran.status == 0, ran.err
    with lm.open_checkpoint(tmp_path) as converted:  # safetensors come first
        assert (converted.format, list(converted)) == ("safetensors", ["a"])
        np.testing.assert_array_equal(converted["a"].read(), halves[0]["a"])


# Damaged and hostile files --------------------------------------------------------------------------------------------

DATA = np.arange(6, dtype=np.float32).tobytes()


def tensor(key: Any = "0", dtype: str = "float32", count: int = 6, **changed: Any) -> Opcodes:
    """A tensor of a storage of 6 numbers."""
    where = {"offset": 0, "shape": (2, 3), "strides": (3, 1)} | changed
    return torch_tensor(key, dtype, count, where["offset"], where["shape"], where["strides"])


def deep(value: Any, times: int) -> Any:
    for _ in range(times):
        value = [value]
    return value


def twice(times: int) -> Opcodes:
    """A list that has the next one twice, and so on: two to this power of tensors."""
    code = b"]" + pickled(tensor()) + b"a"
    for _ in range(times):
        code = b"](" + code + b"q\x00h\x00e"
    return Opcodes(code)


WRONG = {
    "offset": ({"w": tensor(offset=1)}, "within the 24 bytes of its storage, found it up to byte 28"),
    "stride": ({"w": tensor(strides=(4, 1))}, "found it up to byte 28"),
    "negative stride": ({"w": tensor(strides=(-3, 1))}, "an offset, at most 32 extents and as many strides"),
    "negative offset": ({"w": tensor(offset=-1)}, "an offset, at most 32 extents"),
    "other strides": ({"w": tensor(strides=(1,))}, "as many strides"),
    "dimensions": ({"w": tensor(shape=(1,) * 33, strides=(1,) * 33)}, "at most 32 extents"),
    "shape": ({"w": tensor(shape=(2**40, 2**40), strides=(0, 0))}, "a shape of less than"),
    "text as shape": ({"w": tensor(shape="ab")}, "at most 32 extents"),
    "count": ({"w": tensor(count=5)}, r"20 bytes of archive/data/0, found 24"),
    "dtype": ({"w": tensor(dtype="int64")}, r"48 bytes of archive/data/0, found 24"),
    "storage": ({"w": tensor(key="1")}, r"archive/data/1 in the archive, found none"),
    "path": ({"w": tensor(key="../data.pkl")}, r"in the archive, found none"),
    "key": ({"w": tensor(key=3)}, "the id of a storage"),
    "depth": ({"w": deep(tensor(), 100)}, "dicts and lists at most 64 deep"),
    "repetition": ({"w": twice(40)}, "not one of them everywhere"),
    "itself": (Opcodes(b"]q\x00h\x00a"), "dicts and lists at most 64 deep"),
    "names": ({"a.b": tensor(), "a": {"b": tensor()}}, "two tensors named 'a.b'"),
    "keys": ({1: tensor(), "1": tensor()}, "each key of a dict once, found '1' twice"),
    "a call": ({"w": called("torch._utils._rebuild_other", tensor())}, "'w' made by 'torch._utils._rebuild_other'"),
    "a storage": (
        {"w": Opcodes(tensor(dtype="uint8", count=24).replace(b"ByteStorage", b"OtherStorage"))},
        "one of the dtypes bool, .* found torch.OtherStorage",
    ),
    "hooks": ({"w": called("collections.OrderedDict", [("a", 1)])}, "tensors made of storages"),
    "no tensor": (called("torch._utils._rebuild_parameter", 1, True, None), "tensors made of storages"),
    "text as storage": (Opcodes(pickled(("storage", "torch.FloatStorage", "0", "cpu", 6)) + b"Q"), "id of a storage"),
    "calls": (Opcodes(b"X\x01\x00\x00\x00a)R"), "'a' made of"),
    "an empty stack": (Opcodes(b"0"), "POP"),
    "nothing": (Opcodes(b"a"), "a corrupt one"),
    "a memo": (Opcodes(b"r\xff\xff\xff\xff"), "a corrupt one"),
    "a length": (Opcodes(b"\x8e\xff\xff\xff\xff\xff\xff\xff\x00"), "a corrupt one"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_no_tensor_is_made_of(tmp_path, case):
    content, message = WRONG[case]
    (tmp_path / "m.pt").write_bytes(torch_archive(content, {"0": DATA}))
    refused(tmp_path / "m.pt", message)
    assert inspected(tmp_path / "m.pt")["problems"]


@pytest.fixture
def nothing_runs():
    """Fails if something is imported, called or unpickled that Python reports to those who audit it."""
    assert_nothing_ran(lambda: None)
    return assert_nothing_ran


EVENTS: list[str] | None = None
FORBIDDEN = ("pickle.find_class", "exec", "os.system", "subprocess.Popen", "os.exec", "ctypes.dlopen", "import")


def _audit(event: str, _: Any) -> None:
    if EVENTS is not None and event in FORBIDDEN:
        EVENTS.append(event)


def assert_nothing_ran(function: Any) -> Any:
    global EVENTS
    if not hasattr(assert_nothing_ran, "added"):
        sys.addaudithook(_audit)  # which cannot be removed
        assert_nothing_ran.added = True
    EVENTS = []
    try:
        return function()
    finally:
        found, EVENTS = EVENTS, None
        assert not found


INERT = {
    "os.system": called("os.system", "touch evil"),
    "posix.system": called("posix.system", "touch evil"),
    "builtins.eval": called("builtins.eval", "open('evil', 'w')"),
    "torch.load": called("torch.load", "x"),
    "torch.serialization.load": Opcodes(b"\x8c\x13torch.serialization\x8c\x04load\x93)R"),
    "numpy._core.multiarray.scalar": named("numpy._core.multiarray.scalar"),
    "argparse.Namespace": Opcodes(named("argparse.Namespace") + b")\x81}b"),
    "torch.float32.__class__": Opcodes(b"ctorch\nfloat32.__class__\n"),
    "NEWOBJ": Opcodes(named("collections.OrderedDict") + b")\x81"),
}
REFUSED = {
    "INST": Opcodes(b"(X\x04\x00\x00\x00evilios\nsystem\n"),
    "OBJ": Opcodes(b"(" + named("collections.OrderedDict") + b"o"),
    "EXT1": Opcodes(b"\x82\x01"),
    "PERSID": Opcodes(b"Pevil\n"),
}


@pytest.mark.parametrize("name", [*INERT, *REFUSED])
def test_nothing_is_run(tmp_path, name, nothing_runs, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = {"w": tensor(), "x": {**INERT, **REFUSED}[name]}
    (tmp_path / "m.bin").write_bytes(torch_archive(content, {"0": DATA}))

    def read():
        with lm.open_checkpoint(tmp_path / "m.bin") as found:
            return list(found)

    if name in INERT:
        assert read() == ["w"]  # once, so that all is imported
        assert nothing_runs(read) == ["w"]
    else:
        refused(tmp_path / "m.bin", "expected")
        assert name in nothing_runs(lambda: refused(tmp_path / "m.bin", r"if you trust the file, .*torch\.load"))
    assert [path.name for path in tmp_path.iterdir()] == ["m.bin"]


def _mutated(data: bytes, rng: random.Random) -> bytes:
    edited = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(edited))
        match rng.randrange(5):
            case 0:
                edited[at] ^= 1 << rng.randrange(8)
            case 1:
                edited[at] = rng.choice(b"\x00\x01\xff(.0RQbcisoh}]Kq\x81\x93")
            case 2:
                del edited[at : at + rng.randrange(1, 9)]
            case 3:
                start = rng.randrange(len(data))
                edited[at:at] = data[start : start + rng.randrange(1, 40)]
            case _:
                edited[at : at + 1] = rng.choice(
                    (b"cos\nsystem\n", b"(S'evil'\nios\nsystem\n", b"\x8a\x04\xff\xff\xff\x7f")
                )
    return bytes(edited)


def _plain(value: Any, prefix: str = "") -> dict[str, Any]:
    """Name → tensor of what torch has loaded."""
    if hasattr(value, "untyped_storage"):
        return {prefix[1:]: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return {name: found for key, each in items for name, found in _plain(each, f"{prefix}.{key}").items()}


def test_mutated_pickles_are_refused_or_right(tmp_path, nothing_runs, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch = importlib.import_module("torch") if importlib.util.find_spec("torch") else None
    values = {"a": numbers((2, 3)), "b": numbers((5,), np.int64), "c": numbers((3, 2), np.float16)}
    model = {"a": tensor("0"), "b": torch_tensor("1", "int64", 5, 0, (5,), (1,))}
    part = torch_tensor("2", "float16", 6, 0, (2, 2), (2, 1))
    content = pickled({"model": model, "step": [1, "x" * 300], "c": part})
    storages = {str(key): value.tobytes() for key, value in enumerate(values.values())}
    path, rng, right = tmp_path / "m.pt", random.Random(0), 0

    def read() -> dict[str, np.ndarray] | None:
        try:
            with lm.open_checkpoint(path) as found:
                return {name: tensor.read() for name, tensor in found.items() if tensor.nbytes < 1 << 20}
        except lm.CheckpointError:
            return None

    path.write_bytes(torch_archive(Opcodes(content), storages))
    assert read() is not None
    for _ in range(200):
        path.write_bytes(torch_archive(Opcodes(_mutated(content, rng)), storages))
        found = nothing_runs(read)
        if found is None or torch is None:
            continue
        try:
            loaded = torch.load(path, weights_only=True)
        except Exception:  # it refuses more
            continue
        expected = _plain(loaded)
        for name, value in found.items():
            assert value.tobytes() == bits(expected[name])
            right += 1
    assert torch is None or right > 20
    assert [each.name for each in tmp_path.iterdir()] == ["m.pt"]


def test_a_file_that_is_cut_is_refused(tmp_path):
    data = torch_file({"a": numbers((4, 3)), "b": numbers((2,), np.int64)})
    path = tmp_path / "m.pt"
    for end in [*range(0, len(data), 17), len(data) - 1]:
        path.write_bytes(data[:end])
        refused(path, "archive")


def _changed(change: Any, **options: Any) -> bytes:
    """An archive of which the entries are changed while it is written."""
    source, stream = io.BytesIO(torch_file({"a": numbers((64, 64))})), io.BytesIO()
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(stream, "w", **options) as new:
        for info in old.infolist():
            for name, data in change(info.filename, old.read(info)):
                new.writestr(name, data)
    return stream.getvalue()


def _encrypted() -> bytes:
    data = bytearray(torch_file({"a": numbers((2, 2))}))
    for at in range(len(data)):
        if data[at : at + 4] == b"PK\x01\x02":
            data[at + 8] |= 1
    return bytes(data)


def _big(name: str, data: bytes) -> list[tuple[str, bytes]]:
    return [(name, b"big" if name.endswith("byteorder") else data)]


ARCHIVES = {
    "big-endian": (lambda: _changed(_big), r"little-endian values, found big-endian ones.*torch\.load"),
    "compressed": (
        lambda: _changed(lambda name, data: [(name, data)], compression=zipfile.ZIP_DEFLATED),
        "stored without compression, as PyTorch does, found it compressed",
    ),
    "encrypted": (_encrypted, "found it encrypted"),
    "no pickle": (
        lambda: _changed(lambda name, data: [(name.replace(".pkl", ""), data)]), "one data.pkl in the archive"
    ),
    "two pickles": (
        lambda: _changed(lambda name, data: [(name, data), (name.replace("archive", "other"), data)]),
        "one data.pkl in the archive",
    ),
    "a long pickle": (
        lambda: _changed(lambda name, data: [(name, bytes(65 << 20) if name.endswith(".pkl") else data)]),
        r"at most 67108864 bytes of archive/data\.pkl",
    ),
    "a pickle alone": (lambda: pickle.dumps({}), "found a pickle alone"),
    "something else": (lambda: b"words and words", "found b'words an' as its first bytes"),
    "nothing": (lambda: b"", "found b'' as its first bytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", ARCHIVES)
def test_other_archives(tmp_path, case):
    make, message = ARCHIVES[case]
    (tmp_path / "m.bin").write_bytes(make())
    refused(tmp_path / "m.bin", message)


def test_a_member_that_is_there_twice(tmp_path):
    data = torch_file({"a": numbers((2, 2)), "b": numbers((2, 2))})
    (tmp_path / "m.bin").write_bytes(data.replace(b"archive/data/1", b"archive/data/0"))
    refused(tmp_path / "m.bin", "each member of the archive once, found 'archive/data/0' twice")


def test_a_name_of_another_format(tmp_path):
    """What a file is called decides less than what it is."""
    np.save(tmp_path / "m.npy", numbers((3,)))
    Path(tmp_path / "m.npy").rename(tmp_path / "m.bin")
    assert lm.open_checkpoint(tmp_path / "m.bin").format == "numpy"
