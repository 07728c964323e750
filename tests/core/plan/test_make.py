"""Plans: arithmetic on shardings, what use adds, hosts, the timeline, devices that are not here, bad arguments."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from lazymodel._plan.steps import _cpu_temporaries

KIB = 1024


def init(key):
    keys = jax.random.split(key, 3)
    return {
        "embed": {"table": jax.random.normal(keys[0], (512, 64))},
        "layer_0": {
            "query": {"kernel": jax.random.normal(keys[1], (64, 64)), "bias": jnp.zeros(64)},
            "up": {"kernel": jax.random.normal(keys[2], (64, 256))},
        },
        "steps": jnp.zeros((), jnp.int32),
    }


def sharded(mesh):
    specs = {"table": P("model"), "kernel": P(None, "model")}
    model = lm.build_abstract(init, jax.random.key(0))
    return model.with_variables(
        {path: placed(v, NamedSharding(mesh, specs.get(path.split("/")[-1], P()))) for path, v in model.items()}
    )


def placed(variable, sharding):
    return dataclasses.replace(variable, sharding=sharding)


def abstract_mesh(devices=8):
    return AbstractMesh((devices,), ("model",))


SHARDS = {"embed/table": 16 * KIB, "layer_0/query/kernel": 2 * KIB, "layer_0/query/bias": 256,
          "layer_0/up/kernel": 8 * KIB, "steps": 4}  # fmt: skip


def test_arithmetic_needs_no_devices():
    model = sharded(abstract_mesh())
    plan = model.plan(device_memory="1GiB")
    assert {row.path: row.shard_nbytes for row in plan.rows} == SHARDS
    assert plan.device_nbytes == plan.peak_nbytes == plan.used_nbytes == sum(SHARDS.values())
    assert (plan.num_devices, plan.programs, plan.hosts, plan.mesh) == (8, 0, (), {"model": 8})
    assert len(model.programs) == 0
    assert plan.fits
    assert "temporaries of init programs are estimated" in plan.notes[0]


def test_the_timeline_ends_with_everything_held(mesh8):
    plan = sharded(mesh8).plan()
    assert [step.held_nbytes for step in plan.timeline] == sorted(step.held_nbytes for step in plan.timeline)
    assert plan.timeline[-1].held_nbytes == plan.device_nbytes == sum(SHARDS.values())
    assert max(step.peak_nbytes for step in plan.timeline) == plan.peak_nbytes > plan.device_nbytes
    assert plan.programs == 4  # three normal ones, and the bias
    (host,) = plan.hosts
    assert (host.num_devices, host.device_nbytes) == (8, 8 * plan.device_nbytes)
    assert host.peak_nbytes >= host.device_nbytes  # CPU devices are host memory


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_compiled_and_estimated_temporaries_agree(mesh8, dtype, itemsize):
    """What is said of XLA:CPU in `_CPU_TEMPORARIES`, held against its compiler for large arrays."""
    model = lm.build_abstract(lambda key: jax.random.normal(key, (4096, 4096), dtype), jax.random.key(0))
    model = model.shard(mesh8, lambda variable: P("model"))
    compiled = model.plan()
    estimate = _cpu_temporaries(4096 * 4096 // 8 * itemsize, itemsize)
    assert compiled.peak_nbytes - compiled.device_nbytes == pytest.approx(estimate, rel=1e-3)


@pytest.mark.parametrize(("optimizer", "slots"), [("adamw", 2), ("SGD", 0), (3, 3), (["float32", "bfloat16"], 1.5)])
def test_training_adds_gradients_and_slots(optimizer, slots):
    plan = sharded(abstract_mesh()).plan(what_if=lm.WhatIf(optimizer=optimizer))
    trained = sum(SHARDS.values()) - SHARDS["steps"]  # a counter is no parameter
    assert plan.parts["gradients"] == trained
    assert plan.parts.get("optimizer state", 0) == slots * trained
    assert plan.needed_nbytes == plan.used_nbytes == sum(SHARDS.values()) + (1 + slots) * trained
    assert sum(row.used_nbytes for row in plan.rows) == plan.used_nbytes
    assert plan.rows[-1].used_nbytes == SHARDS["steps"]


def test_lora_trains_the_pairs_only():
    plan = sharded(abstract_mesh()).plan(what_if=lm.WhatIf(optimizer="adam", lora_rank=4))
    first, last = 64 * 4 * 4, 4 * 64 * 4 // 8  # the kernel's columns are split, and so are the second's
    assert plan.parts == {
        "parameters": sum(SHARDS.values()),
        "LoRA": first + last,
        "optimizer state": 2 * (first + last),
        "gradients": first + last,
    }
    everything = sharded(abstract_mesh()).plan(what_if=lm.WhatIf(lora_rank=4, lora_targets=".*/kernel"))
    assert everything.parts["LoRA"] == first + last + first + 4 * 256 * 4 // 8


@pytest.mark.parametrize(("mode", "share"), [("int8", 4), ("int4", 8)])
def test_quantizing_leaves_less_than_was_materialized(mode, share):
    plan = sharded(abstract_mesh()).plan(what_if=lm.WhatIf(quantize=mode))
    scales = 4 * (64 + 8 + 32)  # a float32 a column of what each device holds
    small = SHARDS["layer_0/query/bias"] + SHARDS["steps"]
    assert plan.device_nbytes == plan.peak_nbytes == sum(SHARDS.values())
    assert plan.used_nbytes == (sum(SHARDS.values()) - small) // share + scales + small


def test_what_is_compiled_is_the_compilers(mesh8):
    model = sharded(mesh8)

    def forward(tree, x):
        return (x @ tree["layer_0"]["query"]["kernel"]) @ tree["layer_0"]["up"]["kernel"]

    x = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    plan = model.plan(compile=lm.Compile("forward", forward, x))
    assert plan.compiled is not None
    assert plan.used_nbytes == plan.compiled.peak_nbytes > plan.device_nbytes + x.size * 4
    assert plan.notes[-1] == "compiled forward pass: forward"

    def loss(tree, x):
        return jnp.mean(forward(tree, x) ** 2), "auxiliary"

    trained = model.plan(what_if=lm.WhatIf(optimizer="adam"), compile=lm.Compile("train", loss, x))
    assert "gradients" not in trained.parts  # they are among the compiler's temporaries
    assert trained.parts["optimizer state"] == 2 * (sum(SHARDS.values()) - SHARDS["steps"])
    assert trained.compiled.peak_nbytes > trained.parts["parameters"] + trained.parts["optimizer state"]
    pairs = model.plan(what_if=lm.WhatIf(optimizer="adam", lora_rank=2), compile=lm.Compile("train", loss, x))
    assert pairs.compiled.argument_nbytes < trained.compiled.argument_nbytes


def test_variables_on_several_meshes_count_where_they_are():
    devices = jax.devices()
    half = Mesh(np.asarray(devices[:4]), ("model",))
    other = Mesh(np.asarray(devices[4:8]), ("model",))
    model = lm.build_abstract(lambda: {"a": jnp.zeros((64, 64)), "b": jnp.zeros((64, 32))})
    model = model.with_variables(
        {
            "a": placed(model["a"], NamedSharding(half, P("model"))),
            "b": placed(model["b"], NamedSharding(other, P())),
        }
    )
    plan = model.plan(what_if=lm.WhatIf(optimizer="sgd"))
    assert plan.num_devices == 8
    assert plan.device_nbytes == 64 * 32 * 4  # `b` is whole on the other half
    assert plan.parts == {"parameters": 64 * 32 * 4, "gradients": 64 * 32 * 4}


def test_what_does_not_fit_says_what_would():
    model = sharded(abstract_mesh())
    with pytest.raises(lm.DoesNotFitError, match=r"needs 26\.25 KiB on a device .*Largest on a device: embed/table "
                                                 r"16\.00 KiB.* it would fit 16 such devices") as raised:  # fmt: skip
        model.plan(device_memory="16KiB").check()
    assert "bfloat16" in str(raised.value)
    replicated = model.with_variables(
        {path: placed(v, NamedSharding(abstract_mesh(), P())) for path, v in model.items()}
    )
    with pytest.raises(lm.DoesNotFitError, match="replicated on every device, which no number of devices mends"):
        replicated.plan().check("64KiB")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "adamx"}, "optimizer 'adamx' is not known; closest: 'adam"),
        ({"optimizer": -1}, "optimizer is a name, a number of slots or their dtypes; got -1"),
        ({"lora_rank": 0}, "lora_rank is a positive number; got 0"),
        ({"lora_rank": 2, "lora_targets": "("}, "not a regular expression"),
        ({"lora_targets": ".*"}, "lora_targets was given without lora_rank"),
        ({"quantize": "int3"}, "quantize is 'int8' or 'int4'; got 'int3'"),
    ],
)
def test_what_is_stated_is_checked_when_it_is(options, message):
    with pytest.raises(lm.LazyModelError, match=message):
        lm.WhatIf(**options)


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        (("fast",), {}, "what is compiled is a jitted function or one of 'init', .*; got 'fast'"),
        (("forward",), {"batch": 0}, "batch and sequence are positive numbers; got {'batch': 0}"),
        (("forward",), {"sequence": True}, "batch and sequence are positive numbers; got {'sequence': True}"),
        (("forward",), {"inputs": (jnp.ones(2),)}, "a keyword of 'forward' is batch or sequence; got inputs"),
        (("train", len), {"batch": 4}, "batch and sequence are for a model's own functions"),
    ],
)
def test_what_is_compiled_is_checked_when_it_is_said(args, options, message):
    with pytest.raises(lm.LazyModelError, match=message):
        lm.Compile(*args, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"what_if": lm.WhatIf(lora_rank=2, lora_targets="nothing")}, "no variable of .* is a LoRA target 'nothing'"),
        (
            {"what_if": lm.WhatIf(quantize="int8", optimizer="adam")},
            "quantized parameters cannot be trained; add lora_rank",
        ),
        ({"what_if": lm.WhatIf(quantize="int8"), "compile": lm.Compile("train")}, "plan them one by one"),
        ({"what_if": "adam"}, "what_if is a lazymodel.WhatIf, .*; got 'adam'"),
        ({"compile": "forward"}, "compile is a lazymodel.Compile, .*; got 'forward'"),
        ({"compile": lm.Compile("forward", len)}, "needs devices to compile for"),
        ({"device_memory": "16 potatoes"}, "cannot read '16 potatoes' as bytes"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(lm.LazyModelError, match=message):
        sharded(abstract_mesh()).plan(**options)


def numpy_leaves():
    def make(key):
        return {"w": jax.random.normal(key, (64, 64)), "table": np.zeros((64, 64), "float32"), "wide": np.zeros(8)}

    return lm.build_abstract(make, jax.random.key(0))


@pytest.mark.parametrize("make_mesh", [abstract_mesh, lambda: Mesh(np.asarray(jax.devices()), ("model",))])
def test_numpy_leaves_are_no_device_s_unless_they_are_split(make_mesh):
    rules = {"w": P("model"), "table": P(), "wide": P("model")}  # float64 stays on the host whatever the rules say
    model = numpy_leaves().shard(make_mesh(), rules)
    plan = model.plan()
    shard = 64 * 64 * 4 // 8
    assert plan.device_nbytes == plan.used_nbytes == plan.parts["parameters"] == shard
    assert {row.path: (row.shard_nbytes, row.used_nbytes) for row in plan.rows if row.path != "w"} == {
        "table": (0, 0), "wide": (0, 0)
    }  # fmt: skip
    assert plan.timeline[-1].held_nbytes == shard and len(plan.timeline) == 1
    assert {cells[0]: cells[-3] for cells in plan.table().rows} == {
        "w": "P('model')", "table": "on the host", "wide": "on the host"
    }  # fmt: skip
    report = model.explain()
    assert (report.fullest_nbytes, report.imbalance, report.replicated) == (shard, 1.0, {})
    assert report.on_host == {
        "table": "(64, 64), 16.00 KiB: a NumPy array, which nothing splits over devices",
        "wide": "(8,), 64 B: a NumPy array of float64, which devices hold with jax_enable_x64 only: on the host",
    }
    assert "on the host: 2 variables\n  table (64, 64), 16.00 KiB: a NumPy array" in str(report)
    assert str(model.explain("table")).endswith("on the host: a NumPy array, which nothing splits over devices")
    assert "2.00 KiB per device on 8 devices" in repr(model)
    rows = {cells[0]: (cells[-3], cells[-2]) for cells in model.table().rows}
    assert rows["table"] == rows["wide"] == ("on the host", "0 B") and rows["w"] == ("P('model')", "2.00 KiB")
    assert {cells[0]: cells[-2] for cells in numpy_leaves().table().rows}["table"] == "16.00 KiB"
    split = numpy_leaves().shard(make_mesh(), rules | {"table": P(None, "model")}).plan()
    assert split.device_nbytes == split.parts["parameters"] == 2 * shard
    for host, other in zip(plan.hosts, split.hosts, strict=True):
        assert host.peak_nbytes >= host.device_nbytes + 64 * 64 * 4 + 8 * 8  # CPU devices are host memory
        assert other.device_nbytes == host.device_nbytes + 8 * shard


def test_unsharded_numpy_leaves_are_on_no_device():
    plan = numpy_leaves().plan()
    assert plan.device_nbytes == plan.parts["parameters"] == 64 * 64 * 4
    quantized = numpy_leaves().plan(what_if=lm.WhatIf(quantize="int8"))
    assert quantized.parts["parameters"] == 64 * 64 + 64 * 4  # and a scale a column


def test_a_function_is_needed_to_compile_one(mesh8):
    with pytest.raises(lm.LazyModelError, match=r"needs a function and its inputs: Compile\('train', f"):
        sharded(mesh8).plan(compile=lm.Compile("train"))
