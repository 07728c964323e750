"""`lazymodel plan` and `explain`: if a model fits, and why it is split as it is, from its configuration alone.

Responsible for the commands' arguments and output, and for the meshes and models that the arguments name. Keras'
adapter is only used for KerasHub's models.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import re
import sys
import tomllib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from rich.console import Console
from rich.markup import escape

from lazymodel._abstract.frameworks import adapter_of
from lazymodel._abstract.variable import PINNED_HOST
from lazymodel._compile import Compile
from lazymodel._devices.hardware import arithmetic_mesh, libtpu_environment
from lazymodel._devices.hardware import topology as compiled_mesh
from lazymodel._errors import LazyModelError, LazyModelWarning
from lazymodel._model import AbstractModel, build_abstract
from lazymodel._plan.fleet import Fleet
from lazymodel._plan.plan import MemoryPlan, compare_plans
from lazymodel._plan.what_if import REMATS, WhatIf
from lazymodel._programs.jaxprs import CONFIG
from lazymodel._remote.url import is_url, shown
from lazymodel._sharding.auto import Auto, auto
from lazymodel._sharding.roles import role
from lazymodel._show.table import plain, print_text
from lazymodel._show.text import closest, parse_bytes, quiet_tensorflow
from lazymodel.checkpoints._open import SUFFIXES
from lazymodel.extras.cli.output import (
    JSON,
    STORAGE_OPTION,
    add_command,
    check_page,
    dtype_name,
    imported,
    in_options,
    is_imported,
    print_json,
    show,
    storage_options,
)

# Files that only contain weights, from which no model can be built; GGUF files also say of what model they are.
_WEIGHTS = (*(suffix for suffix in SUFFIXES if suffix != ".gguf"), ".msgpack")

_DESCRIPTION = """\
Shows if a model fits, from its configuration: bytes on each device and host, while it is materialized and in use.
Without --compile the numbers are arithmetic; with it, they are the compiler's, for devices that need not exist.
Several --topology, --mesh or --dtype are compared in one table.
Exit status: 0 it fits (at least one of several does), or the devices' memory is unknown; 1 it does not; 2 wrong usage,
or nothing to plan.
"""
_EXAMPLE = "example: lazymodel plan config.json --topology v5e-8 --topology v2-8 --dtype bfloat16 --optimizer adamw"


def add_plan(commands: Any) -> None:
    """Adds the command to `lazymodel`."""
    help = "show if a model fits, before anything is rented or loaded"
    option = add_command(commands, "plan", _plan, help, _DESCRIPTION, _EXAMPLE)
    _add_model(option)
    option("--quantize", ("int8", "int4"), "quantize after loading")
    option("--lora-rank", "RANK", "train LoRA pairs instead of the parameters", type=int)
    option("--optimizer", "NAME", "plan training with it, such as adamw")
    on_host = {"action": "store_const", "const": PINNED_HOST, "dest": "memory_kind"}
    option("--optimizer-on-host", None, "keep the optimizer's slots in the hosts' memory", **on_host)
    option("--moments", "DTYPE", "dtype of the optimizer's moments; default: that of the parameters", type=dtype_name)
    option("--master-weights", "DTYPE", "the optimizer updates a copy with this dtype: float32", type=dtype_name)
    batch = "batch size of the compiled program; without --compile, activations of a transformer are estimated for it"
    option("--batch", "N", f"{batch} and --sequence", type=int)
    option("--sequence", "N", "sequence length, likewise", type=int)
    option("--remat", REMATS, "what training computes again, in the estimate; flash attention is attention")
    option("--compile", ("init", "forward", "train"), "compile it, and use the compiler's numbers")
    option("--device-memory", "BYTES", "bytes of one device, such as 16GiB")
    option("--host-memory", "BYTES", "bytes of one host, such as 192GiB")
    option("--hosts", "N", "number of hosts, each with equally many devices", type=int)
    option("--storage-bandwidth", "BYTES", "bytes a second that a host reads from storage, such as 200MB/s")
    option("--link-bandwidth", "BYTES", "bytes a second that a host gets over the interconnect, such as 25GB/s")
    option(*JSON)
    option("--html", "FILE", "also write the plan as a page")


def _add_model(option: Callable[..., None]) -> None:
    """Adds the options for a model and how it is split."""
    option(
        "model",
        "PRESET_OR_CONFIG",
        "a KerasHub preset, a folder of KerasHub or Hugging Face, a GGUF file, a config.json (no weights needed), the "
        "URL of one of these, or module:factory, a function without arguments that builds a model",
    )
    option(*STORAGE_OPTION, action="append")
    option("--cls --class", "NAME", "KerasHub class; default: the backbone")
    topologies = "devices: a TPU slice, such as v5e:2x4, v5e-8 or v2-8, or GPUs, such as H100:8"
    option("--topology", "NAME", topologies, action="append")
    option("--mesh", "AXES", "such as model=8 or data=2,model=4; default: one axis, model", action="append")
    dtypes = "such as bfloat16 or bf16; default: the preset's, or the configuration's torch_dtype"
    option("--dtype", "POLICY", dtypes, action="append", type=dtype_name)
    option("--host", "PATTERN", "regex of variables that are in the hosts' memory, such as '.*embeddings'")
    rules = "sharding rules, in TOML or JSON: path regex or role:NAME → names of mesh axes; default: lazymodel.auto"
    option("--rules", "FILE", rules)


def add_explain(commands: Any) -> None:
    """Adds the command `explain`: why variables are split as they are."""
    help = "show why each variable of a model is split as it is"
    description = (
        "Shows how a model spreads over devices: what is replicated or split by a guess, and why; with --variable, the "
        "reason for each. Exit status: 0; 2 wrong usage, or rules that do not fit."
    )
    example = "example: lazymodel explain config.json --topology v5e-8 --rules rules.toml"
    option = add_command(commands, "explain", _explain, help, description, example)
    _add_model(option)
    option("--variable", "PATH", "explain this variable; several in turn; default: a summary of all", action="append")
    option(*JSON)


def _explain(arguments: argparse.Namespace) -> int:
    for name in ("topology", "mesh", "dtype"):
        if len(getattr(arguments, name) or ()) > 1:
            raise LazyModelError(f"explain takes one --{name}; plan compares several")
    if not (arguments.topology or arguments.mesh):
        raise LazyModelError("explain needs devices; pass --topology or --mesh, such as --topology v5e-8")
    if CONFIG.jax_platforms is None:
        jax.config.update("jax_platforms", "cpu")
    rules, (mesh,) = _rules(arguments), _meshes(arguments, compiled=False).values()
    model = _model(_described(arguments.model), arguments, (arguments.dtype or [None])[0], WhatIf())
    sharded = _sharded(model, mesh, rules)
    for path in arguments.variable or ():
        if path not in sharded:
            raise LazyModelError(f"{path!r} is not a variable of {sharded.name}{closest(path, sharded)}")
    if arguments.json:
        variables = {
            path: {"spec": v.spec, "shard_nbytes": v.shard_nbytes, "reason": v.reason} for path, v in sharded.items()
        }
        print_json("explain", sharded.explain().to_dict() | {"variables": plain(variables)})
    else:
        print_text("\n".join(str(sharded.explain(path)) for path in arguments.variable or [None]))
    return 0


def _rules(arguments: argparse.Namespace) -> Any:
    """The rules of --rules, as for `shard`, or the automatic ones."""
    if (path := arguments.rules) is None:
        return auto(host=arguments.host)
    if arguments.host is not None:
        raise LazyModelError("--host is for the automatic rules; pass either --host or --rules")
    try:
        with open(path, encoding="utf-8") as file:
            table = (tomllib.loads if path.endswith(".toml") else json.loads)(file.read())
    except (OSError, ValueError, RecursionError) as error:
        raise LazyModelError(f"cannot read the rules {path}: {getattr(error, 'strerror', None) or error}") from error
    example = '"layers.*/up" = ["", "model"]' if path.endswith(".toml") else '{"layers.*/up": [null, "model"]}'
    hint = f"write the names of mesh axes for each pattern, such as {example}"
    if not isinstance(table, dict) or not table:
        raise LazyModelError(f"the rules {path} are not a table with rules; {hint}")

    def entry(found: Any) -> Any:
        return tuple(found) if isinstance(found, list) else found or None

    rules: dict[Any, Any] = {}
    for pattern, found in cast("dict[str, Any]", table).items():
        entries = [found] if isinstance(found, str) else found or []
        if not isinstance(entries, list) or not all(isinstance(each, str | list | None) for each in entries):
            raise LazyModelError(f"the rule {pattern!r} of {path}: found {found!r}; {hint}, with quotes")
        key = role(pattern.removeprefix("role:")) if pattern.startswith("role:") else pattern
        rules[key] = PartitionSpec(*map(entry, entries))
    return rules


def _plan(arguments: argparse.Namespace) -> int:
    with libtpu_environment():
        if CONFIG.jax_platforms is None and not (arguments.compile and not arguments.topology):
            # Nothing runs on devices: an accelerator that another process uses, or that starts slowly, is not touched.
            jax.config.update("jax_platforms", "cpu")
        # Arguments are checked before anything is imported, built or compiled.
        for name in ("device_memory", "host_memory"):
            if (amount := getattr(arguments, name)) is not None:
                parse_bytes(amount, name=f"--{name.replace('_', '-')}", at_least=1)
        check_page(arguments.html)
        given = vars(arguments)
        compiled = {} if arguments.compile not in ("forward", "train") else {k: given[k] for k in ("batch", "sequence")}
        fields = {cls: [f.name for f in dataclasses.fields(cls) if f.name not in compiled] for cls in (WhatIf, Fleet)}
        what_if = WhatIf(**{name: given.get(name) for name in fields[WhatIf]})
        fleet = Fleet(**{name: given[name] for name in fields[Fleet]})
        options = {
            "device_memory": arguments.device_memory,
            "host_memory": arguments.host_memory,
            "fleet": None if fleet == Fleet() else fleet,
            "compile": arguments.compile and Compile(arguments.compile, **compiled),
        }
        storage_options(arguments)
        rules, meshes = _rules(arguments), _meshes(arguments, compiled=bool(arguments.compile))
        plans = _plans(arguments, _described(arguments.model), meshes, rules, what_if, options)
    if len(plans) == 1:
        show(arguments, "plan", *plans.values())
    else:
        show(arguments, "plans", compare_plans(plans))
    return 0 if any(plan.fits is not False for plan in plans.values()) else 1


def _plans(
    arguments: argparse.Namespace,
    source: str,
    meshes: Mapping[str, Any],
    rules: Any,
    what_if: WhatIf,
    options: dict[str, Any],
) -> dict[str, MemoryPlan]:
    """One plan for each dtype and mesh, by name; `options` are those of `AbstractModel.plan`."""
    plans: dict[str, MemoryPlan] = {}
    # KerasHub's models are built quantized, with their LoRA pairs; for other models this is arithmetic.
    built = WhatIf()
    if what_if.quantize is not None and not is_imported(source):
        built, what_if = what_if, dataclasses.replace(what_if, quantize=None, lora_rank=None)
    with Console(stderr=True).status("") as status:  # shown on terminals only
        for dtype in arguments.dtype or [None]:
            status.update(escape(f"building {shown(source)}{f' in {dtype}' if dtype else ''}"))
            model = _model(source, arguments, dtype, built)
            for place, mesh in meshes.items():
                name = ", ".join(filter(None, (place, dtype))) or "one device"
                status.update(escape(f"{'compiling' if options['compile'] else 'planning'} {name}"))
                plans[name] = _sharded(model, mesh, rules).plan(what_if=what_if, **options)
    return plans


def _meshes(arguments: argparse.Namespace, *, compiled: bool) -> dict[str, Any]:
    """The meshes to plan for, by name; all names are checked before the first mesh is compiled for."""
    all_axes = [None if text is None else _parse_axes(text) for text in arguments.mesh or [None]]
    requested = list(itertools.product(arguments.topology or [None], all_axes))
    names = [", ".join(filter(None, (topology, _axes_text(axes or {})))) for topology, axes in requested]
    meshes = [_mesh(*each, compiled=False) for each in requested]
    if compiled:
        meshes = [_mesh(*each, compiled=True) for each in requested]
    return dict(zip(names, meshes, strict=True))


def _described(source: str) -> str:
    """The description of the model: the source itself, or the folder of a weights file that has a configuration."""
    place, mark, query = source.partition("?") if is_url(source) else (source, "", "")
    weights = place.lower().endswith(_WEIGHTS)
    is_path = weights or source.endswith((".gguf", ".json")) or source.startswith(("/", "./", "../"))
    if not is_url(source) and is_path and not os.path.exists(source):
        raise LazyModelError(f"{source} does not exist")
    if not weights or os.path.isdir(source):
        return source
    folder = place.rpartition("/")[0] if is_url(source) else os.path.dirname(source) or "."
    # The URL is not opened yet.
    if is_url(source) or os.path.isfile(os.path.join(folder, "config.json")):
        print(f"lazymodel: {shown(source)} holds weights; planning its folder by config.json", file=sys.stderr)
        return f"{folder}{mark}{query}"
    raise LazyModelError(
        f"{source} holds weights, which do not say what model they are of, and no config.json is next to them; give "
        f"the model's folder or config.json (`lazymodel inspect {source}` lists the tensors)"
    )


def _parse_axes(text: str) -> dict[str, int]:
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
    if axes is None:  # one device that does not exist, of unknown kind
        return None if compiled else AbstractMesh((1,), ("model",))
    sizes, names = tuple(axes.values()), tuple(axes)
    if not compiled:
        return AbstractMesh(sizes, names, (AxisType.Auto,) * len(names))
    if (needed := math.prod(sizes)) > jax.device_count():
        raise LazyModelError(
            f"mesh {_axes_text(axes)} has {needed} devices and this machine {jax.device_count()}; "
            "name the devices to compile for with --topology"
        )
    return jax.sharding.Mesh(np.asarray(jax.devices()[:needed]).reshape(sizes), names)


def _model(source: str, arguments: argparse.Namespace, dtype: str | None, built: WhatIf) -> AbstractModel[Any]:
    options = storage_options(arguments)
    if is_imported(source):
        if options:
            raise LazyModelError("--storage-option is for URLs; a factory decides for itself")
        if arguments.cls is not None or dtype is not None:
            raise LazyModelError("--class and --dtype are for presets and configurations; a factory decides for itself")
        if not callable(factory := imported(source)):
            raise LazyModelError(f"{source} is not a function; name one that builds a model, such as my_models:build")
        return build_abstract(factory)
    os.environ.setdefault("KERAS_BACKEND", "jax")
    with quiet_tensorflow():
        adapter = adapter_of("keras")
    model = adapter.from_config(source, cls=arguments.cls, dtype=dtype, storage_options=options)
    if built.quantize is not None:
        with warnings.catch_warnings():
            # Keras warns for every normalization layer, and a plan shows what is quantized.
            warnings.filterwarnings("ignore", message="Layer .* does not have a `quantize`")
            model = model.quantize(built.quantize)
    return model if built.lora_rank is None else model.lora(built.lora_rank)


def _sharded(model: AbstractModel[Any], mesh: Any, rules: Any) -> AbstractModel[Any]:
    """The model on the mesh; the plan's table shows what the automatic rules could not split."""
    automatic = isinstance(rules, Auto)
    if mesh is None and automatic and rules.host is None:
        return model
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("model",)) if mesh is None else mesh
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LazyModelWarning)
        sharded = model.shard(mesh, rules)
    for warning in [] if automatic else caught:
        print(f"lazymodel: warning: {in_options(str(warning.message), {})}", file=sys.stderr)
    return sharded
