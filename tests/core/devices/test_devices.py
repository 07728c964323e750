"""Memory of devices, here or not, by name."""

from __future__ import annotations

import jax
import pytest

import lazymodel as lm

GIB = 2**30


# Memory ---------------------------------------------------------------------------------------------------------------

# A device and the GiB that it is sold with, and other names of the same.
SOLD: list[tuple[str, float, list[str]]] = [
    ("TPU v2", 8, ["v2", "v2-8"]),
    ("TPU v3", 16, ["v3"]),
    ("TPU v4", 32, ["v4"]),
    ("TPU v5 lite", 16, ["v5e", "V5E", "tpu v5e", "v5litepod", "v5e:2x4", "v5e-8", "v5litepod-16"]),
    ("TPU v5", 96, ["v5p", "v5p:4x4x4", "v5p-128"]),
    ("TPU v6 lite", 32, ["v6e", "trillium", "v6e-256"]),
    ("TPU7x", 96, ["v7x", "tpu7x", "tpu7x-8", "ironwood"]),
    ("NVIDIA B300 SXM6 AC", 288, ["B300"]),
    ("NVIDIA GB200", 189, ["GB200"]),
    ("NVIDIA B200", 183, ["B200"]),
    ("NVIDIA H200", 141, ["H200"]),
    ("NVIDIA GH200 480GB", 96, ["GH200"]),
    ("NVIDIA H20", 96, ["H20"]),
    ("NVIDIA H100 NVL", 94, ["H100-NVL"]),
    ("NVIDIA H100 80GB HBM3", 80, ["H100", "h100", "H100-80GB", "nvidia_h100"]),
    ("NVIDIA A100-SXM4-80GB", 80, ["A100-80GB", "a100 80gb"]),
    ("NVIDIA A100-SXM4-40GB", 40, ["A100-40GB", "A100"]),
    ("NVIDIA L40S", 48, ["L40S", "L40"]),
    ("NVIDIA A40", 48, ["A40"]),
    ("NVIDIA A10G", 24, ["A10"]),
    ("NVIDIA L4", 24, ["L4"]),
    ("Tesla T4", 16, ["T4"]),
    ("Tesla V100-SXM2-32GB", 32, ["V100-32GB"]),
    ("Tesla V100-SXM2-16GB", 16, ["V100"]),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 96, ["RTX PRO 6000"]),
    ("NVIDIA RTX 6000 Ada Generation", 48, ["RTX 6000 Ada"]),
    ("NVIDIA RTX A6000", 48, ["RTX A6000"]),
    ("NVIDIA GeForce RTX 5090", 32, ["RTX 5090"]),
    ("NVIDIA GeForce RTX 4090", 24, ["rtx4090", "RTX 4090"]),
    ("NVIDIA GeForce RTX 3090", 24, ["RTX 3090"]),
    ("AMD Instinct MI210", 64, ["MI210"]),
    ("AMD Instinct MI250X", 64, ["MI250X"]),
    ("AMD Instinct MI300X", 192, ["MI300X"]),
    ("AMD Instinct MI325X", 256, ["MI325X"]),
    ("AMD Instinct MI355X", 288, ["MI355X"]),
]


@pytest.mark.parametrize(("kind", "sold", "names"), SOLD, ids=[kind for kind, _, _ in SOLD])
def test_a_device_has_nearly_what_it_is_sold_with_under_each_name(kind: str, sold: float, names: list[str]) -> None:
    known = lm.device_memory(kind)
    assert known is not None and 0.89 * sold * GIB < known <= 1.0001 * sold * GIB
    assert {name: lm.device_memory(name) for name in names} == dict.fromkeys(names, known)


@pytest.mark.parametrize("name", ["", "cpu", "v9", "TPU v9", "v5x", "A1000", "GL40", "x" * 100_000])
def test_what_is_not_in_the_table_is_unknown(name: str) -> None:
    assert lm.device_memory(name) is None


class _Device:
    """A live device, and what it says of its memory."""

    def __init__(self, stats: object, device_kind: str = "TPU v5 lite", num_cores: int = 1) -> None:
        self.stats, self.device_kind, self.num_cores = stats, device_kind, num_cores

    def memory_stats(self) -> object:
        if isinstance(self.stats, Exception):
            raise self.stats
        return self.stats


def test_a_live_device_knows_better_than_the_table() -> None:
    assert lm.device_memory(_Device({"bytes_limit": 123})) == 123
    for stats in ({"bytes_in_use": 5}, None, RuntimeError("only for addressable devices")):
        assert lm.device_memory(_Device(stats)) == lm.device_memory("v5e")
    v4 = lm.device_memory("v4")
    assert v4 is not None and lm.device_memory(_Device(None, "TPU v4", num_cores=2)) == v4
    assert lm.device_memory(_Device(None, "TPU v4")) == pytest.approx(v4 / 2, rel=0.01), "a core alone"
    assert lm.device_memory(jax.devices()[0]) is None, "CPUs do not say"
    with pytest.raises(lm.LazyModelError, match="such as 'v5e' or 'H100', got 8"):
        lm.device_memory(8)
