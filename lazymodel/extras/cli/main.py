"""The command line: `lazymodel COMMAND …`, also as `python -m lazymodel`.

Responsible for arguments, exit statuses and output streams; functions elsewhere implement the commands.

Exit statuses: 0 success; 1 the command found a problem, and printed it; 2 wrong usage, nothing to work on, or an
exception in the user's code, such as a function that builds a model; 130 interrupted.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib.metadata
import os
import platform
import sys
import traceback
from collections.abc import Collection, Generator, Sequence
from pathlib import Path
from typing import Any, cast

import jax

import lazymodel as lm
from lazymodel._abstract.adapters import adapter_of
from lazymodel._devices.hardware import device_memory
from lazymodel._errors import DoesNotFitError, LazyModelError, is_library
from lazymodel._extras import extra
from lazymodel._mapping.table import WeightMap
from lazymodel._programs.jaxprs import CONFIG
from lazymodel._remote.url import is_url, shown
from lazymodel._show.table import Column, Table
from lazymodel._show.text import closest, format_bytes, listed, plural, quiet_tensorflow
from lazymodel._tensors.buffers import available_memory, cores, default_budget
from lazymodel._version import VERSION
from lazymodel.checkpoints import open_checkpoint
from lazymodel.checkpoints._open import located
from lazymodel.extras.cli.convert import Conversion, convert, selected
from lazymodel.extras.cli.output import (
    JSON,
    STORAGE_OPTION,
    add_command,
    check_page,
    dtype_name,
    imported,
    in_options,
    print_json,
    print_text,
    show,
    storage_options,
)
from lazymodel.extras.cli.plan import add_explain, add_plan

_DESCRIPTION = """\
Converts a checkpoint, a chunk of a tensor at a time: it needs neither devices nor memory for the model. Quantized
tensors are decoded. The destination is complete or unchanged, whatever happens.
With --cls, converts a model of KerasHub, its configuration and tokenizer to a preset of KerasHub, or to a folder that
Hugging Face's transformers load.
Exit status: 0 done; 1 --verify found a difference; 2 wrong usage, or it cannot be done.
"""
_EXAMPLE = """\
example:
  lazymodel convert hf://google/gemma-2-2b gemma.weights.json --dtype bfloat16 --shard-size 2GB --verify
