"""Steps that take layers, repeat, pad, cut and interleave: values are NumPy's, bytes read are those needed, and what
can be written again is.
"""

from __future__ import annotations

import math
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import lazymodel as lm
from lazymodel import From, WeightMap
from tests.large import examples, mostly_large

HEADS, DIM, MODEL, VOCAB, LAYERS = 4, 32, 512, 1001, 8
RNG = np.random.default_rng(0)
TENSORS = {
    "k": RNG.standard_normal((HEADS * DIM, MODEL), np.float32),
    "embed": RNG.standard_normal((VOCAB, MODEL), np.float32),
    "q": RNG.standard_normal((8 * DIM, MODEL), np.float32),
    "gate_up": RNG.standard_normal((4 * 2 * 64, MODEL), np.float32),
    "qkv": RNG.standard_normal((HEADS * 6 * DIM, MODEL), np.float32),
    "blocks": RNG.standard_normal((LAYERS, MODEL, 64), np.float32),
}
K = TENSORS["k"].reshape(HEADS, DIM, MODEL)
GATE_UP = TENSORS["gate_up"].reshape(4, 2, 64, MODEL)
QKV = TENSORS["qkv"].reshape(HEADS, 6, DIM, MODEL)
BY_HEAD = From("k").rearrange("(heads dim) model -> model heads dim", dim=DIM)
GROUPS = From("qkv").rearrange("(groups parts dim) model -> model groups parts dim", parts=6, dim=DIM)
RANKS = From("gate_up").rearrange("(ranks parts ff) model -> parts (ranks ff) model", ranks=4, parts=2)
ONE_HEAD = "model groups 1 dim -> model groups dim"

