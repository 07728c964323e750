"""What the compiler says: memory, refusals, collectives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from lazymodel._devices.compiler import collective_bytes, compile_memory, out_of_memory
from lazymodel._devices.topology import has_libtpu, topology

GIB = 2**30
needs_libtpu = pytest.mark.skipif(not has_libtpu(), reason='needs libtpu: pip install "lazymodel[tpu]"')


def _struct(mesh: Mesh, shape: tuple[int, ...], *spec: object) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))


def _compiled(function, *args, **options):
    return jax.jit(function, **options).lower(*args).compile()


# --- memory ----------------------------------------------------------------------------------------------------------


def test_arguments_and_results_are_those_of_one_device(mesh8: Mesh) -> None:
    memory = compile_memory(lambda x: x * 2, _struct(mesh8, (64, 32), "model"))
    assert (memory.argument_nbytes, memory.output_nbytes, memory.alias_nbytes) == (1024, 1024, 0)
    assert memory.peak_nbytes >= 2048
    assert memory.seconds > 0


def test_a_donated_argument_is_counted_once(mesh8: Mesh) -> None:
    memory = compile_memory(lambda x, y: x + y, *[_struct(mesh8, (64, 32), "model")] * 2, donate=[0])
    assert memory.alias_nbytes == 1024
    assert memory.peak_nbytes == 2048 + memory.temporary_nbytes + memory.code_nbytes


@needs_libtpu
def test_a_program_for_devices_that_are_not_here() -> None:
    mesh = topology("v5e:2x4")
    memory = compile_memory(lambda x, w: x @ w, _struct(mesh, (128, 1024)), _struct(mesh, (1024, 8192), None, "model"))
    assert memory.argument_nbytes == (128 * 1024 + 1024 * 8192 // 8) * 4
    assert memory.output_nbytes in (128 * 8192 * 4, 128 * 8192 // 8 * 4)


@needs_libtpu
def test_a_program_that_cannot_fit_says_by_how_much() -> None:
    def much(x):
        return x + 1

    with pytest.raises(lm.DoesNotFitError, match=r"^much needs 32\.00 GiB.* can use 15\.75 GiB, 16\.25 GiB") as caught:
        compile_memory(much, _struct(topology("v5e:2x4"), (8 * 16 * 1024, 1024, 256), "model"))
    assert (caught.value.needed_nbytes, caught.value.limit_nbytes) == (32 * GIB, int(15.75 * GIB))


def test_a_refusal_of_the_allocator_names_the_largest() -> None:
    error = out_of_memory(
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
        "Used 17.50G of 15.75G hbm. Exceeded hbm capacity by 1.75G.\n\n"
        "  Largest program allocations in hbm:\n\n"
        '  1. Size: 8.00G\n     Operator: op_name="jit(f)/dot_general"\n     Shape: f32[2048,1048576]{1,0:T(8,128)}\n'
        "     Unpadded size: 8.00G\n     ==========================\n\n"
        "  2. Size: 512.00M\n     Shape: bf16[256,1048576]{1,0}\n     ==========================\n",
        "step",
    )
    assert (error.needed_nbytes, error.limit_nbytes) == (int(17.5 * GIB), int(15.75 * GIB))
    assert "1.75 GiB too little" in str(error)
    assert "8.00 GiB f32[2048,1048576] jit(f)/dot_general; 512.00 MiB bf16[256,1048576]." in str(error)


def test_a_refusal_in_other_words_is_passed_on() -> None:
    error = out_of_memory("RESOURCE_EXHAUSTED: no room\nmore", "step")
    assert str(error) == "step does not fit, says the compiler: RESOURCE_EXHAUSTED: no room"
    assert error.needed_nbytes is None


# --- collectives -----------------------------------------------------------------------------------------------------


def test_an_all_reduce_is_sent_twice_but_for_ones_own_part(mesh8: Mesh) -> None:
    compiled = _compiled(
        lambda x, w: x @ w,
        _struct(mesh8, (16, 64), None, "model"),
        _struct(mesh8, (64, 32), "model"),
        out_shardings=NamedSharding(mesh8, P()),
    )
    assert collective_bytes(compiled) == {"all-reduce": 2 * 16 * 32 * 4 * 7 // 8}


def test_an_all_gather_is_sent_once_but_for_ones_own_part(mesh42: Mesh) -> None:
    def body(x):
        return jax.lax.all_gather(x, "model", tiled=True)

    everywhere = jax.shard_map(body, mesh=mesh42, in_specs=P("model"), out_specs=P(), check_vma=False)
    compiled = _compiled(everywhere, _struct(mesh42, (16, 32), "model"))
    assert collective_bytes(compiled) == {"all-gather": 16 * 32 * 4 * 1 // 2}  # groups of two


def test_explicit_collectives(mesh8: Mesh) -> None:
    def body(x):
        ring = [(i, (i + 1) % 8) for i in range(8)]
        return (
            jax.lax.ppermute(x, "model", ring),
            jax.lax.all_to_all(x, "model", 0, 0),
            jax.lax.psum_scatter(x, "model", tiled=True),
        )

    everywhere = jax.shard_map(body, mesh=mesh8, in_specs=P("model"), out_specs=P("model"))
    compiled = _compiled(everywhere, _struct(mesh8, (64, 32), "model"))
    assert collective_bytes(compiled) == {
        "reduce-scatter": 1 * 32 * 4 * 7,
        "all-to-all": 8 * 32 * 4 * 7 // 8,
        "collective-permute": 8 * 32 * 4,
    }


def test_without_collectives_there_are_none(mesh8: Mesh) -> None:
    assert collective_bytes(_compiled(lambda x: x * 2, _struct(mesh8, (64, 32), "model"))) == {}


def _scan(x, stacked):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w) @ w.T, None), x, stacked)[0]


def test_a_loop_counts_as_often_as_it_runs(mesh8: Mesh) -> None:
    compiled = _compiled(_scan, _struct(mesh8, (16, 64)), _struct(mesh8, (20, 64, 256), None, None, "model"))
    assert collective_bytes(compiled)["all-reduce"] == 20 * (2 * 16 * 64 * 4 * 7 // 8)


@needs_libtpu
def test_a_loop_of_a_tpu_program_counts_as_often_as_it_runs() -> None:
    mesh = topology("v5e:2x4")
    compiled = _compiled(_scan, _struct(mesh, (128, 1024)), _struct(mesh, (20, 1024, 8192), None, None, "model"))
    assert collective_bytes(compiled) == {"all-reduce": 20 * (2 * 128 * 1024 * 4 * 7 // 8)}


def test_groups_in_every_notation_and_calls_of_every_kind() -> None:
    text = """\
