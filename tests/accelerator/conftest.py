"""The devices that these tests are for, the sizes that they are given, and CPU devices in their place.

Run by themselves on a machine with an accelerator (`JAX_PLATFORMS= python -m pytest -s tests/accelerator`), the tests
use it. Elsewhere CPU devices count as devices with memory of their own, and everything is tiny.
"""

import contextlib
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from tests.foreign_memory import foreign_memory


@pytest.fixture(scope="session")
def on_accelerator() -> bool:
    """Whether there is one."""
    return jax.default_backend() != "cpu"


@pytest.fixture(autouse=True)
def memory_of_their_own(on_accelerator: bool, repetition: int) -> Iterator[None]:
    """All devices have that."""
    with contextlib.nullcontext() if on_accelerator else foreign_memory(repetition):
        yield


@pytest.fixture(scope="session")
def mesh(on_accelerator: bool) -> Mesh:
    """All devices of this process, or as many of them as a power of two; of CPU devices two."""
    devices = jax.local_devices()
    count = 1 << (len(devices).bit_length() - 1) if on_accelerator else 2
    return Mesh(np.array(devices[:count]), ("model",))


@pytest.fixture(scope="session")
def size(on_accelerator: bool) -> int:
    """How wide models are: a layer of `layers` has 64 MiB in float32, or 16 KiB."""
    return 2048 if on_accelerator else 32
