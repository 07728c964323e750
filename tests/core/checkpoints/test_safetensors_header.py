"""Headers of very many tensors: checked as arrays, exactly as strictly as tensor by tensor, and no object a tensor."""

import gc
import json
import random

import numpy as np
import pytest

import lazymodel as lm
from lazymodel._errors import CheckpointError
from lazymodel._tensors.files import FileSource
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.leaves import FileLeaf
from lazymodel.checkpoints import _safetensors_header as headers
from lazymodel.checkpoints._inspect import inspect_checkpoint
from lazymodel.checkpoints._safetensors_header import read_header
from lazymodel.checkpoints._untrusted import read_json_object

COUNT = 20_000


def write(path, text, size):
    data = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(len(data).to_bytes(8, "little") + data + bytes(size))
    return path


def bytes_header(count, prefix=""):
    entries = (f'"{prefix}{i}":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{i + 1}]}}' for i in range(count))
    return "{" + ",".join(entries) + "}"


@pytest.fixture
def made(monkeypatch):
    """The lazy tensors that were made."""
    tensors = []
    original = LazyTensor.__init__
    monkeypatch.setattr(LazyTensor, "__init__", lambda self, *args: tensors.append(self) or original(self, *args))
    return tensors


def test_tensors_are_made_on_access_only(tmp_path, made, monkeypatch):
    """And what is made for each when opening are names, which the collector of garbage does not even look at."""
    monkeypatch.setattr(headers, "read_json_object", None)  # no JSON parser, which would make dicts and lists
    write(tmp_path / "m.safetensors", bytes_header(COUNT), COUNT)
    gc.collect()
    before = len(gc.get_objects())
    checkpoint = lm.open_checkpoint(tmp_path / "m.safetensors")
    gc.collect()
    assert len(gc.get_objects()) - before < COUNT // 100
    assert len(checkpoint) == COUNT
    assert f"{COUNT:,} tensors" in repr(checkpoint)
    assert checkpoint.nbytes == COUNT
    assert list(checkpoint)[:2] == ["0", "1"]
    assert "5" in checkpoint
    assert made == []
    assert checkpoint["5"].offset == checkpoint["0"].offset + 5
    assert len(made) == 2


