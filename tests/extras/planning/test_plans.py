"""What must be rented for Llama-3-70B, and the lines that make it fit."""

from __future__ import annotations

import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import lazymodel as lm

GIB = 2**30
H, A, KV, D, F, V, L = 8192, 64, 8, 128, 28672, 128256, 80
MIXED = lm.WhatIf("adamw", moments="float32", master_weights="float32", batch=8, sequence=4096)


def llama(key: Any) -> dict[str, Any]:
    def normal(*shape: int) -> Any:
        return jax.random.normal(key, shape, "bfloat16")

    layers = {
        "attention": {
            "query": normal(L, H, A, D), "key": normal(L, H, KV, D), "value": normal(L, H, KV, D),
            "out": normal(L, A, D, H),
        },
        "mlp": {"gate": normal(L, H, F), "up": normal(L, H, F), "down": normal(L, F, H)},
        "attention_norm": {"scale": jnp.ones((L, H), "bfloat16")},
        "mlp_norm": {"scale": jnp.ones((L, H), "bfloat16")},
    }  # fmt: skip
    return {"embedding": {"embedding": normal(V, H)}, "lm_head": {"kernel": normal(H, V)}, "layers": layers}


@pytest.fixture(scope="module")
def model() -> lm.AbstractModel:
    return lm.build_abstract(llama, jax.random.key(0))


def gib(nbytes: int) -> float:
    return round(nbytes / GIB, 1)


def test_the_cheapest_change_that_fits(model: lm.AbstractModel) -> None:
    found = lm.plans(model, "v5p-32", "H100:8", "v5p-128", "v5p-256", what_if=MIXED)
    v5p, h100, less, more = found.rows
    assert (v5p.mesh, v5p.changes, v5p.verdict) == ({"fsdp": 8, "model": 2}, {"remat": "full"}, "fits")
    assert (gib(v5p.plan.needed_nbytes), gib(v5p.spare_nbytes)) == (75.1, 20.6)
    assert (h100.mesh, h100.verdict) == ({"fsdp": 8}, "fits")
    assert h100.changes == {"remat": "full", "memory_kind": "pinned_host"}
    assert (gib(h100.plan.needed_nbytes), gib(h100.plan.offloaded_nbytes)) == (46.5, 788.5)
    assert more.plan.needed_nbytes <= less.plan.needed_nbytes and more.changes == {"batch": 16}
    text = str(found)
    assert "v5p-256: a batch of 8 does not divide into 16 parts; 16 does\n" in text
    assert "H100:8: number of hosts unknown, one assumed; set hosts=…\n" in text
    assert found.best is h100  # of 640 GiB, not 1.5 TiB
    assert eval(found.python, {"lm": lm, "abstract": model}).needed_nbytes == h100.plan.needed_nbytes
    assert json.loads(json.dumps(found.to_dict()))["rows"][0]["plan"]["tight"] is False


def test_less_left_than_the_error_of_the_estimate_is_tight(model: lm.AbstractModel) -> None:
    v5p, h100 = lm.plans(model, "v5p-32", "H100:16", what_if=MIXED, axes={"fsdp": 16}).rows
    assert v5p.changes == h100.changes == {"remat": "full", "batch": 16}
    assert (gib(v5p.plan.needed_nbytes), v5p.verdict) == (gib(h100.plan.needed_nbytes), "fits") == (79.3, "fits")
    assert h100.verdict == "tight" and h100.plan.fits and gib(h100.spare_nbytes) == 0.3
    text = " ".join(str(h100.plan).split())
    assert re.search(r"; tight, [\d.]+ MiB to spare, less than the error of the estimate, 3\.4\d GiB", text)


def test_what_was_asked_for_is_not_changed(model: lm.AbstractModel) -> None:
    lora = lm.WhatIf("adamw", lora_rank=16, lora_targets=".*(query|value)", quantize="int8", batch=8, sequence=4096)
    found = lm.plans(model, "H100:8", what_if=lora)
    assert found.rows[0].verdict == "fits" and found.rows[0].changes == {"remat": "full"}
    assert found.shell == "" and eval(found.python, {"lm": lm, "abstract": model}).fits  # no option has targets


def test_without_training_tensor_parallelism_comes_first(model: lm.AbstractModel) -> None:
    """Up to the eight heads of keys; the rest of the mesh stores parameters in shards."""
    small, large = lm.plans(model, "v5e-8", "v5e-16").rows
    assert (small.mesh, small.verdict, gib(small.spare_nbytes)) == ({"model": 8}, "does not fit", -0.7)
    assert (large.mesh, large.verdict, large.changes) == ({"fsdp": 2, "model": 8}, "fits", {})
    assert "nothing fits; more or larger devices" in str(lm.plans(model, "v5e-8"))


def test_hosts_are_limits_too(model: lm.AbstractModel) -> None:
    (row,) = lm.plans(model, "H100:8", what_if=MIXED, host_memory="512GiB").rows
    assert row.verdict == "does not fit a host"
    assert lm.plans(model, "H100:8", what_if=MIXED, host_memory="512GiB", hosts=2).rows[0].verdict == "fits"


def test_models_with_an_optimizer_are_planned_with_it() -> None:
    optax = pytest.importorskip("optax")
    big = lm.build_abstract(lambda key: jax.random.normal(key, (4096, 65536 * 4)), jax.random.key(0))
    own = lm.plans(big.with_optimizer(optax.adam(1e-3)), "v5e-1", "v5e-4").rows
    stated = lm.plans(big, "v5e-1", "v5e-4", what_if=lm.WhatIf("adam")).rows
    assert [row.verdict for row in own] == ["does not fit", "fits"]
    assert own[1].plan.needed_nbytes == stated[1].plan.needed_nbytes + 512, "a count takes a TPU's smallest tile"
    assert stated[0].changes == {"memory_kind": "pinned_host"} and stated[0].verdict == "fits"


def test_what_cannot_be_planned_says_so(model: lm.AbstractModel) -> None:
    given: Any
    options: Any
    for given, options, message in (
        ([], {}, "plans needs at least one topology"),
        (["v5e-8", "v9-1"], {}, "'v9' is not a TPU generation"),
        (["v5e-8"], {"axes": {"model": 6}}, "do not make the 8 devices"),
        (["v5e-8"], {"rules": {".*": P("nowhere")}}, "'nowhere'"),
        (["v5e-8"], {"device_memory": "lots"}, "device_memory"),
    ):
        with pytest.raises(lm.LazyModelError, match=message):
            lm.plans(model, *given, **options)
