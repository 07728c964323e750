"""Keras initializers as init programs: equal to Keras' own values bit for bit, however they are sharded."""

from __future__ import annotations

from typing import Any

import jax
import keras
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from lazymodel._programs.programs import ProgramCache

INITIALIZERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "zeros": (keras.initializers.Zeros, (16, 24)),
    "ones": (keras.initializers.Ones, (16, 24)),
    "constant": (lambda: keras.initializers.Constant(0.3), (16, 24)),
    "identity": (lambda: keras.initializers.Identity(0.5), (16, 16)),
    "random_normal": (lambda: keras.initializers.RandomNormal(0.1, 0.3, seed=5), (16, 24)),
    "random_uniform": (lambda: keras.initializers.RandomUniform(-0.7, 0.3), (16, 24)),
    "truncated_normal": (lambda: keras.initializers.TruncatedNormal(0.1, 0.7), (16, 24)),
    "variance_scaling": (lambda: keras.initializers.VarianceScaling(2.0, "fan_avg", "uniform"), (16, 24)),
    "glorot_uniform": (keras.initializers.GlorotUniform, (16, 24)),
    "glorot_normal": (keras.initializers.GlorotNormal, (16, 24)),
    "lecun_normal": (keras.initializers.LecunNormal, (16, 24)),
    "lecun_uniform": (keras.initializers.LecunUniform, (16, 24)),
    "he_normal": (keras.initializers.HeNormal, (16, 24)),
    "he_uniform": (keras.initializers.HeUniform, (16, 24)),
    "orthogonal": (keras.initializers.Orthogonal, (16, 24)),
    "orthogonal_conv": (lambda: keras.initializers.Orthogonal(0.3), (2, 2, 8, 16)),
    "stft": (lambda: keras.initializers.STFT("real"), (64, 1, 40)),
}


def abstract_of(make: Any, shape: tuple[int, ...], dtype: str) -> lm.AbstractModel:
    class Holder(keras.layers.Layer):
        def build(self, _: Any) -> None:
            self.kernel = self.add_weight(shape=shape, initializer=make(), dtype=dtype, name="kernel")

    def build() -> Any:
        layer = Holder()
        layer.build(None)
        return layer

    keras.utils.set_random_seed(3)
    return lm.build_abstract(build)


def stock(make: Any, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    keras.utils.set_random_seed(3)
    return np.asarray(keras.Variable(make(), shape=shape, dtype=dtype).value)


@pytest.mark.parametrize("name", INITIALIZERS)
def test_equal_to_keras_on_any_sharding(name: str) -> None:
    make, shape = INITIALIZERS[name]
    expected = stock(make, shape, "float32")
    abstract = abstract_of(make, shape, "float32")
    path = next(path for path in abstract if path.endswith("kernel"))
    tried: list[NamedSharding] = []
    for count, mesh_shape in ((1, (1, 1)), (2, (1, 2)), (8, (4, 2))):
        mesh = Mesh(np.array(jax.devices()[:count]).reshape(mesh_shape), ("batch", "model"))
        for axis, size in enumerate(shape):
            specs = [P(*[None] * axis, "model"), P(*[None] * axis, ("batch", "model")), P()]
            for spec in specs:
                parts = {"model": mesh_shape[1]}.get(*spec[axis:] or [None], count) if spec else 1
                sharding = NamedSharding(mesh, spec)
                # A sharding is tried once, however it can be written.
                if size % parts or any(sharding.is_equivalent_to(other, len(shape)) for other in tried):
                    continue
                tried.append(sharding)
                layer = abstract.shard(mesh, {".*": spec}).materialize()
                value = layer.kernel.value
                assert value.sharding.is_equivalent_to(sharding, len(shape))
                np.testing.assert_array_equal(expected, np.asarray(value), err_msg=f"{path} {spec} {mesh_shape}")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["random_normal", "glorot_uniform", "truncated_normal", "zeros", "constant"])
def test_equal_to_keras_in_half_precision(name: str, dtype: str, mesh8: Mesh) -> None:
    make, shape = INITIALIZERS[name]
    layer = abstract_of(make, shape, dtype).shard(mesh8, {".*": P("model")}).materialize()
    value = np.asarray(layer.kernel.value)
    assert value.dtype.name == dtype
    assert value.tobytes() == stock(make, shape, dtype).tobytes()


def test_a_stateful_seed_is_drawn_in_keras_order() -> None:
    def build() -> Any:
        generator = keras.random.SeedGenerator(7)
        initializer = keras.initializers.RandomNormal(seed=generator)
        return keras.Sequential(
            [keras.layers.Input((4,)), *(keras.layers.Dense(4, kernel_initializer=initializer) for _ in range(3))]
        )

    expected, found = build(), lm.build_abstract(build).materialize()
    for a, b in zip(expected.weights, found.weights, strict=True):
        np.testing.assert_array_equal(a.value, b.value)
    assert not np.array_equal(found.weights[0].value, found.weights[2].value)


def test_seeds_share_one_program_and_configurations_do_not() -> None:
    def deep(count: int, stddev: float) -> Any:
        return lambda: keras.Sequential(
            [
                keras.layers.Input((11,)),
                *(
                    keras.layers.Dense(11, kernel_initializer=keras.initializers.RandomNormal(stddev=stddev))
                    for _ in range(count)
                ),
            ]
        )

    def compiled(build: Any) -> int:
        model = lm.build_abstract(build)
        model.materialize()
        return model.programs.compiled

    ProgramCache.clear_shared()
    model = lm.build_abstract(deep(6, 0.123)).materialize()
    assert len({np.asarray(v.value).tobytes() for v in model.weights if v.ndim == 2}) == 6
    assert compiled(deep(9, 0.123)) == 0
    ProgramCache.clear_shared()
    assert compiled(deep(9, 0.123)) == 2  # kernels and biases
    assert compiled(deep(3, 0.124)) == 0  # scalars are inputs of a program


def test_a_subclass_with_attributes_of_its_own_is_not_confused_with_its_base() -> None:
    class Doubled(keras.initializers.RandomNormal):
        def __call__(self, shape: Any, dtype: Any = None) -> Any:
            return 2 * super().__call__(shape, dtype)

    for make in (lambda: keras.initializers.RandomNormal(seed=1), lambda: Doubled(seed=1)):
        layer = abstract_of(make, (8, 8), "float32").materialize()
        np.testing.assert_array_equal(layer.kernel.value, stock(make, (8, 8), "float32"))


def test_large_plain_callables_become_programs(mesh8: Mesh) -> None:
    def ramp(shape: Any, dtype: Any = None) -> Any:
        return keras.ops.reshape(keras.ops.arange(int(np.prod(shape)), dtype=dtype), shape)

    abstract = abstract_of(lambda: ramp, (64, 128), "float32")
    layer = abstract.shard(mesh8, {".*": P("model")}).materialize()
    np.testing.assert_array_equal(layer.kernel.value, np.arange(64 * 128, dtype="float32").reshape(64, 128))
