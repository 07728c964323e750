"""Processes that save to one place or open it, over and over, at the same time.

`python _beside_worker.py ROLE PLACE SECONDS FOLDER NAME`: what came of it is written to `FOLDER/NAME.json`, for each
outcome how often. Roles: `steps-N` saves steps N, N + 2, …, `folder` and `orbax` one checkpoint, `opener` opens it.
"""

from __future__ import annotations

import collections
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

import lazymodel as lm

VALUES = {"w": np.ones((8, 8), "float32"), "b": np.zeros(4, "float32")}


def main() -> None:
    role, place, seconds, folder, name = sys.argv[1:]
    warnings.simplefilter("ignore")  # that an old step is just being removed by the other saver

    def save_step(turn: int) -> None:
        lm.save_step(VALUES, place, int(role[-1]) + 2 * turn, max_to_keep=2)

    def save(turn: int) -> None:
        lm.save(VALUES, place, overwrite=True, max_shard_size=(200, 1000)[turn % 2])  # shards or one file

    def open_it(turn: int) -> None:
        with lm.open_checkpoint(place) as checkpoint:
            assert set(checkpoint) == set(VALUES)
        if "run" in place:
            assert lm.training_state(place) is not None

    def save_orbax(turn: int) -> None:
        lm.save(VALUES, place, format="orbax", overwrite=True)

    roles: dict[str, Callable[[int], None]] = {"folder": save, "orbax": save_orbax, "opener": open_it}
    act = roles.get(role, save_step)
    (Path(folder) / f"{name}.ready").touch()
    while len(list(Path(folder).glob("*.ready"))) < len(list(Path(folder).glob("log-*.txt"))):
        time.sleep(0.01)
    outcomes, turn, end = collections.Counter[str](), 0, time.monotonic() + float(seconds)
    while time.monotonic() < end:
        turn += 1
        try:
            act(turn)
        except Exception as error:
            outcomes[f"{type(error).__name__}: {error}"] += 1
        else:
            outcomes["ok"] += 1
    (Path(folder) / f"{name}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
