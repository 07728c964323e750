"""Steps of training: which one counts, what is said of it, and what accidents and wrong arguments leave."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import lazymodel as lm
from tests.core.save import _accidents
from tests.large import mostly_large

ABSTRACT = lm.build_abstract(lambda: {"w": jnp.zeros((40, 5)), "b": jnp.zeros((7,)), "count": 0, "rate": 0.5})
SHARDED: dict[str, Any] = {"max_shard_size": 500, "max_to_keep": 2}


def state(step: int) -> dict[str, Any]:
    """A training state of which every number says which step it is of."""
    return {
        "w": jnp.full((40, 5), step, "float32"),
        "b": np.full((7,), step, "float32"),
        "count": step,
        "rate": step / 7,
    }


def assert_step(folder: Path, expected: set[int]) -> int:
    """Which of the expected steps is restored, complete."""
    found = lm.training_state(folder)
    assert found is not None and found.step in expected
    restored = lm.restore(ABSTRACT, folder)
    assert (restored["count"], restored["rate"]) == (found.step, found.step / 7)
    assert {float(element) for name in "wb" for element in np.ravel(restored[name])} == {float(found.step)}
    return found.step


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("size", "accident"),
    mostly_large(
        [*itertools.product((500, "1GB"), (_accidents.kill, _accidents.interrupt, _accidents.fill_disk))],
        [(500, _accidents.fill_disk), ("1GB", _accidents.kill), ("1GB", _accidents.interrupt)],
    ),
)
def test_an_accident_leaves_a_complete_step(folder: Path, accident: Any, size: Any) -> None:
    options = SHARDED | {"max_shard_size": size}
    (folder / "template").mkdir()
    template, seen, count = folder / "template", set[int](), 0
    for step in (1, 2):
        lm.save_step(state(step), template, step, **options)

    def save(root: Path) -> None:
        lm.save_step(state(3), root, 3, **options)

    some = (
        _accidents.turns(_accidents.kinds(template, save))
        if accident is _accidents.kill
        else range(1 + len(options), 1000, 2)
    )
    for root, happened, _, _ in _accidents.at_each_operation(template, save, accident, at=some):
        count += 1
        seen.add(before := assert_step(root, {2, 3} if happened else {3}))
        lm.save_step(state(4), root, 4, **options)
        assert_step(root, {4})
        assert sorted(path.name for path in root.iterdir()) == [str(before), "4"], "leftovers"
        assert not list(root.glob("*/.*")), "leftovers"
    assert count > 15 and seen == {2, 3}


def test_what_is_said_of_a_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert lm.training_state(run) is None
    with pytest.raises(lm.CheckpointError, match="run"):
        lm.restore(ABSTRACT, run)
    for step, data in ((0, None), (10, b"\x00\xff"), (9, {"position": [1, 2]})):
        lm.save_step(state(step), run, np.int64(step), metadata={"loss": step / 4}, data=data)
    found = {step: lm.training_state(run, step=step) for step in (0, 9, 10)}
    assert [(at.metadata, at.data) for at in found.values() if at] == [
        ({"loss": 0.0}, None), ({"loss": 2.25}, {"position": [1, 2]}), ({"loss": 2.5}, b"\x00\xff"),
    ]  # fmt: skip
    assert lm.training_state(run) == found[10] == lm.TrainingState(str(run / "10"), 10, {"loss": 2.5}, b"\x00\xff")
    assert lm.training_state(run / "9") == found[9]
    assert lm.restore(ABSTRACT, run, step=9)["count"] == lm.restore(ABSTRACT, run / "9")["count"] == 9
    for call in (lm.training_state, lambda path, step: lm.restore(ABSTRACT, path, step=step)):
        with pytest.raises(lm.CheckpointError, match="run has no complete step 8; found 10, 9, 0"):
            call(run, step=8)
    with pytest.raises(lm.LazyModelError, match="already"):
        lm.save_step(state(1), run, 9)
    lm.save_step(state(11), run, 9, overwrite=True, max_to_keep=1)
    assert sorted(path.name for path in run.iterdir()) == ["10", "9"], "what was just saved stays"


def test_an_index_whose_shards_are_not_all_there_makes_no_step(tmp_path: Path) -> None:
    for step in (1, 2):
        lm.save_step(state(step), tmp_path, step, max_shard_size=500)
    next((tmp_path / "2").glob("model-00001*")).unlink()
    assert_step(tmp_path, {1})


def test_what_does_not_fit(tmp_path: Path) -> None:
    trained = lm.build_abstract(lambda: {"w": jnp.zeros((40, 5)), "count": 0, "rate": 0.5})
    lm.save_step(state(1), tmp_path / "run", 1)
    lm.save({"w": jnp.zeros((40, 5))}, tmp_path / "plain")
    lm.save_step({"w": jnp.zeros((40, 5)), "count": 0.5, "rate": 1.0}, tmp_path / "kinds", 1)
    for model, path, message in (
        (trained, "run", "'b'"),
        (lm.build_abstract(lambda: {"z": jnp.zeros(3)}), "run", "'z'|'w'"),
        (trained, "plain", "plain has no tensor for the number 'count'"),
        (trained, "kinds", r"'count': expected a number, int64\[\], found float64\[\] in .*kinds"),
    ):
        with pytest.raises(lm.CheckpointError, match=message):
            lm.restore(model, tmp_path / path)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((-1,), {}, "step is a number from 0; got -1"),
        (("5",), {}, "step is a number from 0; got '5'"),
        ((True,), {}, "step is a number"),
        ((1,), {"max_to_keep": 0}, "max_to_keep is a number of steps, from 1"),
        ((1,), {"metadata": {"x": object()}}, "types that JSON has"),
        ((1,), {"data": object()}, "types that JSON has"),
        ((1,), {"format": "orbax"}, "takes no argument format"),
        ((1,), {"storage_options": {"a": 1}}, "storage_options are for URLs"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(lm.LazyModelError, match=message):
        lm.save_step(state(1), tmp_path, *arguments, **options)
    assert not list(tmp_path.iterdir())


def test_wrong_places(tmp_path: Path) -> None:
    lm.save(state(1), tmp_path / "other")
    for path in (tmp_path / "other", tmp_path / "x.safetensors", tmp_path / "other" / "model.safetensors"):
        with pytest.raises(lm.LazyModelError, match=path.name):
            lm.save_step(state(1), path, 1)
    for call in (
        lambda: lm.restore(state(1), tmp_path),  # pyright: ignore
        lambda: lm.restore(ABSTRACT, None),  # pyright: ignore
        lambda: lm.training_state(None),  # pyright: ignore
        lambda: lm.save_step(state(1), None, 1),  # pyright: ignore
    ):
        with pytest.raises(lm.LazyModelError, match="takes|text or"):
            call()