HloModule jit_f, num_partitions=8

%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %add = f32[] add(%a, %b)
}

%cheap (x: f32[8]) -> f32[8] {
  ROOT %p = f32[8]{0} collective-permute(%x), source_target_pairs={{0,1}}
}

%dear (x: f32[8]) -> f32[8] {
  ROOT %q = f32[8]{0} all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%sum
}

%condition (s: (s32[], f32[8])) -> pred[] {
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(7)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %g = (f32[2]{0}, f32[8]{0}) all-gather-start(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
  ROOT %t = (s32[], f32[8]) tuple(%i, %y)
}

%wrapped (x: bf16[8]) -> bf16[8] {
  ROOT %w = bf16[8]{0:T(8,128)(2,1)S(1)} all-to-all(%x), replica_groups=mesh['a'=2,'b'=4] {'b'}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %two = s32[] constant(2)
  %from = s32[] copy(%two)
  %start = (s32[], f32[8]) tuple(/*index=0*/%from, /*index=1*/%x)
  %loop = (s32[], f32[8]) while(%start), condition=%condition, body=%body
  %c = f32[8]{0} conditional(%k, %x, %x), branch_computations={%cheap, %dear}
  %async = ((bf16[8]), bf16[8], s32[]) async-start(%x), calls=%wrapped
  %done = bf16[8] async-done(%async), calls=%wrapped
  ROOT %r = u4[9]{0} all-reduce(%x), replica_groups={}, to_apply=%sum
}
"""
    assert collective_bytes(text) == {
        "all-gather": 5 * (8 * 4 * 3 // 4),  # counted from two to seven
        "all-reduce": 2 * 8 * 4 * 3 // 4 + 2 * 5 * 7 // 8,  # the dearer branch, and nine half bytes over everyone
        "all-to-all": 8 * 2 * 3 // 4,
    }


def test_text_that_is_no_program_has_no_collectives() -> None:
    assert collective_bytes("") == {}
    assert collective_bytes("ENTRY %main {\n  ROOT %x = f32[] while(%x), condition=%main, body=%main\n}") == {}


def test_columns_then_rows_move_less_than_gathering(mesh8: Mesh) -> None:
    def mlp(x, up, down):
        return np.float32(1) * (jnp.tanh(x @ up) @ down)

    x = _struct(mesh8, (16, 64))
    good = _compiled(
        mlp, x, _struct(mesh8, (64, 256), None, "model"), _struct(mesh8, (256, 64), "model"),
        out_shardings=NamedSharding(mesh8, P()),
    )  # fmt: skip
    bad = _compiled(
        mlp, x, _struct(mesh8, (64, 256), "model"), _struct(mesh8, (256, 64), None, "model"),
        out_shardings=NamedSharding(mesh8, P()),
    )  # fmt: skip
    assert sum(collective_bytes(good).values()) < sum(collective_bytes(bad).values())
