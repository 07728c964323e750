"""`stream`: what `materialize` makes, one variable at a time; initial values as lazy tensors, in bands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.random import threefry2x32_p

import lazymodel as lm
from tests.compile_events import compile_events
from tests.foreign_memory import foreign_memory
from tests.large import mostly_large

Model = lm.AbstractModel[Any]

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
def abstract() -> Model:
    return lm.build_abstract(init, jax.random.key(0))


@pytest.fixture(scope="module")
def whole(abstract: Model) -> dict[str, Any]:
    return abstract.materialize()


@pytest.mark.parametrize(
    "placed", mostly_large(["one device", "sharded", "memory of its own"], ["sharded", "memory of its own"])
)
def test_stream_yields_what_materialize_makes(abstract: Model, whole: dict[str, Any], mesh8: Any, placed: str) -> None:
    if placed == "memory of its own":
        with foreign_memory():
            for path, array in abstract.shard(mesh8, lm.auto()).stream(max_host_memory="4MiB"):
                jax.block_until_ready(array)
                assert same(array, whole[path]), path
        return
    if placed == "sharded":
        abstract = abstract.shard(mesh8, lambda variable: P("model") if variable.shape[:1] == (264,) else P())
    found = list(abstract.stream())
    assert sorted(path for path, _ in found) == sorted(whole)
    # What is computed by a whole program comes first, then what is filled in bands, as if it were read.
    assert {path for path, _ in found[: -len(BANDED) - 1]} == set(whole) - BANDED - {"numpy"}
    for path, array in found:
        assert same(array, whole[path]), path
        if isinstance(array, jax.Array):
            assert array.sharding == (abstract[path].sharding or whole[path].sharding)
            assert jax.typeof(array) == jax.typeof(whole[path]) or placed == "sharded"
            assert getattr(array, "weak_type", False) == (path == "weak")
    assert type(dict(found)["numpy"]) is np.ndarray


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


def test_a_checkpoint_is_loaded_and_the_rest_initialized(
    abstract: Model, tmp_path: Path, whole: dict[str, Any]
) -> None:
    given = {"normal": np.ones(LARGE, np.float32), "zeros": np.full((300, 1001), 3, np.float32)}
    lm.save(given, tmp_path / "some.safetensors")
    checkpoint = lm.open_checkpoint(tmp_path / "some.safetensors")
    found = list(abstract.stream(checkpoint, initialize="missing"))
    assert [path for path, _ in found if path in given] == list(checkpoint), "in the order of the file"
    for path, array in found:
        assert same(array, given.get(path, whole[path])), path
    with pytest.raises(lm.CheckpointError, match=r"'normal'.*shape"):
        abstract.stream({"normal": np.ones(3, np.float32)}, initialize="missing")
    with pytest.raises(lm.CheckpointError, match="no tensor for 9 of 12 variables"):
        abstract.stream(checkpoint, initialize="nothing")


def test_what_is_computed_from_other_variables_is_refused_at_once(abstract: Model) -> None:
    copies = optax.GradientTransformation(lambda params: jax.tree.map(jnp.copy, params), lambda *_: None)
    with pytest.raises(lm.LazyModelError, match="'optimizer/normal' .* computed from the values of other variables"):
        abstract.with_optimizer(copies).stream()
    with_zeros = lm.build_abstract(lambda: {"w": jnp.ones((4, 16))}).with_optimizer(optax.adam(1e-3))
    assert {path: float(np.sum(array)) for path, array in with_zeros.stream()}["optimizer/0/mu/w"] == 0


def initial_value(abstract: Model, name: str) -> lm.LazyTensor:
    """A variable of an abstract model, of which only what is asked for is computed."""
    return lm.map_checkpoint(abstract, lambda values: {"found": values[name]})["found"]


# Bands of whole rows, of a part of one, and of a part of an inner axis; of one element for each counter, and more.
@pytest.mark.parametrize(
    "shape",
    [
        (1030, 272),
        pytest.param((2, 2**18 + 48), marks=pytest.mark.large),
        pytest.param((2, 3, 2**17 + 16), marks=pytest.mark.large),
        (40,),
        (3, 4, 48),
    ],
)
def test_any_slice_of_a_lazy_initial_value(shape: tuple[int, ...]) -> None:
    tensor = initial_value(lm.build_abstract(lambda key: {"w": jax.random.uniform(key, shape)}, jax.random.key(0)), "w")
    expected = np.asarray(jax.random.uniform(jax.random.key(0), shape))
    rng = np.random.default_rng(0)
    for _ in range(10):
        index = tuple(slice(*sorted(rng.integers(0, extent + 1, 2))) for extent in shape)
        np.testing.assert_array_equal(tensor[index].read(), expected[index])
    np.testing.assert_array_equal(tensor.T.read(), expected.T)


def test_counters_go_on_beyond_32_bits() -> None:
    """Two rows of 64 GiB, between which the lower 32 bits of the counter of elements begin again."""
    key, shape = jax.random.key(5), (2**20, 2**14)
    found = initial_value(lm.build_abstract(lambda key: {"w": jax.random.bits(key, shape)}, key), "w")
    row = 2**32 // shape[1]
    counters = np.arange((row - 1) * shape[1], (row + 1) * shape[1], dtype=np.uint64)
    words = jax.random.key_data(key)
    halves = (counters >> np.uint64(32)).astype(np.uint32), counters.astype(np.uint32)
    first, second = threefry2x32_p.bind(words[0], words[1], *halves)
    np.testing.assert_array_equal(found[row - 1 : row + 1].read().ravel(), first ^ second)


def test_an_abstract_model_is_saved_and_grown(
    abstract: Model, tmp_path: Path, mesh8: Any, whole: dict[str, Any]
) -> None:
    for name, model in (("abstract", abstract.shard(mesh8, lm.auto())), ("whole", whole)):
        lm.save(model, tmp_path / name, max_shard_size="1MiB")
    saved = lm.open_checkpoint(tmp_path / "abstract")
    assert len(saved.files) > 2
    assert not lm.diff(saved, lm.open_checkpoint(tmp_path / "whole")) and not lm.diff(abstract, saved)
    grown = lm.grow.experts(abstract, {"normal": "experts"}, 2)  # nothing is computed before it is read
    np.testing.assert_array_equal(grown["experts"][1].read(), np.asarray(whole["normal"]))
