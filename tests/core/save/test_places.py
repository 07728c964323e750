"""What is there before, meanwhile and afterwards: the same on a disk and in a bucket."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

import lazymodel as lm
from tests.core.save._places import FOLDERS, INDEX, SHARDED, Bucket, Disk, once
from tests.large import mostly_large
from tests.processes import free_address, printed, run_workers
from tests.servers.object_server import ObjectServer
from tests.small import make_small

WORKER = Path(__file__).with_name("_save_worker.py")


@pytest.fixture(params=["disk", "gs"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    """An empty one; a bucket takes small parts."""
    place = Disk(tmp_path / "disk") if request.param == "disk" else Bucket(request.getfixturevalue("object_server"))
    make_small(monkeypatch, least_upload_part=4 << 10, upload_part=4 << 10)
    place.empty()
    return place


def test_an_index_names_shards_of_its_own_save_and_other_files_stay(place: Disk) -> None:
    foreign = ["saved/notes.txt", "saved/model-00001-of-00002.bin", "saved-too"]
    place.save(1, **SHARDED)
    foreign += ["saved/adapter.safetensors", "saved/model-00001-of-00009.safetensors"]  # which no index lists
    for name in foreign:
        place.put(name)
    for fill, options, count in ((2, SHARDED, 3), (3, SHARDED, 3), (4, {}, 1)):
        place.save(fill, **options)
        objects = place.objects()
        assert {name: objects.pop(name) for name in foreign} == dict.fromkeys(foreign, b"x")
        if f"saved/{INDEX}" in objects:
            index = json.loads(objects.pop(f"saved/{INDEX}"))
            assert {f"saved/{name}" for name in index["weight_map"].values()} == objects.keys()
        assert len(objects) == count
        assert place.found() == fill


def test_what_is_there_stays_unless_it_may_be_replaced(place: Disk) -> None:
    for path, options in (("saved", {}), ("more", SHARDED), ("x.safetensors", {})):
        place.save(1, path, overwrite=False, **options)
        before = place.objects()
        with pytest.raises(lm.LazyModelError, match=f"{path}.* overwrite=True"):
            place.save(2, path, overwrite=False)
        assert place.objects() == before
        place.save(2, path)
        assert place.found(path) == 2


def test_what_would_hide_a_checkpoint_or_be_hidden_is_refused(place: Disk) -> None:
    place.save(1, **SHARDED)
    others = {"other": "weights.safetensors", "keras": "model.weights.h5", "index": "x.safetensors.index.json"}
    for name in (*(f"{folder}/{name}" for folder, name in others.items()), "x.safetensors/y", "file"):
        place.put(name)
    before = place.objects()
    shard = next(name for name in before if name.startswith("saved/model-"))
    for path, words in {
        "saved/model.safetensors": f"sharded checkpoint of .*{INDEX}",
        shard: f"sharded checkpoint of .*{INDEX}",
        **{folder: f"already in .*{folder}, .*{name}" for folder, name in others.items()},
        "x.safetensors": "is a folder; give the name of a file",
        "file": "is a file; give a folder",
    }.items():
        for overwrite in (False, True):
            with pytest.raises(lm.LazyModelError, match=words):
                place.save(2, path, overwrite=overwrite)
    assert place.objects() == before
    place.save(2, "saved/other.safetensors")
    assert (place.found(), place.found("saved/other.safetensors")) == (1, 2)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_and_an_error_of_ones_own_leave_what_was_there(place: Disk) -> None:
    place.save(1, **SHARDED)
    before = place.objects()

    def interrupt() -> None:  # in a thread that uploads; Ctrl-C goes to the main one
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def fail() -> None:
        raise ZeroDivisionError

    for path, options in (("saved", {}), ("saved", SHARDED), ("x.safetensors", {})):
        for work, error in ((interrupt, KeyboardInterrupt), (fail, ZeroDivisionError)):
            with pytest.raises(error):
                place.save(2, path, progress=once(work), **options)
    assert place.objects() == before
    assert not isinstance(place, Bucket) or place.server.counters()["open_uploads"] == []


@pytest.mark.parametrize("world", mostly_large(FOLDERS, ["sharded", "single over sharded", "sharded over loose"]))
def test_readers_see_the_old_or_the_new(place: Disk, world: str) -> None:
    """And who opened the old one before is not given the new one's values."""
    FOLDERS[world].make(place)
    state = place.found()
    early = lm.open_checkpoint(place.url(), place.options) if state is not None else None
    seen: list[int | None] = []

    def look(done: int, total: int) -> None:
        seen.append(place.found())

    place.save(2, progress=look, **FOLDERS[world].new)
    assert len(seen) > 3
    assert {*seen} == {state}
    assert place.found() == 2
    if early is not None:
        with early, pytest.raises(lm.CheckpointError, match="changed while it|no longer exists|No such file"):
            [early[name].read() for name in early]


