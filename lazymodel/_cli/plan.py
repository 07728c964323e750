"""`lazymodel plan`: will a model fit, and where, from its configuration alone.

Responsible for what the command takes and prints, and for the meshes and models that its arguments name. Keras' adapter
is asked only for what KerasHub describes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Generator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType
from rich.console import Console
from rich.markup import escape

from lazymodel._abstract.adapters import named
from lazymodel._abstract.memory import PINNED_HOST
from lazymodel._cli.imported import dtype_name, imported, is_imported
from lazymodel._cli.output import check_page, show
from lazymodel._cli.storage import add_storage_options, storage_options
from lazymodel._compile.compile import Compile
from lazymodel._devices.topology import arithmetic_mesh, libtpu_environment
from lazymodel._devices.topology import topology as compiled_mesh
from lazymodel._errors import LazyModelError, LazyModelWarning
from lazymodel._model import AbstractModel, build_abstract
from lazymodel._plan.activations import REMATS
from lazymodel._plan.compare import compare_plans
from lazymodel._plan.fleet import Fleet
from lazymodel._plan.plan import MemoryPlan
from lazymodel._plan.what_if import WhatIf
from lazymodel._programs.jaxprs import CONFIG
from lazymodel._remote.url import is_url, shown
from lazymodel._sharding.auto import auto
from lazymodel._show.quiet import quiet_tensorflow
from lazymodel._show.text import parse_bytes

# Files that hold weights and nothing that a model could be built from.
_WEIGHTS = (
    ".safetensors", ".safetensors.index.json", ".h5", ".weights.json", ".keras", ".npz", ".npy", ".bin", ".pt", ".pth",
    ".ckpt", ".msgpack",
)  # fmt: skip

_DESCRIPTION = """\
Says whether a model fits, from its configuration: bytes on each device and host, while it is materialized and in use.
Without --compile it is arithmetic; with it, the numbers are the compiler's, for devices that need not be here.
Several --topology, --mesh or --dtype are compared in one table.
Exit status: 0 it fits (one of several does), or what the devices have is not known; 1 it does not; 2 wrong usage, or
nothing is there to plan.
"""
_EXAMPLE = "example: lazymodel plan config.json --topology v5e-8 --topology v2-8 --dtype bfloat16 --optimizer adamw"


def add_plan_parser(commands: Any) -> None:
    """Adds the command to `lazymodel`."""
    parser = commands.add_parser(
        "plan",
        help="whether a model fits, before anything is rented or loaded",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        metavar="PRESET_OR_CONFIG",
        help="a KerasHub preset, a folder of KerasHub or Hugging Face, a GGUF file, a config.json (no weights needed), "
        "the URL of one of these, or module:factory, a function without arguments that builds a model",
    )
    add_storage_options(parser)
    parser.add_argument("--class", "--cls", dest="cls", metavar="NAME", help="KerasHub class; default: the backbone")
    parser.add_argument(
        "--topology",
        action="append",
        metavar="NAME",
        help="devices: a TPU slice, such as v5e:2x4, v5e-8 or v2-8, or cards, such as H100:8",
    )
    parser.add_argument(
        "--mesh", action="append", metavar="AXES", help="such as model=8 or data=2,model=4; default: one axis, model"
    )
    parser.add_argument(
        "--dtype",
        action="append",
        type=dtype_name,
        metavar="POLICY",
        help="such as bfloat16 or bf16; default: the preset's, or the configuration's torch_dtype",
    )
    parser.add_argument("--quantize", choices=("int8", "int4"), help="quantize after loading")
    parser.add_argument("--lora-rank", type=int, metavar="RANK", help="train LoRA pairs instead of the parameters")
    parser.add_argument("--optimizer", metavar="NAME", help="plan training with it, such as adamw")
    parser.add_argument(
        "--host",
        metavar="PATTERN",
        help="regex of variables that lie in the hosts' memory, such as '.*embeddings'",
    )
    parser.add_argument("--optimizer-on-host", action="store_true", help="the optimizer's slots lie there")
    parser.add_argument(
        "--moments", type=dtype_name, metavar="DTYPE", help="dtype of the optimizer's moments; default: the parameters'"
    )
    parser.add_argument(
        "--master-weights", type=dtype_name, metavar="DTYPE", help="the optimizer updates a copy of this dtype: float32"
    )
    parser.add_argument(
        "--batch",
        type=int,
        metavar="N",
        help="batch size of what is compiled; without --compile, activations of a "
        "dense transformer are estimated for it and --sequence",
    )
    parser.add_argument("--sequence", type=int, metavar="N", help="sequence length, likewise")
    parser.add_argument(
        "--remat", choices=REMATS, help="what training computes again in the estimate; flash attention is attention"
    )
    parser.add_argument(
        "--compile", choices=("init", "forward", "train"), help="compile it, and take the compiler's numbers"
    )
    parser.add_argument("--device-memory", metavar="BYTES", help="bytes of one device, such as 16GiB")
    parser.add_argument("--host-memory", metavar="BYTES", help="bytes of one host, such as 192GiB")
    parser.add_argument("--hosts", type=int, metavar="N", help="hosts that the devices belong to, as many to each")
    parser.add_argument(
        "--storage-bandwidth", metavar="BYTES", help="what a host reads from storage a second, such as 200MB/s"
    )
    parser.add_argument(
        "--link-bandwidth", metavar="BYTES", help="what comes to a host over the interconnect, such as 25GB/s"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument("--html", metavar="FILE", help="write the plan as a page, too")
    parser.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    with libtpu_environment():
        if CONFIG.jax_platforms is None and not (arguments.compile and not arguments.topology):
            # Nothing runs here: an accelerator that another process uses, or that takes long to wake, is left alone.
            jax.config.update("jax_platforms", "cpu")
        what_if, compile = _stated(arguments)
        fleet = _fleet(arguments)
        storage_options(arguments)  # what cannot be read is said now
        meshes = _meshes(arguments)
        source = _described(arguments.model)
        plans = _plans(arguments, source, meshes, what_if, compile, fleet)
    if len(plans) == 1:
        show(arguments, "plan", *plans.values())
    else:
        show(arguments, "plans", compare_plans(plans))
    return 0 if any(plan.fits is not False for plan in plans.values()) else 1


def _stated(arguments: argparse.Namespace) -> tuple[WhatIf, Compile | None]:
    """What can be found wrong before anything is imported, built or compiled is an error here."""
    for name, amount in (("--device-memory", arguments.device_memory), ("--host-memory", arguments.host_memory)):
        if amount is not None:
            parse_bytes(amount, name=name, at_least=1)
    if arguments.optimizer_on_host and arguments.optimizer is None:
        raise LazyModelError("--optimizer-on-host is for --optimizer; name it")
    check_page(arguments.html)
    sizes = {"batch": arguments.batch, "sequence": arguments.sequence}
    compiled = arguments.compile in ("forward", "train")
    what_if = WhatIf(
        arguments.optimizer,
        arguments.lora_rank,
        quantize=arguments.quantize,
        memory_kind=PINNED_HOST if arguments.optimizer_on_host else None,
        moments=arguments.moments,
        master_weights=arguments.master_weights,
        remat=arguments.remat,
        **({} if compiled else sizes),
    )
    return what_if, arguments.compile and Compile(arguments.compile, **(sizes if compiled else {}))


def _fleet(arguments: argparse.Namespace) -> Fleet | None:
    given = arguments.hosts, arguments.storage_bandwidth, arguments.link_bandwidth
    return None if given == (None, None, None) else Fleet(*given)


def _plans(
    arguments: argparse.Namespace,
    source: str,
    meshes: Mapping[str, Any],
    what_if: WhatIf,
    compile: Compile | None,
    fleet: Fleet | None,
) -> dict[str, MemoryPlan]:
    """One for each dtype and mesh, by what people call them."""
    plans: dict[str, MemoryPlan] = {}
    # What KerasHub builds is built quantized, with the pairs that it then has; of others it is arithmetic.
    built = WhatIf()
    if what_if.quantize is not None and not is_imported(source):
        built, what_if = what_if, dataclasses.replace(what_if, quantize=None, lora_rank=None)
    with _status() as say:
        for dtype in arguments.dtype or [None]:
            say(f"building {shown(source)}{f' in {dtype}' if dtype else ''}")
            model = _model(source, arguments, dtype, built)
            for place, mesh in meshes.items():
                name = ", ".join(filter(None, (place, dtype))) or "one device"
                say(f"{'compiling' if compile else 'planning'} {name}")
                plans[name] = _sharded(model, mesh, arguments.host).plan(
                    device_memory=arguments.device_memory,
                    host_memory=arguments.host_memory,
                    what_if=what_if,
                    compile=compile,
                    fleet=fleet,
                )
    return plans


def _meshes(arguments: argparse.Namespace) -> dict[str, Any]:
    """The meshes to plan for, by what people call them; all names are checked before the first is made."""
    all_axes = [None if text is None else parse_axes(text) for text in arguments.mesh or [None]]
    wanted = list(itertools.product(arguments.topology or [None], all_axes))

    names = [", ".join(filter(None, (topology, _axes_text(axes or {})))) for topology, axes in wanted]
    meshes = [_mesh(*each, compiled=False) for each in wanted]
    if arguments.compile is not None:
        meshes = [_mesh(*each, compiled=True) for each in wanted]
    return dict(zip(names, meshes, strict=True))


def _described(source: str) -> str:
    """What describes the model: the source itself, or the folder of a weights file with its configuration beside it."""
    if is_url(source):
        return _described_at_url(source)
    weights = source.lower().endswith(_WEIGHTS)
    is_path = (
        weights or source.endswith((".gguf", ".json")) or os.path.isabs(source) or source.startswith(("./", "../"))
    )
    if is_path and not os.path.exists(source):
        raise LazyModelError(f"{source} does not exist")
    if not weights or os.path.isdir(source):
        return source
    folder = os.path.dirname(source) or "."
    if os.path.isfile(os.path.join(folder, "config.json")):
        print(f"lazymodel: {source} holds weights; planning its folder by config.json", file=sys.stderr)
        return folder
    raise LazyModelError(
        f"{source} holds weights, which do not say what model they are of, and no config.json lies beside them; give "
        f"the model's folder, its config.json, a preset or module:factory (`lazymodel inspect {source}` lists the "
        "tensors)"
    )


def _described_at_url(source: str) -> str:
    """Likewise of a URL, which is not asked for anything yet."""
    place, mark, query = source.partition("?")
    if not place.lower().endswith(_WEIGHTS):
        return source
    print(f"lazymodel: {shown(source)} holds weights; planning its folder by config.json", file=sys.stderr)
    return f"{place.rpartition('/')[0]}{mark}{query}"


def parse_axes(text: str) -> dict[str, int]:
    """`data=2,model=4` as a mapping of axis name to size."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*(\d{1,7})\s*", part)
        if match is None or match[1] in axes or not int(match[2]):
            raise LazyModelError(f"cannot read mesh {text!r}; write names and sizes, such as model=8 or data=2,model=4")
        axes[match[1]] = int(match[2])
    return axes


