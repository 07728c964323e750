"""Keras initializers as init programs: equal to Keras' own values bit for bit, however they are sharded."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.large import mostly_large

KI = keras.initializers
OWN: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    **{cls.__name__: (cls, (16, 24)) for cls in (KI.Zeros, KI.Ones, KI.GlorotUniform, KI.GlorotNormal, KI.Orthogonal)},
    **{cls.__name__: (cls, (16, 24)) for cls in (KI.LecunNormal, KI.LecunUniform, KI.HeNormal, KI.HeUniform)},
    "Constant": (lambda: KI.Constant(0.3), (16, 24)),
    "Identity": (lambda: KI.Identity(0.5), (16, 16)),
    "RandomNormal": (lambda: KI.RandomNormal(0.1, 0.3, seed=5), (16, 24)),
    "RandomUniform": (lambda: KI.RandomUniform(-0.7, 0.3), (16, 24)),
    "TruncatedNormal": (lambda: KI.TruncatedNormal(0.1, 0.7), (16, 24)),
    "VarianceScaling": (lambda: KI.VarianceScaling(2.0, "fan_avg", "uniform"), (16, 24)),
    "Orthogonal of a convolution": (lambda: KI.Orthogonal(0.3), (2, 2, 8, 16)),
    "STFT": (lambda: KI.STFT("real"), (64, 1, 40)),
}


def own_abstract(name: str, dtype: str = "float32") -> tuple[np.ndarray, lm.AbstractModel]:
    """Keras' own value of a variable, and the abstract model that has it."""
    make, shape = OWN[name]
    keras.utils.set_random_seed(3)
    expected = np.asarray(keras.Variable(make(), shape=shape, dtype=dtype).value)
    keras.utils.set_random_seed(3)

    def build() -> keras.layers.Layer:
        layer = keras.layers.Layer()
        layer.kernel = layer.add_weight(shape=shape, initializer=make(), dtype=dtype, name="kernel")
        return layer

    return expected, lm.build_abstract(build)


# What has a program of its own; others have one of these with other numbers, or are below.
ALONE = ("RandomNormal", "TruncatedNormal", "VarianceScaling", "Orthogonal of a convolution", "Identity", "STFT")
HALVES = ("bfloat16", "float16")
MESHES = ((1, 1), (1, 2), (4, 2))


@pytest.mark.parametrize(
    ("name", "mesh_shape"),
    mostly_large([*itertools.product(OWN, MESHES)], [("VarianceScaling", (1, 2)), *((name, (4, 2)) for name in ALONE)]),
)
def test_equal_to_keras_on_any_sharding(name: str, mesh_shape: tuple[int, int]) -> None:
    expected, abstract = own_abstract(name)
    tried: list[NamedSharding] = []
    count = mesh_shape[0] * mesh_shape[1]
    mesh = Mesh(np.array(jax.devices()[:count]).reshape(mesh_shape), ("batch", "model"))
    for axis, size in enumerate(expected.shape):
        for spec in (P(*[None] * axis, "model"), P(*[None] * axis, ("batch", "model")), P()):
            parts = {"model": mesh_shape[1]}.get(*spec[axis:] or [None], count) if spec else 1
            sharding = NamedSharding(mesh, spec)
            # A sharding is tried once, however it can be written.
            if size % parts or any(sharding.is_equivalent_to(other, expected.ndim) for other in tried):
                continue
            tried.append(sharding)
            value = abstract.shard(mesh, {".*": spec}).materialize().kernel.value
            assert value.sharding.is_equivalent_to(sharding, expected.ndim)
            np.testing.assert_array_equal(expected, np.asarray(value), err_msg=f"{name} {spec} {mesh_shape}")


@pytest.mark.parametrize(
    ("name", "dtype"),
    mostly_large(
        [*itertools.product(("RandomNormal", "GlorotUniform", "TruncatedNormal", "Zeros", "Constant"), HALVES)],
        [("RandomNormal", "bfloat16"), ("Constant", "bfloat16"), ("Zeros", "bfloat16")],
    ),
)
def test_equal_to_keras_in_half_precision(name: str, dtype: str, mesh8: Mesh) -> None:
    expected, abstract = own_abstract(name, dtype)
    value = np.asarray(abstract.shard(mesh8, {".*": P("model")}).materialize().kernel.value)
    assert value.dtype.name == dtype
    assert value.tobytes() == expected.tobytes()


def test_seeds_and_configurations_share_programs(repetition: int) -> None:
    width = 37 + 2 * repetition  # for which nobody has programs yet

    def compiled(count: int, stddev: float) -> tuple[keras.Model, int]:
        def build() -> keras.Model:
            normals = (KI.RandomNormal(stddev=stddev) for _ in range(count))
            layers = (keras.layers.Dense(width, kernel_initializer=normal) for normal in normals)
            return keras.Sequential([keras.Input((width,)), *layers])

        abstract = lm.build_abstract(build)
        return abstract.materialize(), abstract.programs.compiled

    model, programs = compiled(6, 0.123)
    assert programs == 2, "kernels and biases"
    assert len({np.asarray(v.value).tobytes() for v in model.weights if v.ndim == 2}) == 6
    assert compiled(9, 0.123)[1] == 0
    assert compiled(3, 0.124)[1] == 0, "scalars are inputs of a program"
