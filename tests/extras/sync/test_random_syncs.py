"""Random shapes, dtypes, steps and meshes: a sampler gets the bits that loading the same would give it."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.large import mostly_large

SMALL = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
DTYPES = [*SMALL, "int8", "int32", "uint8", "bool", "int4"]
SHAPES = [(8, 16), (16, 8), (24,), (8, 4, 6), (0, 8), (8, 0), (1,), ()]


class Random:
    """One random sync of a variable `w`."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        shape, dtype = self.pick(SHAPES), jnp.dtype(self.pick(DTYPES))
        with warnings.catch_warnings(action="ignore"):
            self.values = (self.rng.normal(size=shape) * 10.0 ** self.rng.integers(-3, 4)).astype("f4").astype(dtype)
        self.source = lm.From("w")
        for _ in range(self.rng.integers(0, 4)):
            self.source = self.step(self.source)
        self.table = lm.WeightMap({"w": self.source})
        shape = self.values.shape[:: -1 if str(self.source).count(".transpose") % 2 else 1]
        self.trainer = self.abstract(self.values.shape, self.values.dtype)
        self.sampler = self.abstract(shape, jnp.dtype(self.pick(SMALL)))

    def pick(self, choices: Any) -> Any:
        return choices[self.rng.integers(len(choices))]

    def step(self, source: lm.From) -> lm.From:
        factor = self.pick([1 / 3, 0.1, -1.0, 2.0, -0.5, 1e-3, 7.0, 1.0])
        number = self.pick([factor, np.float32(factor), np.float64(factor), int(max(1, abs(factor)))])
        dtype = jnp.dtype(self.pick(SMALL))
        functions: list[Any] = [
            *(lambda x: x.astype(np.float32) * number, lambda x: x + number, lambda x: x / number, lambda x: -x),
            *(lambda x: number - x, lambda x: x.astype(dtype), lambda x: x * number + number),
        ]
        return self.pick([source.scale(factor), source.T, *(source.apply(each) for each in functions)])

    def abstract(self, shape: tuple[int, ...], dtype: Any) -> Any:
        sizes = self.pick([(2, 4), (4, 2), (8, 1), (1, 4), (2, 2)])
        count = sizes[0] * sizes[1]
        first, kind = self.pick([0, 8 - count]), self.pick([AxisType.Auto, AxisType.Explicit])
        devices = np.array(jax.devices()[:: self.pick([1, 1, -1])])[first : first + count].reshape(sizes)
        axes: list[Any] = [None] * len(shape)
        for size, name in zip(sizes, "xy", strict=True):
            if fits := [n for n, extent in enumerate(shape) if axes[n] is None and extent % size == 0]:
                axes[self.pick(fits)] = name
        mesh = Mesh(devices, ("x", "y"), axis_types=(kind, kind))
        return lm.build_abstract(lambda: {"w": jnp.zeros(shape, dtype)}).shard(mesh, {".*": P(*axes)})


def result(function: Any) -> Any:
    """What a function returns; None if it refuses."""
    try:
        return np.asarray(function()["w"])
    except lm.LazyModelError:
        return None


def check(seed: int) -> None:
    case = Random(seed)
    with warnings.catch_warnings(action="ignore"):  # of NumPy, for what overflows
        expected = result(lambda: case.sampler.materialize(lm.map_checkpoint({"w": case.values}, case.table)))
        trainer, into = case.trainer.materialize({"w": case.values}), case.sampler.materialize()
        found = result(lambda: lm.Sync(case.trainer, case.sampler, case.table)(trainer, into=into))
    if expected is None:  # an integer that does not fit, which only reading sees, is an error there
        return
    assert found is not None, case.source
    nan = np.isnan(expected.astype(np.float32))
    assert np.array_equal(nan, np.isnan(found.astype(np.float32))), case.source
    bits = f"uint{8 * expected.itemsize}"
    assert np.array_equal(expected.view(bits)[~nan], found.view(bits)[~nan]), case.source


@pytest.mark.parametrize("seed", mostly_large(range(24), range(2)))
def test_random_syncs(seed: int) -> None:
    check(seed)


@pytest.mark.large
@pytest.mark.parametrize("first", range(1000, 1240, 20))
def test_many_random_syncs(first: int) -> None:
    wrong: list[Any] = []
    for seed in range(first, first + 20):
        try:
            check(seed)
        except Exception as error:
            wrong.append((seed, f"{type(error).__name__}: {error}"[:300]))
    assert not wrong
