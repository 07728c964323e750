"""Processes of which one opens another checkpoint, of the same names, shapes and dtypes: all refuse, and name the file.

Four processes go through all scenarios, one after the other; the last one loads, so none left them out of step.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py  # pyright: ignore[reportMissingTypeStubs]
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import lazymodel as lm
from lazymodel._tensors.source import SAMPLE, Source, samples
from tests.processes import free_address, printed, run_workers
from tests.servers.object_server import ObjectServer

pytestmark = pytest.mark.timeout(120)

WORKER = Path(__file__).with_name("_other_checkpoint_worker.py")
PROCESSES, OTHER = 4, 2  # processes, and which of them is the one


def values(seed: int) -> dict[str, np.ndarray]:
    """What differs in a tenth of its bytes, as of a model of which some layers were trained."""
    found = np.random.default_rng(0).standard_normal((1024, 1024)).astype(np.float32)
    found[600:] += seed * (np.arange(424) < 102)[:, None]
    return {"w": found, "b": np.zeros(1024, np.float32)}


def hdf5(where: Path, tensors: Mapping[str, np.ndarray]) -> None:
    with h5py.File(where, "w") as file:
        for name, value in tensors.items():
            file.create_dataset(name, data=value, compression="gzip", chunks=True)


def npy_folder(where: Path, tensors: Mapping[str, np.ndarray]) -> None:
    where.mkdir()
    for name, value in tensors.items():
        np.save(where / f"{name}.npy", value)


def orbax(where: Path, tensors: Mapping[str, np.ndarray], *, ocdbt: bool) -> None:
    checkpoint = pytest.importorskip("orbax.checkpoint")
    with checkpoint.Checkpointer(checkpoint.PyTreeCheckpointHandler(use_ocdbt=ocdbt)) as checkpointer:
        checkpointer.save(where, dict(tensors))


FORMATS: dict[str, tuple[str, Callable[[Path, Any], None]]] = {
    "safetensors": ("x.safetensors", lambda where, tensors: save_file(tensors, where)),
    "npz": ("x.npz", lambda where, tensors: np.savez(where, **tensors)),
    "deflated": ("x.npz", lambda where, tensors: np.savez_compressed(where, **tensors)),
    "hdf5": ("x.h5", hdf5),
    "npy": ("x", npy_folder),
    "ocdbt": ("x", lambda where, tensors: orbax(where, tensors, ocdbt=True)),
    "zarr": ("x", lambda where, tensors: orbax(where, tensors, ocdbt=False)),
}


def refused(folder: Path, server: ObjectServer) -> dict[str, Any]:
    """Scenario → what processes open, and options."""
    found: dict[str, Any] = {}
    for kind, (name, save) in FORMATS.items():
        paths = [folder / f"{kind}-{seed}" / name for seed in (1, 2)]
        for seed, path in enumerate(paths, 1):
            path.parent.mkdir()
            save(path, values(seed))
        found[kind] = [str(paths[process == OTHER]) for process in range(PROCESSES)], {}
    stored = found["safetensors"][0]
    for option in ({"replicas": "exchange"}, {"spec": "x"}, {"stream": True}, {"mapped": True}):
        found[f"{option}"] = stored, option
    for kind in ("url", "no ETag"):
        for seed in (1, 2):
            file = f"{kind}-{seed}/x.safetensors"
            (server.root / file).parent.mkdir()
            shutil.copy(folder / f"safetensors-{seed}" / "x.safetensors", server.root / file)
            server.hostile(file, "no-etag" if kind == "no ETag" else None)
        found[kind] = [server.url(f"{kind}-{1 + (process == OTHER)}/x.safetensors") for process in range(PROCESSES)], {}
    found["memory"] = [int(process == OTHER) for process in range(PROCESSES)], {}
    # One bit, where no sample is taken, and hashes that each process was given for its own file.
    bit = folder / "bit.safetensors"
    data = bytearray(Path(stored[0]).read_bytes())
    sampled = {start + at for start in samples(len(data)) for at in range(SAMPLE)}
    data[next(at for at in range(len(data) // 2, len(data)) if at not in sampled)] ^= 1
    bit.write_bytes(data)
    digests = {file: hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in (stored[0], str(bit))}
    for name, file in (("x.safetensors", stored[0]), ("bit.safetensors", str(bit))):
        Path(file).with_name("SHA256SUMS").write_text(f"{digests[file]}  {name}\n")
    found["verified"] = [str(bit) if process == OTHER else stored[0] for process in range(PROCESSES)], {"verify": True}
    return found


def loaded(folder: Path) -> dict[str, Any]:
    """The same for copies that are the same."""
    copies = [folder / f"copy-{process}.safetensors" for process in range(PROCESSES)]
    for copy in copies:
        shutil.copyfile(folder / "safetensors-1" / "x.safetensors", copy)
    return {"copies": ([*map(str, copies)], {}), "copies exchanged": ([*map(str, copies)], {"replicas": "exchange"})}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, _object_server: ObjectServer) -> list[Mapping[str, str]]:
    """What came of each scenario, by process."""
    folder = tmp_path_factory.mktemp("other")
    _object_server.reset()
    tasks = refused(folder, _object_server) | loaded(folder)
    (folder / "tasks.json").write_text(json.dumps(tasks))
    address = free_address()
    arguments = [(process, PROCESSES, address, folder) for process in range(PROCESSES)]
    codes = run_workers(WORKER, arguments, folder, patience=90, LAZYMODEL_WAIT_SECONDS="20")
    assert codes == [0] * PROCESSES, f"exit codes {codes}\n{printed(folder, PROCESSES)}"
    return [json.loads((folder / f"outcomes-{process}.json").read_text()) for process in range(PROCESSES)]


LOADED = ("copies", "copies exchanged")


def test_nobody_loads_a_mixture(outcomes: list[Mapping[str, str]]) -> None:
    for scenario, outcome in outcomes[0].items():
        assert all(other[scenario] == outcome for other in outcomes), scenario
        if scenario in LOADED:
            assert outcome == "loaded"
            continue
        assert outcome.startswith("CheckpointError: "), (scenario, outcome)
        assert "process 0 would" in outcome and f"process {OTHER} would" in outcome, (scenario, outcome)


def test_the_error_names_the_files(outcomes: list[Mapping[str, str]]) -> None:
    for scenario, message in outcomes[0].items():
        if scenario not in ("memory", *LOADED):
            first, other = message.split(f"process {OTHER} would")
            assert "-1/x" in first and ("-2/x" in other or "bit.safetensors" in other), (scenario, message)
    assert "ETag" in outcomes[0]["url"] and "sampled content" in outcomes[0]["no ETag"]
    assert outcomes[0]["verified"].count("verified sha256 ") == 2


def test_one_process_computes_nothing_more(tmp_path: Path, mesh8: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(values(1), tmp_path / "x.safetensors")
    monkeypatch.setattr(Source, "fingerprint", None)
    model = lm.build_abstract(lambda: {"w": jnp.zeros((1024, 1024)), "b": jnp.zeros(1024)}).shard(mesh8, {".*": P()})
    model.materialize(lm.open_checkpoint(tmp_path / "x.safetensors"))


@pytest.mark.parametrize("size", [0, 1, SAMPLE, 128 * SAMPLE, 128 * SAMPLE + 1, 10**7, 10**12])
def test_samples_lie_in_the_file(size: int) -> None:
    starts = list(samples(size))
    assert starts == sorted(starts) == list(samples(size)) and len(starts) <= 128
    assert all(0 <= start < size for start in starts)
    if size:
        assert starts[0] == 0 and starts[-1] + SAMPLE >= size
    assert max(np.diff([*starts, size]), default=0) <= max(2 * size / 126, SAMPLE)