# Several processes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processes(_object_server: ObjectServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes of four devices each saved what `_save_worker` makes, to a disk and to a bucket."""
    _object_server.reset()
    Bucket(_object_server).empty()
    folder, address = tmp_path_factory.mktemp("processes"), free_address()
    (folder / "disk").mkdir()
    arguments = [(process, address, _object_server.origin(), folder) for process in range(2)]
    codes = run_workers(WORKER, arguments, folder, patience=50)
    assert codes == [0, 0], printed(folder, 2)
    shutil.copytree(Bucket(_object_server).folder, folder / "gs")
    assert _object_server.counters()["open_uploads"] == []
    return folder


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["disk", "gs"])
def test_two_processes_write_one_checkpoint(processes: Path, name: str) -> None:
    place = Disk(processes / name)
    outcomes = [json.loads((processes / f"outcomes-{process}.json").read_text()) for process in range(2)]
    outcomes = [{key.removeprefix(f"{name} "): value for key, value in each.items()} for each in outcomes]
    expected = np.load(processes / "expected.npz")
    for path, given in {"plain": "plain", "mapped": "mapped", "one.safetensors": "plain"}.items():
        with lm.open_checkpoint(place.url(path)) as ckpt:
            wanted = {key.removeprefix(f"{given}:"): expected[key] for key in expected if key.startswith(given)}
            assert {key: ckpt[key].read().tobytes() for key in ckpt} == {k: v.tobytes() for k, v in wanted.items()}
    nbytes = sum(expected[key].nbytes for key in expected if key.startswith("plain"))
    assert sum(outcome["wrote"] for outcome in outcomes) == nbytes, "every byte once"
    assert all(outcome["wrote"] > (nbytes / 4 if name == "gs" else 0) for outcome in outcomes)
    for failed in range(2):
        assert outcomes[failed][f"{failed} failed"] == "no more"
        said = f"process {failed} failed, so nothing was saved here either: no more"
        assert outcomes[1 - failed][f"{failed} failed"].startswith(said)
    assert all("variables differ in name" in outcome["differ"] for outcome in outcomes)
    if name == "disk":
        assert outcomes[1]["1 full"].startswith("cannot write") and "No space left" in outcomes[1]["1 full"]
        assert outcomes[0]["1 full"].startswith("process 1 failed, so nothing was saved here either: cannot write")
    objects = place.objects()
    indexes = {path: json.loads(objects[f"{path}/{INDEX}"]) for path in ("plain", "mapped")}
    shards = {f"{path}/{shard}" for path, index in indexes.items() for shard in index["weight_map"].values()}
    assert objects.keys() == shards | {f"plain/{INDEX}", f"mapped/{INDEX}", "one.safetensors"}, "failures left nothing"


def test_two_processes_write_one_adapter(processes: Path) -> None:
    expected = np.load(processes / "expected.npz")
    adapter = lm.open_adapter(processes / "adapter")
    assert (adapter.ranks, adapter.scales) == ({"w": 6}, {"w": 1.0})
    np.testing.assert_array_equal(adapter.source["base_model.model.w.lora_A.weight"], expected["plain:rows"].T)
    np.testing.assert_array_equal(adapter.source["base_model.model.w.lora_B.weight"], expected["plain:columns"].T)
    assert sorted(path.name for path in (processes / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
