"""Saving to buckets: bit for bit, in parts, within the budget; whatever fails, there is the old or the new one."""

from __future__ import annotations

import json
import re
import signal
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from lazymodel._remote import upload
from lazymodel._save import remote
from lazymodel.checkpoints import _open
from tests.private_memory import private_nbytes
from tests.processes import free_address, printed, run_workers
from tests.servers.object_server import ObjectServer
from tests.servers.s3 import S3Server

WORKER = Path(__file__).with_name("_remote_save_worker.py")
PATIENCE = 50  # seconds, for processes
QUICK = {"backoff": {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=5), "base": 2}}
WRITES = ["PUT", "POST", "DELETE"]
INDEX = "model.safetensors.index.json"
PART = 4 << 10  # bytes, in stores that take such parts
SHARDED = {"max_shard_size": 6 << 10}


def values(fill: int) -> dict[str, np.ndarray]:
    """A checkpoint of 14 KiB of which every element says which one it is; one file, or three shards of 6 KiB."""
    return {name: np.full((32, 32), fill, "float32") for name in ("a/w", "b", "c")} | {
        f"only {fill}": np.full(3, fill, "float32"),
        "nothing": np.zeros((0, 4), "float32"),
    }


class Bucket:
    """A bucket of the object server, by one of its dialects."""

    def __init__(self, server: ObjectServer, scheme: str, options: dict[str, Any]) -> None:
        self.server, self.scheme, self.options = server, scheme, options | {"retry_config": QUICK}
        self.folder = server.root / "uploads"

    @property
    def once(self) -> dict[str, Any]:
        """Options with which nothing is tried again."""
        return self.options | {"retry_config": QUICK | {"max_retries": 0}}

    def url(self, path: str = "saved") -> str:
        return f"{self.scheme}://uploads/{path}"

    def save(self, fill: int, path: str = "saved", **options: Any) -> None:
        options = {"overwrite": True, "storage_options": self.options} | options
        lm.save(values(fill), self.url(path), **options)

    def objects(self) -> dict[str, bytes]:
        files = (path for path in sorted(self.folder.rglob("*")) if path.is_file())
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in files}

    def found(self, path: str = "saved") -> int | None:
        """Which checkpoint is there, complete; None where there is none."""
        try:
            ckpt = lm.open_checkpoint(self.url(path), self.options)
        except lm.CheckpointError:
            return None
        with ckpt:
            read = {name: tensor.read() for name, tensor in ckpt.items()}
        fills = {float(element) for value in read.values() for element in value.flat}
        assert len(fills) == 1, f"a mixture: {fills}"
        fill = int(fills.pop())
        assert {name: value.tobytes() for name, value in read.items()} == {
            name: value.tobytes() for name, value in values(fill).items()
        }
        return fill


