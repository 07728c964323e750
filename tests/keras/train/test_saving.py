"""Keras' own saving inside `streamed_saving`: in pieces, and the old or the new, complete, wherever it is killed."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import filecmp
import os
import resource
import shutil
import threading
import tracemalloc
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import keras
import keras_hub
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import lazymodel as lm
import lazymodel_keras as lk
from tests.core.save._accidents import Accident, Accidents, Killed, fail, interrupt, kill
from tests.keras.models import BACKBONES, BERT, columns, randomize, seeded, state_of
from tests.small import make_small

BERT_BACKBONE = BACKBONES["bert"][0]
KB = 1 / (1 << 20)  # in GB, as Keras counts shards


def net(seed: int = 0) -> keras.Model:
    layers = [keras.layers.Dense(16, name=f"layer_{i}") for i in range(4)]
    return randomize(keras.Sequential([keras.layers.Input((16,)), *layers], name="net"), seed)


def bert(seed: int = 0) -> Any:
    return randomize(BERT_BACKBONE(**{**BERT, "max_sequence_length": 64}, name="bert"), seed)


def task(seed: int = 0) -> Any:
    return randomize(keras_hub.models.BertTextClassifier(bert(), num_classes=2, name="task"), seed)


def values(model: Any) -> list[np.ndarray]:
    return [np.asarray(variable.value) for variable in model.weights]


def loaded(path: Path) -> list[np.ndarray]:
    model = net()
    model.load_weights(path)
    return values(model)


@dataclasses.dataclass(frozen=True)
class Way:
    """A way of saving, and of reading what it saved as stock Keras does."""

    make: Callable[[int], Any]
    name: str
    save_new: Callable[[Any, Path], Any]
    load: Callable[[Path], list[np.ndarray]]
    save_old: Callable[[Any, Path], Any] | None = None  # what is replaced, if it is saved in another way
    others: tuple[str, ...] = ()  # files that are there, besides `notes.txt`

    def save(self, model: Any, folder: Path, *, old: bool = False) -> None:
        with lk.streamed_saving():
            ((self.save_old if old else None) or self.save_new)(model, folder / self.name)


def save_lora(model: Any, path: Path) -> None:
    rng = np.random.default_rng(int(abs(float(values(model)[0].flat[0])) * 1e6))
    if not getattr(model, "_lora_rank", None):
        model.enable_lora(2)
    for variable in model.trainable_variables:
        variable.assign(rng.standard_normal(variable.shape).astype("f"))
    model.save_lora_weights(str(path))


def load_lora(path: Path) -> list[np.ndarray]:
    model = bert()
    model.enable_lora(2)
    model.load_lora_weights(str(path))
    return [np.asarray(variable.value) for variable in model.trainable_variables]


def sharded(size: float) -> Callable[[Any, Path], Any]:
    return lambda model, path: model.save_weights(path, max_shard_size=size * KB)


def preset(size: float | None) -> Callable[[Any, Path], Any]:
    return lambda model, path: model.save_to_preset(str(path), max_shard_size=size and size * KB)


def load_preset(path: Path) -> list[np.ndarray]:
    return values(BERT_BACKBONE.from_preset(str(path)))


WAYS = {
    "weights": Way(net, "m.weights.h5", lambda model, path: model.save_weights(path), loaded),
    "more shards": Way(net, "m.weights.json", sharded(1.25), loaded, sharded(2.5), ("other_00000.weights.h5",)),
    "fewer shards": Way(net, "m.weights.json", sharded(2.5), loaded, sharded(1.25), ("m_0.weights.h5",)),
    "keras": Way(net, "m.keras", lambda m, path: m.save(path), lambda p: values(keras.saving.load_model(p))),
    "legacy": Way(net, "m.h5", lambda m, path: m.save(path), lambda p: values(keras.saving.load_model(p))),
    "folder": Way(
        *(net, "m", lambda m, path: m.save(path, zipped=False), lambda p: values(keras.saving.load_model(p))),
        others=("m/notes.txt",),
    ),
    "lora": Way(bert, "m.lora.h5", save_lora, load_lora),
    "preset": Way(bert, "p", preset(None), load_preset, preset(20), ("p/notes.txt", "p/assets/mine/vocabulary.txt")),
    "sharded preset": Way(bert, "p", preset(20), load_preset, preset(None), ("p/.hidden",)),
    "task": Way(
        *(task, "p", preset(None)),
        lambda path: values(keras_hub.models.BertTextClassifier.from_preset(str(path), preprocessor=None)),
        others=("p/notes.txt",),
    ),
}
QUICK = ("more shards", "keras", "preset")  # a file, several, and a folder; the others are for the large run
ways = pytest.mark.parametrize(
    "way",
    [pytest.param(way, id=name, marks=() if name in QUICK else pytest.mark.large) for name, way in WAYS.items()],
    scope="module",
)


@contextlib.contextmanager
def accidents(at: int = 1 << 30, accident: Accident = kill) -> Generator[Accidents]:
    """Counts what changes files, datasets of HDF5 among it; at the n-th operation the accident happens."""
    found, create = Accidents(at, accident), h5py.Group.create_dataset

    def counted(*args: Any, **kwargs: Any) -> Any:
        found.step("dataset")
        return create(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, found.possible():
        patch.setattr(h5py.Group, "create_dataset", counted)
        yield found


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return len(one) == len(other) and all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture(scope="module")
def prepared(way: Way, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with the old state and others' files, to be copied; what it, a clean save and their listing are."""
    old, new = way.make(1), way.make(2)
    tmp_path = tmp_path_factory.mktemp("way")
    folder = tmp_path / "work"
    folder.mkdir()
    way.save(old, folder, old=True)
    for name in ("notes.txt", *way.others):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(f"not to be touched: {name}")
    before = way.load(folder / way.name)
    shutil.copytree(folder, tmp_path / "clean")
    with accidents() as operations:
        way.save(new, tmp_path / "clean")
    after = way.load(tmp_path / "clean" / way.name)
    assert not same(before, after)
    return folder, new, before, after, listing(tmp_path / "clean"), operations.count


