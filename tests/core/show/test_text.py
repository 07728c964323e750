"""What a person writes as a byte count is read exactly or refused with one clear error, wherever it is written."""

from __future__ import annotations

import decimal
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import lazymodel as lm
from tests.command import main


@pytest.fixture(scope="module")
def model() -> lm.AbstractModel:
    return lm.build_abstract(lambda: {"w": jnp.zeros((256, 1024))})


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("512", 512),
        ("16GiB", 16 << 30),
        (" 64 MB ", 64_000_000),
        ("1.5kib", 1536),
        ("0.1PB", 100_000_000_000_000),  # not a float's idea of it
        ("9007199254740993", 9007199254740993),
        (np.int64(5), 5),
        (16e9, 16_000_000_000),
        (np.float32(2.0), 2),
    ],
)
def test_counts_are_exact(model: lm.AbstractModel, text: Any, count: int) -> None:
    found = model.plan(device_memory=text).device_memory
    assert found == count and type(found) is int


NONSENSE: list[Any] = [
    *("", " ", "nan", "inf", "-1", "-1GiB", "+4", "1e9", "1_000", "0x10", ".5GiB", "5.GiB", "16 potatoes", "GiB"),
    *("٣GiB", "true", "16Gi", "1,5GiB", "9" * 400, "9" * 400 + "GiB", "9EiB", "lots", "0", "0.4"),
    *(0, -1, True, False, np.True_, math.nan, math.inf, -math.inf, np.nan, 1.5, 1e300, 10**30, 1 << 63),
    *(b"4GiB", [1], np.array([4]), np.array(4.5), decimal.Decimal(4), 1j, {}, object()),
]


@pytest.mark.parametrize("value", NONSENSE, ids=lambda value: repr(value)[:12])
def test_nonsense_is_refused_by_name(model: lm.AbstractModel, value: Any) -> None:
    with pytest.raises(lm.LazyModelError, match="^device_memory") as caught:
        model.plan(device_memory=value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("value", [0, 511, "0.4", math.nan, True, "lots"])
def test_budgets_are_refused_before_anything_is_read(model: lm.AbstractModel, tmp_path: Path, value: Any) -> None:
    save_file({"w": np.ones((256, 1024), "float32")}, tmp_path / "model.safetensors")
    with lm.open_checkpoint(tmp_path) as checkpoint:
        for options in ({"checkpoint": checkpoint}, {"initialize": "all"}):
            with pytest.raises(lm.LazyModelError, match="^max_host_memory"):
                model.materialize(**options, max_host_memory=value)
        assert checkpoint.bytes_read == 0


@pytest.mark.parametrize("value", [0, "lots"])
def test_device_memory_is_refused_everywhere(model: lm.AbstractModel, capsys: Any, value: Any) -> None:
    with pytest.raises(lm.LazyModelError, match="^device_memory"):
        model.plan().check(device_memory=value)
    with pytest.raises(lm.LazyModelError, match="^device_memory"):
        lm.plans(model, "v5e-1", device_memory=value)
    assert main(["plan", "no:where", "--device-memory", str(value)]) == 2
    assert "--device-memory" in capsys.readouterr().err
