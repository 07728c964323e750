"""Every verb on a mesh without devices, and on devices that are only compiled for: it works, or says what it needs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from lazymodel._devices.compiler import compile_memory
from lazymodel._devices.topology import has_libtpu

RULES = {"kernel": P(None, "model"), "bias": P()}


def init(key: Any) -> dict[str, Any]:
    return {"kernel": jax.random.normal(key, (64, 256)), "bias": jnp.zeros(256)}


def on(mesh: Any) -> lm.AbstractModel:
    return lm.build_abstract(init, jax.random.key(0)).shard(mesh, RULES)


@pytest.fixture(params=["without devices", "cards without devices"])
def arithmetic(request: pytest.FixtureRequest) -> lm.AbstractModel:
    return on(lm.arithmetic_mesh("v5e:2x4" if request.param == "without devices" else "H100:8"))


def test_explain_on_a_mesh_without_devices(arithmetic: lm.AbstractModel) -> None:
    text = str(arithmetic.explain("kernel"))
    assert "each of 8 devices holds (64, 32), 8.00 KiB" in text
    assert "axis 'model' (8) divides dimensions 0, 1" in text
    report = arithmetic.explain()
    assert (report.num_devices, report.fullest_nbytes, report.emptiest_nbytes) == (8, 9216, 9216)
    assert dict(report.replicated) == {"bias": "(256,), 1.00 KiB: rule 'bias' matches"}
    assert report.imbalance == pytest.approx(9216 * 8 / (64 * 256 * 4 + 1024))


def test_what_looks_at_shapes_works_without_devices(arithmetic: lm.AbstractModel) -> None:
    assert arithmetic.plan().device_nbytes == 9216
    assert "9.00 KiB per device on 8 devices" in repr(arithmetic)
    assert "9.00 KiB per device on 8 devices" in arithmetic._repr_html_()
    assert arithmetic.tree["kernel"].sharding.shard_shape((64, 256)) == (64, 32)
    assert arithmetic.rekey(1).reinitialize("bias", jax.nn.initializers.ones)["bias"].spec == P()
    found = lm.smallest_topology(arithmetic, "v5e", RULES, compile=None)
    assert found.smallest.num_devices == 1


def test_what_needs_devices_says_so(arithmetic: lm.AbstractModel) -> None:
    before = "'bias' is sharded over a mesh without devices .* before it is materialized"
    with pytest.raises(lm.LazyModelError, match=before):
        arithmetic.materialize()
    with pytest.raises(lm.LazyModelError, match=before):
        arithmetic.materialize({"kernel": np.ones((64, 256), "f"), "bias": np.ones(256, "f")})
    for compile in ("init", "forward", "train"):
        function = None if compile == "init" else lambda tree: tree["bias"].sum()
        with pytest.raises(lm.LazyModelError, match=f"compiling '{compile}' needs devices .* lazymodel.topology"):
            arithmetic.plan(compile=lm.Compile(compile, function))
    with pytest.raises(lm.LazyModelError, match=r"sharded over a mesh without any .* lazymodel\.topology"):
        compile_memory(lambda tree: tree["bias"] + 1, arithmetic.tree)


@pytest.mark.skipif(not has_libtpu(), reason='needs libtpu: pip install "lazymodel[tpu]"')
def test_devices_that_are_only_compiled_for_hold_nothing() -> None:
    model = on(lm.topology("v5e:2x4"))
    assert model.explain().num_devices == 8
    with pytest.raises(lm.LazyModelError, match="'bias' is sharded over devices that are not here"):
        model.materialize()
    with pytest.raises(lm.LazyModelError, match="'bias' is sharded over devices that are not here"):
        model.materialize({"kernel": np.ones((64, 256), "f"), "bias": np.ones(256, "f")})
