"""Init programs made at random: every way to their values gives those of eager execution, byte for byte."""

from __future__ import annotations

import operator
import random
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lazymodel as lm
from tests.core.trace._eager import assert_eager, same_bytes
from tests.large import mostly_large

R, L = jax.random, jax.lax
# Few, so that eager execution compiles few kernels: ragged, of a vector register, beyond what is recomputed, empty.
SHAPES = [(), (7,), (16,), (1, 7), (8, 16), (16, 7), (33, 16), (48, 48), (96, 64), (4, 8, 16), (2, 3, 5), (0, 8)]
FLOATS = ["float32", "float32", "float32", "bfloat16", "float16"]
CASTS = "bool int4 uint4 int8 uint8 int16 int32 uint32 int64 float16 bfloat16 float32 float64 float8_e4m3fn complex64"
Array = Any

DRAWS: list[Callable[..., Array]] = [
    R.normal, R.normal, R.normal, R.uniform, R.laplace, R.gumbel, R.exponential, R.logistic,
    lambda k, s, d: R.truncated_normal(k, -2, 2, s, d), lambda k, s, d: R.gamma(k, 1.5, s, d),
    lambda k, s, d: R.uniform(k, s, d, -0.3, 0.3), lambda k, s, d: R.rademacher(k, s, d),
    lambda k, s, d: R.bernoulli(k, 0.4, s), lambda k, s, d: R.randint(k, s, -5, 9),
    lambda k, s, d: R.randint(k, s, 0, 100, jnp.int8), lambda k, s, d: R.bits(k, s, jnp.uint16),
    lambda k, s, d: jnp.ones(s, d), lambda k, s, d: jnp.zeros(s, d), lambda k, s, d: jnp.full(s, -0.0, d),
    lambda k, s, d: jnp.arange(np.prod(s, dtype=int)).reshape(s), lambda k, s, d: np.linspace(-1, 1, 16, dtype="f4"),
    lambda k, s, d: R.permutation(k, 48).astype(d), lambda k, s, d: R.orthogonal(k, 16, (2,)),
    lambda k, s, d: R.categorical(k, jnp.zeros(5), shape=s), lambda k, s, d: R.fold_in(k, 3),
    lambda k, s, d: jax.vmap(lambda key: R.normal(key, s, d))(R.split(k, 3)),
    lambda k, s, d: jax.nn.initializers.lecun_normal()(k, (16, 16), d), lambda k, s, d: R.poisson(k, 3.0, s),
    lambda k, s, d: R.choice(k, jnp.arange(9.0), s), lambda k, s, d: R.dirichlet(k, jnp.ones(7), s).astype(d),
]  # fmt: skip


@jax.custom_jvp
def clipped(x: Array, low: Array, high: Array) -> Array:
    return jnp.clip(x * 1.5, low, high)


@jax.custom_vjp
def _scaled(x: Array, y: Array) -> Array:
    return x * 0.3 + y


_scaled.defvjp(lambda x, y: (_scaled(x, y), x), lambda x, g: (g * x, g))


def scaled(x: Array, y: Array) -> Array:
    return _scaled(jnp.asarray(x), jnp.asarray(y))  # of NumPy arrays alone, it computes in NumPy unless it is traced


def over_devices(function: Callable[[Array], Array], x: Array, *, whole: bool = False) -> Array:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("all",))
    into, out = jax.P("all"), jax.P() if whole else jax.P("all")
    return jax.shard_map(function, mesh=mesh, in_specs=into, out_specs=out)(x)


def placed(x: Array) -> Array:
    return L.with_sharding_constraint(x, jax.NamedSharding(jax.sharding.Mesh(np.array(jax.devices()), "a"), jax.P()))


def sums(x: Array) -> dict[str, Array]:
    return {"sum": x.sum(-1), "twice": x * 2.0 + x.mean(), "large": x > 0.5}


def wide(x: Array) -> Array:
    """What there are factorizations of."""
    return x.astype(jnp.float32)


def iterated(x: Array) -> Array:
    return L.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 0.5 + jnp.tanh(c[1])), (0, x))[1]