"""


def _add_convert(commands: Any) -> None:
    option = add_command(
        commands, "convert", _convert, "convert a checkpoint to another one, of any format", _DESCRIPTION, _EXAMPLE
    )
    option("source", "SRC", "a file, a folder or a URL, as for lazymodel.open_checkpoint")
    option(
        "destination",
        "DST",
        "x.safetensors, a folder (of safetensors, unless --to is orbax), x.weights.h5 or x.weights.json (and shards "
        "next to it); safetensors also as the URL of a bucket",
    )
    option(*STORAGE_OPTION, action="append")
    formats = ("safetensors", "orbax", "hdf5", "preset", "huggingface")
    option("--to", formats, "format of DST, if its name does not determine it; the last two with --cls")
    option("--dtype", "NAME", "convert floating-point tensors to this dtype, such as bfloat16", type=dtype_name)
    option(
        "--shard-size", "BYTES", "maximum of tensors in a file; default: 5GB, with --cls 10GiB", dest="max_shard_size"
    )
    option("--include", "GLOB", "convert only tensors with such names", action="append")
    option("--exclude", "GLOB", "omit tensors with such names", action="append")
    option(
        "--map",
        "MODULE:NAME",
        "a lazymodel.WeightMap with which a checkpoint with the paths of a model is written, or a function that takes "
        "and returns tensors by name",
    )
    option(
        "--adapter", "FOLDER", "merge a LoRA adapter of PEFT, a folder or URL; several without --cls", action="append"
    )
    option("--cls --class", "NAME", "a model class of KerasHub, such as Gemma3CausalLM")
    option("--quantize", ("int8", "int4"), "quantize the model of --cls, as Keras does")
    option("--max-host-memory", "BYTES", "limit for tensors in transit; default: 256MiB")
    option("--verify", None, "read everything back and compare")
    option("--overwrite", None, "replace an existing checkpoint")
    option("--quiet", None, "show no progress")


_SIZES = ("max_shard_size", "max_host_memory")


def _on_cpu() -> None:
    """An accelerator that another process uses, or that starts slowly, is not touched unless the user chose one."""
    if CONFIG.jax_platforms is None:
        jax.config.update("jax_platforms", "cpu")


def _convert(arguments: argparse.Namespace) -> int:
    _on_cpu()
    given = storage_options(arguments)
    if given and not any(map(is_url, [arguments.source, arguments.destination, *(arguments.adapter or ())])):
        raise LazyModelError("--storage-option is for URLs, and neither SRC nor DST is one")
    options: dict[str, Any] = {
        "source_options": given if is_url(arguments.source) else None,
        "dtype": arguments.dtype,
        "verify": arguments.verify,
        "overwrite": arguments.overwrite,
        "progress": False if arguments.quiet else None,
    }
    options |= {name: value for name in _SIZES if (value := getattr(arguments, name)) is not None}
    found = _model(arguments, options) if arguments.cls is not None else _tensors(arguments, given, options)
    if found:
        print_text(f"{shown(arguments.destination)} differs from {shown(arguments.source)}: {listed(found)}")
        return 1
    print(f"lazymodel: {shown(arguments.destination)} is written{' and verified' * arguments.verify}", file=sys.stderr)
    return 0


def _tensors(arguments: argparse.Namespace, given: dict[str, Any] | None, options: dict[str, Any]) -> list[str]:
    if arguments.quantize or arguments.to in ("preset", "huggingface"):
        what = f"--quantize {arguments.quantize}" if arguments.quantize else f"--to {arguments.to}"
        raise LazyModelError(f"{what} is for models of KerasHub; name one with --cls, such as --cls Gemma3CausalLM")
    mapping: Any = None if arguments.map is None else imported(arguments.map)
    if mapping is not None and not isinstance(mapping, WeightMap) and not callable(mapping):
        raise LazyModelError(f"--map {arguments.map}: expected a WeightMap or a function, found {type(mapping)}")
    how = Conversion(
        options.pop("source_options"),
        options.pop("dtype"),
        include=arguments.include or (),
        exclude=arguments.exclude or (),
        mapping=cast(Any, mapping),
        adapters=[lm.open_adapter(path, given if is_url(path) else None) for path in arguments.adapter or ()],
        verify=options.pop("verify"),
    )
    options |= {"format": arguments.to, "storage_options": given if is_url(arguments.destination) else None}
    return convert(arguments.source, arguments.destination, how, **options)


def _model(arguments: argparse.Namespace, options: dict[str, Any]) -> list[str]:
    adapters = arguments.adapter or [None]
    if len(adapters) > 1:
        raise LazyModelError("--cls takes one --adapter; merge the others first, without --cls")
    for name in ("include", "exclude", "map"):
        if getattr(arguments, name):
            raise LazyModelError(f"--{name} is for checkpoints; --cls converts a whole model")
    if arguments.to not in (None, "preset", "huggingface"):
        raise LazyModelError(f"--to {arguments.to} is for checkpoints; with --cls it is preset or huggingface")
    os.environ.setdefault("KERAS_BACKEND", "jax")
    with quiet_tensorflow():
        framework = adapter_of("keras")
    return framework.convert(
        arguments.cls,
        arguments.source,
        arguments.destination,
        to=arguments.to,
        quantize=arguments.quantize,
        adapter=adapters[0],
        **options,
    )


def _add_diff(commands: Any) -> None:
    description = (
        "Compares names, shapes, dtypes and values, reading both chunk by chunk. Exit status, as of diff: 0 they are "
        "the same, 1 they differ, 2 one cannot be read."
    )
    example = "example: lazymodel diff before.safetensors after/ --tolerance 0.01"
    option = add_command(commands, "diff", _diff, "compare two checkpoints", description, example)
    option("a", "A", "a file, a folder or a URL, as for open_checkpoint")
    option("b", "B", "likewise")
    option(*STORAGE_OPTION, action="append")
    option(*JSON)
    option(
        "--tolerance",
        "RELATIVE",
        "treat elements as equal that differ by no more than this times the larger of the two, such as 0.01, and "
        "ignore dtypes; by default, dtypes and bytes must be the same",
        type=float,
    )


@contextlib.contextmanager
def _opened(arguments: argparse.Namespace, *paths: str) -> Generator[list[Any]]:
    """The checkpoints at paths; options are for those that are URLs."""
    options = storage_options(arguments)
    needless = not any(map(is_url, paths))  # then opening raises for options
    with contextlib.ExitStack() as stack:
        given = (open_checkpoint(path, options if needless or is_url(path) else None) for path in paths)
        yield list(map(stack.enter_context, given))


def _diff(arguments: argparse.Namespace) -> int:
    with _opened(arguments, arguments.a, arguments.b) as (a, b):
        found = lm.diff(a, b, tolerance=arguments.tolerance)
    show(arguments, "diff", found)
    return 1 if found else 0


def _add_digest(commands: Any) -> None:
    description = (
        "Prints 64 bits for every tensor, which depend on shapes and values alone, not on format, file or sharding; or "
        "compares those of two checkpoints. No cryptographic hash. Exit status: 0; 1 two differ; 2 one cannot be read."
    )
    example = "example: lazymodel digest model.safetensors --json > digest.json"
    option = add_command(commands, "digest", _digest, "64 bits for every tensor's values", description, example)
    option("a", "A", "a file, a folder or a URL, as for open_checkpoint")
    option("b", "B", "another one, to compare with", nargs="?")
    option(*STORAGE_OPTION, action="append")
    option(*JSON)


def _digest(arguments: argparse.Namespace) -> int:
    _on_cpu()
    with _opened(arguments, *filter(None, (arguments.a, arguments.b))) as checkpoints:
        found = list(map(lm.digest, checkpoints))
    if len(found) == 2:
        show(arguments, "digest", differing := found[0].diff(found[1]))
        return 1 if differing else 0
    if arguments.json:
        print_json("digest", {"tensors": found[0].to_dict()})
    else:
        print_text(str(found[0]))
    return 0


def _add_stats(commands: Any) -> None:
    description = (
        "Prints mean, deviation, range and spectral norm of every tensor, read one at a time. Exit status: 0; 1 if a "
        "number is NaN or infinite; 2 the checkpoint cannot be read."
    )
    help = "statistics of a checkpoint's values; finds numbers that are not finite"
    example = "example: lazymodel stats model.safetensors --include '*mlp*' --plot stats.png"
    option = add_command(commands, "stats", _stats, help, description, example)
    option("checkpoint", "CHECKPOINT", "a file, a folder or a URL, as for lazymodel.open_checkpoint")
    option(*STORAGE_OPTION, action="append")
    option(*JSON)
    option("--include", "GLOB", "only tensors with such names", action="append")
    option("--exclude", "GLOB", "omit tensors with such names", action="append")
    option("--stacked", "REGEX", "tensors with all layers along their first axis, which are measured one by one")
    option(
        "--no-spectral", None, "no spectral norms, which take most of the time", dest="spectral", action="store_false"
    )
    option("--plot", "FILE", "also draw deviation and spectral norm over depth; needs matplotlib")


def _stats(arguments: argparse.Namespace) -> int:
    with open_checkpoint(arguments.checkpoint, storage_options(arguments)) as checkpoint:
        names = selected(list(checkpoint), arguments.include or (), arguments.exclude or ())
        tensors = {name: checkpoint[name] for name in names}
        found = lm.statistics(tensors, stacked=arguments.stacked, spectral=arguments.spectral)
    if arguments.plot:
        found.plot(arguments.plot)
    if arguments.json:
        nan = {"mean": None, "std": None}  # of tensors without finite elements: JSON has no NaN
        rows = {path: row | (nan if row["mean"] != row["mean"] else {}) for path, row in found.to_dict().items()}
        print_json("stats", {"tensors": rows})
    else:
        print_text(str(found))
    return 1 if any(row.nonfinite for row in found.values()) else 0


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
    ("quantizing NNX modules, LoRA pairs", "qwix", "lazymodel[qwix]"),
    ("plots", "matplotlib", "matplotlib"),
)
_ALWAYS = ("jax", "jaxlib", "numpy", "ml_dtypes", "rich")
_SETTINGS = ("JAX_PLATFORMS", "XLA_FLAGS", "KERAS_BACKEND", "HF_HUB_OFFLINE", "HF_ENDPOINT", "LAZYMODEL_WAIT_SECONDS")


def _add_doctor(commands: Any) -> None:
    help = "show versions, devices, memory, caches, and packages missing for features"
    description = (
        "Prints versions, devices and their memory, caches, settings, and which package is missing for which feature. "
        "Starts JAX' devices. Exit status: 0; 1 if JAX finds no device."
    )
    add_command(commands, "doctor", _doctor, help, description, "example: lazymodel doctor --json > report.json")(*JSON)


def _doctor(arguments: argparse.Namespace) -> int:
    """Nothing is read over a network, and only JAX is imported: other packages are found by their metadata."""
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
        with extra("libtpu_environment")():
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
    def nbytes(count: int | None) -> str:
        return "unknown" if count is None else format_bytes(count)

    versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in found["packages"].items())
    host, caches = found["host"], found["caches"]
    about = [
        ("versions", f"{versions}, Python {found['python']} ({sys.executable})"),
        ("system", found["system"]),
        *(
            ("devices", f"{d['count']} × {d['kind']} ({d['platform']}), memory of each: {nbytes(d['memory_nbytes'])}")
            for d in found["devices"]
        ),
        *([("devices", f"none: {found['trouble']}")] if found["trouble"] else []),
        ("host", f"{plural(host['cores'], 'core')}, available memory: {nbytes(host['available_nbytes'])}"),
        ("max_host_memory", f"{nbytes(host['budget_nbytes'])} by default"),
        ("compiled programs", caches["compiled programs"] or "not kept; set JAX_COMPILATION_CACHE_DIR to keep them"),
        ("Hugging Face", caches["Hugging Face"] or "no cache"),
        *(("setting", f"{name}={value}") for name, value in found["settings"].items()),
    ]
    rows: list[tuple[str, str, str]] = []
    for each in found["features"]:
        there = "yes" if each["version"] else f"pip install '{each['install']}'"
        rows.append((each["feature"], f"{each['package']} {each['version'] or '–'}", there))
    return [
        Table("what there is", (Column(""), Column("found")), about),
        Table("what works", tuple(map(Column, ("feature", "package", "there"))), rows),
    ]


def _add_inspect(commands: Any) -> None:
    help = "list the content of a checkpoint, and its problems"
    description = (
        "Lists a checkpoint's files, tensors and metadata and all of its problems. Reads headers only. "
        "Exit status: 0 no problems, 1 problems were found, 2 there is no checkpoint."
    )
    example = "example: lazymodel inspect model.safetensors --verify"
    option = add_command(commands, "inspect", _inspect, help, description, example)
    option("checkpoint", "CHECKPOINT", "a file, a folder or a URL, as for lazymodel.open_checkpoint")
    option(*STORAGE_OPTION, action="append")
    option(*JSON)
    option(
        "--verify",
        None,
        "also hash the files, and compare with the hashes of a Hugging Face cache or download, or of a manifest such "
        "as SHA256SUMS; reads every file once",
    )
    option("--html", "FILE", "also write a page")


def _inspect(arguments: argparse.Namespace) -> int:
    check_page(arguments.html)
    options = storage_options(arguments)
    where = located(arguments.checkpoint, options)
    summary = extra("inspect_checkpoint")(where, verify=arguments.verify)
    if extra("is_adapter")(where):
        try:
            with contextlib.closing(lm.open_adapter(arguments.checkpoint, options)) as adapter:
                summary.metadata["adapter"] = repr(adapter)
        except LazyModelError as error:
            summary = summary.with_problem(str(error))
    show(arguments, "inspect", summary)
    return 1 if summary.problems else 0


_EXAMPLES = """\
examples:
  lazymodel inspect model.safetensors                list the content of a checkpoint, and its problems
  lazymodel plan config.json --topology v5e-8        does a model fit, before any hardware is rented?
  lazymodel convert folder model.weights.h5          convert a checkpoint to another one, of any format
  lazymodel diff before.safetensors after/           compare two checkpoints
  lazymodel digest model.safetensors                 64 bits for every tensor's values, in any format
  lazymodel explain config.json --topology v5e-8     why is each variable split as it is?
  lazymodel stats model.safetensors                  mean, deviation, range of values; numbers that are not finite
  lazymodel doctor                                   show what is installed, and packages missing for features

