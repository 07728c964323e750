"""`lazymodel doctor`: lists packages, devices, memory and caches; for a first overview and for bug reports.

Nothing is read over a network, and only JAX is imported: other packages are found by their metadata.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

import jax

from lazymodel._cli.output import JSON, add_command, print_json
from lazymodel._devices.hardware import device_memory
from lazymodel._devices.topology import libtpu_environment
from lazymodel._programs.jaxprs import CONFIG
from lazymodel._show.table import Column, Table, print_text
from lazymodel._show.text import format_bytes, plural
from lazymodel._tensors.buffers import available_memory, cores, default_budget
from lazymodel._version import VERSION

_FEATURES = (  # (feature, the package that it needs, the extra of lazymodel or the package to install)
    ("Keras models", "keras", "lazymodel[keras]"),
    ("KerasHub presets, Hugging Face folders of theirs", "keras-hub", "lazymodel[keras]"),
    ("Keras' weight files", "h5py", "lazymodel[keras]"),
    ("Flax models", "flax", "lazymodel[flax]"),
    ("Orbax checkpoints", "orbax-checkpoint", "lazymodel[orbax]"),
    ("buckets and hubs", "obstore", "lazymodel[remote]"),
    ("plans by the TPU compiler", "libtpu", "lazymodel[tpu]"),
    ("optimizer state", "optax", "optax"),
    ("GGUF files of types IQ1 to IQ3", "gguf", "lazymodel[gguf]"),
    ("plots", "matplotlib", "matplotlib"),
    ("plans as pages", "plotly", "lazymodel[page]"),
    ("completion in shells", "shtab", "lazymodel[completion]"),
)
_ALWAYS = ("jax", "jaxlib", "numpy", "ml_dtypes", "rich")
_SETTINGS = ("JAX_PLATFORMS", "XLA_FLAGS", "KERAS_BACKEND", "HF_HUB_OFFLINE", "HF_ENDPOINT", "LAZYMODEL_WAIT_SECONDS")


def add_doctor_parser(commands: Any) -> None:
    """Adds the command to `lazymodel`."""
    help = "show versions, devices, memory, caches, and packages missing for features"
    description = (
        "Prints versions, devices and their memory, caches, settings, and which package is missing for which feature. "
        "Starts JAX' devices. Exit status: 0; 1 if JAX finds no device."
    )
    add_command(commands, "doctor", _doctor, help, description, "example: lazymodel doctor --json > report.json")(*JSON)


def _doctor(arguments: argparse.Namespace) -> int:
    found = _found()
    if arguments.json:
        print_json("doctor", found)
    else:
        print_text("\n\n".join(table.text() for table in _tables(found)))
    return 0 if found["devices"] else 1


def _found() -> dict[str, Any]:
    devices, trouble = _devices()
    cache = CONFIG.jax_compilation_cache_dir
    hub = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface"), "hub").expanduser()
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {"lazymodel": VERSION, **{name: _version(name) for name in _ALWAYS}},
        "features": [
            {"feature": feature, "package": package, "version": _version(package), "install": extra}
            for feature, package, extra in _FEATURES
        ],
        "devices": devices,
        "trouble": trouble,
        "host": {"cores": cores(), "available_nbytes": available_memory(), "budget_nbytes": default_budget()},
        "caches": {"compiled programs": cache, "Hugging Face": str(hub) if os.path.isdir(hub) else None},
        "settings": {name: os.environ[name] for name in _SETTINGS if name in os.environ},
    }


def _devices() -> tuple[list[dict[str, Any]], str | None]:
    try:
        with libtpu_environment():
            found = jax.devices()
    except RuntimeError as error:  # a requested platform is missing, or a chip is in use
        return [], str(error).splitlines()[0]
    kinds = collections.Counter((device.platform, device.device_kind, device_memory(device)) for device in found)
    return [
        {"platform": where, "kind": kind, "count": count, "memory_nbytes": memory}
        for (where, kind, memory), count in kinds.items()
    ], None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _tables(found: dict[str, Any]) -> list[Table]:
    versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in found["packages"].items())
    host, caches = found["host"], found["caches"]
    available = "unknown" if host["available_nbytes"] is None else format_bytes(host["available_nbytes"])
    about = [
        ("versions", f"{versions}, Python {found['python']} ({sys.executable})"),
        ("system", found["system"]),
        *(("devices", _device_text(each)) for each in found["devices"]),
        *([("devices", f"none: {found['trouble']}")] if found["trouble"] else []),
        ("host", f"{plural(host['cores'], 'core')}, {available} of memory available, of which loading stages at most "
         f"{format_bytes(host['budget_nbytes'])} unless max_host_memory says otherwise"),
        ("compiled programs", caches["compiled programs"] or "not kept; set JAX_COMPILATION_CACHE_DIR to keep them"),
        ("Hugging Face", caches["Hugging Face"] or "no cache"),
        *(("setting", f"{name}={value}") for name, value in found["settings"].items()),
    ]  # fmt: skip
    rows = [
        (each["feature"], f"{each['package']} {each['version'] or '–'}", "yes" if each["version"] else
         f"pip install '{each['install']}'")
        for each in found["features"]
    ]  # fmt: skip
    return [
        Table("what there is", (Column(""), Column("found")), about),
        Table("what works", tuple(map(Column, ("feature", "package", "there"))), rows),
    ]


def _device_text(device: dict[str, Any]) -> str:
    memory = "of unknown memory" if device["memory_nbytes"] is None else f"of {format_bytes(device['memory_nbytes'])}"
    return f"{device['count']} × {device['kind']} ({device['platform']}) {memory} each"
