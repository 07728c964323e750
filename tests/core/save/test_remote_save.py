"""Saving to buckets: bit for bit, in parts, within the budget; whatever fails, there is the old or the new one."""

from __future__ import annotations

import itertools
import re
import shutil
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import lazymodel as lm
from tests.core.save._places import FOLDERS, INDEX, SHARDED, Bucket, once, placed
from tests.large import mostly_large
from tests.private_memory import private_nbytes
from tests.processes import printed, run_workers
from tests.servers.object_server import ObjectServer
from tests.servers.s3 import S3Server
from tests.small import make_small

WORKER = Path(__file__).with_name("_save_worker.py")
WRITES = ["PUT", "POST", "DELETE"]
PART = 4 << 10  # bytes, in stores that take such parts
# Of one file alone, of one that becomes a shard, of shards, and of shards that get an index first.
# Schemes, and options of saving.
SOME = mostly_large(
    [*itertools.product(("gs", "az"), ({}, SHARDED))],
    [("gs", SHARDED), ("az", {})],
)
BRIEF = ("single over sharded", "sharded")


@pytest.fixture
def buckets(object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> dict[str, Bucket]:
    """An empty one, by each dialect, which takes small parts."""
    make_small(monkeypatch, least_upload_part=PART, upload_part=PART)
    made = {scheme: Bucket(object_server, scheme) for scheme in ("gs", "az")}
    made["gs"].empty()
    return made


@pytest.fixture
def bucket(buckets: dict[str, Bucket]) -> Bucket:
    return buckets["gs"]


@pytest.mark.parametrize("dialect", mostly_large(["gs", "az", "s3"], ["gs", "s3"]))
def test_what_is_saved_comes_back_bit_for_bit(
    dialect: str, buckets: dict[str, Bucket], s3: S3Server, mesh8: jax.sharding.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    bits = np.random.default_rng(0).integers(0, 256, (24, 1 << 16), np.uint8)
    if dialect == "s3":  # which takes no shorter parts, and moto neither
        make_small(monkeypatch, least_upload_part=5 << 20)
        bits = np.tile(bits, (6, 1))
    wanted = {
        "columns": placed(bits.view("float32"), mesh8, None, "model"),
        "rows": placed(bits[:8, :4096].view(ml_dtypes.bfloat16), mesh8, "model"),
        "everywhere": placed(bits[0, :77], mesh8),
        "fours": (bits[1, :100] & 15).view(ml_dtypes.float4_e2m1fn),
        "count": jnp.asarray(3),
        "nothing": jnp.zeros((0, 4)),
    }
    url, options = "s3://bucket/saved", s3.options()
    if dialect != "s3":
        url, options = buckets[dialect].url(), buckets[dialect].options
    lm.save(wanted, f"{url}.safetensors", storage_options=options)
    for where in (url, f"{url}.safetensors"):
        if where == url:  # from there to another place, two shards
            with lm.open_checkpoint(f"{url}.safetensors", options) as ckpt:
                lm.save(ckpt, url, storage_options=options, max_shard_size="1MB")
        with lm.open_checkpoint(where, options) as ckpt:
            assert set(ckpt) == set(wanted)
            for name, array in wanted.items():
                read = ckpt[name].read()
                assert (read.dtype, read.shape) == (array.dtype, array.shape)
                assert read.tobytes() == np.asarray(array).tobytes(), name
    if dialect == "s3":
        assert s3.open_uploads() == []
    else:
        counters = buckets[dialect].server.counters()
        assert counters["open_uploads"] == []
        assert counters["uploads"] == {"begun": 3, "completed": 3}
        parts = sum(count for path, count in counters["paths"].items() if path.endswith("/saved.safetensors"))
        assert parts > bits.nbytes / PART, "it came in parts"


def test_the_number_of_threads_does_not_grow_with_what_is_saved(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (started.append(thread.name), start(thread)))
    counts: list[int] = []
    for size in (16, 256):
        started.clear()
        lm.save({"x": np.zeros((size, 1 << 10), np.float32)}, bucket.url("x.safetensors"), max_host_memory="256KiB",
                storage_options=bucket.options, overwrite=True)  # fmt: skip
        counts.append(len(started))
    assert bucket.server.counters()["paths"], "it was sent"
    assert counts[1] <= counts[0] + 3, counts  # as many chunks as there are rows


def test_no_more_memory_than_was_allowed(object_server: ObjectServer) -> None:
    bucket, saving = Bucket(object_server), {"storage_options": object_server.gcs()}
    bucket.empty()
    large = {"large": jnp.ones((96 << 18,), "float32").block_until_ready()}
    lm.save({"small": np.ones(3)}, bucket.url("first.safetensors"), **saving)  # what stays
    before, seen = private_nbytes(), list[int]()

    def watch(done: int, total: int) -> None:
        seen.append(private_nbytes() - before)

    lm.save(large, bucket.url("large.safetensors"), max_host_memory="24MiB", progress=watch, **saving)
    assert seen and max(seen) < 32 << 20
    with lm.open_checkpoint(bucket.url("large.safetensors"), bucket.options) as ckpt:
        assert (ckpt["large"][:: 1 << 16].read() == 1).all()
    bucket.empty()
    with pytest.raises(lm.LazyModelError, match=r"max_host_memory=1\.00 MiB is too little .* sent in parts"):
        lm.save(large, bucket.url(), max_host_memory="1MiB", **saving)
    assert bucket.objects() == {}


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("hf://owner/name", "hf://owner/name: a repository on a hub takes commits"),
        ("https://host/folder?sig=SECRET", "https://host/folder: few web servers take files"),
        ("http://127.0.0.1/folder", "few web servers take files"),
    ],
)
def test_places_that_cannot_be_written_to(url: str, words: str) -> None:
    with pytest.raises(lm.LazyModelError, match=f"cannot save to .*{words}.*Expected s3://, gs:// or az://") as caught:
        lm.save({"w": np.ones(1)}, url)
    assert "SECRET" not in str(caught.value)


