"""`lazymodel convert`: converts a checkpoint to another one, of any format.

Responsible for the command's arguments and output. `_save/convert` converts; models of KerasHub are converted by
Keras' adapter, which is only used with --cls.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

import jax

from lazymodel._abstract.arrays import named
from lazymodel._cli.output import STORAGE_OPTION, add_command, dtype_name, imported, storage_options
from lazymodel._errors import LazyModelError
from lazymodel._mapping.table import WeightMap
from lazymodel._programs.jaxprs import CONFIG
from lazymodel._remote.url import is_url, shown
from lazymodel._save.convert import convert
from lazymodel._show.quiet import quiet_tensorflow
from lazymodel._show.table import print_text
from lazymodel._show.text import listed

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


def add_convert_parser(commands: Any) -> None:
    """Adds the command to `lazymodel`."""
    option = add_command(
        commands, "convert", _convert, "convert a checkpoint to another one, of any format", _DESCRIPTION, _EXAMPLE
    )
    option("source", "SRC", "a file, a folder or a URL, as for lazymodel.open_checkpoint")
    option(
        "destination",
        "DST",
        "x.safetensors, a folder (of safetensors, unless --to is orbax or npy), x.weights.h5, x.weights.json (and "
        "shards next to it) or x.npz; safetensors also as the URL of a bucket",
    )
    option(*STORAGE_OPTION, action="append")
    formats = ("safetensors", "orbax", "hdf5", "numpy", "npy", "preset", "huggingface")
    option("--to", formats, "format of DST, if its name does not determine it; the last two with --cls")
    option("--dtype", "NAME", "convert floating-point tensors to this dtype, such as bfloat16", type=dtype_name)
    option("--shard-size", "BYTES", "maximum of tensors in a file; default: 5GB, with --cls 10GiB")
    option("--include", "GLOB", "convert only tensors with such names", action="append")
    option("--exclude", "GLOB", "omit tensors with such names", action="append")
    option(
        "--map",
        "MODULE:NAME",
        "a lazymodel.WeightMap with which a checkpoint with the paths of a model is written, or a function that takes "
        "and returns tensors by name",
    )
    option("--cls --class", "NAME", "a model class of KerasHub, such as Gemma3CausalLM")
    option("--quantize", ("int8", "int4"), "quantize the model of --cls, as Keras does")
    option("--max-host-memory", "BYTES", "limit for tensors in transit; default: 256MiB")
    option("--verify", None, "read everything back and compare")
    option("--overwrite", None, "replace an existing checkpoint")
    option("--quiet", None, "show no progress")


def _convert(arguments: argparse.Namespace) -> int:
    if CONFIG.jax_platforms is None:
        # Nothing runs on devices: an accelerator that another process uses, or that starts slowly, is not touched.
        jax.config.update("jax_platforms", "cpu")
    given = storage_options(arguments)
    if given and not (is_url(arguments.source) or is_url(arguments.destination)):
        raise LazyModelError("--storage-option is for URLs, and neither SRC nor DST is one")
    options: dict[str, Any] = {
        "source_options": given if is_url(arguments.source) else None,
        "dtype": arguments.dtype,
        "verify": arguments.verify,
        "overwrite": arguments.overwrite,
        "progress": False if arguments.quiet else None,
    }
    for name, value in (("max_shard_size", arguments.shard_size), ("max_host_memory", arguments.max_host_memory)):
        options |= {} if value is None else {name: value}
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
    mapping: WeightMap | Callable[..., Any] | None = None if arguments.map is None else imported(arguments.map)
    if mapping is not None and not isinstance(mapping, WeightMap) and not callable(mapping):
        raise LazyModelError(f"--map {arguments.map}: expected a WeightMap or a function, found {type(mapping)}")
    return convert(
        arguments.source,
        arguments.destination,
        format=arguments.to,
        include=arguments.include or (),
        exclude=arguments.exclude or (),
        mapping=mapping,
        storage_options=given if is_url(arguments.destination) else None,
        **options,
    )


def _model(arguments: argparse.Namespace, options: dict[str, Any]) -> list[str]:
    for name in ("include", "exclude", "map"):
        if getattr(arguments, name):
            raise LazyModelError(f"--{name} is for checkpoints; --cls converts a whole model")
    if arguments.to not in (None, "preset", "huggingface"):
        raise LazyModelError(f"--to {arguments.to} is for checkpoints; with --cls it is preset or huggingface")
    os.environ.setdefault("KERAS_BACKEND", "jax")
    with quiet_tensorflow():
        adapter = named("keras")
    return adapter.convert(
        arguments.cls,
        arguments.source,
        arguments.destination,
        to=arguments.to,
        quantize=arguments.quantize,
        **options,
    )
