"""The smallest slice on which a model fits."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.conftest import needs_libtpu

GIB = 2**30

_WIDTH, _LAYERS = 16384, 24  # 1 GiB a layer, none of it made
_RULES = {".*": P(None, "model")}


def _model() -> lm.AbstractModel:
    def init(key: jax.Array) -> dict[str, jax.Array]:
        keys = jax.random.split(key, _LAYERS)
        return {f"layer{i}": jax.random.normal(keys[i], (_WIDTH, _WIDTH), jnp.float32) for i in range(_LAYERS)}

    return lm.build_abstract(init, jax.random.key(0))


def test_what_is_no_device_is_refused() -> None:
    with pytest.raises(lm.LazyModelError, match="'H101' is not a TPU generation; closest: 'H100'"):
        lm.smallest_topology(_model(), "H101", _RULES)
    for name in (8, None):
        with pytest.raises(lm.LazyModelError, match=f"a TPU generation or a GPU, such as 'v5e' or 'H100'; got {name}"):
            lm.smallest_topology(_model(), name, _RULES)  # pyright: ignore[reportArgumentType]


def test_the_smallest_by_arithmetic() -> None:
    table = lm.smallest_topology(_model(), "v5e", _RULES, compile=None)
    assert [(row.name, row.fits) for row in table.rows] == [("v5e:1x1", False), ("v5e:2x2", True)]
    assert table.smallest.device_nbytes == 6 * GIB
    assert table.smallest.compiled_nbytes is None
    assert "24.00 GiB a device even if everything is split" in repr(table)
    assert ["v5e:2x2", "4", "model=4", "6.00", "GiB", "–", "yes"] in [line.split() for line in repr(table).splitlines()]
    assert "<td" in table._repr_html_()


def test_cards_are_counted_by_arithmetic() -> None:
    table = lm.smallest_topology(_model(), "A100-80GB", _RULES)
    assert (table.smallest.name, table.smallest.compiled_nbytes) == ("A100-80GB:1", None)
    assert lm.smallest_topology(_model(), "L4", _RULES).smallest.name == "L4:2"


def test_a_slice_on_which_the_rules_or_axes_do_not_fit_is_passed_over() -> None:
    table = lm.smallest_topology(_model(), "v5e", _RULES, axes={"batch": 8, "model": -1}, compile=None)
    # Only one of eight parts of the mesh splits the model, so 24 GiB need two of them.
    assert (table.smallest.name, dict(table.smallest.axes)) == ("v5e:4x4", {"batch": 8, "model": 2})
    assert "do not make the 1 devices of v5e:1x1" in table.rows[0].reason


def test_what_fits_nowhere_says_what_comes_nearest() -> None:
    replicated = {".*": P()}
    with pytest.raises(lm.DoesNotFitError, match=r"fits on no v5e slice .* nearest is v5e:2x2 with 24\.00 GiB"):
        lm.smallest_topology(_model(), "v5e", replicated, compile=None)
    with pytest.raises(lm.DoesNotFitError, match=r"at most 1 devices.*24\.00 GiB a device even if everything is split"):
        lm.smallest_topology(_model(), "v5e", _RULES, max_devices=1, compile=None)
    with pytest.raises(lm.DoesNotFitError, match="the smallest slice has more"):
        lm.smallest_topology(_model(), "v5p", _RULES, max_devices=1, compile=None)
    with pytest.raises(lm.LazyModelError, match="'v9' is not a TPU generation"):
        lm.smallest_topology(_model(), "v9", _RULES)


@needs_libtpu
def test_the_compiler_confirms_the_smallest() -> None:
    row = lm.smallest_topology(_model(), "v5e", _RULES).smallest
    assert row.name == "v5e:2x2"
    assert row.device_nbytes is not None and row.compiled_nbytes is not None
    assert row.compiled_nbytes == pytest.approx(row.device_nbytes, rel=0.1)


@needs_libtpu
def test_what_the_compiler_refuses_is_passed_over() -> None:
    def forward(tree: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ tree["layer0"]) + 1

    # 20 GiB of input on every device: no v5e has room, though the variables alone would fit.
    x = jax.ShapeDtypeStruct((20 * 16384, 16384), jnp.float32)
    with pytest.raises(lm.DoesNotFitError, match="fits on no v5e slice"):
        lm.smallest_topology(_model(), "v5e", _RULES, max_devices=4, compile=lm.Compile("forward", forward, x))


@needs_libtpu
def test_init_programs_compile_for_devices_that_are_not_here() -> None:
    plan = _model().shard(lm.topology("v5e:2x4"), _RULES).plan(compile=lm.Compile("init"))
    assert plan.device_nbytes == _WIDTH * _WIDTH * 4 * _LAYERS // 8
    assert plan.device_memory == lm.device_memory("v5e")
    assert plan.fits
