"""Initial values are those of eager execution, bit for bit, whatever is computed and however it is sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lazymodel as lm
from tests.core.trace._eager import KEY, assert_eager, assert_same
from tests.large import mostly_large

Model = lm.AbstractModel[Any]

SIZES = (1, 7, 16, 100, 256, 1000)
I = jax.nn.initializers  # noqa: E741 (short, in a long table)


def normal(key: Any, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape)


def power_iteration(w: jax.Array) -> jax.Array:
    """Divides a matrix by an estimate of its largest singular value."""

    def step(u: Any, _: Any) -> Any:
        v = u @ w
        u = w @ (v / jnp.linalg.norm(v))
        return u / jnp.linalg.norm(u), None

    u, _ = jax.lax.scan(step, jnp.ones(w.shape[0]), None, length=4)
    return w / (u @ w @ (w.T @ u) / jnp.linalg.norm(w.T @ u))


# Functions of a key and a width that compute with what they have computed.
REDUCING: dict[str, Callable[[Any, int], Any]] = {
    "centered": lambda k, n: (lambda x: x - x.mean(0))(normal(k, 33, n)),
    "variance": lambda k, n: normal(k, 33, n).var(1),
    "standard_deviation": lambda k, n: normal(k, 33, n).std(0) * 0.3 + 1.0,
    "layer_norm": lambda k, n: (lambda x: (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5))(
        normal(k, 33, n)
    ),
    "unit_columns": lambda k, n: (lambda x: x / jnp.linalg.norm(x, axis=0))(normal(k, 33, n)),
    "gram": lambda k, n: (lambda a: a.T @ a)(normal(k, 256, min(n, 256))),
    "cholesky": lambda k, n: (lambda a: jnp.linalg.cholesky(a @ a.T + jnp.eye(33)))(normal(k, 33, n)),
    "ball": lambda k, n: jax.random.ball(k, n, 2.0, (5,)),
    "softmax": lambda k, n: jax.nn.softmax(normal(k, 33, n) * 3.0),
    "logsumexp": lambda k, n: jax.nn.logsumexp(normal(k, 33, n), axis=0) / 7.0,
    "cumulative": lambda k, n: jnp.cumsum(normal(k, 33, n) * 0.1, axis=1),
    "einsum": lambda k, n: jnp.einsum("abc,cd->bad", normal(k, 4, 8, n), normal(k, n, 8)) / n,
    "convolved": lambda k, n: jnp.convolve(normal(k, 64 + n), normal(k, n) / 3.0),
    "svd": lambda k, n: (lambda u, s, v: {"u": u, "s": s / s.max(), "v": v})(
        *jnp.linalg.svd(normal(k, 24, n) * 0.1, full_matrices=False)
    ),
    "eigh": lambda k, n: (lambda a: jnp.linalg.eigh(a @ a.T))(normal(k, 24, n))[1],
    "qr": lambda k, n: jnp.linalg.qr(normal(k, 48, n) * 0.5),
    "solved": lambda k, n: jnp.linalg.solve(jnp.eye(16) * 3 + normal(k, 16, 16) * 0.1, normal(k, 16, n)),
    "spectral": lambda k, n: power_iteration(normal(k, 20, n)),
    "half": lambda k, n: (lambda x: x - x.mean(0))(jax.random.normal(k, (33, n), jnp.bfloat16)) * 0.3,
    "whitened_jit": lambda k, n: jax.jit(lambda x: {"mean": x.mean(0), "scaled": (x - x.mean(0)) / x.std(0)})(
        normal(k, 33, n) / 3.0
    ),
    "shared": lambda k, n: (lambda w: {"w": w, "norm": jnp.linalg.norm(w, axis=0), "key": jax.random.split(k)})(
        normal(k, 64, n) * 0.02
    ),
    "vmapped": lambda k, n: jax.vmap(lambda row: (row - row.mean()) / row.std())(normal(k, 16, n)),
}
IN_BRIEF = [
    ("centered", 1), ("layer_norm", 100), ("gram", 128), ("cholesky", 16), ("shared", 100), ("half", 7),
]  # fmt: skip


def test_what_is_computed_from_computed_values(mesh8: Any) -> None:
    assert_eager(lambda key: {f"{name}_{width}": REDUCING[name](key, width) for name, width in IN_BRIEF}, mesh8)


@pytest.mark.large
@pytest.mark.parametrize("name", REDUCING)
def test_what_is_computed_from_computed_values_of_many_shapes(name: str, mesh8: Any, mesh42: Any) -> None:
    for width in SIZES:
        if name in ("eigh", "convolved") and width > 256:
            continue
        for number, key in enumerate(jax.random.split(KEY, 2)):
            assert_eager(lambda key, width=width: REDUCING[name](key, width), mesh8, mesh42, key=key, seed=number)


# --- jax.random and jax.nn.initializers -----------------------------------------------------------------------------

# Distributions by their arguments before the shape.
_DRAWS: dict[str, tuple[Any, ...]] = {
    "bernoulli": (0.3,), "beta": (2.0, 3.0), "binomial": (10.0, 0.3), "bits": (), "cauchy": (), "chisquare": (3.0,),
    "double_sided_maxwell": (0.1, 2.0), "exponential": (), "f": (3.0, 4.0), "gamma": (2.5,),
    "generalized_normal": (1.5,), "geometric": (0.2,), "gumbel": (), "laplace": (), "loggamma": (0.4,), "logistic": (),
    "lognormal": (0.5,), "maxwell": (), "normal": (), "pareto": (2.0,), "poisson": (4.0,), "rademacher": (),
    "rayleigh": (0.5,), "t": (4.0,), "triangular": (0.0, 0.3, 1.0), "truncated_normal": (-2, 2), "wald": (1.5,),
    "weibull_min": (1.0, 2.0),
}  # fmt: skip
DRAWS: dict[str, Callable[..., Any]] = {
    **{
        name: lambda k, s, name=name, given=given: getattr(jax.random, name)(k, *given, shape=s) * 0.02 + 1.0
        for name, given in _DRAWS.items()
    },
    "ball": lambda k, s: jax.random.ball(k, s[-1], shape=s[:-1]),
    "categorical": lambda k, s: jax.random.categorical(k, jnp.arange(9.0) / 7, shape=s),
    "choice": lambda k, s: jax.random.choice(k, jnp.arange(99.0), s, p=jnp.arange(99.0) / 4851),
    "choice_without": lambda k, s: jax.random.choice(k, 5000, (s[-1],), replace=False),
    "dirichlet": lambda k, s: jax.random.dirichlet(k, jnp.ones(s[-1]) * 0.7, s[:-1]),
    "multinomial": lambda k, s: jax.random.multinomial(k, 20, jnp.ones(9) / 9, shape=(s[0], 9)),
    **{
        f"multivariate_{method}": lambda k, s, method=method: jax.random.multivariate_normal(
            k, jnp.zeros(8), jnp.eye(8) * 2 + 0.3, s[:-1], method=method
        )
        for method in ("cholesky", "svd")
    },
    "orthogonal": lambda k, s: jax.random.orthogonal(k, min(s[-1], 64), s[:1]),
    "permutation": lambda k, s: jax.random.permutation(k, jnp.arange(float(s[0] * s[1])).reshape(s), independent=True),
    "randint": lambda k, s: jax.random.randint(k, s, 0, 1000) / 7,
    "uniform": lambda k, s: jax.random.uniform(k, s, minval=-0.3, maxval=0.3),
}


FAMILIES = "glorot xavier he kaiming lecun"
INITIALIZERS: dict[str, Callable[..., Any]] = {
    **{name: getattr(I, name)() for family in FAMILIES.split() for name in (f"{family}_normal", f"{family}_uniform")},
    "zeros": I.zeros,
    "ones": I.ones,
    "constant": I.constant(0.3),
    "uniform": I.uniform(0.1),
    "normal": I.normal(0.02),
    "truncated_normal": I.truncated_normal(0.02),
    "fan_avg_uniform": I.variance_scaling(2.0, "fan_avg", "uniform"),
    "fan_out_normal": I.variance_scaling(0.5, "fan_out", "normal"),
    "fan_in_truncated": I.variance_scaling(1.0, "fan_in", "truncated_normal"),
    "orthogonal": I.orthogonal(1.5),
    "wide_orthogonal": lambda key, shape: I.orthogonal()(key, shape[::-1]).T,
    "delta_orthogonal": lambda key, shape: I.delta_orthogonal()(key, (3, min(shape), max(shape))),
    "half": lambda key, shape: I.lecun_normal()(key, shape, jnp.bfloat16),
    "fused_multiply_add": lambda key, shape: jax.random.normal(key, shape) * 0.02 + 1.0,
    "two_constants": lambda key, shape: jax.random.normal(key, shape) * 0.02 * 0.3 / 7.0,
    "unit_norm": lambda key, shape: (lambda w: w / jnp.linalg.norm(w))(jax.random.normal(key, shape)),
    "unit_columns": lambda key, shape: (lambda w: w / jnp.linalg.norm(w, axis=0))(jax.random.normal(key, shape)),
    "unit_rows": lambda key, shape: (lambda w: w / jnp.linalg.norm(w, axis=-1, keepdims=True))(
        jax.random.normal(key, shape)
    ),
    "centered": lambda key, shape: (lambda w: w - w.mean(0))(jax.random.normal(key, shape)),
    "softmax": lambda key, shape: jax.nn.softmax(jax.random.normal(key, shape)),
    "low_rank": lambda key, shape: jax.random.normal(key, (shape[0], 4)) @ jax.random.normal(key, (4, shape[1])),
    "permutation": lambda key, shape: jax.random.permutation(key, shape[0] * shape[1]).reshape(shape),
    "rotary": lambda key, shape: jnp.sin(jnp.arange(float(shape[0]))[:, None] / 1e4 ** jnp.linspace(0, 1, shape[1])),
}


@pytest.fixture(scope="module")
def initialized() -> tuple[Model, dict[str, jax.Array]]:
    """A model with a variable for each initializer, and their values."""

    def init(key: Any) -> dict[str, jax.Array]:
        return {name: function(key, (80, 64)) for name, function in INITIALIZERS.items()}

    return lm.build_abstract(init, KEY), init(KEY)


# On one device; split into shards that fill vector registers, and into some of eight columns, which do not.
@pytest.mark.parametrize(
    "spec", mostly_large([None, jax.P("model"), jax.P(None, "model")], [jax.P(None, "model")]), ids=str
)
def test_initializers_on_every_sharding(
    initialized: tuple[Model, dict[str, jax.Array]], mesh8: Any, spec: jax.P | None
) -> None:
    model, expected = initialized
    if spec is not None:
        rows = jax.P(None, None, "model")  # of what has three dimensions
        model = model.shard(mesh8, lambda variable: rows if len(variable.shape) == 3 else spec)
    assert_same(model.materialize(), expected)


# Whole-tree jit equals eager execution for these. It does not for `normal(0.02)` with jax 0.10: there XLA multiplies
# the two constants of `sqrt(2) * erf_inv(u) * 0.02` first.
def test_standard_initializers_equal_whole_tree_jit(mesh8: Any) -> None:
    def init(key: Any) -> dict[str, jax.Array]:
        names = ("lecun_normal", "he_uniform", "truncated_normal", "ones")
        return {name: INITIALIZERS[name](key, (256, 128)) for name in names}

    sharded = lm.build_abstract(init, KEY).shard(mesh8, {".*": jax.P("model")})
    whole = jax.jit(init, out_shardings=jax.NamedSharding(mesh8, jax.P("model")))(KEY)
    assert_same(sharded.materialize(), whole)


def test_narrow_orthogonal_matrices(mesh8: Any) -> None:
    """Columns shorter than a vector register, which LAPACK wants one after the other."""

    def init(key: Any) -> list[jax.Array]:
        return [
            I.orthogonal()(each, s)
            for s, each in zip(((16, 4), (4, 16), (33, 7)), jax.random.split(key, 3), strict=True)
        ]

    assert_same(lm.build_abstract(init, KEY).shard(mesh8, {".*": jax.P()}).materialize(), init(KEY))


def test_draws(mesh8: Any) -> None:
    names = ("multivariate_svd", "lognormal")
    assert_eager(lambda key: {name: DRAWS[name](key, (16, 7)) for name in names}, mesh8)


@pytest.mark.large
@pytest.mark.parametrize("name", DRAWS)
def test_draws_of_many_shapes(name: str, mesh8: Any, mesh42: Any) -> None:
    for number, shape in enumerate([(1, 7), (16, 100), (7, 256), (8, 1000), (256, 16)]):
        assert_eager(lambda key, shape=shape: DRAWS[name](key, shape), mesh8, mesh42, seed=number)


@pytest.mark.large
@pytest.mark.parametrize("name", INITIALIZERS)
def test_initializers_of_many_shapes(name: str, mesh8: Any, mesh42: Any) -> None:
    for number, shape in enumerate([(1, 7), (16, 100), (7, 256), (1000, 8), (256, 16), (256, 1000), (100, 100)]):
        assert_eager(lambda key, shape=shape: INITIALIZERS[name](key, shape), mesh8, mesh42, seed=number)


# --- what eager kernels are given, and where they run ---------------------------------------------------------------


def over_devices(function: Callable[[Any], Any], x: Any, out: Any, count: int = 8) -> Any:
    """A function of shards, on as many devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]), ("all",))
    return jax.shard_map(function, mesh=mesh, in_specs=jax.P("all"), out_specs=out)(x)


