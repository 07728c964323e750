"""Packages whose inits compute: built, materialized equal to their own code, and resumed; each skipped if missing.

`requirements_computing.txt` lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lazymodel as lm

from .support_table import leaves

pytestmark = [pytest.mark.large, pytest.mark.timeout(900)]
KEY = jax.random.key(0)


def haiku() -> dict[str, Any]:
    hk = pytest.importorskip("haiku")
    images = jnp.zeros((1, 32, 32, 3))
    resnet = hk.transform_with_state(lambda x: hk.nets.ResNet18(10)(x, True)).init
    return {"ResNet18": lambda key: resnet(key, images)}


def flowjax() -> dict[str, Any]:
    flows = pytest.importorskip("flowjax.flows")
    base = pytest.importorskip("flowjax.distributions").Normal
    spline = pytest.importorskip("flowjax.bijections").RationalQuadraticSpline

    def flow(name: str, **options: Any) -> Callable[[Any], Any]:
        return lambda key: getattr(flows, name)(key, base_dist=base(jnp.zeros(3)), flow_layers=2, **options)

    return {
        "coupling": flow("coupling_flow"),
        "autoregressive": flow("masked_autoregressive_flow"),
        "neural autoregressive": flow("block_neural_autoregressive_flow"),
        "planar": flow("planar_flow"),
        "triangular spline": flow("triangular_spline_flow"),
        "coupling of splines": lambda key: flow("coupling_flow", transformer=spline(knots=5, interval=4))(key),
    }


def jaxley() -> dict[str, Any]:
    jx = pytest.importorskip("jaxley")
    channels = pytest.importorskip("jaxley.channels")

    def cell(key: Any) -> Any:
        made = jx.Cell(jx.Branch(jx.Compartment(), ncomp=2), parents=[-1, 0, 0])
        made.insert(channels.HH())
        made.make_trainable("radius")
        return {"parameters": made.get_parameters(), "noise": jax.random.normal(key, (3,))}

    return {"cell": cell}


def distrax() -> dict[str, Any]:
    dx = pytest.importorskip("distrax")

    def flow(key: Any) -> Any:
        shifted = dx.Block(dx.ScalarAffine(jax.random.normal(key, (3,)), 2.0), 1)
        return dx.Transformed(dx.MultivariateNormalDiag(jnp.zeros(3), jnp.ones(3)), dx.Chain([shifted]))

    def mixture(key: Any) -> Any:
        parts = dx.Normal(jax.random.normal(key, (4,)), jnp.ones(4))
        return dx.MixtureSameFamily(dx.Categorical(jnp.zeros(4)), parts)

    return {
        "diagonal": lambda key: dx.MultivariateNormalDiag(jax.random.normal(key, (3,)), jnp.ones(3)),
        "flow": flow,
        "mixture": mixture,
    }


def numpyro() -> dict[str, Any]:
    npr, infer = pytest.importorskip("numpyro"), pytest.importorskip("numpyro.infer")
    guides, dist = pytest.importorskip("numpyro.infer.autoguide"), pytest.importorskip("numpyro.distributions")

    def model(x: Any) -> None:
        scale = npr.sample("scale", dist.LogNormal(0, 1))
        npr.sample("x", dist.Normal(npr.sample("mean", dist.Normal(0, 1)), scale), obs=x)

    def guide(name: str) -> Callable[[Any], Any]:
        def init(key: Any) -> Any:  # anew for each build: a guide keeps what its first call makes
            svi = infer.SVI(model, getattr(guides, name)(model), npr.optim.Adam(1e-2), infer.Trace_ELBO())
            return svi.init(key, jnp.arange(5.0))

        return init

    # Not those that join all latent variables in one vector: numpyro itself orders these otherwise when it is traced.
    return {name: guide(name) for name in ("AutoNormal", "AutoIAFNormal")}


def brax() -> dict[str, Any]:
    envs = pytest.importorskip("brax.envs")
    return {"inverted_pendulum": envs.get_environment("inverted_pendulum", backend="generalized").reset}


def jax_md() -> dict[str, Any]:
    energy, simulate = pytest.importorskip("jax_md.energy"), pytest.importorskip("jax_md.simulate")
    displacement, shift = pytest.importorskip("jax_md.space").periodic(10.0)
    init, _ = simulate.nve(energy.soft_sphere_pair(displacement), shift, 1e-3)
    places = jax.random.uniform(jax.random.key(1), (64, 2)) * 10
    return {"nve": lambda key: init(key, places, kT=1.0)}


@pytest.mark.parametrize("package", [haiku, flowjax, jaxley, distrax, numpyro, brax, jax_md], ids=lambda p: p.__name__)
def test_it_builds_equals_and_resumes(package: Callable[[], dict[str, Any]], tmp_path: Path, mesh8: Any) -> None:
    for name, init in package().items():
        expected = leaves(init(KEY))
        abstract = lm.build_abstract(init, KEY)
        made = abstract.materialize(progress=False)
        assert_equal(leaves(made), expected)
        lm.save_step(made, tmp_path / name, step=1)
        sharded = abstract.shard(mesh8, {".*": jax.P()}) if len(abstract) else abstract
        assert_equal(leaves(lm.restore(sharded, tmp_path / name)), expected)


def assert_equal(made: list[Any], expected: list[Any]) -> None:
    assert len(made) == len(expected) > 0
    for one, other in zip(made, expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
