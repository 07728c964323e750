"""Saving as Orbax does: a folder that Orbax writes beside the destination, and that is put in its place as a whole.

Responsible for the tree, for what may be replaced, and for the processes' agreement. What is in the folder is Orbax's.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lazymodel._devices.agreement import agreement
from lazymodel._errors import LazyModelError
from lazymodel._save.atomic import Staging, staging, writing
from lazymodel._show.text import listed
from lazymodel.checkpoints._open import staging_folder
from lazymodel.checkpoints._orbax_folder import foreign_entries, zero_size_metadata

_QUIET = 0.3  # seconds without a late write after which no more is expected
_LATEST = 10.0  # seconds, at most, that late writes are waited for


def save_orbax(arrays: Mapping[str, Any], path: Path, *, overwrite: bool) -> None:
    """Saves arrays as an item, at paths with `/` between keys. With several processes all of them must call it."""
    try:
        orbax: Any = importlib.import_module("orbax.checkpoint")
    except ImportError as error:
        raise LazyModelError("format='orbax' needs orbax-checkpoint: pip install 'lazymodel[orbax]'") from error
    tree = tree_of(arrays)
    path = Path(os.path.realpath(path))  # a link stays, and what it leads to is replaced
    leads = jax.process_index() == 0  # Orbax waits for all processes, whichever devices the arrays are on
    everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("devices",)), PartitionSpec())
    shardings = [everywhere] if jax.process_count() > 1 else []
    terms = {"done": "saved", "given": "trees differ", "mend": "Save the same model in all processes"}
    stage = Staging(path, inside=False)
    with contextlib.ExitStack() as stack:
        with agreement(shardings, **terms):
            if leads:
                stack.enter_context(staging(path, rivals=[staging_folder(path, inside=True)]))
                if not overwrite and path.exists():
                    raise LazyModelError(
                        f"there is something already: {path}. Pass overwrite=True (--overwrite) to replace it"
                    )
                check_replaced(path)
                with writing(path):
                    stage.new.rmdir()  # Orbax makes it
                stack.enter_context(_outlasting(stage.folder))
        with agreement(shardings, **terms):
            try:
                # Not StandardCheckpointer, whose threads would still write when a Ctrl-C has ended the call.
                with orbax.Checkpointer(orbax.StandardCheckpointHandler()) as checkpointer:
                    given = orbax.args.StandardSave(tree, custom_metadata=zero_size_metadata(arrays) or None)
                    checkpointer.save(stage.new, args=given)
            except Exception as error:  # of many types: Orbax's own, tensorstore's, the system's
                reason = (str(error) or type(error).__name__).splitlines()[0]
                raise LazyModelError(
                    f"cannot write {path}: Orbax says: {reason}. What was there before is as it was"
                ) from error
        with agreement(shardings, **terms):
            if leads:
                stage.replace_folder()


@contextlib.contextmanager
def _outlasting(folder: Path) -> Generator[None]:
    """Where Orbax gives up, removes what it began in a saver's folder until nothing of it comes back.

    Orbax raises at the first write that fails. tensorstore's threads finish the others, and make folders for them anew.
    """
    try:
        yield
    except BaseException:
        start = last = time.monotonic()
        while (now := time.monotonic()) < min(last + _QUIET, start + _LATEST):
            for child in folder.glob("new*"):
                shutil.rmtree(child, ignore_errors=True)
                last = now
            time.sleep(_QUIET / 30)
        raise


def tree_of(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays at their keys; None for those without elements, which Orbax does not save."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *parents, key = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise LazyModelError(f"{name!r}: Orbax saves a tree, and a part of this path is an array itself")
        if key in node:
            raise LazyModelError(f"{name!r}: Orbax saves a tree, and this path is also the beginning of another")
        node[key] = array if array.size else None
    return tree


def check_replaced(path: Path) -> Path | None:
    """What is at a path and may be replaced, if anything; LazyModelError for what may not be."""
    if not path.exists():
        return None
    if not path.is_dir():
        raise LazyModelError(f"{path} is a file; give a folder")
    if foreign := foreign_entries(path):
        raise LazyModelError(
            f"{path} holds what is no part of an Orbax checkpoint and would be gone with it: {listed(foreign)}"
            ". Save to another folder, or move these away"
        )
    return path
