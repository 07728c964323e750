"""A fleet that reads once: what several processes hold is read by one of them, and exchanged.

Two processes of four devices go through scenarios of `_exchange_worker`, one after the other, and with the large tests
four of two through all. Where one opens another checkpoint, of the same names, shapes and dtypes, all refuse, and name
the file.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import h5py  # pyright: ignore[reportMissingTypeStubs]
import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import lazymodel as lm
from lazymodel._materialize import exchange
from lazymodel._materialize.stream import StreamItem, read_items
from lazymodel._tensors import shards
from lazymodel._tensors.shards import divide
from tests.core.materialize._exchange_worker import tensors
from tests.core.materialize._variables import bytes_read, model_of
from tests.large import mostly_large
from tests.processes import free_address, printed, run_workers
from tests.servers.object_server import ObjectServer

pytestmark = pytest.mark.timeout(120)

WORKER = Path(__file__).with_name("_exchange_worker.py")
PATIENCE = 100  # seconds, all processes together
GOOD = "exchanged,in_groups,across,read"
OTHER = 1  # which process opens another checkpoint
BRIEF = ("safetensors", "zarr", "url", "memory", "verified", "copies exchanged")  # what two processes open


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


def other_checkpoints(folder: Path, server: ObjectServer) -> dict[str, Any]:
    """Scenario → what processes open, and options."""
    found: dict[str, Any] = {}
    for kind, (name, save) in FORMATS.items():
        paths = [folder / f"{kind}-{seed}" / name for seed in (1, 2)]
        for seed, path in enumerate(paths, 1):
            path.parent.mkdir()
            save(path, values(seed))
        found[kind] = [str(paths[process == OTHER]) for process in range(4)], {}
    stored = found["safetensors"][0]
    for option in ({"replicas": "exchange"}, {"spec": "x"}, {"stream": True}, {"mapped": True}):
        found[f"{option}"] = stored, option
    for kind in ("url", "no ETag"):
        for seed in (1, 2):
            file = f"{kind}-{seed}/x.safetensors"
            (server.root / file).parent.mkdir()
            shutil.copy(folder / f"safetensors-{seed}" / "x.safetensors", server.root / file)
            server.hostile(file, "no-etag" if kind == "no ETag" else None)
        found[kind] = [server.url(f"{kind}-{1 + (process == OTHER)}/x.safetensors") for process in range(4)], {}
    found["memory"] = [int(process == OTHER) for process in range(4)], {}
    # One bit, and hashes that each process was given for its own file.
    bit = folder / "bit.safetensors"
    data = bytearray(Path(stored[0]).read_bytes())
    data[len(data) // 2] ^= 1
    bit.write_bytes(data)
    digests = {file: hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in (stored[0], str(bit))}
    for name, file in (("x.safetensors", stored[0]), ("bit.safetensors", str(bit))):
        Path(file).with_name("SHA256SUMS").write_text(f"{digests[file]}  {name}\n")
    found["verified"] = [str(bit) if process == OTHER else stored[0] for process in range(4)], {"verify": True}
    return found


def same_checkpoints(folder: Path) -> dict[str, Any]:
    """The same for copies that are the same."""
    copies = [folder / f"copy-{process}.safetensors" for process in range(4)]
    for copy in copies:
        shutil.copyfile(folder / "safetensors-1" / "x.safetensors", copy)
    return {"copies": ([*map(str, copies)], {}), "copies exchanged": ([*map(str, copies)], {"replicas": "exchange"})}


def outcomes_of(folder: Path, processes: int, scenarios: str, expected: list[int], **more: str) -> list[Any]:
    """Runs all processes to their end, with these exit codes; what came of each scenario, by process."""
    address = free_address()
    arguments = [(process, processes, address, folder, scenarios) for process in range(processes)]
    codes = run_workers(WORKER, arguments, folder, patience=PATIENCE, LAZYMODEL_WAIT_SECONDS="20", **more)
    assert codes == expected, f"exit codes {codes}\n{printed(folder, processes)}"
    return [json.loads((folder / f"outcomes-{process}.json").read_text()) for process in range(processes)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exchange")
    save_file(tensors(), folder / "model.safetensors")
    many = {f"w{number}": np.full((128, 512), number, "float32") for number in range(160)}
    save_file(many, folder / "many.safetensors")
    for name in ("right", *(f"truncated-{process}" for process in range(4))):
        save_file({"w": np.ones((2048, 256), "float32")}, folder / f"{name}.safetensors")
    return folder


@pytest.fixture(scope="module")
def served(_object_server: ObjectServer, folder: Path) -> tuple[ObjectServer, str]:
    """A server that has the file, and the file's name there."""
    _object_server.reset()
    shutil.copy(folder / "model.safetensors", _object_server.root / "exchanged.safetensors")
    return _object_server, "exchanged.safetensors"