# Failures -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", mostly_large(FOLDERS, BRIEF))
def test_whichever_request_fails_nothing_is_left_behind(bucket: Bucket, world: str) -> None:
    FOLDERS[world].make(bucket)
    bucket.put("foreign")
    before, state = bucket.objects(), bucket.found()
    failures: list[str] = []
    for number in range(1, 100):
        bucket.server.reset()
        bucket.server.faults(["503"], requests=[number], methods=WRITES, path="/gcs/*")
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                bucket.save(2, storage_options=bucket.once, **FOLDERS[world].new)
            except lm.LazyModelError as error:
                failures.append(str(error))
        if len(failures) == number:
            assert bucket.objects() == before
            assert bucket.server.counters()["open_uploads"] == []
            assert bucket.found() == state
            continue
        assert bucket.found() == 2
        if not warned:
            break
        assert "not all that it replaces could be removed" in str(warned[0].message)
        failures.append("")
        bucket.save(3, **FOLDERS[world].new)  # which removes what is left
        assert bucket.found() == 3
        others = len([name for name in bucket.objects() if re.search("-[0-9]{5}-of|foreign", name) and name in before])
        assert len(bucket.objects()) - others in (1, 2, 4), "one file alone, with its index, or three with theirs"
        FOLDERS[world].make(bucket)
        bucket.put("foreign")
        before = bucket.objects()
    told = [failure for failure in failures if failure]
    assert len(told) > 4
    for failure in told:
        assert failure.startswith("cannot write gs://uploads/saved/")
        assert "503" in failure
        assert "a fault that" not in failure, "what the server says"
        assert "uploadId" not in failure


@pytest.mark.parametrize(("scheme", "options"), SOME)
def test_a_store_that_fails_now_and_then_is_asked_again(
    buckets: dict[str, Bucket], scheme: str, options: dict[str, Any]
) -> None:
    bucket = buckets[scheme]
    for kind in ("503", "429", "reset", "lost"):
        bucket.save(1, **options)
        bucket.server.reset()
        bucket.server.faults([kind], every=3, methods=WRITES, path="/*")
        bucket.save(2, **options)
        assert bucket.server.counters()["faults"][kind] > 1
        bucket.server.faults()
        assert bucket.found() == 2
        assert len(bucket.objects()) == (4 if options else 1)


@pytest.mark.parametrize("options", mostly_large([{}, SHARDED], [{}]))
def test_what_was_done_and_not_answered_is_done(bucket: Bucket, options: dict[str, Any]) -> None:
    """Each request's answer gets lost in turn, and what asks once more finds that an upload is no longer there."""
    bucket.save(1, **options)
    for number in range(1, 100):
        bucket.server.reset()
        bucket.server.faults(["lost"], requests=[number], methods=WRITES, path="/gcs/*")
        bucket.save(number % 2 + 2, **options)
        assert bucket.found() == number % 2 + 2
        assert len(bucket.objects()) == (4 if options else 1)
        if not bucket.server.counters()["faults"]:
            break
    assert number > 4


