"""Bytes that arrays take on devices: what plans count by arithmetic, against the TPU compiler's layouts."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from lazymodel._programs import programs
from tests.conftest import needs_libtpu
from tests.large import mostly_large

GIB = 2**30
PACKED = {"int4": 2, "uint4": 2, "float4_e2m1fn": 2, "int2": 4, "uint2": 4}  # dtype → elements in a byte
DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn", "bool", "uint16", "int32", *PACKED)


def model(shapes: Mapping[str, tuple[tuple[int, ...], str]], mesh: Any, spec: Any = None) -> lm.AbstractModel:
    """A model of zeros, each variable of a shape and dtype."""
    built = lm.build_abstract(lambda: {path: jnp.zeros(*each) for path, each in shapes.items()})
    return built.shard(mesh, lambda variable: spec or P())


def compiled(abstract: lm.AbstractModel) -> jax.stages.Compiled:
    """A program that takes the model and does nothing with it."""
    structs = {path: variable.struct for path, variable in abstract.items()}
    return jax.jit(lambda tree: 0, keep_unused=True).lower(structs).compile()


def check(abstract: lm.AbstractModel) -> None:
    """Every variable's bytes are those of the tiles that the compiler chose, and together those that it reports."""
    program = compiled(abstract)
    formats = program.input_formats[0][0]
    for path, variable in abstract.items():
        layout = formats[path].layout
        sizes = [variable.sharding.shard_shape(variable.shape)[n] for n in layout.major_to_minor] or [1]
        tile = layout.tiling[0] if layout.tiling else ()  # an array without elements has none
        for place, unit in enumerate(tile, len(sizes) - len(tile)):
            sizes[place] += -sizes[place] % unit
        each = PACKED.get(variable.dtype.name, 1) if layout.sub_byte_element_size_in_bits else 1
        assert variable.shard_nbytes == math.prod(sizes) * variable.dtype.itemsize // each, (variable, layout)
    assert sum(variable.shard_nbytes for variable in abstract.values()) == abstract.plan().device_nbytes
    assert abstract.plan().device_nbytes == program.memory_analysis().argument_size_in_bytes


KINDS = [
    *((11_000, 10), (1000, 12), (3, 3, 40, 40), (2, 300), (300, 2), (33, 33), (7, 5, 3, 130), (1, 1), (64, 64)),
    *((), (1,), (64,), (96,), (128,), (129,), (1000,), (1024,), (1025,), (5000,), (0, 4), (2048, 8192)),
]


@needs_libtpu
@pytest.mark.parametrize("dtype", mostly_large(["float32", "bfloat16", "int8", "int4"], ["bfloat16", "int4"]))
def test_one_device_has_the_compilers_bytes(dtype: str) -> None:
    check(model({str(place): (shape, dtype) for place, shape in enumerate(KINDS)}, lm.topology("v5e-1")))


@needs_libtpu
def test_tiles_are_of_the_shard() -> None:
    shapes = {"heads": (96, 80, 3), "square": (96, 96), "vector": (160,)}
    check(model({path: (shape, "float32") for path, shape in shapes.items()}, lm.topology("v5e-8"), P("model")))


@needs_libtpu
def test_a_stated_order_and_the_hosts_memory_are_padded_as_well() -> None:
    mesh = lm.topology("v5e-1")
    built = lm.build_abstract(lambda: jnp.zeros((1000, 10)))
    for order, nbytes in (((0, 1), 1000 * 128 * 4), ((1, 0), 16 * 1024 * 4)):
        placed = built.shard(mesh, lambda _, order=order: Format(Layout(order), NamedSharding(mesh, P())))
        assert compiled(placed).memory_analysis().argument_size_in_bytes == nbytes == placed.plan().device_nbytes
    away = built.shard(mesh, lambda _: NamedSharding(mesh, P(), memory_kind="pinned_host"))
    found, plan = compiled(away).memory_analysis(), away.plan()
    assert found.host_argument_size_in_bytes == plan.offloaded_nbytes == 16 * 1024 * 4
    assert found.argument_size_in_bytes == plan.device_nbytes == 0


def random_shapes(count: int) -> list[tuple[tuple[int, ...], str]]:
    """Shapes of at most 4 Mi elements; many sizes are a power of two, or next to one."""
    generator, found = random.Random(count), list[tuple[tuple[int, ...], str]]()
    near = [size + more for size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) for more in (-1, 0, 1) if size + more]
    for _ in range(count):
        shape: Sequence[int] = ()
        for _ in range(generator.choice((0, 1, 1, 2, 2, 2, 3, 3, 4, 5))):
            size = generator.choice(near) if generator.random() < 0.7 else generator.randrange(1, 5000)
            shape = (*shape, size if math.prod(shape) * size <= 1 << 22 else generator.randrange(1, 9))
        found.append((tuple(generator.sample(shape, len(shape))), generator.choice(DTYPES)))
    return found


