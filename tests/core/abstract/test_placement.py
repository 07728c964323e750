"""Who holds what: bytes on each device, of devices that are here and of a mesh's numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from lazymodel._abstract.placement import Placement, device_nbytes, device_shardings


def model(shardings: dict[str, Any]) -> lm.AbstractModel:
    abstract = lm.build_abstract(lambda: {"a": jnp.zeros((64, 8)), "b": jnp.zeros(64), "n": np.zeros(64, "f")})
    placed = {path: dataclasses.replace(v, sharding=shardings.get(path)) for path, v in abstract.items()}
    return abstract.with_variables(placed)


def test_bytes_on_each_device_of_several_meshes() -> None:
    devices = jax.devices()
    half, whole = Mesh(np.asarray(devices[:4]), ("x",)), Mesh(np.asarray(devices[:8]), ("x",))
    abstract = model({"a": NamedSharding(half, P("x")), "b": NamedSharding(whole, P("x"))})
    assert device_nbytes(abstract.values()) == {
        device: 64 * 8 // 4 * 4 * (index < 4) + 64 // 8 * 4 for index, device in enumerate(devices[:8])
    }
    one = model({"a": SingleDeviceSharding(devices[3]), "b": NamedSharding(half, P())})
    assert device_nbytes(one.values()) == {d: 64 * 4 + 64 * 8 * 4 * (d == devices[3]) for d in devices[:4]}
    assert device_nbytes(model({}).values()) == {}


@pytest.mark.parametrize(("spec", "split"), [(P(), 0), (P("x"), 64 * 4 // 8)])
def test_numpy_arrays_count_where_they_are_split(spec: P, split: int) -> None:
    mesh = AbstractMesh((8,), ("x",))
    abstract = model({"b": NamedSharding(mesh, P()), "n": NamedSharding(mesh, spec)})
    assert device_nbytes(abstract.values()) == dict.fromkeys(range(8), 64 * 4 + split)


def test_a_thousand_devices_are_one_group() -> None:
    mesh = AbstractMesh((1024,), ("x",))
    placement = Placement(device_shardings(model({path: NamedSharding(mesh, P()) for path in "abn"})))
    assert len(placement.signatures) == 1 and placement.signatures.total() == len(placement.devices) == 1024
    signature, nbytes = placement.fullest({"a": 5, "b": 7})
    assert nbytes == placement.held({"a": 5, "b": 7})[signature] == 12
    assert placement.meshes == [mesh]


def test_what_has_no_sharding_beside_a_mesh_without_devices_is_planned_too() -> None:
    mesh = AbstractMesh((8,), ("x",))
    abstract = model({"a": NamedSharding(mesh, P("x"))})
    values = {path: np.zeros(v.shape, v.dtype) for path, v in abstract.items()}
    for plan in (abstract.plan(), abstract.plan(values)):
        assert plan.device_nbytes == 64 * 8 * 4 // 8  # `b` lies on a device of its own, one that is here
        assert plan.num_devices == 9