def _axes_text(axes: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in axes.items())


def _mesh(topology: str | None, axes: Mapping[str, int] | None, *, compiled: bool) -> Any:
    """The mesh to plan for; None is one device."""
    if topology is not None:
        return compiled_mesh(topology, axes) if compiled else arithmetic_mesh(topology, axes)
    if axes is None:  # one device that is neither here nor of a known kind
        return None if compiled else AbstractMesh((1,), ("model",))
    sizes, names = tuple(axes.values()), tuple(axes)
    if not compiled:
        return AbstractMesh(sizes, names, (AxisType.Auto,) * len(names))
    here = jax.devices()
    if (wanted := math.prod(sizes)) > len(here):
        raise LazyModelError(
            f"mesh {_axes_text(axes)} has {wanted} devices and this machine {len(here)}; "
            "name the devices to compile for with --topology"
        )
    return jax.sharding.Mesh(np.asarray(here[:wanted]).reshape(sizes), names)


def _model(source: str, arguments: argparse.Namespace, dtype: str | None, built: WhatIf) -> AbstractModel[Any]:
    options = storage_options(arguments)
    if is_imported(source):
        if options:
            raise LazyModelError("--storage-option is for URLs; a factory decides for itself")
        if arguments.cls is not None or dtype is not None:
            raise LazyModelError("--class and --dtype are for presets and configurations; a factory decides for itself")
        return _from_factory(source)
    os.environ.setdefault("KERAS_BACKEND", "jax")
    with quiet_tensorflow():
        adapter = named("keras")
    model = adapter.from_config(source, cls=arguments.cls, dtype=dtype, storage_options=options)
    if built.quantize is not None:
        with warnings.catch_warnings():
            # Keras has one for every normalization layer, and a plan shows what is quantized.
            warnings.filterwarnings("ignore", message="Layer .* does not have a `quantize`")
            model = model.quantize(built.quantize)
    return model if built.lora_rank is None else model.lora(built.lora_rank)


def _from_factory(text: str) -> AbstractModel[Any]:
    factory = imported(text)
    if not callable(factory):
        raise LazyModelError(f"{text} is no function; name one that builds a model, such as my_models:build")
    return build_abstract(factory)


def _sharded(model: AbstractModel[Any], mesh: Any, host: str | None) -> AbstractModel[Any]:
    """The model on the mesh, by the automatic rules; what they could not split is in the plan's table."""
    if mesh is None and host is None:
        return model
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("model",)) if mesh is None else mesh
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LazyModelWarning)
        return model.shard(mesh, auto(host=host))


@contextlib.contextmanager
def _status() -> Generator[Callable[[str], None]]:
    """Says on standard error what is going on, where a person is watching."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("") as status:
        yield lambda text: status.update(escape(text))