# By what they take: a float array of at least so many dimensions, and anything. Who refuses a shape is passed over.
OF_FLOAT: list[Callable[..., Array]] = [
    lambda x: x * 0.37, lambda x: x + 1.25, lambda x: x / 3.0, lambda x: 2 - x, lambda x: -x, lambda x: x * x,
    lambda x: x / x, lambda x: x - x, jnp.tanh, jnp.exp, jnp.square, lambda x: x**3, lambda x: x**-0.5,
    lambda x: jnp.log1p(jnp.abs(x)), lambda x: jnp.sqrt(jnp.abs(x)), jnp.sign, jnp.floor, lambda x: x % 0.7,
    lambda x: jnp.hypot(x, x), lambda x: jnp.arctan2(x, x), lambda x: jnp.logaddexp(x, x), jnp.signbit, jnp.isfinite,
    lambda x: jnp.float_power(2.0, x), lambda x: jnp.clip(x, -0.5, 0.5), lambda x: jnp.nan_to_num(1 / jnp.trunc(x)),
    jax.nn.gelu, jax.nn.relu, jax.nn.silu, jax.nn.softmax, jax.nn.standardize, jax.nn.log_softmax, jax.nn.softplus,
    lambda x: x - x.mean(0), lambda x: x - x.mean(), lambda x: x / (jnp.linalg.norm(x) + 1e-3), lambda x: x.var(0),
    lambda x: x / (x.std(-1, keepdims=True) + 0.1), lambda x: jax.nn.logsumexp(x, -1), lambda x: x.prod(-1),
    lambda x: jnp.cumsum(x, 0) * 0.1, lambda x: jnp.cumprod(x, -1), lambda x: L.associative_scan(jnp.add, x),
    lambda x: jnp.vecdot(x, x), lambda x: jnp.vdot(x, x), lambda x: jnp.dot(x, x), lambda x: jnp.inner(x, x),
    lambda x: jnp.einsum("...ij,...ij->...i", x, x), lambda x: jnp.einsum("ij,kj->ik", x, x),
    lambda x: jnp.einsum("ij,ij,ij->j", x, x, x), lambda x: jnp.einsum("ij,ik->jk", x, x), lambda x: x.T @ x,
    lambda x: jnp.tensordot(x, x, x.ndim), lambda x: jnp.kron(x, x)[:9], lambda x: jnp.outer(x, x)[:16, :33],
    lambda x: jnp.correlate(x, x), lambda x: jnp.convolve(x, x, "same"), lambda x: jnp.cov(x), jnp.median,
    lambda x: jnp.linalg.qr(wide(x))[0], lambda x: jnp.linalg.svd(wide(x), full_matrices=False)[1],
    lambda x: jnp.linalg.pinv(wide(x)),
    lambda x: jnp.linalg.cholesky(wide(x @ x.T) + 9 * jnp.eye(x.shape[0])), lambda x: jnp.linalg.eigh(wide(x @ x.T))[1],
    lambda x: jnp.linalg.det(wide(x[:7, :7])), lambda x: jnp.linalg.inv(wide(x[:7, :7]) + 9 * jnp.eye(7)),
    lambda x: jnp.linalg.matrix_power(x[:16, :16] * 0.1, 3), lambda x: jnp.linalg.norm(x, axis=-1, ord=1),
    lambda x: jnp.fft.rfft(wide(x)), lambda x: jnp.interp(x, jnp.arange(4.0), jnp.arange(4.0) ** 2), jax.grad(jnp.sum),
    jax.grad(lambda x: jnp.sum(jnp.tanh(x) ** 2)), lambda x: jax.jvp(jnp.sin, (x,), (x,))[1],
    lambda x: clipped(x, -0.2, 0.0), lambda x: scaled(x, x), lambda x: scaled(x, 1.0), lambda x: jax.nn.relu6(x * 3),
    jax.jit(lambda x: x * 0.3 + 0.1), jax.jit(lambda x: (x - x.mean(0)) / (x.var(0) + 1.0)), jax.jit(sums), sums,
    lambda x: jax.jit(lambda a, b: jnp.sqrt(a) * jnp.sqrt(b))(jnp.abs(x), jnp.abs(x)),
    lambda x: jax.jit(lambda a, b: (a * b + a, a @ b.T))(x, x), lambda x: jax.jit(clipped)(x, 0.0, 1.0),
    jax.checkpoint(lambda x: jnp.sin(x) * x.mean()), jax.vmap(lambda row: row / (jnp.sum(row**2) + 1.0)),
    lambda x: jax.vmap(lambda a, b: a @ b)(x, x), lambda x: L.map(lambda row: row * 0.3 + row.sum(), x),
    lambda x: L.scan(lambda c, row: (c * 0.9 + row, c), jnp.zeros(x.shape[1:], x.dtype), x)[1], iterated,
    lambda x: L.scan(lambda c, row: (c, c @ row), x, x)[1],
    lambda x: L.fori_loop(0, 3, lambda i, y: y * 0.5 + jnp.tanh(y), x), lambda x: L.reduce_precision(x, 5, 7),
    lambda x: L.cond(x.sum() > 0, lambda y: y * 0.3, lambda y: y + y.mean(), x), lambda x: (x > 0) * x,
    lambda x: L.switch(jnp.argmax(x.reshape(-1)[:3]), [jnp.sin, jnp.cos, lambda y: y * 2], x), L.stop_gradient,
    lambda x: over_devices(lambda y: y * 2 + 1, x), lambda x: over_devices(lambda y: L.psum(y, "all"), x, whole=True),
    lambda x: placed(x) * 0.3, jax.jit(lambda x: placed(x * 0.3) + 1), lambda x: jnp.histogram(x, bins=7)[0],
    lambda x: jax.nn.dot_product_attention(*[wide(x)[:, :, None]] * 3), lambda x: jnp.diff(x),
    lambda x: L.conv_general_dilated(x[:, None], jnp.ones((2, 1, 3), x.dtype), (1,), "SAME"),
    lambda x: L.optimization_barrier(x) * 0.5, lambda x: np.float32(0.3) * x, lambda x: x * np.arange(x.shape[-1]),
    lambda x: x + jnp.float32(1e-3) * jnp.arange(x.shape[-1]), lambda x: L.erf_inv(jnp.tanh(x)), jnp.sinc,
    lambda x: jax.lax.complex(x, x), lambda x: jnp.ldexp(x, 3), lambda x: jnp.frexp(x)[0], lambda x: jnp.modf(x)[1],
]  # fmt: skip
OF_ANY: list[Callable[..., Array]] = [
    lambda x: x > 0, lambda x: x >= 1, lambda x: x == x, lambda x: ~(x > 0), lambda x: x * 2, lambda x: x + x,
    lambda x: x * 0.5, lambda x: x * True, lambda x: jnp.where(x > 0, x, 0), lambda x: jnp.where(x != 0, 1.0, -0.0),
    lambda x: x.sum(0), lambda x: x.sum(), lambda x: x.max(-1), lambda x: x.min(), lambda x: x.any(0),
    lambda x: x.argmax(-1), lambda x: x.mean(-1), lambda x: jnp.cumsum(x, -1), lambda x: jnp.cumsum(x > 0, 0),
    lambda x: L.cummax(x, 0), lambda x: jnp.sort(x, -1), lambda x: jnp.argsort(x, 0),
    lambda x: x.all(), lambda x: jnp.unique_counts(x, size=4),
    jnp.tril, lambda x: jnp.triu(x, 1), lambda x: jnp.diag(x), lambda x: jnp.trace(x), lambda x: x.T, lambda x: x[::-1],
    lambda x: x[: max(1, x.shape[0] // 2)], lambda x: jnp.roll(x, 3, -1), lambda x: x.reshape(-1), lambda x: x[None],
    lambda x: x.reshape(x.shape[::-1]), lambda x: jnp.swapaxes(x, 0, -1), lambda x: jnp.pad(x, [(1, 2)] * x.ndim),
    lambda x: jnp.concatenate([x, x * 2]), lambda x: jnp.stack([x, -x], 1), lambda x: jnp.repeat(x, 2, 0),
    lambda x: jnp.tile(x, 2), lambda x: x[jnp.array([0, 2, 1])], lambda x: jnp.take(x, jnp.arange(3), -1),
    lambda x: L.dynamic_slice_in_dim(x, 1, 3), lambda x: x.at[0].set(1), lambda x: x.at[:2].add(x[:2]),
    lambda x: x.at[jnp.array([0, 0, 1])].mul(2), lambda x: L.top_k(x, 3)[0], lambda x: jnp.split(x, 2), jnp.ravel,
    lambda x: jax.nn.one_hot(x.astype(int) % 5, 5), lambda x: jnp.broadcast_to(x, (3, *x.shape)), lambda x: abs(x),
    lambda x: jnp.asarray(x, jnp.float32), lambda x: jnp.real(x), lambda x: x // 2, lambda x: x % 3, lambda x: x & 1,
    lambda x: x << 1, lambda x: x ^ x, lambda x: jnp.bincount(x.reshape(-1), length=6), jnp.copy, jnp.squeeze,
    lambda x: L.bitcast_convert_type(x, jnp.uint8), lambda x: jnp.prod(x, 0), lambda x: jnp.meshgrid(x, x)[0],
    jax.jit(lambda x: {"a": x * 2, "b": x + 1}), lambda x: jnp.select([x > 1, x > 0], [x, x * 2], 5),
    lambda x: jnp.dot(x, x.T), lambda x: jnp.linalg.norm(x), lambda x: jnp.count_nonzero(x), lambda x: jnp.ptp(x),
    lambda x: jax.nn.softmax(x * 1.0), lambda x: jnp.searchsorted(jnp.arange(4), x), lambda x: x.astype(bool) * 0.3,
]  # fmt: skip
OF_TWO: list[Callable[..., Array]] = [
    jnp.add, jnp.multiply, lambda a, b: a - 0.5 * b, lambda a, b: jnp.where(a > b, a, b * 0.1), lambda a, b: a * b + a,
    lambda a, b: (a > 0) * b, lambda a, b: a * (b != 0), lambda a, b: a / (abs(b) + 1), jnp.maximum, jnp.arctan2,
    jax.jit(lambda a, b: a * b + a.mean(0)), lambda a, b: a @ b.T, lambda a, b: jnp.einsum("...i,...i->...", a, b),
    lambda a, b: jnp.einsum("...i,...i,...i->...", a, b, a), lambda a, b: jnp.concatenate([a, b, a]),
    jax.jit(lambda a, b: (a + b, a.sum(0), {"b": b})), lambda a, b: L.cond(a.sum() > 0, jnp.add, jnp.subtract, a, b),
    lambda a, b: L.scan(lambda c, x: (c + x[0] * x[1], x[0]), jnp.zeros_like(a[0]), (a, b)), lambda a, b: a <= b,
    lambda a, b: jax.vmap(jnp.dot)(a, b), lambda a, b: jax.nn.logsumexp(a, 0, b=abs(b)), jnp.divmod, jnp.fmod,
    lambda a, b: scaled(a, b), lambda a, b: jnp.linalg.lstsq(wide(a), wide(b))[0], jnp.logical_xor, jnp.hypot,
    jnp.power, jnp.isclose,
]  # fmt: skip


def random_program(seed: int) -> Callable[[Any], Any]:
    """A function of a key: random draws, operations on what came before, some of it returned, by numbers."""

    def init(key: Any) -> Any:
        rng = random.Random(seed)
        values: list[Any] = []

        def keep(result: Any) -> None:
            values.extend(leaf for leaf in jax.tree.leaves(result) if leaf.size <= 1 << 14 and leaf.ndim <= 5)

        for number in range(rng.randint(1, 3)):
            keep(rng.choice(DRAWS)(R.fold_in(key, number), rng.choice(SHAPES), jnp.dtype(rng.choice(FLOATS))))
        first = len(values)
        for _ in range(rng.randint(4, 12)):
            numbers = [x for x in values if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
            if not numbers:
                break
            x = rng.choice(numbers[-4:] if rng.random() < 0.7 else numbers)
            kind = rng.random()
            others = [y for y in numbers if y.shape == x.shape]
            if kind < 0.12:
                operation, operands = operator.methodcaller("astype", rng.choice(CASTS.split())), [x]
            elif kind < 0.3:
                operation, operands = rng.choice(OF_TWO), [x, rng.choice(others)]
            elif kind < 0.55 or not jnp.issubdtype(x.dtype, np.floating):
                operation, operands = rng.choice(OF_ANY), [x]
            else:
                operation, operands = rng.choice(OF_FLOAT), [x]
            try:
                keep(operation(*operands))
            except (TypeError, ValueError, IndexError, AttributeError, NotImplementedError):
                continue  # not for this shape or dtype
        return values[first:][-6:] or values

    return init


def check(seed: int, mesh: Any) -> int:
    """Compares a program's values with its own, however they are made; how many leaves it has."""
    init, key = random_program(seed), R.key(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NumPy, and of what overflows
        expected = assert_eager(init, mesh, key=key, seed=seed)
        model = lm.build_abstract(init, key)
        named = dict(zip([str(number) for number in range(len(expected))], expected, strict=True))
        for path, array in model.stream():
            assert same_bytes(array, named[path]), f"{path} of {seed} by itself"
        measured = [path for path in model if not jnp.issubdtype(model[path].dtype, jax.dtypes.prng_key)]
        found = lm.statistics(model, spectral=False) if measured else {}
        assert list(found) == measured
        for path, row in found.items():
            values = np.asarray(named[path])
            values = np.abs(values) if row.dtype == "complex64" else values.astype(np.float64)
            finite = values[np.isfinite(values)]
            assert row.nonfinite == values.size - finite.size
            if finite.size:
                assert (row.min, row.max) == (finite.min(), finite.max()), f"range of {path} of {seed}"
                scale = np.abs(finite).max()
                np.testing.assert_allclose([row.mean, row.std], [finite.mean(), finite.std()], 1e-4, 1e-5 * scale)
    return len(expected)


@pytest.mark.parametrize("seed", mostly_large([*range(8), 1269], (0, 1)))
def test_random_programs(seed: int, mesh8: Any) -> None:
    check(seed, mesh8)


@pytest.mark.large
@pytest.mark.parametrize("first", range(1000, 1760, 20))
def test_many_random_programs(first: int, mesh8: Any, mesh42: Any) -> None:
    wrong = []
    for seed in range(first, first + 20):
        try:
            check(seed, (mesh8, mesh42)[seed % 2])
        except Exception as error:
            wrong.append((seed, f"{type(error).__name__}: {error}"[:300]))
    assert not wrong