@needs_libtpu
@pytest.mark.large
@pytest.mark.parametrize("name", ["v2-8", "v3-8", "v4-8", "v5e-1", "v5p-8", "v6e-1", "v7x-2"])
def test_random_shapes_have_the_compilers_bytes(name: str) -> None:
    """But elements of two bits on v2 and v3, where the arithmetic may be some rows short."""
    early = name in ("v2-8", "v3-8")
    shapes = [each for each in random_shapes(250) if not (early and "int2" in each[1])][:200]
    check(model({str(place): each for place, each in enumerate(shapes)}, lm.topology(name)))


def test_elements_of_less_than_a_byte_are_packed_except_on_cpus(mesh8: Any) -> None:
    shapes = {dtype: ((128, 512), dtype) for dtype in PACKED}
    packed = {dtype: 128 * 512 // each for dtype, each in PACKED.items()}
    for mesh, nbytes in (
        (mesh8, dict.fromkeys(PACKED, 128 * 512)),
        (lm.arithmetic_mesh("v5e-8"), packed),
        (lm.arithmetic_mesh("H100:8"), packed),
    ):
        plan = model(shapes, mesh).plan()
        assert {row.path: row.shard_nbytes for row in plan.rows} == nbytes
        assert {row.path: row.nbytes for row in plan.rows} == nbytes
        assert (plan.device_nbytes, plan.parts["parameters"]) == (sum(nbytes.values()),) * 2
        assert not any(row.padding_nbytes for row in plan.rows)


def test_quantizing_to_int4_counts_what_int4_takes() -> None:
    mesh = lm.arithmetic_mesh("v5e-1")
    whole = model({"w": ((1000, 512), "float32")}, mesh).plan(what_if=lm.WhatIf(quantize="int4"))
    packed = model({"w": ((1000, 512), "int4")}, mesh).plan()
    assert whole.parts["parameters"] == packed.parts["parameters"] + 512 * 4
    assert packed.device_nbytes == 1000 * 512 // 2


def test_the_plan_names_the_padding() -> None:
    tables = {f"table{n}": ((11_000_000, 10), "float32") for n in range(26)}
    abstract = model(tables | {"dense": ((1024, 1024), "float32")}, lm.arithmetic_mesh("v5e-1"))
    plan = abstract.plan()
    padding = 26 * (16 * 11_000_064 - 10 * 11_000_000) * 4
    assert sum(row.padding_nbytes for row in plan.rows) == padding
    assert plan.fits is False
    assert plan.device_nbytes == 26 * 16 * 11_000_064 * 4 + 4 * 2**20
    assert "6.39 GiB of a device are padding of tiles: 'table0', (11000000, 10), takes as much as (11000064, 16)" in (
        plan.notes
    )
    assert not any(
        "padding" in note for note in abstract.shard(lm.arithmetic_mesh("H100:1"), lambda _: P()).plan().notes
    )


@needs_libtpu
def test_what_the_compiler_pads_is_no_activation() -> None:
    abstract = model({"table": ((110_000, 10), "float32"), "int4": ((48, 256, 1024), "int4")}, lm.topology("v5e-1"))
    plan = abstract.plan(compile=lm.Compile("forward", lambda tree: tree["table"][0]))
    assert plan.compiled is not None
    assert plan.parts["parameters"] == plan.compiled.argument_nbytes == 16 * 110_080 * 4 + 48 * 256 * 1024 // 2
    assert plan.parts["activations"] == plan.compiled.peak_nbytes - plan.compiled.argument_nbytes < 2**21


def test_replicated_variables_are_so_with_padding() -> None:
    abstract = model({"odd": ((1000, 10), "float32")}, lm.arithmetic_mesh("v5e-8"))
    assert list(abstract.explain().replicated) == ["odd"]
    assert abstract["odd"].padding_nbytes == 16 * 1024 * 4 - 40_000
    with pytest.raises(lm.DoesNotFitError, match=r"odd 64\.00 KiB \(replicated\)"):
        abstract.plan().check(30_000)


@needs_libtpu
def test_initial_values_that_cannot_be_split_are_whole_while_they_are_made() -> None:
    def init(key: Any) -> Any:
        value = jax.random.normal(key, (1024, 2048))
        return {"norm": value / jnp.linalg.norm(value), "plain": jax.random.normal(key, (1024, 2048))}

    sharded = lm.build_abstract(init, jax.random.key(0)).shard(lm.topology("v5e-8"), lambda _: P("model"))
    plan, program = sharded.plan(), sharded.plan(compile=lm.Compile("init"))
    assert plan.device_nbytes == program.device_nbytes == 2 * 2**20
    assert plan.peak_nbytes == 16 * 2**20
    assert 0.75 < plan.peak_nbytes / program.peak_nbytes < 1.35


@needs_libtpu
def test_wide_orthogonal_matrices_are_said_to_compile_slowly(mesh8: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_SLOW_QR", 16)
    make, tpu = jax.nn.initializers.orthogonal(), lm.topology("v5e-1")
    for shape, mesh, said in (((16, 300), tpu, 1), ((8, 301), tpu, 0), ((16, 302), mesh8, 0)):
        sharded = lm.build_abstract(make, jax.random.key(0), shape).shard(mesh, lambda _: P())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sharded.plan(compile=lm.Compile("init"))
        assert ["unroll its QR decomposition" in str(each.message) for each in caught] == [True] * said
