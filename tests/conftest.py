"""Eight virtual CPU devices for every test, quiet backends, and folders that are skipped without their framework."""

import gc
import importlib.metadata
import importlib.util
import os
import platform
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

# Read when jax, keras and tensorflow are first imported, so before any test module is.
_DEVICES = "--xla_force_host_platform_device_count=8"
# Compiling is most of the suite's time, and LLVM most of that: unoptimized it takes a third. What it then compiles to
# would multiply and add in one instruction in some programs and not in others, so tests that compare bits have it do so
# nowhere, on a CPU without that instruction. XLA's newer generator of fused loops, which JAX 0.10 may do without and
# 0.12 may not, takes three times as long as the older. A quarter of what is left is splitting programs for many
# compiling threads, and workers have one core each. `.ci/run` sets the level, and what it runs like that is compiled as
# users' programs are.
_JAXLIB = importlib.metadata.version("jaxlib")
_LEVEL = "--xla_backend_optimization_level"
_OF_JAXLIB = (
    *(("--xla_cpu_use_fusion_emitters=false",) if _JAXLIB.startswith("0.10.") else ()),
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_max_isa=AVX",
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_ALL = "LAZYMODEL_TESTS_XLA_FLAGS"  # by which xdist's workers learn of those that are taken back below
_flags = os.environ.get(_ALL, os.environ.get("XLA_FLAGS", "")).split()
if not any(flag.startswith(_DEVICES.partition("=")[0]) for flag in _flags):
    _flags.append(_DEVICES)
if os.environ["JAX_PLATFORMS"] == "cpu" and not any(flag.startswith(_LEVEL) for flag in _flags):
    # Of others it is not known which flags they take; the second level multiplies and adds alike everywhere.
    known = _JAXLIB.startswith(("0.10.", "0.12.")) and platform.machine() == "x86_64"
    _flags += [f"{_LEVEL}=0", *_OF_JAXLIB] if known else [f"{_LEVEL}=2"]
os.environ[_ALL] = os.environ["XLA_FLAGS"] = " ".join(_flags)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["KERAS_BACKEND"] = "jax"
os.environ["COLUMNS"] = "120"  # tables are as wide as where there is no terminal

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from tests.programs import share_programs  # noqa: E402
from tests.servers.object_server import ObjectServer  # noqa: E402
from tests.servers.s3 import S3Server  # noqa: E402

share_programs()
if _OF_JAXLIB[0] in _flags:
    jax.numpy.zeros(()).block_until_ready()  # jaxlib has read the flags now; libtpu exits at one that it does not know
    os.environ["XLA_FLAGS"] = " ".join(flag for flag in _flags if flag not in _OF_JAXLIB)

ROOT = Path(__file__).parent.parent
HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
needs_libtpu = pytest.mark.skipif(not HAS_LIBTPU, reason='needs libtpu: pip install "lazymodel[tpu]"')

# Folder or file under tests/ → the modules that its tests import at the top.
_NEEDS = {"keras": ("keras", "keras_hub"), "flax": ("flax",), "others": ("flax",)}
_NEEDS |= {f"others/{name}.py": ("tunix",) for name in ("test_tunix", "test_tunix_rl")}
_NEEDS |= {"others/test_loading.py": ("flax", "transformers")}
_NEEDS |= {"others/test_maxtext.py": ("maxtext",)}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--repeat", type=int, default=1, help="run each test so many times, with other random numbers")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if (times := metafunc.config.getoption("repeat")) > 1:
        metafunc.fixturenames.append("repetition")
        metafunc.parametrize("repetition", range(times), indirect=True)


@pytest.fixture
def repetition(request: pytest.FixtureRequest) -> int:
    """Which of how many times this is, from 0: a seed."""
    return getattr(request, "param", 0)


class _Skipped(pytest.Module):
    """A module of tests for something that is not installed."""

    reason = ""

    def collect(self) -> NoReturn:
        pytest.skip(self.reason, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skips a framework's tests, by name and with the reason, where the framework is not installed."""
    for folder, modules in _NEEDS.items():
        if module_path.is_relative_to(Path(__file__).parent / folder):
            for module in modules:
                if importlib.util.find_spec(module) is None:
                    what = "-r tests/others/requirements*.txt" if "others" in folder else f"'lazymodel[{folder}]'"
                    skipped = _Skipped.from_parent(parent, path=module_path)
                    skipped.reason = f"{module} is not installed: pip install {what}"
                    return skipped
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those beside this file come first: another worker would wait for the longest of them at the end."""
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)


def pytest_collection_finish() -> None:
    """What is imported stays: a full garbage collection, which Keras asks for very often, need not go through it."""
    gc.collect()
    gc.freeze()


_frozen_at = 0.0  # seconds of this process


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Nor through what tests have left in the caches of JAX, Keras and TensorFlow: Keras models are built with a full
    collection each, which took an eighth of the time where only the end of a module did this.
    """
    global _frozen_at
    ends = nextitem is None or nextitem.path != item.path
    if ends:
        share_programs()  # of which a test may have taken leave, for a persistent cache of its own
    if ends or time.process_time() > _frozen_at + 1:
        gc.collect()
        gc.freeze()
        _frozen_at = time.process_time()


def child_environment(*, libtpu: bool = False) -> dict[str, str]:
    """The environment for scripts that tests run: devices are their own business, and whether libtpu compiles there."""
    dropped = (_DEVICES.partition("=")[0], *(_OF_JAXLIB if libtpu else ()))
    return os.environ | {"XLA_FLAGS": " ".join(flag for flag in _flags if not flag.startswith(dropped))}


def _mesh(shape: tuple[int, ...], axes: tuple[str, ...]) -> jax.sharding.Mesh:
    devices = jax.devices()
    if len(devices) < 8:
        pytest.skip(f"needs 8 devices, and there are {len(devices)}")
    # Mesh has Auto axes; `jax.make_mesh` makes Explicit ones, which Keras layers do not take.
    return jax.sharding.Mesh(np.array(devices[:8]).reshape(shape), axes)


@pytest.fixture
def mesh8() -> jax.sharding.Mesh:
    """Eight devices in one axis, `model`."""
    return _mesh((8,), ("model",))


@pytest.fixture
def mesh42() -> jax.sharding.Mesh:
    """Eight devices in two axes: `batch` of four, `model` of two."""
    return _mesh((4, 2), ("batch", "model"))


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    """No thread of a stream outlives the test."""
    yield
    # One whose start a Ctrl-C cut short stays listed and is not alive; if it comes to run, it finds all stopped.
    left = [each for each in threading.enumerate() if each.name.startswith("lazymodel-stream")]
    assert not [thread for thread in left if thread.is_alive()]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """An interrupt is not ignored, as in what a shell runs in the background, and comes through: JAX has a callback for
    garbage collections, and Python drops what is raised while that runs.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()
    yield
    gc.enable()
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def settings_come_back() -> Iterator[None]:
    """JAX' settings and the programs that tests share are what they were, once examples for users have run."""
    before = jax.config.values.copy()
    yield
    for name, value in jax.config.values.items():
        if value is not before[name]:
            jax.config.update(name, before[name])
    share_programs()


@pytest.fixture(scope="session")
def _object_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    pytest.importorskip("obstore", reason="needs obstore: pip install 'lazymodel[remote]'")
    with ObjectServer(tmp_path_factory.mktemp("objects")) as server:
        yield server


@pytest.fixture
def object_server(_object_server: ObjectServer) -> ObjectServer:
    """A store that speaks HTTP, GCS, Azure and Hugging Face: counters and controls as at the start, files as left."""
    _object_server.reset()
    return _object_server


@pytest.fixture(scope="session")
def _s3() -> Iterator[S3Server]:
    pytest.importorskip("obstore", reason="needs obstore: pip install 'lazymodel[remote]'")
    for module in ("moto", "flask", "flask_cors"):
        pytest.importorskip(module)
    with S3Server() as server:
        yield server


@pytest.fixture
def s3(_s3: S3Server) -> S3Server:
    """moto's S3 with an empty bucket."""
    _s3.reset()
    return _s3
