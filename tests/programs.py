"""What XLA has compiled in this run of the tests, for all of its processes: an equal program is loaded, which takes a
tenth of the time.

JAX keeps it as in its persistent cache, of which nothing else is set: to the library there is none. With a folder in
the variable LAZYMODEL_TESTS_PROGRAMS programs are kept there for later runs, too.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache

_FOLDER = "LAZYMODEL_TESTS_PROGRAMS"  # by which xdist's workers learn of their controller's


class _Programs(compilation_cache.CacheInterface):
    """Files that are complete as soon as they are there: JAX' own are not, and tests compile in many threads."""

    def __init__(self, folder: str) -> None:
        # JAX's keys have all that programs depend on but the flags that `conftest` takes back once they are read.
        flags = os.environ.get("LAZYMODEL_TESTS_XLA_FLAGS", "")
        self._path = Path(folder) / hashlib.sha256(flags.encode()).hexdigest()[:16]
        self._path.mkdir(parents=True, exist_ok=True)

    def get(self, key: str) -> bytes | None:
        try:
            return (self._path / key).read_bytes()
        except FileNotFoundError:
            return None

    def put(self, key: str, value: bytes) -> None:
        part = self._path / f"{os.getpid()}-{threading.get_ident()}"
        part.write_bytes(value)
        part.replace(self._path / key)


def share_programs() -> None:
    """From here on; again after a test that had a cache of its own."""
    if _FOLDER not in os.environ:
        os.environ[_FOLDER] = tempfile.mkdtemp(prefix="programs-")
        atexit.register(shutil.rmtree, os.environ[_FOLDER], ignore_errors=True)
    private: Any = compilation_cache
    private.reset_cache()
    private._cache, private._cache_initialized = _Programs(os.environ[_FOLDER]), True
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