@contextlib.contextmanager
def stopping() -> Generator[None, None, None]:
    """Takes what ends a save; Keras' own `finally` may put one of its own in its place, closing what is not open."""
    try:
        yield
    except (Killed, KeyboardInterrupt, OSError, lm.LazyModelError):
        pass
    except UnboundLocalError as error:
        if not isinstance(error.__context__, KeyboardInterrupt | OSError):
            raise


def check_way(way: Way, prepared: Any, points: Callable[[int], Any], accident: Accident = kill) -> tuple[int, int]:
    """Lets a save have an accident at some of its operations; returns how often old and new were found."""
    folder, new, before, after, clean, count = prepared
    work, found = folder.parent / "try", [0, 0]
    assert count > 5
    for number in points(count):
        shutil.copytree(folder, work)
        with stopping(), accidents(number, accident):
            way.save(new, work)
        opened = way.load(work / way.name)
        assert same(opened, before) or same(opened, after), f"a mixture after operation {number} of {count}"
        found[same(opened, after)] += 1
        for name in ("notes.txt", *way.others):
            assert (work / name).read_text() == f"not to be touched: {name}", number
        if accident is not kill:  # it tidied up itself
            left = [name for name in listing(work) if "lazymodel-saving" in name]
            assert not left or same(opened, after), f"{left} after {number}"
        way.save(new, work)
        assert listing(work) == clean, f"after a save that was killed at operation {number}"
        assert same(way.load(work / way.name), after)
        shutil.rmtree(work)
    return found[0], found[1]