@pytest.fixture(scope="module")
def two(folder: Path, served: tuple[ObjectServer, str]) -> list[Mapping[str, Any]]:
    """What came of each scenario, by process, of two processes; and what the server sent."""
    server, name = served
    all_tasks = other_checkpoints(folder, server) | same_checkpoints(folder)
    (folder / "tasks.json").write_text(json.dumps({name: all_tasks[name] for name in BRIEF}))
    (folder / "all_tasks.json").write_text(json.dumps(all_tasks))
    scenarios = f"{GOOD},remote,truncated,choices,tasks"
    found = outcomes_of(folder, 2, scenarios, [0, 0], MODEL_URL=server.url(name))
    return [outcome | {"sent": server.counters()["path_bytes"][name]} for outcome in found]


@pytest.fixture(scope="module")
def four(folder: Path, two: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """And of four, of which the last is killed in the end."""
    (folder / "all_tasks.json").replace(folder / "tasks.json")
    return outcomes_of(folder, 4, f"{GOOD},explicit,many,tasks,killed", [0, 0, 0, -9])


@pytest.fixture(scope="module", params=mostly_large(["two", "four"], ["two"]))
def outcomes(request: pytest.FixtureRequest) -> list[Mapping[str, Any]]:
    return request.getfixturevalue(request.param)


@pytest.fixture
def opened(outcomes: list[Mapping[str, Any]]) -> list[Mapping[str, str]]:
    """What came of opening some checkpoints, by process."""
    return [outcome["tasks"] for outcome in outcomes]


SPECS = [
    *(P(), P("x"), P(None, "x"), P("y", "x"), P(("x", "y")), P(None, ("y", "x")), P(None, None, "y")),
    *(P("x", None, "y"), P(None, "y", "x"), P(("y", "x"), None, None)),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 0, 1)], ids=["stored", "transposed"])
