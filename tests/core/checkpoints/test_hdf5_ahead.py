"""HDF5 files at URLs: what lists their datasets is fetched many pieces at a time, and no more than that."""

import h5py
import numpy as np
import pytest

import lazymodel as lm
from lazymodel._remote.file import RemoteFile
from lazymodel._remote.path import remote_path
from lazymodel.checkpoints import _hdf5
from lazymodel.checkpoints._hdf5_ahead import fetch_groups


@pytest.fixture
def file(object_server):
    """The path on the server of a file with 60 datasets of 200 kB, ten to a group, as Keras lays them out."""
    path = object_server.root / "ahead.weights.h5"
    with h5py.File(path, "w") as file:
        for layer in range(6):
            for number in range(10):
                values = np.full(50_000, 10 * layer + number, "float32")
                file[f"layers/block_{layer}/part_{number}/vars/0"] = values
    yield path.name
    path.unlink()


def test_pieces_are_fetched_together(file, object_server, monkeypatch):
    asked = []
    monkeypatch.setattr(_hdf5, "fetch_groups", lambda *arguments: asked.append(object_server.counters()["requests"]))
    with lm.open_checkpoint(object_server.url(file)) as checkpoint:
        names = list(checkpoint)
    one_by_one = object_server.counters()
    object_server.reset_counters()
    object_server.configure(latency=0.01)

    def fetch(*arguments):
        fetch_groups(*arguments)
        asked.append(object_server.counters()["requests"])

    monkeypatch.setattr(_hdf5, "fetch_groups", fetch)
    with lm.open_checkpoint(object_server.url(file)) as checkpoint:
        assert list(checkpoint) == names
        together = object_server.counters()
        assert together["requests"] == asked[-1], "nothing was left to be asked for by itself"
        assert together["most_in_flight"] > one_by_one["most_in_flight"] == 1
        assert together["bytes"] < (64 << 10) + 60 * (12 << 10)
        for name in names:
            layer, number = (int(part.split("_")[1]) for part in name.split("/")[1:3])
            assert set(checkpoint[name].read().tolist()) == {10 * layer + number}


@pytest.mark.parametrize("seed", range(4))
def test_what_is_not_understood_is_left_to_the_library(seed, file, object_server):
    """Damage anywhere in what is followed: it ends, and raises nothing."""
    path = object_server.root / file
    with h5py.File(path) as opened:
        root = h5py.h5o.get_info(opened.id).addr
    content = bytearray(path.read_bytes())
    rng = np.random.default_rng(seed)
    for sign in (b"TREE", b"SNOD", b"HEAP"):
        at = content.find(sign) + 4
        content[at : at + 200] = rng.integers(0, 256, 200, np.uint8).tobytes()
    path.write_bytes(content)
    place = remote_path(object_server.url(file))
    with RemoteFile(place.store, place.key) as remote:
        for address in (root, 0, 1 << 40):
            fetch_groups(remote, 0, address, (8, 8))
    assert object_server.counters()["bytes"] < 2 * len(content)