def test_a_failed_upload_is_aborted_at_s3(s3: S3Server) -> None:
    old = {"w": np.arange(5 << 20, dtype=np.uint8)}
    given = {"storage_options": s3.options(), "overwrite": True}
    lm.save(old, "s3://bucket/saved", **given)

    def fail(done: int, total: int) -> None:
        if done > total / 2:
            assert s3.open_uploads(), "it was begun"
            raise ZeroDivisionError

    for path, options in {"saved": {}, "saved/other": {"max_shard_size": 1}}.items():
        with pytest.raises(ZeroDivisionError):
            lm.save(
                {"w": np.ones(24 << 20, np.uint8), "v": np.ones(1)},
                f"s3://bucket/{path}",
                progress=fail,
                **given,
                **options,
            )
        assert s3.open_uploads() == []
    with lm.open_checkpoint("s3://bucket/saved", s3.options()) as ckpt:
        assert ckpt["w"].read().tobytes() == old["w"].tobytes()
    with pytest.raises(lm.CheckpointError):
        lm.open_checkpoint("s3://bucket/saved/other", s3.options())


@pytest.mark.timeout(60)
def test_what_a_killed_saver_left_goes_with_the_next_save(bucket: Bucket, tmp_path: Path) -> None:
    bucket.save(1, **SHARDED)
    before = bucket.objects()
    codes = run_workers(WORKER, [("killed", bucket.server.origin())], tmp_path, patience=50)
    assert codes == [-signal.SIGKILL], printed(tmp_path, 1)
    left = {name: content for name, content in bucket.objects().items() if name not in before}
    assert len(left) == 2, "shards that were complete"
    assert bucket.found() == 1
    bucket.save(2, **SHARDED)
    assert bucket.found() == 2
    assert len(bucket.objects()) == 4
    bucket.empty()
    (bucket.folder / "saved").mkdir()
    for name, content in left.items():
        (bucket.folder / name).write_bytes(content)
    assert bucket.found() is None, "not all of them are there"
    bucket.save(3, overwrite=False)
    assert bucket.found() == 3
    assert [*bucket.objects()] == ["saved/model.safetensors"]


# Others at work -------------------------------------------------------------------------------------------------------


def test_who_opens_while_shards_are_replaced_gets_the_new_ones(bucket: Bucket) -> None:
    """It reads the old index, whose shards are gone, and then the new one."""
    bucket.save(1, **SHARDED)
    index = f"saved/{INDEX}"
    old = bucket.objects()[index]
    bucket.save(2, **SHARDED)
    shutil.copy(bucket.folder / index, bucket.folder / "new")
    bucket.put(index, old)
    bucket.server.replace(f"uploads/{index}", after=1, source="uploads/new")
    assert bucket.found() == 2


@pytest.mark.parametrize(("scheme", "options"), SOME)
def test_of_two_savers_one_succeeds(buckets: dict[str, Bucket], scheme: str, options: dict[str, Any]) -> None:
    bucket = buckets[scheme]
    for old in (None, {}, SHARDED):
        bucket.empty()
        if old is not None:
            bucket.save(1, **old)
        with pytest.raises(lm.LazyModelError, match="was saved to by another saver meanwhile"):
            bucket.save(2, progress=once(lambda: bucket.save(3, **options)), **options)
        assert bucket.found() == 3
        indexed = bool(options) or old is SHARDED
        assert len(bucket.objects()) == (4 if options else 2 if indexed else 1)
    assert scheme == "az" or bucket.server.counters()["open_uploads"] == []


def test_arguments_that_do_not_fit_together(tmp_path: Path) -> None:
    with pytest.raises(lm.LazyModelError, match="storage_options are for URLs, found a path"):
        lm.save({"w": np.ones(1)}, tmp_path / "saved", storage_options={"region": "x"})
    with pytest.raises(lm.LazyModelError, match="gs://uploads/saved: only safetensors are saved to buckets"):
        lm.save({"w": np.ones(1)}, "gs://uploads/saved", format="orbax")
