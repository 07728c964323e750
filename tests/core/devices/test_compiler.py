"""What the compiler says: memory and refusals."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from lazymodel._devices.compiler import compile_memory, out_of_memory
from lazymodel._devices.topology import has_libtpu, topology

GIB = 2**30
needs_libtpu = pytest.mark.skipif(not has_libtpu(), reason='needs libtpu: pip install "lazymodel[tpu]"')


def _struct(mesh: Mesh, shape: tuple[int, ...], *spec: object) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))


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