# Each: entries, their values, the partition spec of all, and how often a byte of the tensor is read.
CASES: dict[str, tuple[dict[str, From], dict[str, np.ndarray], P, int]] = {
    "layers": (
        {"{i}/kernel": From("blocks").take("i").T},
        {f"{i}/kernel": TENSORS["blocks"][i].T for i in range(LAYERS)},
        P(None, "model"),
        1,
    ),
    "heads, a copy a device": (
        {"k": BY_HEAD.repeat(1, 2)},
        {"k": np.repeat(K, 2, 0).transpose(2, 0, 1)},
        P(None, "model"),
        2,
    ),
    "heads, all of them on each device": (
        {"k": BY_HEAD.repeat(-2, 2).rearrange("model heads dim -> model (heads dim)", dim=DIM)},
        {"k": np.repeat(K, 2, 0).transpose(2, 0, 1).reshape(MODEL, -1)},
        P("model"),
        1,
    ),
    "padded vocabulary": (
        {"embed": From("embed").pad(0, 1024, value=-1.5, of=VOCAB).T},
        {"embed": np.concatenate([TENSORS["embed"], np.full((23, MODEL), -1.5, np.float32)]).T},
        P(None, "model"),
        1,
    ),
    "rotary halves to pairs": (
        {"q": From("q").rearrange("(heads half pair) model -> model heads (pair half)", heads=8, half=2)},
        {"q": TENSORS["q"].reshape(8, 2, DIM // 2, MODEL).transpose(3, 0, 2, 1).reshape(MODEL, 8, DIM)},
        P("model"),
        1,
    ),
    "gate and up by rank": (
        {name: RANKS.part(n, of=2).rearrange("1 ff model -> model ff") for n, name in enumerate(("gate", "up"))},
        {name: GATE_UP[:, n].reshape(-1, MODEL).T for n, name in enumerate(("gate", "up"))},
        P(None, "model"),
        1,
    ),
    "query, key and value by head": (
        {"qkv": From("qkv").rearrange("(heads parts dim) model -> parts model heads dim", heads=8, parts=3)},
        {"qkv": TENSORS["qkv"].reshape(8, 3, DIM, MODEL).transpose(1, 3, 0, 2)},
        P(None, None, "model"),
        1,
    ),
    "query, key and value by group": (
        {
            "q": GROUPS.part(0, of=(4, 1, 1), axis=2).rearrange("model groups q dim -> model (groups q) dim", q=4),
            "k": GROUPS.part(1, of=(4, 1, 1), axis=2).rearrange(ONE_HEAD),
            "v": GROUPS.part(2, of=(4, 1, 1), axis=2).rearrange(ONE_HEAD),
        },
        {
            "q": QKV[:, :4].reshape(-1, DIM, MODEL).transpose(2, 0, 1),
            "k": QKV[:, 4].transpose(2, 0, 1),
            "v": QKV[:, 5].transpose(2, 0, 1),
        },
        P("model"),
        1,
    ),
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("steps") / "model.safetensors"
    save_file(TENSORS, path)
    return path


@pytest.mark.parametrize(
    "case",
    mostly_large(
        CASES, ["gate and up by rank", "padded vocabulary", "heads, a copy a device", "query, key and value by group"]
    ),
)
def test_a_sampler_gets_the_same_from_a_trainer(mesh8: jax.sharding.Mesh, case: str) -> None:
    entries, expected, spec, _ = CASES[case]
    used = {name for source in entries.values() for name in source.names}
    trainer = jax.device_put(
        {name: TENSORS[name] for name in used}, jax.sharding.NamedSharding(mesh8, P(None, "model"))
    )
    sampler = model_of({path: each.shape for path, each in expected.items()}).shard(mesh8, {".*": spec})
    found = lm.Sync(trainer, sampler, WeightMap(entries))(trainer, into=sampler.materialize())
    for path, values in expected.items():
        np.testing.assert_array_equal(found[path], values)


def model_of(shapes: dict[str, tuple[int, ...]]) -> lm.AbstractModel:
    return lm.build_abstract(lambda: {path: jnp.zeros(shape) for path, shape in shapes.items()})


@pytest.mark.parametrize("case", CASES)
def test_shards_read_what_they_need_and_saving_restores_the_file(
    file: Path, tmp_path: Path, mesh8: jax.sharding.Mesh, case: str
) -> None:
    entries, expected, spec, times = CASES[case]
    abstract = model_of({path: each.shape for path, each in expected.items()}).shard(mesh8, {".*": spec})
    used = {name for source in entries.values() for name in source.names}
    table = eval(str(WeightMap(entries, ignore=[name for name in TENSORS if name not in used])), {"lm": lm})
    with lm.open_checkpoint(file) as checkpoint:
        assert table.check(checkpoint, abstract).one_way == ""
        mapped = lm.map_checkpoint(checkpoint, table, abstract)
        nbytes = sum(each.nbytes for each in expected.values())
        tracemalloc.start()  # which sees NumPy's memory, not that of finished arrays
        model = abstract.materialize(mapped, max_host_memory="256KiB")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert checkpoint.bytes_read == times * sum(TENSORS[name].nbytes for name in used)
        assert peak < max(nbytes, 1 << 20)
    for path, values in expected.items():
        np.testing.assert_array_equal(model[path], values)
    lm.save(model, tmp_path / "again.safetensors", mapping=table)
    with lm.open_checkpoint(tmp_path / "again.safetensors") as again:
        assert set(again) == used
        for name in used:
            np.testing.assert_array_equal(np.asarray(again[name]), TENSORS[name])


X = From("x")


@pytest.mark.parametrize(
    ("source", "expected", "one_way"),
    [
        (
            X.pad(0, 6),
            lambda x: np.pad(x, ((0, 2), (0, 0))),
            "nothing says how many of the 6 are not padding; give",
        ),
        (X.pad(1, 3, value=float("-inf"), of=3), lambda x: x, ""),
        (X.pad(-1, 4, value=float("-inf"), of=3), lambda x: np.pad(x, ((0, 0), (0, 1)), constant_values=-np.inf), ""),
        (X.slice(0, 1, 3), lambda x: x[1:3], "nothing says what .slice has left out; give it the tensor's extent, of="),
        (X.slice(0, 1, 3, of=4), lambda x: x[1:3], ""),
        (X.slice(0, 1, 3, value=2, of=4).unsaved(), lambda x: x[1:3], ""),
    ],
)
def test_padding_and_cutting_can_be_saved_if_the_extent_is_known(
    source: From, expected: Callable[[np.ndarray], np.ndarray], one_way: str
) -> None:
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    abstract = model_of({"a": expected(x).shape})
    table = eval(str(WeightMap({"a": source})), {"lm": lm})
    mapped = lm.map_checkpoint({"x": x}, table, abstract)
    np.testing.assert_array_equal(mapped["a"].read(), expected(x))
    report = table.check({"x": x}, abstract)
    assert report.ok and one_way in report.one_way and bool(one_way) == bool(report.one_way)
    if not one_way and not source.read_only:
        written = np.asarray(table.write(dict(mapped))["x"])
        kept = slice(1, 3) if "slice" in repr(source) else slice(None)
        np.testing.assert_array_equal(written[kept], x[kept])
        assert written.shape == x.shape and (kept.start is None or not written[[0, 3]].any())


LAYER = {"{i}": From("x").take("i")}


@pytest.mark.parametrize(
    ("entries", "shapes", "message"),
    [
        (LAYER, {"0": (3,), "1": (3,)}, r"'x' would be written as \[2, 3\], the checkpoint has \[4, 3\]"),
        (LAYER, {"0": (3,), "3": (3,)}, "'0' is a layer of 'x', and no variable gives layer 1, 2 of at least 4"),
        ({"{i}": X.take("i", axis=1)}, {"0": (4,), "1": (4,), "2": (4,)}, ""),
        (
            {"{i}/a": X.take("i").part(0, of=(1, 2)), "{i}/b": X.take("i").part(1, of=(1, 2))},
            {f"{i}/{name}": (n,) for i in range(4) for name, n in (("a", 1), ("b", 2))},
            "",
        ),
        (
            {"{i}/a": X.part(0, of=(1, 2), axis=1).take("i"), "{i}/b": X.part(1, of=(1, 2), axis=-1).take("i")},
            {f"{i}/{name}": (n,) for i in range(4) for name, n in (("a", 1), ("b", 2))},
            "no variable gives part 1 of",  # axis 1 and axis -1 are different texts
        ),
        ({"{i}/{j}": X.T.take("j").take("i")}, {f"{i}/{j}": () for i in range(4) for j in range(3)}, ""),
        (LAYER | {"last": X.slice(0, 3, 4).unsaved()}, {"0": (3,), "last": (1, 3)}, r"would be written as \[1, 3\]"),
    ],
)
def test_layers_are_stacked_again_if_all_are_there(entries: Any, shapes: Any, message: str) -> None:
    x, table, abstract = np.arange(12, dtype=np.float32).reshape(4, 3), WeightMap(entries), model_of(shapes)
    mapped = lm.map_checkpoint({"x": x}, table, abstract)
    report = table.check({"x": x}, abstract)
    assert report.ok and re.search(message, report.one_way) and bool(message) == bool(report.one_way)
    if not message:
        np.testing.assert_array_equal(np.asarray(table.write(dict(mapped))["x"]), x)


@pytest.mark.parametrize(
    ("source", "shape", "message"),
    [
        (X.take("i"), (3,), r"\{i\} is '4', expected a number from 0 to 3: axis 0 of \[4, 3\]"),
        (X.take("i", axis=2), (3,), "there is no axis 2 in 2 dimensions"),
        (X.pad(0, 3), (3, 3), r"expected at most 3 along axis 0, found 4 of \[4, 3\]"),
        (X.pad(0, 8, of=5), (8, 3), "expected 5 along axis 0, found 4"),
        (X.pad(0, 8, value=0.5), (8, 3), "0.5 is not a number of dtype int32"),
        (X.pad(0, 8, value=float("inf")), (8, 3), "inf is not a number of dtype int32"),
        (X.slice(0, 2, 5), (3, 3), "expected 5 along axis 0, found 4"),
        (X.slice(0, 0, 2, of=3), (2, 3), "expected 3 along axis 0, found 4"),
        (X.repeat(2, 2), (8, 3), "there is no axis 2"),
    ],
)
def test_a_tensor_that_a_step_does_not_fit(source: From, shape: tuple[int, ...], message: str) -> None:
    report = WeightMap({"{i}": source}).check({"x": np.zeros((4, 3), np.int32)}, model_of({"4": shape}))
    assert re.search(message, report.misshapen["4"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: From("{i}.w").take("i"), r"take\('i'\): expected {i} in the path alone, found it in"),
        (lambda: WeightMap({"a": X.take("i")}), r"entry 'a': take\('i'\) needs {i} in the path"),
        (lambda: X.repeat(0, 0), "repeat takes a count of at least 1; got 0"),
        (lambda: X.pad(0, 3, of=4), "pad takes an extent of= from 0 to 3; got 4"),
        (lambda: X.slice(0, 2, 2), "slice takes 0 <= start < stop <= of; got 2, 2, of=None"),
        (lambda: X.slice(0, 0, 3, of=2), "of=2"),
        (lambda: WeightMap({"a": X.repeat(0, 2)}).write({"a": np.zeros(3)}), "3 of .3., axis 0, are not 2 copies"),
        (lambda: WeightMap({"{i}": X.take("i")}).write({"a": np.zeros(3)}), "{i} is 'a', expected a number"),
        (lambda: WeightMap(LAYER).write({"0": np.zeros(3), "00": np.zeros(3)}), "both '0' and '00' would be written"),
        (lambda: WeightMap(LAYER).write({"0": np.zeros(3), "1": np.zeros(2)}), "tensors of {i} differ in shape"),
    ],
)
def test_steps_and_arrays_that_cannot_be(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(lm.LazyModelError, match=message):
        make()


@examples(20, 100, data=st.data())
def test_any_box_of_a_chain_is_numpys(data: st.DataObject) -> None:
    values = np.arange(math.prod(shape := data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))).reshape(
        shape
    )
    source, tensor = X, values.astype(np.float32)
    whole = tensor
    for _ in range(data.draw(st.integers(1, 3))):
        axis = data.draw(st.integers(-whole.ndim, whole.ndim - 1))
        extent, kind = whole.shape[axis], data.draw(st.sampled_from(["repeat", "pad", "T"]))
        if kind == "T":
            source, whole = source.T, whole.T
        elif kind == "repeat":
            count = data.draw(st.integers(1, 3))
            source, whole = source.repeat(axis, count), np.repeat(whole, count, axis)
        else:
            widths = [(0, 0)] * whole.ndim
            widths[axis] = (0, data.draw(st.integers(0, 3)))
            source = source.pad(axis, extent + widths[axis][1], value=7, of=extent)
            whole = np.pad(whole, widths, constant_values=7)
    table = WeightMap({"a": source})
    (mapped,) = lm.map_checkpoint({"x": tensor}, table, model_of({"a": whole.shape})).values()
    ends = [sorted(data.draw(st.tuples(*[st.integers(0, extent)] * 2))) for extent in whole.shape]
    box = tuple(slice(*each) for each in ends)
    np.testing.assert_array_equal(mapped.read(box), whole[box])
    np.testing.assert_array_equal(np.asarray(table.write({"a": mapped})["x"]), tensor)
