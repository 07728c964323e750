"""What the Keras integration builds on, and no name of `lazymodel` has: tensors computed slab by slab, every slab once,
whatever is asked for; tables of what another library makes of 4-bit floats.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import lazymodel as lm
from lazymodel._tensors.decoded import Computation, Output
from lazymodel._tensors.lazy import lazy
from tests.small import buffer_sizes


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
    with buffer_sizes(slab=data.draw(st.sampled_from([1, 50, 200, 1 << 20]))):
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
def test_every_number_is_read_once(tmp_path, mesh8, spec, slab):
    x = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    save_file({"w": x}, tmp_path / "x.safetensors")
    seen, reports = [], []

    def function(values):
        seen.append(values.nbytes)
        return by_column(values)

    checkpoint = lm.open_checkpoint(tmp_path / "x.safetensors")
    tensors = dict(zip("qs", computed(checkpoint["w"], function), strict=True))
    model = lm.build_abstract(lambda: {"q": jnp.zeros((64, 128), "int8"), "s": jnp.zeros((1, 128), "float16")})
    model = model.shard(mesh8, {"q": spec, "s": P(None, "model")})
    plan = model.plan(tensors)
    with buffer_sizes(slab=slab):
        arrays = model.materialize(tensors, report=reports.append)
    expected = by_column(x)
    np.testing.assert_array_equal(arrays["q"], expected[0])
    np.testing.assert_array_equal(arrays["s"], expected[1].astype(np.float16))
    assert sum(seen) == checkpoint.bytes_read == x.nbytes, "what comes of one slab is computed with one reading"
    assert max(seen) <= slab or max(seen) == 64 * 4
    (report,) = reports
    assert report.read_nbytes == report.needed_nbytes == plan.read_nbytes == x.nbytes
    assert {tensor.name for row in report.rows for tensor in row.tensors} == {"w"}


def test_a_failure_names_the_tensor(tmp_path):
    save_file({"w": np.ones((8, 8), np.float32)}, tmp_path / "x.safetensors")

    def function(values):
        raise ValueError("no number")

    bulk, _ = computed(lm.open_checkpoint(tmp_path / "x.safetensors")["w"], function)
    with pytest.raises(lm.CheckpointError, match=r"'q' from tensor 'w' of .*x.safetensors: no number"):
        lm.build_abstract(lambda: {"q": jnp.zeros((8, 8), "int8")}).materialize({"q": bulk})