@ways
def test_killed(way: Way, prepared: Any) -> None:
    check_way(way, prepared, lambda count: [count // 2, count * 2 // 3, count - 2])  # those at the end decide


@pytest.mark.large
@ways
def test_killed_at_every_operation(way: Way, prepared: Any) -> None:
    assert all(check_way(way, prepared, lambda count: range(1, count + 1)))


@pytest.mark.large
# Keras' temporary folders in ours, which went with it, are looked for once more when they are collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@ways
@pytest.mark.parametrize("accident", [interrupt, fail])
def test_interrupted_at_every_operation(way: Way, prepared: Any, accident: Accident) -> None:
    with pytest.warns(lm.LazyModelWarning) if accident is fail else contextlib.nullcontext():
        check_way(way, prepared, lambda count: range(1, count + 1), accident)


def in_a_child_that_writes_little(limit: int, work: Callable[[], Any]) -> bool:
    """Returns True if `work` ended without an error in a child process whose files cannot exceed `limit` bytes.

    A child, because HDF5 may end the process where it cannot write what is left while it closes a file.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of forks, and this one uses no device
        child = os.fork()
    if child == 0:
        try:
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


@ways
def test_a_full_disk_leaves_the_old(way: Way, prepared: Any, tmp_path: Path) -> None:
    template, new, before, after, clean, _ = prepared
    folder = shutil.copytree(template, tmp_path / "full")
    for limit in (100, 1500):
        assert not in_a_child_that_writes_little(limit, lambda: way.save(new, folder))
        assert same(way.load(folder / way.name), before)
    way.save(new, folder)
    assert same(way.load(folder / way.name), after)
    assert listing(folder) == clean


@pytest.mark.parametrize("name", ["weights", "more shards", "preset"])
def test_a_disk_without_room_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is written: HDF5 would end the process when it finds out too late."""
    way, (old, new) = WAYS[name], (WAYS[name].make(1), WAYS[name].make(2))
    way.save(old, tmp_path)
    listed, nbytes = listing(tmp_path), sum(value.nbytes for value in values(new))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=nbytes - 1))
    with pytest.raises(lm.LazyModelError, match=rf"{tmp_path}/.* needs .*, and there are .* free"):
        way.save(new, tmp_path)
    assert same(way.load(tmp_path / way.name), values(old))
    assert listing(tmp_path) == listed


@pytest.mark.parametrize("name", ["weights", "more shards", "preset"])
def test_a_second_saver_is_refused(name: str, tmp_path: Path) -> None:
    way, refused = WAYS[name], list[str]()
    model = way.make(1)
    way.save(model, tmp_path, old=True)

    def save_meanwhile() -> None:
        with pytest.raises(lm.LazyModelError, match="being saved to by another saver") as raised:
            way.save(model, tmp_path)
        refused.append(str(raised.value))

    def begin_a_second(operations: Accidents, operation: str) -> None:
        if operation == "dataset" and not refused:
            refused.append("")
            second = threading.Thread(target=save_meanwhile)
            second.start()
            second.join(60)

    with accidents(1, begin_a_second):
        way.save(model, tmp_path)
    assert len(refused) == 2
    assert same(way.load(tmp_path / way.name), values(model))


def test_what_a_path_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path, and a link."""
    monkeypatch.chdir(tmp_path)
    model = net(3)
    (tmp_path / "elsewhere").mkdir()
    os.symlink(tmp_path / "elsewhere" / "target.weights.h5", tmp_path / "link.weights.h5")
    with lk.streamed_saving():
        model.save_weights("plain.weights.h5")
        model.save_weights("link.weights.h5")
        (tmp_path / "elsewhere" / "target.weights.h5").chmod(0o600)
        model.save_weights("link.weights.h5")
    assert (tmp_path / "link.weights.h5").is_symlink()
    assert (tmp_path / "elsewhere" / "target.weights.h5").stat().st_mode & 0o777 == 0o600
    for name in ("plain.weights.h5", "link.weights.h5", "elsewhere/target.weights.h5"):
        assert same(loaded(tmp_path / name), values(model))
    assert listing(tmp_path) == sorted(
        ["plain.weights.h5", "link.weights.h5", "elsewhere", "elsewhere/target.weights.h5"]
    )


def test_the_current_folder_is_replaced_and_entered_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of weights in shards nothing is left once they are saved in one file."""
    (tmp_path / "p").mkdir()
    monkeypatch.chdir(tmp_path / "p")
    model = bert(3)
    for size in (20, None):
        with lk.streamed_saving():
            preset(size)(model, Path("."))
        assert same(load_preset(Path(".")), values(model))
        assert os.getcwd() == str(tmp_path / "p")
        assert (len(os.listdir()) > 4) is (size is not None)
    assert sorted(os.listdir()) == ["config.json", "metadata.json", "model.weights.h5"]


