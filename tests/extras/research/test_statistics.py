"""Statistics: NumPy's values on any sharding, nothing gathered, one program a signature; table, dict and figure."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import lazymodel as lm
from tests.compile_events import compile_events
from tests.large import mostly_large

P = jax.P


def random(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.5, 2.0, shape).astype(np.float32)


def check(found: Any, values: np.ndarray, matrix: np.ndarray | None = None) -> None:
    values = values.astype(np.float64)
    expected = [values.mean(), values.std(), values.min(), values.max()]
    np.testing.assert_allclose([found.mean, found.std, found.min, found.max], expected, rtol=1e-5, atol=1e-6)
    assert found.nonfinite == 0
    if matrix is None:
        assert found.spectral_norm is None
    else:
        assert found.spectral_norm == pytest.approx(np.linalg.norm(matrix.astype(np.float64), 2), rel=2e-3)


@pytest.mark.parametrize(
    "spec",
    mostly_large(
        [P(), P("batch"), P(None, "model"), P("batch", "model"), P(("model", "batch"))],
        [P(), P("batch", "model"), P(("model", "batch"))],
    ),
)
def test_values_are_numpys_on_every_sharding(spec: Any, mesh42: Any) -> None:
    values = random((64, 96))
    placed = jax.device_put(values, jax.NamedSharding(mesh42, spec))
    check(lm.statistics({"w": placed})["w"], values, values)


def test_explicit_axes_one_device_and_a_checkpoint(tmp_path: Path) -> None:
    values = random((64, 32))
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    explicit = jax.device_put(values, jax.NamedSharding(mesh, P("x")))
    found = lm.statistics({"explicit": explicit, "one": jax.device_put(values, jax.devices()[3]), "host": values})
    np.savez(tmp_path / "weights.npz", w=values)
    for row in (*found.values(), lm.statistics(lm.open_checkpoint(tmp_path / "weights.npz"))["w"]):
        check(row, values, values)


def test_more_dimensions_become_the_squarest_matrix(mesh8: Any) -> None:
    query, output, kernel = random((64, 8, 8)), random((8, 8, 48)), random((3, 3, 16, 24))
    placed = jax.device_put(query, jax.NamedSharding(mesh8, P(None, "model")))
    found = lm.statistics({"query": placed, "output": output, "conv": kernel})
    check(found["query"], query, query.reshape(64, 64))
    check(found["output"], output, output.reshape(64, 48))
    check(found["conv"], kernel, kernel.reshape(144, 24))


def test_nothing_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    jit, texts = jax.jit, []

    def recording(function: Any, **options: Any) -> Any:
        def call(*args: Any) -> Any:
            compiled = jit(function, **options).lower(*args).compile()
            texts.append(compiled.as_text())
            return compiled(*args)

        return call

    monkeypatch.setattr(jax, "jit", recording)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("rows", "columns"))  # jitted functions are kept
    both, last = P("rows", "columns"), P(None, ("rows", "columns"))
    for shape, spec in (((64, 128), last), ((64, 8, 16), both)):
        lm.statistics({"w": jax.device_put(random(shape), jax.NamedSharding(mesh, spec))})
        moved = re.findall(r"= \w+\[([\d,]*)\]\S* (?:all-gather|all-to-all|collective-permute)", texts[-1])
        assert all(np.prod([int(n) for n in dims.split(",") if n]) < 1024 for dims in moved), "vectors only"
        assert "all-reduce" in texts[-1]
    assert len(texts) == 2


@pytest.mark.parametrize(
    "values",
    [
        np.float32(1e6) + random((256, 64)) / 20,
        -np.float32(1e3) - random((256, 64)) ** 2 / 1000,
        np.arange(2**30, 2**30 + 100, dtype=np.int32),
        np.array([2**32 - 1, 2**32 - 3], np.uint32),
        np.array([2e38 + 2e38j, 1], np.complex64),
        np.array([3e-39, -1e-40, 2.0], np.float32),
    ],
    ids=str,
)
def test_far_from_zero_and_near_the_limits(values: np.ndarray) -> None:
    for found in lm.statistics({"host": values, "device": jnp.asarray(values)}, spectral=False).values():
        wide = (np.abs(values.astype(complex)) if values.dtype.kind == "c" else values).astype(np.longdouble)
        expected = [float(each) for each in (wide.mean(), wide.std(), wide.min(), wide.max())]
        np.testing.assert_allclose([found.mean, found.std, found.min, found.max], expected, rtol=1e-5, atol=1e-37)


def test_float64_near_its_limits() -> None:
    for values in ([1e300, -1e300, 5e299, 1], [1.7e308, -1.7e308], [5e-324, -1e-310, 3e-320], [1e308 + 1e308j, 1e300]):
        found = lm.statistics({"w": np.array(values)})["w"]
        wide = (np.abs(np.array(values)) if isinstance(values[0], complex) else np.array(values)).astype(np.longdouble)
        np.testing.assert_allclose([found.mean, found.std], [float(wide.mean()), float(wide.std())], rtol=1e-9)
        assert (found.min, found.max) == (float(wide.min()), float(wide.max()))


def test_low_rank_zero_and_tiny_matrices() -> None:
    outer = np.outer(random((50,)), random((40,), 1))
    found = lm.statistics({"outer": outer, "zero": np.zeros((8, 8), np.float32), "one": np.full((1, 1), -3.0)})
    check(found["outer"], outer, outer)
    assert found["zero"].spectral_norm == 0
    assert found["one"].spectral_norm == pytest.approx(3)
    two = np.diag([5.0, 4.999, 1.0]).astype(np.float32)
    assert lm.statistics([two])["0"].spectral_norm == pytest.approx(5, rel=1e-4)


def test_dtypes() -> None:
    half = random((32, 32)).astype(ml_dtypes.bfloat16)
    counts = np.arange(10, dtype=np.int32)
    found = lm.statistics(
        {
            "half": jnp.asarray(half),
            "counts": counts,
            "mask": np.array([True, False]),
            "double": random((16, 16)).astype(np.float64) + 1e9,
            "complex": np.array([3 + 4j, 0]),
            "key": jax.random.key(0),
            "empty": np.zeros((0, 4)),
            "text": "no array",
        }
    )
    check(found["half"], half.astype(np.float32), half.astype(np.float32))
    check(found["counts"], counts)
    assert found["mask"].mean == 0.5
    assert found["double"].std == pytest.approx(random((16, 16)).std(), rel=1e-6)  # float32 would have lost it
    assert found["complex"].max == 5
    assert set(found) == {"half", "counts", "mask", "double", "complex", "empty"}


@pytest.mark.parametrize("place", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("size", [1e-40, 1e-30, 1e-18, 1.0, 1e18, 1e30, 3e38])
def test_numbers_of_every_size(size: float, place: Any) -> None:
    if size == 1e-40 and place is jnp.asarray:
        pytest.skip("XLA's CPUs take subnormal numbers for zero")
    values = np.clip(random((24, 40)) * np.float32(size / 8), -size, size).astype(np.float32)
    found, wide = lm.statistics({"w": place(values)})["w"], values.astype(np.float64)
    assert [found.min, found.max] == [wide.min(), wide.max()]
    expected = [wide.mean(), wide.std(), np.linalg.norm(wide, 2)]
    np.testing.assert_allclose([found.mean, found.std, found.spectral_norm], expected, 2e-3)


@pytest.mark.parametrize(
    "dtype",
    mostly_large(
        ["bool", "int4", "int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"],
        ["bool", "int4", "int64", "uint64"],
    ),
)
def test_ends_of_integers_are_exact(dtype: str) -> None:
    ends = (0, 1) if dtype == "bool" else (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
    values = np.array(ends, dtype)
    with jax.enable_x64(True):
        found = lm.statistics({"host": values, "device": jnp.asarray(values), "none": jnp.zeros((0, 8), dtype)})
    for row in (found["host"], found["device"]):
        assert [row.min, row.max] == [int(values[0]), int(values[1])]
        assert row.std == pytest.approx(values.astype(float).std())
    assert np.isnan(found["none"].mean)


def test_what_is_initialized_without_random_numbers() -> None:
    def init() -> Any:
        return {"constant": jnp.ones((4,)) * 2, "tril": jnp.tril(jnp.ones((8, 8))), "range": jnp.arange(12.0) > 3}

    found = lm.statistics(lm.build_abstract(init), spectral=False)
    for path, values in init().items():
        check(found[path], np.asarray(values))


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    values = random((8, 8))
    spoiled = values.copy()
    spoiled[0, :2] = np.nan, np.inf
    found = lm.statistics({"w": spoiled})
    assert found["w"].nonfinite == 2
    assert found["w"].max == values.ravel()[2:].max()
    assert np.isfinite(found["w"].spectral_norm or np.nan)
    assert "not finite: 2 elements of w" in repr(found)


def test_stacked_layers_are_measured_one_by_one(mesh8: Any) -> None:
    stack = random((8, 32, 16))
    for spec in (P("model"), P(None, "model")):
        placed = jax.device_put(stack, jax.NamedSharding(mesh8, spec))
        found = lm.statistics({"layers": {"w": placed}, "b": np.zeros(3)}, stacked="layers/.*")
        assert list(found)[1:] == [f"layers/w[{layer}]" for layer in range(8)]
        for layer in range(8):
            check(found[f"layers/w[{layer}]"], stack[layer], stack[layer])
            assert found[f"layers/w[{layer}]"].shape == (32, 16)
            assert found[f"layers/w[{layer}]"].layer == layer


def test_one_program_a_signature(mesh8: Any) -> None:
    sharding = jax.NamedSharding(mesh8, P("model"))
    arrays = {f"layers/{layer}/w": jax.device_put(random((72, 40), layer), sharding) for layer in range(6)}
    with compile_events() as events:
        found = lm.statistics(arrays)
    assert events.count("compile jit(measure)") == 1
    assert found["layers/5/w"].mean == pytest.approx(random((72, 40), 5).mean(), rel=1e-5)
    assert lm.statistics(arrays, spectral=False)["layers/0/w"].spectral_norm is None


def test_an_abstract_model_is_measured_as_it_would_be(tmp_path: Path, mesh8: Any) -> None:
    def init(key: jax.Array) -> Any:
        wide = jax.random.normal(key, (4, 40, 80)) * 3 + 1
        square = jax.nn.initializers.orthogonal(2.0)(key, (32, 32))
        return {"wide": wide, "square": square, "half": wide[0].astype(jnp.bfloat16), "key": key, "one": jnp.ones(())}

    abstract = lm.build_abstract(init, jax.random.key(0)).shard(mesh8, lm.auto())
    model = abstract.materialize()
    found = lm.statistics(abstract, stacked="wide")
    assert list(found) == ["half", "one", "square", *(f"wide[{index}]" for index in range(4))]
    for index in range(4):
        check(found[f"wide[{index}]"], *[np.asarray(model["wide"][index])] * 2)
    check(found["half"], *[np.asarray(model["half"]).astype(np.float32)] * 2)
    assert found["square"].spectral_norm == pytest.approx(2, rel=1e-4)
    given = {"square": random((32, 32))}
    lm.save(given, tmp_path / "given.safetensors")
    with pytest.warns(lm.LazyModelWarning, match="has no tensor for 3 of 5"):
        loaded = lm.statistics(abstract, lm.open_checkpoint(tmp_path / "given.safetensors"))
    check(loaded["square"], given["square"], given["square"])
    check(loaded["one"], np.ones(()))
    with pytest.raises(lm.LazyModelError, match="measured by itself"):
        lm.statistics(model, given)


def test_blocks_and_both_sides_of_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazymodel.extras.research.statistics._BLOCK", 1 << 10)
    monkeypatch.setattr("lazymodel.extras.research.statistics._PRODUCT", 1 << 10)
    tall = random((300, 70)) + 100  # several blocks; a mean that float32 would lose digits to
    found = lm.statistics({"tall": tall, "wide": tall.T.copy(), "low": np.outer(tall[:, 0], tall[0])})
    check(found["tall"], tall, tall)
    check(found["wide"], tall.T, tall)
    check(found["low"], *[np.outer(tall[:, 0], tall[0])] * 2)


def layers() -> Any:
    arrays = {f"layers/{layer}/w": np.full((4, 4), layer + 1, np.float32) for layer in range(12)}
    return lm.statistics({**arrays, "embed": np.ones((4, 2), np.float32)})


def test_table_dict_and_lines() -> None:
    found = layers()
    text = repr(found)
    assert "statistics of 13 variables" in text
    row = next(line for line in text.splitlines() if line.startswith("layers/{0..11}/w"))
    assert row.split()[1:6] == ["12", "1…12", "0", "1", "12"]
    assert "<table>" in found._repr_html_() and "layers/{0..11}/w" in found._repr_html_()
    assert json.loads(json.dumps(found.to_dict()))["layers/3/w"]["spectral_norm"] == pytest.approx(16)
    lines = found.over_depth("mean")
    assert list(lines) == ["layers/{layer}/w"]
    assert list(lines["layers/{layer}/w"].items())[:2] == [(0, 1.0), (1, 2.0)]
    with pytest.raises(lm.LazyModelError, match="a statistic is one of mean"):
        found.over_depth("median")
    with pytest.raises(KeyError, match="closest: 'layers/1/w'"):
        found["layer/1/w"]


def test_figure(tmp_path: Path) -> None:
    figure = layers().plot(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert [axes.get_title() for axes in figure.axes] == ["standard deviation", "spectral norm"]
    line = figure.axes[1].get_lines()[0]
    np.testing.assert_allclose(line.get_ydata(), 4 * np.arange(1, 13), rtol=1e-4)
    with pytest.raises(lm.LazyModelError, match="nothing to draw over depth"):
        lm.statistics({"w": np.ones((2, 2))}).plot()


def test_errors() -> None:
    with pytest.raises(lm.LazyModelError, match="there are no arrays in"):
        lm.statistics({"name": "text"})
    with pytest.raises(lm.LazyModelError, match="there is no checkpoint at x.safetensors"):
        lm.statistics("x.safetensors")
    with pytest.raises(lm.LazyModelError, match="stacked='layer' matches no variable; closest: 'layers'"):
        lm.statistics({"layers": np.ones((2, 2))}, stacked="layer")
