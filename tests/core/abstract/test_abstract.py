"""An abstract model as a value: copied, never pickled, with the bytes that each device of its shardings holds."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from lazymodel.__main__ import main


def test_copies_and_pickles() -> None:
    """It never changes, so a copy is the model itself; its programs cannot go to another process."""
    abstract = lm.build_abstract(lambda key: {"w": jax.random.normal(key, (4,))}, jax.random.key(0))
    assert copy.copy(abstract) is abstract
    assert copy.deepcopy({"model": abstract})["model"] is abstract
    with pytest.raises(lm.LazyModelError, match=r"cannot be pickled.*build_abstract"):
        pickle.dumps(abstract)


def test_what_the_command_line_needs_of_a_framework_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lazymodel_keras", None)
    assert main(["plan", "some_preset"]) != 0
    printed = capsys.readouterr()
    assert "needs lazymodel_keras" in printed.out + printed.err
    assert "pip install 'lazymodel[keras]'" in printed.out + printed.err


# --- bytes on each device -------------------------------------------------------------------------------------------

DEVICES = jax.devices()
HALF, WHOLE = Mesh(np.asarray(DEVICES[:4]), ("x",)), Mesh(np.asarray(DEVICES[:8]), ("x",))
EIGHT, THOUSAND = AbstractMesh((8,), ("x",)), AbstractMesh((1024,), ("x",))
A, B, N = 64 * 8 * 4, 64 * 4, 64 * 4  # bytes of the variables; `n` is an array of NumPy

PLACES: dict[str, tuple[dict[str, Any], int, int]] = {  # shardings, bytes of the most loaded device, and devices
    "two meshes": ({"a": NamedSharding(HALF, P("x")), "b": NamedSharding(WHOLE, P("x"))}, A // 4 + B // 8, 8),
    "one of four": ({"a": SingleDeviceSharding(DEVICES[3]), "b": NamedSharding(HALF, P())}, A + B, 4),
    "NumPy whole": ({path: NamedSharding(EIGHT, P()) for path in "abn"}, A + B, 8),
    "NumPy split": ({path: NamedSharding(EIGHT, P("x" if path == "n" else None)) for path in "abn"}, A + B + N // 8, 8),
    "many": ({path: NamedSharding(THOUSAND, P()) for path in "abn"}, A + B, 1024),
    # What has no sharding lies on a device of its own, one that is here.
    "a mesh and none": ({"a": NamedSharding(EIGHT, P("x"))}, A // 8, 9),
}


@pytest.mark.parametrize("case", PLACES)
def test_bytes_on_the_most_loaded_device(case: str) -> None:
    shardings, nbytes, devices = PLACES[case]
    abstract = lm.build_abstract(lambda: {"a": jnp.zeros((64, 8)), "b": jnp.zeros(64), "n": np.zeros(64, "f")})
    placed = {path: dataclasses.replace(v, sharding=shardings.get(path)) for path, v in abstract.items()}
    model = abstract.with_variables(placed)
    values = {path: np.zeros(variable.shape, variable.dtype) for path, variable in model.items()}
    for plan in (model.plan(), model.plan(values)):
        assert (plan.device_nbytes, plan.num_devices) == (nbytes, devices)
    if devices != 9:
        held = f"{nbytes} B" if nbytes < 1024 else f"{nbytes / 1024:.2f} KiB"
        assert f" {held} per device on {devices:,} devices" in repr(model)