def test_a_preset_without_the_tasks_own_weights_any_more(tmp_path: Path) -> None:
    """Stock KerasHub leaves the old ones there, and then fails to load them."""
    with lk.streamed_saving():
        task(1).save_to_preset(str(tmp_path / "p"))
        assert (tmp_path / "p" / "task.weights.h5").exists()
        bert(2).save_to_preset(str(tmp_path / "p"))
    assert (tmp_path / "p" / "task.weights.h5").exists(), "a backbone is saved into what else there is, as stock does"
    assert same(load_preset(tmp_path / "p"), values(bert(2)))


# In pieces ------------------------------------------------------------------------------------------------------------


def test_saving_copies_a_few_bytes_at_a_time(tmp_path: Path, mesh42: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch, saved_chunk=(chunk := 1 << 16))
    width, layers = 512, 3
    original, written = h5py.Dataset.__setitem__, list[int]()

    def write(self: Any, where: Any, values: Any) -> None:
        written.append(values.nbytes)
        original(self, where, values)

    monkeypatch.setattr(h5py.Dataset, "__setitem__", write)

    def wide() -> keras.Model:
        dense = [keras.layers.Dense(width, use_bias=False, name=f"d{i}") for i in range(layers)]
        half = keras.layers.Dense(width, use_bias=False, dtype="bfloat16", name="half")
        return keras.Sequential([keras.Input((width,)), *dense, half])

    def save_and_measure(name: str) -> tuple[int, int]:
        model = seeded(lambda: lm.build_abstract(wide)).shard(mesh42, lambda variable: P(None, "model")).materialize()
        tracemalloc.start()
        model.save_weights(tmp_path / name, **({"max_shard_size": 2e-3} if name.endswith("json") else {}))
        current, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return current, peak

    one, whole = width * width * 4, (layers * 4 + 2) * width * width
    assert save_and_measure("stock.weights.h5")[0] > whole, "stock keeps a copy"
    for name in ("ours.weights.h5", "ours.weights.json"):
        with lk.streamed_saving():
            current, peak = save_and_measure(name)
        assert current < one and peak < one
        assert sum(written) == whole and max(written) <= chunk
        written.clear()
    assert filecmp.cmp(tmp_path / "stock.weights.h5", tmp_path / "ours.weights.h5", shallow=False)


def test_presets_and_whole_models_are_saved_in_pieces(tmp_path: Path, mesh42: Mesh) -> None:
    cls, config = BACKBONES["bert"]

    model = lm.build_abstract(cls, **config).shard(mesh42, columns).materialize()
    compiled = net(1)
    compiled.compile("adam", "mse")
    compiled.optimizer.build(compiled.trainable_variables)
    compiled.optimizer.variables[2].assign(np.ones((16, 16)))
    with lk.streamed_saving():
        model.save_to_preset(str(tmp_path / "ours"))
        compiled.save(tmp_path / "net.keras")
    model.save_to_preset(str(tmp_path / "stock"))
    assert sorted(os.listdir(tmp_path / "ours")) == sorted(os.listdir(tmp_path / "stock"))
    for name in ("model.weights.h5", "config.json"):
        assert filecmp.cmp(tmp_path / "ours" / name, tmp_path / "stock" / name, shallow=False)
    again = keras.saving.load_model(tmp_path / "net.keras")
    assert same(*([np.asarray(variable.value) for variable in state_of(model)] for model in (compiled, again)))
