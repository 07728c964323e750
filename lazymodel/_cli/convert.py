"""`lazymodel convert`: a checkpoint as another one, of any format.

Responsible for what the command takes and prints. Converting is `_save/convert`'s matter; for models of KerasHub it is
Keras' adapter's, which is asked only with --cls.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

import jax

from lazymodel._abstract.adapters import named
from lazymodel._cli.imported import dtype_name, imported
from lazymodel._cli.storage import add_storage_options, storage_options
from lazymodel._errors import LazyModelError
from lazymodel._mapping.table import WeightMap
from lazymodel._programs.jaxprs import CONFIG
from lazymodel._remote.url import is_url, shown
from lazymodel._save.convert import convert
from lazymodel._show.quiet import quiet_tensorflow
from lazymodel._show.table import print_text
from lazymodel._show.text import listed

_DESCRIPTION = """\
Converts a checkpoint, a piece of a tensor at a time: it needs neither devices nor memory for the model. What is
quantized is decoded. The destination is complete or is what it was before, whatever happens.
With --cls, a model of KerasHub, its configuration and tokenizer become a preset of KerasHub, or a folder that Hugging
Face's transformers load.
Exit status: 0 done; 1 --verify found a difference; 2 wrong usage, or it cannot be done.
"""
_EXAMPLE = """\
example:
  lazymodel convert hf://google/gemma-2-2b gemma.weights.json --dtype bfloat16 --shard-size 2GB --verify
"""


def add_convert_parser(commands: Any) -> None:
    """Adds the command to `lazymodel`."""
    parser = commands.add_parser(
        "convert",
        help="a checkpoint as another one, of any format",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SRC", help="a file, a folder or a URL, as for lazymodel.open_checkpoint")
    parser.add_argument(
        "destination",
        metavar="DST",
        help="x.safetensors, a folder (of safetensors, unless --to is orbax or npy), x.weights.h5, x.weights.json (and "
        "shards beside it) or x.npz; safetensors also as the URL of a bucket",
    )
    add_storage_options(parser)
    parser.add_argument(
        "--to",
        choices=("safetensors", "orbax", "hdf5", "numpy", "npy", "preset", "huggingface"),
        help="format of DST where its name does not say it; the last two with --cls",
    )
    parser.add_argument(
        "--dtype", type=dtype_name, metavar="NAME", help="what floating-point tensors become, such as bfloat16"
    )
    parser.add_argument("--shard-size", metavar="BYTES", help="of tensors in a file; default: 5GB, with --cls 10GiB")
    parser.add_argument("--include", action="append", metavar="GLOB", help="convert tensors of such names only")
    parser.add_argument("--exclude", action="append", metavar="GLOB", help="leave tensors of such names out")
    parser.add_argument(
        "--map",
        metavar="MODULE:NAME",
        help="a lazymodel.WeightMap that a checkpoint with the paths of a model is written with, or a function that "
        "takes and returns tensors by name",
    )
    parser.add_argument("--cls", "--class", metavar="NAME", help="a model class of KerasHub, such as Gemma3CausalLM")
    parser.add_argument("--quantize", choices=("int8", "int4"), help="quantize the model of --cls, as Keras does")
    parser.add_argument("--max-host-memory", metavar="BYTES", help="for tensors on their way; default: 256MiB")
    parser.add_argument("--verify", action="store_true", help="read everything back and compare")
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint that is there already")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.set_defaults(run=_convert)


def _convert(arguments: argparse.Namespace) -> int:
    if CONFIG.jax_platforms is None:
        # Nothing runs here: an accelerator that another process uses, or that takes long to wake, is left alone.
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
        raise LazyModelError(f"{what} is for models of KerasHub; say which with --cls, such as --cls Gemma3CausalLM")
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
