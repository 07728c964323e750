"""Marks for tests of what only newer versions of Keras and KerasHub have, or do right."""

from __future__ import annotations

from importlib import metadata

import keras
import pytest


def parts(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(part) for part in version.split(".")[:2])


KERAS = keras.__version__
_HUBS = metadata.packages_distributions()["keras_hub"]  # without importing it, which takes its time
KERAS_HUB = metadata.version(_HUBS[0])  # keras-hub or keras-hub-nightly


def _needs(name: str, found: str, oldest: str, what: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(parts(found) < parts(oldest), reason=f"{what}: {name} {oldest} or newer, not {found}")


def needs_keras(oldest: str, what: str) -> pytest.MarkDecorator:
    """Skips a test where Keras is older; the reason is `what` came with that version."""
    return _needs("Keras", KERAS, oldest, what)


def needs_keras_hub(oldest: str, what: str) -> pytest.MarkDecorator:
    """Skips a test where KerasHub is older; the reason is `what` came with that version."""
    return _needs("KerasHub", KERAS_HUB, oldest, what)


needs_orbax_callback = needs_keras("3.14", "keras.callbacks.OrbaxCheckpoint")
needs_saved_tasks = needs_keras_hub("0.30", "tasks saved without a preprocessor")
