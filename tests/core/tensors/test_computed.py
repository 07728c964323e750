"""Tensors computed slab by slab: the values of the whole, every slab computed once, whatever is asked for."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import lazymodel as lm
from lazymodel._materialize.stream import StreamItem, stream
from lazymodel._tensors import computed as computed_module
from lazymodel._tensors.computed import Computation, Output
from lazymodel._tensors.lazy import lazy


def by_column(values: np.ndarray) -> tuple[np.ndarray, ...]:
    """Numbers relative to the largest of their column, and that."""
    largest = np.max(np.abs(values), axis=0, keepdims=True)
    return np.round(values / largest * 100).astype(np.int8), largest


def computed(source, function=by_column, steps=None, ratios=None):
    computation = Computation(source, function, steps or (source.shape[0], 1))
    return (
        computation.output(Output(np.dtype(np.int8), (1, 1), lambda found: found[0])),
        computation.output(Output(source.dtype, ratios or (source.shape[0], 1), lambda found: found[1], small=True)),
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_boxes_of_the_outputs(data):
    rows, columns = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    step = data.draw(st.integers(1, 5))
    x = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)

    def by_group(values: np.ndarray) -> tuple[np.ndarray, ...]:
        groups = [values[start : start + step] for start in range(0, len(values), step)]
        sums = np.stack([group.max(axis=0) for group in groups])
        return np.concatenate([(g > s / 2).astype(np.int8) for g, s in zip(groups, sums, strict=True)]), sums

    bulk, small = by_group(x)
    source = lazy(x.T.copy()).T if data.draw(st.booleans()) else lazy(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(computed_module, "SLAB", data.draw(st.sampled_from([1, 50, 200, 1 << 20])))
        outputs = computed(source, by_group, (step, 1), (step, 1))
        for whole, tensor in sorted(zip((bulk, small), outputs, strict=True), key=lambda _: data.draw(st.booleans())):
            assert tensor.shape == whole.shape
            box = tuple(
                slice(start := data.draw(st.integers(0, extent - 1)), data.draw(st.integers(start + 1, extent)))
                for extent in whole.shape
            )
            np.testing.assert_array_equal(tensor.read(box), whole[box])
            np.testing.assert_array_equal(np.asarray(np.transpose(tensor)), whole.T)


@pytest.mark.parametrize("spec", [P(), P("model"), P(None, "model")])
@pytest.mark.parametrize("slab", [1 << 10, 8 << 20])
def test_every_number_is_read_once(tmp_path, mesh8, monkeypatch, spec, slab):
    monkeypatch.setattr(computed_module, "SLAB", slab)
    x = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    save_file({"w": x}, tmp_path / "x.safetensors")
    seen = []

    def function(values):
        seen.append(values.nbytes)
        return by_column(values)

    bulk, small = computed(lm.open_checkpoint(tmp_path / "x.safetensors")["w"], function)
    items = [
        StreamItem("q", bulk, bulk.shape, np.dtype(np.int8), NamedSharding(mesh8, spec)),
        StreamItem("s", small, small.shape, np.dtype(np.float16), NamedSharding(mesh8, P())),
    ]
    done = []
    arrays = dict(stream(items, on_bytes=done.append))
    expected = by_column(x)
    np.testing.assert_array_equal(arrays["q"], expected[0])
    np.testing.assert_array_equal(arrays["s"], expected[1].astype(np.float16))
    assert sum(done) == bulk.nbytes + 128 * 2
    assert sum(seen) == x.nbytes, "what comes of one slab is computed with one reading"
    assert max(seen) <= slab or max(seen) == 64 * 4


def test_what_a_report_and_a_plan_say(tmp_path, mesh8):
    x = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    save_file({"w": x}, tmp_path / "x.safetensors")
    bulk, small = computed(lm.open_checkpoint(tmp_path / "x.safetensors")["w"])
    model = lm.build_abstract(lambda: {"q": jax.numpy.zeros((64, 128), "int8"), "s": jax.numpy.zeros((1, 128))})
    model = model.shard(mesh8, {"q": P(None, "model"), "s": P(None, "model")})
    reports = []
    plan = model.plan({"q": bulk, "s": small})
    tree = model.materialize({"q": bulk, "s": small}, report=reports.append)
    np.testing.assert_array_equal(tree["s"], np.abs(x).max(axis=0, keepdims=True))
    (report,) = reports
    assert report.read_nbytes == report.needed_nbytes == plan.read_nbytes == x.nbytes
    assert {tensor.name for row in report.rows for tensor in row.tensors} == {"w"}


def test_a_failure_names_the_tensor(tmp_path, mesh8):
    save_file({"w": np.ones((8, 8), np.float32)}, tmp_path / "x.safetensors")

    def function(values):
        raise ValueError("no number")

    bulk, _ = computed(lm.open_checkpoint(tmp_path / "x.safetensors")["w"], function)
    item = StreamItem("q", bulk, bulk.shape, np.dtype(np.int8), NamedSharding(mesh8, P()))
    with pytest.raises(lm.CheckpointError, match=r"'q' from tensor 'w' of .*x.safetensors: no number"):
        list(stream([item]))