def constrained(x: Any) -> Any:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("all",))
    return jax.lax.with_sharding_constraint(x * 0.3, jax.NamedSharding(mesh, jax.P("all"))) + x.mean(0)


KERNELS: dict[str, Callable[[Any], Any]] = {
    "vecdot": lambda k: jax.vmap(lambda key: (lambda x: jnp.vecdot(x, x))(normal(key, 8, 16)))(jax.random.split(k, 16)),
    "norms": lambda k: [(lambda x: jnp.vecdot(x, x))(normal(key, 8, 16)) for key in jax.random.split(k, 12)],
    "einsum": lambda k: [(lambda x: jnp.einsum("ij,ij->i", x, x))(normal(key, 8, 24)) for key in jax.random.split(k)],
    "thrice": lambda k: (lambda x: jnp.einsum("ij,ij,ij->j", x, x, x))(normal(k, 33, 16)),
    "roots": lambda k: (lambda x: jax.jit(lambda a, b: jnp.sqrt(a) * jnp.sqrt(b))(x, x))(jnp.abs(normal(k, 16, 16))),
    "roots_of_two": lambda k: (lambda x: jax.jit(lambda a, b: (jnp.sqrt(a) * jnp.sqrt(b), a.sum()))(x, x))(
        jnp.abs(normal(k, 16, 16))
    ),
    "masked": lambda k: jax.random.bernoulli(jax.random.fold_in(k, 1), 0.5, (16, 16)) * normal(k, 16, 16),
    "compared": lambda k: (normal(k, 16) > 0) > 0,
    "four_bits": lambda k: jnp.cumsum(jax.random.randint(k, (8, 16), 0, 3).astype("int4"), -1),
    "four_bits_sorted": lambda k: jnp.sort(jnp.ones((8, 16), "uint4").cumsum(-1), -1)[:, ::-1] * 2,
    "shards": lambda k: over_devices(lambda x: x * 2 + 1, normal(k, 8, 16), jax.P("all")),
    "shards_added": lambda k: over_devices(lambda x: jax.lax.psum(x, "all"), normal(k, 8, 16), jax.P()),
    "shards_factorized": lambda k: jnp.linalg.qr(over_devices(lambda x: x * 2, normal(k, 16, 16), jax.P("all")))[0],
    "shards_of_four": lambda k: over_devices(lambda x: x.sum(0), normal(k, 16, 16), jax.P("all"), 4).reshape(4, 16),
    "constrained": lambda k: jax.jit(constrained)(normal(k, 8, 16)),
    "placed": lambda k: jax.jit(lambda x: x * 0.3 + 1, out_shardings=jax.NamedSharding(
        jax.sharding.Mesh(np.array(jax.devices()[:8]), ("all",)), jax.P("all")))(normal(k, 8, 16)),
    "no_elements": lambda k: [normal(k, 0, 8) * 2, normal(k, 0, 8).sum(0), jnp.zeros((0, 0, 16))],
}  # fmt: skip


@pytest.mark.parametrize(
    "names",
    mostly_large(
        [
            brief := ["thrice", "roots_of_two", "four_bits", "shards_added", "shards_of_four", "placed", "no_elements"],
            [*KERNELS],
        ],
        [brief],
    ),
    ids=["brief", "all"],
)
def test_what_kernels_are_given_and_where_they_run(mesh42: Any, names: list[str]) -> None:
    """Over the devices that some of them name, in their order and in another one."""
    turned = jax.sharding.Mesh(mesh42.devices.ravel()[::-1], ("all",))
    assert_eager(lambda key: {name: KERNELS[name](key) for name in names}, mesh42, turned)