def test_inspecting_makes_no_tensor(tmp_path, made):
    folder = tmp_path / "folder"
    folder.mkdir()
    files = {}
    for shard in "ab":
        write(folder / f"{shard}.safetensors", bytes_header(COUNT // 2, shard), COUNT // 2)
        files |= {f"{shard}{i}": f"{shard}.safetensors" for i in range(COUNT // 2)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}, indent=2))
    summary = inspect_checkpoint(folder)
    assert len(summary.tensors) == COUNT
    assert summary.nbytes == COUNT
    assert not summary.problems
    assert lm.open_checkpoint(folder).nbytes == COUNT
    assert made == []


def described(header):
    return [(name, *header.find(name)) for name in header.names], header.metadata


def both_ways(path, monkeypatch):
    """What the header says, or its error, read in either way; and whether the fast one took it."""

    def outcome():
        try:
            return described(read_header(FileSource(str(path))))
        except CheckpointError as error:
            return str(error)

    with monkeypatch.context() as patch:
        taken = []
        fast = headers._written_as_usual
        patch.setattr(headers, "_written_as_usual", lambda *args: taken.append(fast(*args)) or taken[-1])
        first = outcome()
        patch.setattr(headers, "_written_as_usual", lambda *args: None)
        return first, outcome(), bool(taken and taken[0] is not None)


METADATA = '"__metadata__":{"format":"pt","a:b":"{}"},'
A = '"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}'
B = '"b":{"dtype":"BF16","shape":[],"data_offsets":[24,26]}'
EMPTY = '"e":{"dtype":"I64","shape":[0,9],"data_offsets":[24,24]}'


@pytest.mark.parametrize(
    "text",
    [
        "{" + A + "," + B + "}",
        "{" + B + "," + A + "}   ",
        "{" + METADATA + A + "," + B + "}",
        "{" + A + "," + EMPTY + "," + B + "}",
        "{" + B + "," + EMPTY + "," + A + "}",
        ("{" + A + "," + B + "}").replace(",", ", ").replace(":", ": "),
        ("{" + A + "," + B + "}").replace('"a"', '"wörter 名:{[ \U0001f600"'),
    ],
)
def test_what_writers_write_is_read_as_arrays(tmp_path, monkeypatch, text):
    path = write(tmp_path / "m.safetensors", text, 26)
    first, second, fast = both_ways(path, monkeypatch)
    assert first == second
    assert not isinstance(first, str)
    assert fast


HOSTILE = {
    "an empty header": "{}",
    "only metadata": "{" + METADATA[:-1] + "}",
    "a repeated name": "{" + A + "," + A + "}",
    "a repeated name, escaped": "{" + A + "," + A.replace('"a"', r'"\u0061"') + "}",
    "a repeated field": "{" + A.replace('"shape"', '"shape":[9],"shape"') + "," + B + "}",
    "metadata twice": "{" + METADATA + METADATA + A + "," + B + "}",
    "metadata last": "{" + A + "," + B + "," + METADATA[:-1] + "}",
    "a repeated key of metadata": "{" + METADATA.replace('"a:b"', '"format"') + A + "," + B + "}",
    "metadata with half a character": "{" + METADATA.replace("pt", r"\ud800") + A + "," + B + "}",
    "metadata of numbers": "{" + METADATA.replace('"pt"', "1") + A + "," + B + "}",
    "no metadata": '{"__metadata__":null,' + A + "," + B + "}",
    "a tensor called metadata": ("{" + A + "," + B + "}").replace('"a"', '"__metadata__"'),
    "an overlap": "{" + A + "," + B.replace("[24,26]", "[22,24]") + "}",
    "a gap": "{" + A + "," + B.replace("[24,26]", "[25,27]") + "}",
    "bytes left over": "{" + A + "}",
    "more than there is": "{" + A + "," + B + "," + A.replace('"a"', '"c"').replace("0,24", "26,50") + "}",
    "a reversed range": "{" + A.replace("0,24", "24,0") + "," + B + "}",
    "a negative extent": "{" + A.replace("2,3", "-2,-3") + "," + B + "}",
    "a boolean": "{" + A.replace("2,3", "true,6") + "," + B + "}",
    "a float": "{" + A.replace("2,3", "2.0,3") + "," + B + "}",
    "an exponent": "{" + A.replace("2,3", "2e0,3") + "," + B + "}",
    "NaN": "{" + A.replace("2,3", "NaN") + "," + B + "}",
    "a leading zero": "{" + A.replace("2,3", "02,3") + "," + B + "}",
    "a large int": "{" + A.replace("2,3", str(2**63)) + "," + B + "}",
    "a product that wraps": "{" + A.replace("2,3", f"{2**32},{2**32}").replace("0,24", "0,0") + "," + B + "}",
    "large and nothing": "{" + A.replace("2,3", f"0,{2**32},{2**32}").replace("0,24", "0,0") + "," + B + "}",
    "too many dimensions": "{" + A.replace("2,3", "2,3" + ",1" * 31) + "," + B + "}",
    "other bytes than the shape": "{" + A.replace("2,3", "2,2") + "," + B + "}",
    "an unknown dtype": "{" + A.replace("F32", "F33") + "," + B + "}",
    "six bits": "{" + A.replace("F32", "F6_E2M3") + "," + B + "}",
    "half a byte": "{" + A.replace("F32", "F4").replace("2,3", "3").replace("0,24", "0,1") + "," + B + "}",
    "no comma": "{" + A + B + "}",
    "two commas": "{" + A + ",," + B + "}",
    "a comma first": "{," + A + "," + B + "}",
    "a comma last": "{" + A + "," + B + ",}",
    "no brace": "{" + A + "," + B,
    "two braces": "{" + A + "," + B + "}}",
    "more after it": "{" + A + "," + B + "} x",
    "a list": "[" + A + "," + B + "]",
    "a control character": ("{" + A + "," + B + "}").replace('"a"', '"a\n"'),
    "three offsets": "{" + A.replace("0,24", "0,24,24") + "," + B + "}",
    "another field": "{" + A.replace('"shape"', '"x":1,"shape"') + "," + B + "}",
    "fields in another order": '{"a":{"shape":[2,3],"dtype":"F32","data_offsets":[0,24]},' + B + "}",
    "not UTF-8": ("{" + A + "," + B + "}").encode().replace(b'"a"', b'"\xff"'),
    "UTF-16": ("{" + A + "," + B + "}").encode("utf-16"),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_both_ways_agree_on_what_is_hostile_or_unusual(tmp_path, monkeypatch, text):
    first, second, _ = both_ways(write(tmp_path / "m.safetensors", text, 26), monkeypatch)
    assert first == second


def test_both_ways_agree_on_damaged_headers(tmp_path, monkeypatch):
    rng = random.Random(0)
    good = ("{" + METADATA + A + "," + EMPTY + "," + B + "}").encode()
    taken = 0
    for _ in range(600):
        data = bytearray(good)
        for _ in range(rng.choice((1, 1, 2))):
            at = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[at] = rng.choice(b'0129,:"[]{} \\\x00\xff-.eE')
                case 1:
                    del data[at : at + rng.randrange(1, 4)]
                case 2:
                    data[at:at] = bytes(rng.choices(b'019,:"[]{} \\u', k=rng.randrange(1, 3)))
                case _:
                    other = rng.randrange(len(data))
                    data[at:at] = data[other : other + rng.randrange(1, 60)]
        first, second, fast = both_ways(write(tmp_path / "m.safetensors", bytes(data), 26), monkeypatch)
        assert first == second, bytes(data)
        taken += fast
    assert taken > 20  # names and metadata may be anything


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"a":2}',
        '{"a" : 1, "a":2, "b":":"}',
        '{"x":{"a":1,"a":1}}',
        '{"x":[{"a":1,"a":1}]}',
        '{"x":{"y":{"a":1,"a":1}}}',
        r'{"x":1,"\u0078":1}',
        '{"x":{"y":1},"x":{"z":1,"w":2}}',
    ],
)
def test_a_repeated_key_is_found_at_any_depth(text):
    with pytest.raises(CheckpointError, match="twice"):
        read_json_object(text.encode(), "file")


def test_json_with_colons_in_strings_is_read():
    content = {"a:b": {"c:": ":", "d": [{"e": {":": "::"}}]}}
    assert read_json_object(json.dumps(content).encode(), "file") == content


def test_a_large_index_is_parsed_once(tmp_path, monkeypatch):
    """Without calling back for each object."""
    calls = []
    original = json.loads
    monkeypatch.setattr(json, "loads", lambda *args, **kwargs: calls.append(kwargs) or original(*args, **kwargs))
    content = {"metadata": {"total_size": 1}, "weight_map": {f"layers.{i}.w": "m.safetensors" for i in range(100)}}
    assert read_json_object(json.dumps(content, indent=2).encode(), "file") == content
    assert calls == [{}]


def test_leaves_know_what_the_header_says(tmp_path):
    path = write(tmp_path / "m.safetensors", "{" + METADATA + B + "," + A + "}", 26)
    tensor = lm.open_checkpoint(path)["b"]
    assert isinstance(tensor.leaf, FileLeaf)
    assert (tensor.shape, tensor.dtype.name) == ((), "bfloat16")
    assert tensor.offset == path.stat().st_size - 2
    np.testing.assert_array_equal(np.asarray(tensor), np.zeros((), tensor.dtype))