@pytest.fixture
def bucket(object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """An empty one, with small parts."""
    monkeypatch.setattr(upload, "LEAST_PART", PART)
    monkeypatch.setattr(upload, "PART", PART)
    return emptied(Bucket(object_server, "gs", object_server.gcs()))


@pytest.fixture
def azure(object_server: ObjectServer, bucket: Bucket) -> Bucket:
    return Bucket(object_server, "az", object_server.azure())


def emptied(bucket: Bucket) -> Bucket:
    bucket.folder.mkdir(exist_ok=True)
    for path in sorted(bucket.folder.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    return bucket


def place(array: np.ndarray, mesh: jax.sharding.Mesh, *spec: Any) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


# What is written ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["gs", "az", "s3"])
def test_what_is_saved_comes_back_bit_for_bit(
    dialect: str, bucket: Bucket, azure: Bucket, s3: S3Server, mesh8: jax.sharding.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    bits = np.random.default_rng(0).integers(0, 256, (24, 1 << 16), np.uint8)
    if dialect == "s3":  # which takes no shorter parts, and moto neither
        monkeypatch.setattr(upload, "LEAST_PART", 5 << 20)
        bits = np.tile(bits, (6, 1))
    wanted = {
        "columns": place(bits.view("float32"), mesh8, None, "model"),
        "rows": place(bits[:8, :4096].view(ml_dtypes.bfloat16), mesh8, "model"),
        "everywhere": place(bits[0, :77], mesh8),
        "fours": (bits[1, :100] & 15).view(ml_dtypes.float4_e2m1fn),
        "count": jnp.asarray(3),
        "nothing": jnp.zeros((0, 4)),
    }
    url, options = {
        "gs": (bucket.url(), bucket.options),
        "az": (azure.url(), azure.options),
        "s3": ("s3://bucket/saved", s3.options()),
    }[dialect]
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
        counters = bucket.server.counters()
        assert counters["open_uploads"] == []
        assert counters["uploads"] == {"begun": 3, "completed": 3}
        parts = sum(count for path, count in counters["paths"].items() if path.endswith("/saved.safetensors"))
        assert parts > bits.nbytes / PART, "it came in parts"


def test_no_more_memory_than_was_allowed(object_server: ObjectServer) -> None:
    bucket = emptied(Bucket(object_server, "gs", object_server.gcs()))
    large = {"large": jnp.ones((96 << 18,), "float32").block_until_ready()}
    del bucket.options["retry_config"]

    lm.save({"small": np.ones(3)}, bucket.url("first.safetensors"), storage_options=bucket.options)  # what stays
    before, peak = private_nbytes(), 0

    def watch(done: int, total: int) -> None:
        nonlocal peak
        peak = max(peak, private_nbytes() - before)

    lm.save(
        large,
        bucket.url("large.safetensors"),
        max_host_memory="24MiB",
        progress=watch,
        storage_options=bucket.options,
    )
    assert 0 < peak < 32 << 20
    with lm.open_checkpoint(bucket.url("large.safetensors"), bucket.options) as ckpt:
        assert (ckpt["large"][:: 1 << 16].read() == 1).all()
    emptied(bucket)
    with pytest.raises(lm.LazyModelError, match=r"max_host_memory=1\.00 MiB is too little .* sent in parts"):
        lm.save(large, bucket.url(), max_host_memory="1MiB", storage_options=bucket.options)
    assert bucket.objects() == {}


def test_the_index_names_shards_of_this_save_alone(bucket: Bucket) -> None:
    (bucket.folder / "saved").mkdir()
    foreign = {"saved/config.json": b"{}", "saved/model-00001-of-00002.bin": b"x", "saved-too": b"x"}
    for name, content in foreign.items():
        (bucket.folder / name).write_bytes(content)
    for fill in (1, 2):
        bucket.save(fill, **SHARDED)
        objects = bucket.objects()
        index = json.loads(objects.pop(f"saved/{INDEX}"))
        shards = {f"saved/{name}" for name in index["weight_map"].values()}
        assert len(shards) == 3
        assert objects.keys() == shards | foreign.keys()
        assert {name: objects[name] for name in foreign} == foreign
        assert bucket.found() == fill


# What may be saved where ----------------------------------------------------------------------------------------------


def test_what_is_there_stays_unless_it_may_be_replaced(bucket: Bucket) -> None:
    for path, options in (("saved", {}), ("more", SHARDED), ("x.safetensors", {})):
        bucket.save(1, path, overwrite=False, **options)
        before = bucket.objects()
        with pytest.raises(lm.LazyModelError, match="there is a checkpoint already: .* Pass overwrite=True"):
            bucket.save(2, path, overwrite=False)
        assert bucket.objects() == before
        bucket.save(2, path)
        assert bucket.found(path) == 2


def test_what_would_hide_a_checkpoint_or_be_hidden_is_refused(bucket: Bucket) -> None:
    bucket.save(1, **SHARDED)
    for name in ("other/weights.safetensors", "x.safetensors/y", "file"):
        (bucket.folder / name).parent.mkdir(exist_ok=True)
        (bucket.folder / name).write_bytes(b"x")
    before = bucket.objects()
    for path, words in {
        "saved/model.safetensors": "would change the sharded checkpoint of .*index.json, or be hidden",
        "other": "a checkpoint already in .*other, of another format or other names",
        "x.safetensors": "is a folder; give the name of a file",
        "file": "is a file; give a folder",
    }.items():
        with pytest.raises(lm.LazyModelError, match=words):
            bucket.save(2, path)
    assert bucket.objects() == before


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


def test_arguments_that_do_not_fit_together(tmp_path: Path) -> None:
    with pytest.raises(lm.LazyModelError, match="storage_options are for URLs, found a path"):
        lm.save({"w": np.ones(1)}, tmp_path / "saved", storage_options={"region": "x"})
    with pytest.raises(lm.LazyModelError, match="gs://uploads/saved: only safetensors are saved to buckets"):
        lm.save({"w": np.ones(1)}, "gs://uploads/saved", format="orbax")


# Failures -------------------------------------------------------------------------------------------------------------

WORLDS: dict[str, tuple[dict[str, Any] | None, dict[str, Any], bool]] = {  # old, new, whether the old index is lost
    "single": (None, {}, False),
    "sharded": (None, SHARDED, False),
    "single over single": ({}, {}, False),
    "sharded over single": ({}, SHARDED, False),
    "single over sharded": (SHARDED, {}, False),
    "sharded over sharded": (SHARDED, SHARDED, False),
    "single over loose": (SHARDED, {}, True),
    "sharded over loose": (SHARDED, SHARDED, True),
}


def made(bucket: Bucket, world: str) -> dict[str, Any]:
    """Makes what is there in a world before, and says how the new checkpoint is saved."""
    old, new, loose = WORLDS[world]
    if loose:  # named as those of Hugging Face's tools, and without their index
        lm.save(values(1), bucket.folder / "saved", **SHARDED)
        (bucket.folder / "saved" / INDEX).unlink()
    elif old is not None:
        bucket.save(1, **old)
    return new


@pytest.mark.parametrize("world", WORLDS)
def test_whichever_request_fails_nothing_is_left_behind(bucket: Bucket, world: str) -> None:
    new = made(bucket, world)
    (bucket.folder / "foreign").write_bytes(b"x")
    before, state = bucket.objects(), bucket.found()
    failures: list[str] = []
    for number in range(1, 100):
        bucket.server.reset()
        bucket.server.faults(["503"], requests=[number], methods=WRITES, path="/gcs/*")
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                bucket.save(2, storage_options=bucket.once, **new)
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
        bucket.save(3, **new)  # which removes what is left
        assert bucket.found() == 3
        others = len([name for name in bucket.objects() if re.search("-[0-9]{5}-of|foreign", name) and name in before])
        assert len(bucket.objects()) - others in (1, 2, 4), "one file alone, with its index, or three with theirs"
        emptied(bucket)
        made(bucket, world)
        (bucket.folder / "foreign").write_bytes(b"x")
        before = bucket.objects()
    told = [failure for failure in failures if failure]
    assert len(told) > 4
    for failure in told:
        assert failure.startswith("cannot write gs://uploads/saved/")
        assert "503" in failure
        assert "a fault that" not in failure, "what the server says"
        assert "uploadId" not in failure


@pytest.mark.parametrize("scheme", ["gs", "az"])
@pytest.mark.parametrize("options", [{}, SHARDED])
def test_a_store_that_fails_now_and_then_is_asked_again(
    bucket: Bucket, azure: Bucket, scheme: str, options: dict[str, Any]
) -> None:
    chosen = {"gs": bucket, "az": azure}[scheme]
    for kind in ("503", "429", "reset", "lost"):
        chosen.save(1, **options)
        bucket.server.reset()
        bucket.server.faults([kind], every=3, methods=WRITES, path="/*")
        chosen.save(2, **options)
        assert bucket.server.counters()["faults"][kind] > 1
        bucket.server.faults()
        assert chosen.found() == 2
        assert len(chosen.objects()) == (4 if options else 1)


@pytest.mark.parametrize("options", [{}, SHARDED])
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


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_and_an_error_of_ones_own_leave_what_was_there(bucket: Bucket) -> None:
    bucket.save(1, **SHARDED)
    before = bucket.objects()

    def interrupted() -> Callable[[int, int], None]:
        pressed = threading.Event()

        def interrupt(done: int, total: int) -> None:
            # In a thread that uploads; Ctrl-C goes to the main one. Once: a second one does not wait for the abort.
            if done > total / 2 and not pressed.is_set():
                pressed.set()
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        return interrupt

    def fail(done: int, total: int) -> None:
        raise ZeroDivisionError

    for options in ({}, SHARDED):
        with pytest.raises(KeyboardInterrupt):
            bucket.save(2, progress=interrupted(), **options)
        with pytest.raises(ZeroDivisionError):
            bucket.save(2, progress=fail, **options)
    with pytest.raises(KeyboardInterrupt):
        bucket.save(2, "x.safetensors", progress=interrupted())
    assert bucket.objects() == before
    assert bucket.server.counters()["open_uploads"] == []


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
    codes = run_workers(WORKER, [("killed", bucket.server.origin())], tmp_path, patience=PATIENCE)
    assert codes == [-signal.SIGKILL], printed(tmp_path, 1)
    left = {name: content for name, content in bucket.objects().items() if name not in before}
    assert len(left) == 2, "shards that were complete"
    assert bucket.found() == 1
    bucket.save(2, **SHARDED)
    assert bucket.found() == 2
    assert len(bucket.objects()) == 4
    emptied(bucket)
    (bucket.folder / "saved").mkdir()
    for name, content in left.items():
        (bucket.folder / name).write_bytes(content)
    assert bucket.found() is None, "not all of them are there"
    bucket.save(3, overwrite=False)
    assert bucket.found() == 3
    assert [*bucket.objects()] == ["saved/model.safetensors"]


# Others at work -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
def test_readers_see_the_old_or_the_new(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, world: str) -> None:
    new = made(bucket, world)
    state = bucket.found()
    early = lm.open_checkpoint(bucket.url(), bucket.options) if state is not None else None
    seen: list[int | None] = []
    afterwards: list[int | None] = []
    delete = remote.delete
    monkeypatch.setattr(remote, "delete", lambda paths: (afterwards.append(bucket.found()), delete(paths))[1])
    bucket.save(2, progress=lambda done, total: seen.append(bucket.found()), **new)
    assert len(seen) > 3
    assert {*seen} == {state}
    assert afterwards == [2]
    assert bucket.found() == 2
    if early is not None:
        with (
            early,
            pytest.raises(lm.CheckpointError, match="changed while it was being read|there is nothing any more"),
        ):
            [early[name].read() for name in early]


def test_who_opens_while_shards_are_replaced_gets_the_new_ones(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.save(1, **SHARDED)
    read = _open.read_json_file

    def replaced(file: Any) -> dict[str, Any]:
        content = read(file)
        monkeypatch.setattr(_open, "read_json_file", read)
        bucket.save(2, **SHARDED)
        return content

    monkeypatch.setattr(_open, "read_json_file", replaced)
    assert bucket.found() == 2


@pytest.mark.parametrize("scheme", ["gs", "az"])
@pytest.mark.parametrize("options", [{}, SHARDED])
def test_of_two_savers_one_succeeds(bucket: Bucket, azure: Bucket, scheme: str, options: dict[str, Any]) -> None:
    chosen = {"gs": bucket, "az": azure}[scheme]
    for old in (None, {}, SHARDED):
        emptied(bucket)
        if old is not None:
            chosen.save(1, **old)
        others: list[int] = []

        def other(done: int, total: int, others: list[int] = others) -> None:
            if not others:
                others.append(3)
                chosen.save(3, **options)

        with pytest.raises(lm.LazyModelError, match="was saved to by another saver meanwhile"):
            chosen.save(2, progress=other, **options)
        assert chosen.found() == 3
        indexed = bool(options) or old is SHARDED
        assert len(chosen.objects()) == (4 if options else 2 if indexed else 1)
    assert scheme == "az" or bucket.server.counters()["open_uploads"] == []


# Several processes ----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
def test_two_processes_upload_files_of_their_own(bucket: Bucket, tmp_path: Path) -> None:
    address = free_address()
    arguments = [(process, address, bucket.server.origin(), tmp_path) for process in range(2)]
    codes = run_workers(WORKER, arguments, tmp_path, patience=PATIENCE)
    assert codes == [0, 0], printed(tmp_path, 2)
    expected = np.load(tmp_path / "expected.npz")
    for name, path in {"plain": "plain", "mapped": "mapped", "one.safetensors": "plain"}.items():
        with lm.open_checkpoint(bucket.url(name), bucket.options) as ckpt:
            wanted = {key.removeprefix(f"{path}:"): value for key, value in expected.items() if key.startswith(path)}
            assert set(ckpt) == set(wanted)
            for key, value in wanted.items():
                assert ckpt[key].read().tobytes() == value.tobytes(), (name, key)
    outcomes = [json.loads((tmp_path / f"outcomes-{process}.json").read_text()) for process in range(2)]
    nbytes = sum(value.nbytes for key, value in expected.items() if key.startswith("plain"))
    assert sum(outcome["sent"] for outcome in outcomes) == nbytes, "every byte once"
    assert all(outcome["sent"] > nbytes / 4 for outcome in outcomes)
    for failed, name in {1: "plain", 0: "one.safetensors"}.items():
        assert outcomes[failed][name] == "no more"
        said = f"process {failed} failed, so nothing was saved here either: no more"
        assert outcomes[1 - failed][name].startswith(said)
    assert all("tensors differ" in outcome["differ"] for outcome in outcomes)
    indexes = {name: json.loads(bucket.objects()[f"{name}/{INDEX}"]) for name in ("plain", "mapped")}
    shards = {f"{name}/{shard}" for name, index in indexes.items() for shard in index["weight_map"].values()}
    assert bucket.objects().keys() == shards | {f"plain/{INDEX}", f"mapped/{INDEX}", "one.safetensors"}
    assert bucket.server.counters()["open_uploads"] == []
