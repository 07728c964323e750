"""The ceiling of host memory, measured from the kernel's side: private memory of a process that streams under it.

On CPU devices the arrays are host memory too. They are dropped one by one, so what may be held at any time is the
ceiling and the variable that was yielded last.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.conftest import ROOT

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="private memory is read from /proc"),
]

CEILING = 4 << 20
# Bytes beyond the ceiling and the variable: buffers start with huge pages, of which those at both ends are partly used,
# and malloc and Python keep some of what they were given back.
SLACK = 4 << 20
SHAPE = (1024, 1024)  # 4 MiB of float32
COUNT = 12


def tensors(shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    rows = np.arange(shape[0], dtype=np.float32)[:, None]
    return {f"w{index:02}": rows + np.arange(shape[1], dtype=np.float32) % (50 + index) for index in range(COUNT)}


def write_safetensors(folder: Path) -> Path:
    path = folder / "model.safetensors"
    save_file(tensors(SHAPE), path)
    return path


def write_chunked(folder: Path) -> Path:
    h5py = pytest.importorskip("h5py")
    path = folder / "model.weights.h5"
    with h5py.File(path, "w") as file:
        for name, values in tensors(SHAPE).items():
            file.create_dataset(name, data=values, chunks=(128, 256), compression="gzip", compression_opts=1)
    return path


def write_npz(folder: Path) -> Path:
    path = folder / "model.npz"
    np.savez_compressed(path, **tensors(SHAPE))
    return path


def run(case: str, path: Path) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    command = [sys.executable, "-m", "tests.core.materialize._host_budget_worker", case, str(path), str(CEILING)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("case", "write"),
    [
        ("plain", write_safetensors),
        ("cast", write_safetensors),
        ("transposed", write_safetensors),
        ("concatenated", write_safetensors),
        ("chunked", write_chunked),
        ("deflated", write_npz),
    ],
)
def test_private_memory_stays_under_the_ceiling(tmp_path: Path, case: str, write: Any) -> None:
    found = run(case, write(tmp_path))
    print(f"\n{case}: {found['peak'] / 2**20:.1f} MiB, variable {found['largest'] >> 20} MiB")
    assert found["total"] == COUNT * np.prod(SHAPE) * 4
    assert found["peak"] <= CEILING + found["largest"] + SLACK
    assert found["total"] > 5 * (CEILING + found["largest"] + SLACK) // 2, "holding all of it would be noticed"
