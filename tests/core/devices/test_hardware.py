"""Memory of devices that are not here."""

import jax
import pytest

from lazymodel._devices.hardware import device_memory, tpu_generation

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "sold"),
    [
        ("TPU v2", 8),
        ("TPU v3", 16),
        ("TPU v4", 32),
        ("TPU v5 lite", 16),
        ("TPU v5", 96),
        ("TPU v6 lite", 32),
        ("TPU7x", 96),
        ("NVIDIA A100-SXM4-40GB", 40),
        ("NVIDIA A100-SXM4-80GB", 80),
        ("NVIDIA H100 80GB HBM3", 80),
        ("NVIDIA H200", 141),
        ("NVIDIA B300 SXM6 AC", 288),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 96),
        ("NVIDIA L4", 24),
        ("Tesla T4", 16),
        ("Tesla V100-SXM2-32GB", 32),
        ("NVIDIA GeForce RTX 4090", 24),
        ("AMD Instinct MI300X", 192),
        ("AMD Instinct MI355X", 288),
    ],
)
def test_a_device_kind_has_nearly_what_it_is_sold_with(name: str, sold: int) -> None:
    known = device_memory(name)
    assert known is not None
    assert 0.89 * sold * GIB < known <= sold * GIB


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("TPU v5 lite", ["v5e", "V5E", "tpu v5e", "v5litepod", "v5e:2x4", "v5e-8", "v5litepod-16"]),
        ("TPU v5", ["v5p", "v5p:4x4x4", "v5p-128"]),
        ("TPU7x", ["v7x", "tpu7x", "tpu7x-8", "ironwood"]),
        ("TPU v6 lite", ["v6e", "trillium", "v6e-256"]),
        ("NVIDIA H100 80GB HBM3", ["h100", "H100-80GB", "nvidia_h100"]),
        ("NVIDIA A100-SXM4-80GB", ["A100-80GB", "a100 80gb"]),
        ("NVIDIA GeForce RTX 4090", ["rtx4090", "RTX 4090"]),
    ],
)
def test_short_names_mean_the_same_device(kind: str, names: list[str]) -> None:
    assert {name: device_memory(name) for name in names} == dict.fromkeys(names, device_memory(kind))


def test_the_size_in_a_name_decides_and_the_smaller_is_taken_without_one() -> None:
    assert device_memory("A100") == device_memory("A100-40GB")
    assert device_memory("V100") == device_memory("Tesla V100-SXM2-16GB")
    assert device_memory("H100 NVL") != device_memory("H100")


@pytest.mark.parametrize("name", ["", "cpu", "v9", "TPU v9", "v5x", "A1000", "GL40", "x" * 100_000])
def test_what_is_not_in_the_table_is_unknown(name: str) -> None:
    assert device_memory(name) is None
    assert tpu_generation(name) is None


def test_cpus_do_not_say() -> None:
    assert device_memory(jax.devices()[0]) is None


class _Device:
    device_kind = "TPU v5 lite"

    def __init__(self, stats: object, num_cores: int = 1) -> None:
        self.stats = stats
        self.num_cores = num_cores

    def memory_stats(self) -> object:
        if isinstance(self.stats, Exception):
            raise self.stats
        return self.stats


def test_a_live_device_knows_better_than_the_table() -> None:
    assert device_memory(_Device({"bytes_limit": 123})) == 123
    assert device_memory(_Device({"bytes_in_use": 5})) == device_memory("v5e")
    assert device_memory(_Device(None)) == device_memory("v5e")
    assert device_memory(_Device(RuntimeError("only for addressable devices"))) == device_memory("v5e")


def test_a_core_of_v4_alone_has_half_of_its_chip() -> None:
    core, chip = _Device(None, num_cores=1), _Device(None, num_cores=2)
    core.device_kind = chip.device_kind = "TPU v4"
    assert device_memory(chip) == device_memory("v4")
    assert device_memory(core) == pytest.approx(device_memory("v4") / 2, rel=0.01)
