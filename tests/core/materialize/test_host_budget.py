"""The ceiling of host memory, measured from the kernel's side: private memory of a process that streams under it.

On CPU devices the arrays are host memory too. They are dropped one by one, so what may be held at any time is the
ceiling and the variable that was yielded last.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import h5py  # pyright: ignore[reportMissingTypeStubs]
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.large import mostly_large
from tests.processes import printed, run_workers

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="private memory is read from /proc"),
]

WORKER = Path(__file__).with_name("_host_budget_worker.py")
CEILING = 4 << 20
# Bytes beyond the ceiling and the variable: buffers start with huge pages, of which those at both ends are partly used,
# and malloc and Python keep some of what they were given back.
SLACK = 4 << 20
SHAPE = (1024, 1024)  # 4 MiB of float32
COUNT = 12
CASES = ["plain", "cast", "transposed", "concatenated", "chunked", "incompressible", "deflated"]
BRIEF = ["plain", "transposed", "concatenated"]  # of one file


@pytest.fixture(scope="module", params=mostly_large([BRIEF, CASES], [BRIEF]), ids=["brief", "all"])
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    """What each case took, in a process of its own."""
    folder = tmp_path_factory.mktemp("budget")
    rows = np.arange(SHAPE[0], dtype=np.float32)[:, None]
    tensors = {f"w{index:02}": rows + np.arange(SHAPE[1], dtype=np.float32) % (50 + index) for index in range(COUNT)}
    plain = folder / "model.safetensors"
    save_file(tensors, plain)
    files = dict.fromkeys(CASES, plain)
    files |= {"chunked": folder / "model.weights.h5", "deflated": folder / "model.npz"}
    files["incompressible"] = folder / "incompressible.weights.h5"  # encoded chunks are as large as decoded ones
    cases: list[str] = request.param
    if cases == CASES:
        with h5py.File(files["incompressible"], "w") as file:
            noise = np.random.default_rng(0).integers(0, 2**32, SHAPE, np.uint32).view(np.float32)
            for name in tensors:
                file.create_dataset(
                    name, data=noise, chunks=(128, 512), compression="gzip", compression_opts=1, shuffle=True
                )
        with h5py.File(files["chunked"], "w") as file:
            for name, values in tensors.items():
                file.create_dataset(name, data=values, chunks=(128, 256), compression="gzip", compression_opts=1)
        np.savez_compressed(files["deflated"], **tensors)
    arguments = [(case, files[case], CEILING, folder / f"{case}.json") for case in cases]
    codes = run_workers(WORKER, arguments, folder, patience=90)
    assert codes == [0] * len(cases), printed(folder, len(cases))
    return {case: json.loads((folder / f"{case}.json").read_text()) for case in cases}


def test_private_memory_stays_under_the_ceiling(found: dict[str, Any]) -> None:
    for case, took in found.items():
        peak, total, largest = (took[name] for name in ("peak", "total", "largest"))
        print(f"\n{case}: {peak / 2**20:.1f} MiB, variable {largest >> 20} MiB")
        assert total == COUNT * np.prod(SHAPE) * 4
        assert peak <= CEILING + largest + SLACK, case
        assert total > 5 * (CEILING + largest + SLACK) // 2, "holding all of it would be noticed"