`lazymodel COMMAND --help` shows more about each.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command with these arguments, by default those of the process, and returns its exit status."""
    parser, commands = _make_parser()
    argv = sys.argv[1:] if argv is None else argv
    command = next((text for text in argv if not text.startswith("-")), None)
    if command is not None and command not in commands:
        parser.error(f"there is no command {command!r}{closest(command, commands)}; commands: {', '.join(commands)}")
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        near = closest(unknown[0], arguments.flags.values()) if "run" in arguments else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
    if "run" not in arguments:
        parser.print_help()
        return 0
    try:
        return arguments.run(arguments)
    except DoesNotFitError as error:  # raised by a compiler that gave no numbers for a plan
        print(f"lazymodel: {in_options(str(error), arguments.flags)}", file=sys.stderr)
        return 1
    except LazyModelError as error:
        print(f"lazymodel: error: {in_options(str(error), arguments.flags)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130  # the exit status of shells for SIGINT
    except (Exception, SystemExit) as error:  # a user's function that exits with 0 has not built anything either
        _print_own_traceback(error)
        return 2


def _print_own_traceback(error: BaseException) -> None:
    """Prints the traceback of an exception in a user's code, without our frames that lead there."""
    chained: BaseException | None = error
    while chained is not None:
        own = chained.__traceback__
        while own is not None and (is_library(own.tb_frame) or "importlib" in own.tb_frame.f_code.co_filename):
            own = own.tb_next
        if own is not None or isinstance(chained, SyntaxError):  # otherwise it is a bug of ours
            chained.__traceback__ = own
        chained = chained.__cause__ or chained.__context__
    traceback.print_exception(error)


def _make_parser() -> tuple[argparse.ArgumentParser, Collection[str]]:
    """The parser, and the names of the commands."""
    parser = argparse.ArgumentParser(
        prog="lazymodel",
        description="Look at checkpoints and models before loading, and convert them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lazymodel {VERSION}")
    commands = parser.add_subparsers(metavar="COMMAND")
    for add in (_add_inspect, add_plan, add_explain, _add_convert, _add_diff, _add_digest, _add_stats, _add_doctor):
        add(commands)
    return parser, commands.choices