@pytest.mark.parametrize("shape", [(24, 40, 16), pytest.param((200, 72, 8), marks=pytest.mark.large)], ids=str)
def test_parts_become_the_array(
    shape: tuple[int, ...], axes: tuple[int, ...], spec: P, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On eight devices of this process, which are taken for eight processes: every byte is read once by all of them."""
    monkeypatch.setattr(shards, "SMALL", 0)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("x", "y"))
    values = np.random.default_rng(0).integers(0, 2**16, shape, np.uint16).view(ml_dtypes.bfloat16)
    save_file({"w": values}, tmp_path / "w.safetensors")
    tensor, values = lm.open_checkpoint(tmp_path / "w.safetensors")["w"].transpose(axes), values.transpose(axes)
    sharding = NamedSharding(mesh, spec)
    partition = divide(tensor, sharding, np.arange(8).reshape(2, 4))
    if partition is None:  # no two devices hold the same, in rows that are ranges of the file
        assert spec in ([P(None, ("y", "x"))] if axes[0] else [P(("x", "y")), P(("y", "x"), None, None)])
        return
    assert partition.own_elements().sum() == values.size
    each = exchange.ExchangedItem(StreamItem("w", tensor, tensor.shape, tensor.dtype, sharding), partition)
    ((_, parts),) = read_items([each.part], 1 << 30)
    assert bytes_read({"w": tensor}) == values.nbytes
    array = each.whole(parts)
    assert array.sharding == sharding and np.asarray(array).tobytes() == values.tobytes()
    memory: Any = cast(Any, exchange._exchange_program(partition)).lower(parts).compile().memory_analysis()
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes <= 1.05 * each.nbytes


HEADERS = 2 * (64 << 10)  # bytes that both processes fetch of the beginning of the file
FILE_NBYTES = sum(tensor.nbytes for tensor in tensors().values())


def test_each_byte_is_read_once(outcomes: list[Mapping[str, Any]]) -> None:
    """The worker has compared all bits."""
    for scenario in {"exchanged", "in_groups", "across", "explicit"} & outcomes[0].keys():
        read = [outcome[scenario]["read"] for outcome in outcomes]
        assert FILE_NBYTES <= sum(read) <= 1.02 * FILE_NBYTES, scenario
        assert max(read) <= 1.1 * FILE_NBYTES / len(outcomes), f"they share the work evenly: {scenario}"


def test_processes_fetch_each_byte_once_together(two: list[Mapping[str, Any]]) -> None:
    assert FILE_NBYTES <= two[0]["sent"] <= 1.01 * FILE_NBYTES + HEADERS
    assert sum(outcome["remote"]["read"] for outcome in two) <= 1.02 * FILE_NBYTES


@pytest.mark.large
def test_without_every_replica_reads(four: list[Mapping[str, Any]]) -> None:
    for outcome in four[:-1]:
        assert outcome["read"]["read"] > 2 * outcome["exchanged"]["read"]
        assert outcome["read"]["exchanged"] == outcome["read"]["programs"] == 0


@pytest.mark.large
def test_many_exchanges_do_not_wait_for_each_other(four: list[Mapping[str, Any]]) -> None:
    assert [outcome["many"] for outcome in four] == ["loaded and moved"] * 4


def test_variables_that_are_alike_share_a_program(outcomes: list[Mapping[str, Any]]) -> None:
    """Nine that are alike have one; loaded once more, all find theirs again."""
    for outcome in outcomes:
        assert 0 < outcome["exchanged"]["programs"] <= 13
        assert outcome["in_groups"]["programs"] == 0


def test_the_report_counts_what_came_over_the_interconnect(two: list[Mapping[str, Any]]) -> None:
    for outcome in two:
        assert outcome["exchanged"]["exchanged"] > FILE_NBYTES
        assert "from other devices" in outcome["exchanged"]["text"]
        assert outcome["exchanged"]["rounds"] > outcome["read"]["rounds"] == 0


def test_what_fails_in_one_process_fails_in_all(two: list[Mapping[str, Any]]) -> None:
    assert "truncated-1.safetensors changed while it was being read" in two[1]["truncated"]
    assert two[0]["truncated"].startswith("process 1 failed, so nothing was materialized here either: ")


def test_processes_that_would_not_run_the_same_programs_are_refused(two: list[Mapping[str, Any]]) -> None:
    for outcome in two:
        assert outcome["choices"].startswith("the processes' checkpoints, keys or seeds differ: ")


@pytest.mark.large
def test_a_process_that_is_killed_at_an_exchange_hangs_nobody(four: list[Mapping[str, Any]]) -> None:
    for outcome in four[:-1]:
        assert "could not be exchanged" in outcome["killed"] or "so nothing was materialized" in outcome["killed"]


# --- another checkpoint -----------------------------------------------------------------------------------------------

LOADED = ("copies", "copies exchanged")


def test_nobody_loads_a_mixture(opened: list[Mapping[str, str]]) -> None:
    for scenario, outcome in opened[0].items():
        assert all(other[scenario] == outcome for other in opened), scenario
        if scenario in LOADED:
            assert outcome == "loaded"
            continue
        assert outcome.startswith("CheckpointError: "), (scenario, outcome)
        assert "process 0 would" in outcome and f"process {OTHER} would" in outcome, (scenario, outcome)


def test_the_error_names_the_files(opened: list[Mapping[str, str]]) -> None:
    for scenario, message in opened[0].items():
        if scenario not in ("memory", *LOADED):
            first, other = message.split(f"process {OTHER} would")
            assert "-1/x" in first and ("-2/x" in other or "bit.safetensors" in other), (scenario, message)
    assert "ETag" in opened[0]["url"] and "sampled content" in opened[0].get("no ETag", "sampled content")
    assert opened[0]["verified"].count("verified sha256 ") == 2


def test_one_process_computes_nothing_more(tmp_path: Path, mesh8: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(values(1), tmp_path / "x.safetensors")
    checkpoint = lm.open_checkpoint(tmp_path / "x.safetensors")
    monkeypatch.setattr(type(checkpoint["w"].source.reader), "fingerprint", None)
    model_of(checkpoint, NamedSharding(mesh8, P())).materialize(checkpoint)


def test_a_folder_of_more_files_than_samples(tmp_path: Path) -> None:
    """An Orbax checkpoint with a file for each array: each is sampled."""
    many = {f"w{number}": np.full((64, 64), number, np.float32) for number in range(160)}
    found: list[str] = []
    for name in ("first", "other"):
        if name == "other":
            many["w99"][:] = -1
        orbax(tmp_path / name, many, ocdbt=False)
        origin = lm.open_checkpoint(tmp_path / name)["w0"].source.origin
        found.append(cast(Any, origin).fingerprint())
    assert found[0] != found[1]


@pytest.mark.parametrize("nbytes", [1, 4 << 10, 512 << 10, (512 << 10) + 1, 10**7])
def test_files_that_differ_anywhere_in_a_twentieth_are_told_apart(tmp_path: Path, nbytes: int) -> None:
    """By samples, of whatever size they are; copies are not."""

    def fingerprint(data: np.ndarray) -> str:
        save_file({"w": data}, tmp_path / "x.safetensors")
        return lm.open_checkpoint(tmp_path / "x.safetensors")["w"].source.reader.fingerprint()

    data = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    expected = fingerprint(data)
    assert fingerprint(data) == expected
    for start in (0, nbytes // 3, nbytes - max(nbytes // 20, 1)):
        other = data.copy()
        other[start : start + max(nbytes // 20, 1)] ^= 1
        assert fingerprint(other) != expected, start
    other = data.copy()
    other[-1] ^= 1
    assert fingerprint(other) != expected, "the last byte is always among them"
