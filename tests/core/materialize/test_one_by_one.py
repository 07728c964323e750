"""`stream`: what `materialize` makes, one variable at a time; initial values as lazy tensors, in bands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.random import threefry2x32_p

import lazymodel as lm
from lazymodel._mapping import values
from lazymodel._mapping.values import lazy_values
from lazymodel._programs import bands
from tests.compile_events import compile_events
from tests.foreign_memory import foreign_memory

P = jax.P
initializers = jax.nn.initializers
LARGE = (264, 1008)  # a little more than a band, and not a multiple


def init(key: jax.Array) -> dict[str, Any]:
    """What has bands, and what has none: sums, ragged rows, values from other places, keys, NumPy arrays."""
    return {
        "normal": jax.random.normal(key, LARGE) * 0.02,
        "uniform": initializers.he_uniform()(key, LARGE, jnp.bfloat16),
        "truncated": initializers.lecun_normal()(key, (3, 88, 1008)),
        "integers": jax.random.randint(key, (400, 1000), 0, 100),
        "zeros": jnp.zeros((300, 1001)),
        "weak": jnp.full((32, 16), 2.0),
        "orthogonal": initializers.orthogonal()(key, (32, 32)),
        "ragged": jax.random.normal(key, (40, 25)),
        "scaled": jax.random.normal(key, (16, 32)) * jnp.arange(32.0),
        "transposed": jax.random.normal(key, (16, 32)).T,
        "key": key,
        "numpy": np.arange(3, dtype=np.int64),
    }


BANDED = {"normal", "uniform", "truncated", "integers", "zeros", "weak"}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    return a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture(scope="module")
def abstract() -> lm.AbstractModel[dict[str, Any]]:
    return lm.build_abstract(init, jax.random.key(0))


@pytest.fixture(scope="module")
def whole(abstract: lm.AbstractModel[dict[str, Any]]) -> dict[str, Any]:
    return abstract.materialize()


def test_bands_are_found_where_elements_are_computed_by_themselves(abstract: lm.AbstractModel[Any]) -> None:
    assert {path for recipe in abstract.recipes for path in recipe.paths if bands.bands(recipe)} == BANDED


@pytest.mark.parametrize("sharded", [False, True])
def test_stream_yields_what_materialize_makes(
    abstract: lm.AbstractModel[Any], whole: dict[str, Any], mesh8: Any, *, sharded: bool
) -> None:
    if sharded:
        abstract = abstract.shard(mesh8, lambda variable: P("model") if variable.shape[:1] == (264,) else P())
    found = list(abstract.stream())
    assert sorted(path for path, _ in found) == sorted(whole)
    assert [path for path, _ in abstract.stream()] == [path for path, _ in found]
    for path, array in found:
        assert same(array, whole[path]), path
        if isinstance(array, jax.Array):
            assert array.sharding == (abstract[path].sharding or whole[path].sharding)
            assert jax.typeof(array) == jax.typeof(whole[path]) or sharded
            assert getattr(array, "weak_type", False) == (path == "weak")
    assert type(dict(found)["numpy"]) is np.ndarray


def test_stream_onto_memory_of_its_own(abstract: lm.AbstractModel[Any], whole: dict[str, Any], mesh8: Any) -> None:
    with foreign_memory():
        for path, array in abstract.shard(mesh8, lm.auto()).stream(max_host_memory="4MiB"):
            jax.block_until_ready(array)
            assert same(array, whole[path]), path


def test_nothing_is_kept() -> None:
    shape, most = (264, 1024), 0
    abstract = lm.build_abstract(lambda key: [jax.random.normal(key, shape) for _ in range(6)], jax.random.key(1))
    for _, array in abstract.stream(max_host_memory="1MiB"):
        jax.block_until_ready(array)
        most = max(most, sum(each.shape == shape for each in jax.live_arrays()))
    assert 1 <= most <= 2


def test_one_program_a_signature() -> None:
    def layers(key: jax.Array) -> Any:
        return [{"w": jax.random.normal(key, (48, 1040)), "b": jnp.ones((1040,))} for key in jax.random.split(key, 8)]

    abstract = lm.build_abstract(layers, jax.random.key(0))
    with compile_events() as events:
        assert len(list(abstract.stream())) == 16
    assert sum(event.startswith("compile") for event in events) == 2, events


def test_a_checkpoint_is_loaded_and_the_rest_initialized(tmp_path: Path, whole: dict[str, Any]) -> None:
    abstract = lm.build_abstract(init, jax.random.key(0))
    given = {"normal": np.ones(LARGE, np.float32), "zeros": np.full((300, 1001), 3, np.float32)}
    lm.save(given, tmp_path / "some.safetensors")
    checkpoint = lm.open_checkpoint(tmp_path / "some.safetensors")
    found = list(abstract.stream(checkpoint, initialize="missing"))
    assert [path for path, _ in found if path in given] == list(checkpoint), "in the order of the file"
    for path, array in found:
        assert same(array, given.get(path, whole[path])), path
    with pytest.raises(lm.CheckpointError, match="'normal'.*shape"):
        abstract.stream({"normal": np.ones(3, np.float32)}, initialize="missing")
    with pytest.raises(lm.CheckpointError, match="has no tensor for 9 of 12 variables"):
        abstract.stream(checkpoint, initialize="nothing")


def test_what_is_computed_from_other_variables_is_refused_at_once(abstract: lm.AbstractModel[Any]) -> None:
    copies = optax.GradientTransformation(lambda params: jax.tree.map(jnp.copy, params), lambda *_: None)
    with pytest.raises(lm.LazyModelError, match="'optimizer/normal' .* computed from the values of other variables"):
        abstract.with_optimizer(copies).stream()
    with_zeros = lm.build_abstract(lambda: {"w": jnp.ones((4, 16))}).with_optimizer(optax.adam(1e-3))
    assert {path: float(np.sum(array)) for path, array in with_zeros.stream()}["optimizer/0/mu/w"] == 0


SHAPES = st.lists(st.integers(1, 5), max_size=2).map(tuple) | st.just((40,))


@settings(max_examples=12, deadline=None)
@given(SHAPES, st.sampled_from([16, 48, 272]), st.data())
def test_any_slice_of_a_lazy_initial_value(lead: tuple[int, ...], last: int, data: st.DataObject) -> None:
    """With bands of 256 elements, so that rows are longer and shorter than a band."""
    shape = (*lead, last)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bands, "BAND", 256)
        patch.setattr(values, "BAND", 256)
        patch.setattr(bands, "_KNOWN", {})
        abstract = lm.build_abstract(lambda key: {"w": jax.random.uniform(key, shape)}, jax.random.key(0))
        tensor = lazy_values(abstract)["w"]
        assert isinstance(tensor.leaf, values._BandLeaf)
        expected = np.asarray(jax.random.uniform(jax.random.key(0), shape))
        bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
        index = tuple(slice(*bound) for bound in bounds)
        np.testing.assert_array_equal(tensor[index].read(), expected[index])
        np.testing.assert_array_equal(tensor.T.read(), expected.T)


def test_counters_go_on_beyond_32_bits() -> None:
    key = jax.random.key(5)
    words = jax.random.key_data(key)
    jaxpr = jax.make_jaxpr(lambda key: jax.random.bits(key, (2**20, 2**14)))(key)
    low = np.uint32(2**32 - 16)
    found = bands._run_band(jaxpr, 2**34, 32, np.uint32(2), low, key)
    high = np.repeat(np.uint32([2, 3]), 16)
    first, second = threefry2x32_p.bind(words[0], words[1], high, low + np.arange(32, dtype=np.uint32))
    np.testing.assert_array_equal(found, first ^ second)


def test_an_abstract_model_is_saved_and_grown(tmp_path: Path, mesh8: Any, whole: dict[str, Any]) -> None:
    abstract = lm.build_abstract(init, jax.random.key(0))
    for name, model in (("abstract", abstract.shard(mesh8, lm.auto())), ("whole", whole)):
        lm.save(model, tmp_path / name, max_shard_size="1MiB")
    saved = lm.open_checkpoint(tmp_path / "abstract")
    assert len(saved.files) > 2
    assert not lm.diff(saved, lm.open_checkpoint(tmp_path / "whole")) and not lm.diff(abstract, saved)
    grown = lm.grow.experts(abstract, {"normal": "experts"}, 2)  # nothing is computed before it is read
    np.testing.assert_array_equal(grown["experts"][1].read(), np.asarray(whole["normal"]))
