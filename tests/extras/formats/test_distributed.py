"""Shards that ranks of torch.distributed wrote, joined: as whole tensors, in shards, and from the real writer."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

import lazymodel as lm

ARRAYS = {
    "grid": np.arange(7 * 9, dtype=np.float32).reshape(7, 9),
    "rows": np.arange(48, dtype=np.float16).reshape(8, 6),
    "columns": np.arange(24, dtype=np.int8).reshape(4, 6),
    "whole": np.arange(5.0),
    "one": np.ones(1, np.float32),
    "scalar": np.array(3),
}
# What each rank has: a part of a grid, rows or columns alone, and no row of what has fewer than ranks.
RANKS: list[dict[str, tuple[slice, ...]]] = [
    {"grid": np.s_[:4, :5], "rows": np.s_[:5, :], "one": np.s_[:1,]},
    {"grid": np.s_[:4, 5:], "whole": np.s_[:,]},
    {"grid": np.s_[4:, :5], "rows": np.s_[5:, :], "columns": np.s_[:, :3], "one": np.s_[1:,]},
    {"grid": np.s_[4:, 5:], "columns": np.s_[:, 3:], "scalar": ()},
]


def write(folder: Path) -> Path:
    for number, own in enumerate(RANKS, 1):
        parts = {name: np.array(ARRAYS[name][index], order="C") for name, index in own.items()}
        starts = {name: {"saved_offsets": [part.start or 0 for part in index]} for name, index in own.items()}
        file = folder / f"shard-{number:05}-model-00001-of-00001.safetensors"
        save_file(parts, file, {"DCP_SHARDING_INFO": json.dumps(starts)})
    return folder


def test_tensors_are_whole(tmp_path: Path, mesh42: jax.sharding.Mesh) -> None:
    with lm.open_checkpoint(write(tmp_path)) as checkpoint:
        assert checkpoint.nbytes == sum(array.nbytes for array in ARRAYS.values())
        for name, array in ARRAYS.items():
            header = checkpoint.describe(name)
            assert (header.shape, header.dtype, header.nbytes) == (array.shape, array.dtype, array.nbytes)
            np.testing.assert_array_equal(checkpoint[name].read(), array)
        before = checkpoint.bytes_read
        np.testing.assert_array_equal(checkpoint["grid"].read(np.s_[5:7, 6:8]), ARRAYS["grid"][5:7, 6:8])
        assert checkpoint.bytes_read - before <= 2 * 4 * 4  # two rows of one part
        rows = {"rows": ARRAYS["rows"]}
        model = lm.build_abstract(lambda: {name: jax.numpy.asarray(array) for name, array in rows.items()})
        loaded = model.shard(mesh42, {"rows": P("batch", "model")}).materialize({"rows": checkpoint["rows"]})
        np.testing.assert_array_equal(loaded["rows"], ARRAYS["rows"])


@pytest.mark.large
def test_what_the_writer_of_pytorch_saves(tmp_path: Path) -> None:
    """Four processes, a mesh of two axes; every tensor as it was."""
    pytest.importorskip("torch")
    script = """
        import sys, torch, torch.distributed as dist, torch.multiprocessing as mp
        import torch.distributed.checkpoint as dcp
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
        from safetensors.torch import load_file

        def run(rank, folder):
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
            mesh, full = init_device_mesh("cpu", (2, 2)), load_file(f"{folder}/full.safetensors")
            places = {"grid": [Shard(0), Shard(1)], "rows": [Shard(0), Replicate()]}
            places |= {"columns": [Replicate(), Shard(1)], "one": [Shard(0), Shard(0)]}
            parts = {n: distribute_tensor(t, mesh, places[n]) if n in places else t for n, t in full.items()}
            writer = dcp.HuggingFaceStorageWriter(f"{folder}/out", save_distributed=True)
            dcp.save(parts, storage_writer=writer)
            dist.destroy_process_group()

        if __name__ == "__main__":
            mp.spawn(run, (sys.argv[1],), nprocs=4)
    """
    save_file(ARRAYS, tmp_path / "full.safetensors")
    (tmp_path / "save.py").write_text(textwrap.dedent(script))
    done = subprocess.run([sys.executable, tmp_path / "save.py", tmp_path], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    with lm.open_checkpoint(tmp_path / "out") as checkpoint:
        whole: dict[str, Any] = load_file(tmp_path / "full.safetensors")
        assert sorted(checkpoint) == sorted(whole)
        for name, array in whole.items():
            found = checkpoint[name].read()
            assert (found.dtype, found.shape) == (array.dtype, array.shape)
            np.testing.assert_array_equal(found, array)
