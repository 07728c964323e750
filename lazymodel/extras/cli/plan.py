"""`lazymodel plan` and `explain`: if a model fits, and why it is split as it is, from its configuration alone.

Responsible for the commands' arguments and output, and for the meshes and models that the arguments name. Keras'
adapter is only used for KerasHub's models.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import shlex
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

import lazymodel
from lazymodel._abstract.adapters import adapter_of
from lazymodel._abstract.variable import PINNED_HOST
from lazymodel._errors import LazyModelError, LazyModelWarning
from lazymodel._extras import extra
from lazymodel._model import AbstractModel, build_abstract
from lazymodel._programs.jaxprs import CONFIG
from lazymodel._remote.url import is_url, shown
from lazymodel._sharding.roles import role
from lazymodel._show.table import plain
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
    print_text,
    show,
    storage_options,
)

# Files that only contain weights, from which no model can be built; GGUF files also say of what model they are.
_WEIGHTS = tuple(suffix for suffix in SUFFIXES if suffix != ".gguf")

_DESCRIPTION = """\
Shows if a model fits, from its configuration: bytes on each device and host, while it is materialized and in use.
Without --compile the numbers are arithmetic; with it, they are the compiler's, for devices that need not exist.
Several --topology, or one for training without --mesh, are a table: on each, meshes, recomputation and host memory for
the optimizer are tried, cheapest first, and the line that does the cheapest one is below it.
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
    option(
        "--remat", ("attention", "full"), "what training computes again, in the estimate; flash attention is attention"
    )
    option("--compile", ("init", "forward", "train"), "compile it, and use the compiler's numbers")
    option("--device-memory", "BYTES", "bytes of one device, such as 16GiB")
    option("--host-memory", "BYTES", "bytes of one host, such as 192GiB")
    option("--hosts", "N", "number of hosts, each with equally many devices", type=int)
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
    option("--mesh", "AXES", "such as model=8 or fsdp=2,model=4; default: one axis, model, or for training the best")
    dtypes = "such as bfloat16 or bf16; default: the preset's, or the configuration's torch_dtype"
    option("--dtype", "POLICY", dtypes, type=dtype_name)
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
    if len(arguments.topology or ()) > 1:
        raise LazyModelError("explain takes one --topology; plan compares several")
    if not (arguments.topology or arguments.mesh):
        raise LazyModelError("explain needs devices; pass --topology or --mesh, such as --topology v5e-8")
    if CONFIG.jax_platforms is None:
        jax.config.update("jax_platforms", "cpu")
    topology = arguments.topology[0] if arguments.topology else None
    rules, mesh = _rules(arguments), _mesh(topology, _axes(arguments), compiled=False)
    model = _model(_described(arguments.model), arguments, lazymodel.WhatIf())
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
        return lazymodel.auto(host=arguments.host)
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
    with extra("libtpu_environment")():
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
        fields = [field.name for field in dataclasses.fields(lazymodel.WhatIf) if field.name not in compiled]
        what_if = lazymodel.WhatIf(**{name: given.get(name) for name in fields})
        options: dict[str, Any] = {name: given[name] for name in ("device_memory", "host_memory", "hosts")}
        compile = arguments.compile and lazymodel.Compile(arguments.compile, **compiled)
        storage_options(arguments)
        rules, axes, topologies = _rules(arguments), _axes(arguments), arguments.topology or [None]
        if compile and len(topologies) > 1:
            raise LazyModelError("--compile takes one --topology")
        meshes = [_mesh(topology, axes, compiled=False) for topology in topologies]
        if compile:
            meshes = [_mesh(topologies[0], axes, compiled=True)]
        source = _described(arguments.model)
        # KerasHub's models are built quantized, with their LoRA pairs; for other models this is arithmetic.
        built = what_if.quantize is not None and not is_imported(source)
        with Console(stderr=True).status(escape(f"building {shown(source)}")) as status:  # shown on terminals only
            model = _model(source, arguments, what_if if built else lazymodel.WhatIf())
            if built:
                what_if = dataclasses.replace(what_if, quantize=None, lora_rank=None)
            status.update("compiling" if compile else "planning")
            training = arguments.topology and what_if.optimizer and axes is None and not compile
            if len(topologies) == 1 and not training:
                plan = _sharded(model, meshes[0], rules).plan(what_if=what_if, compile=compile, **options)
                show(arguments, "plan", plan)
                return 0 if plan.fits is not False else 1
            plans = lazymodel.plans(model, *arguments.topology, what_if=what_if, rules=rules, axes=axes, **options)
    plans = dataclasses.replace(plans, source=_as_typed(arguments, ("quantize", "lora_rank") if built else ()))
    show(arguments, "plans", plans, plans.code)
    return 0 if plans.best is not None else 1


def _as_typed(arguments: argparse.Namespace, names: tuple[str, ...]) -> str:
    """The model and the options for it, as for a shell."""
    parts = [arguments.model]
    for name in ("cls", "dtype", "host", "rules", *names):
        if (value := getattr(arguments, name)) is not None:
            parts += [arguments.flags[name], str(value)]
    return shlex.join(parts)


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


def _axes(arguments: argparse.Namespace) -> dict[str, int] | None:
    """`data=2,model=4` of --mesh as a mapping of axis name to size; None without --mesh."""
    if (text := arguments.mesh) is None:
        return None
    axes: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*(\d{1,7})\s*", part)
        if match is None or match[1] in axes or not int(match[2]):
            raise LazyModelError(f"cannot read mesh {text!r}; write names and sizes, such as model=8 or data=2,model=4")
        axes[match[1]] = int(match[2])
    return axes


def _mesh(topology: str | None, axes: Mapping[str, int] | None, *, compiled: bool) -> Any:
    """The mesh to plan for; None is one device."""
    if topology is not None:
        return (lazymodel.topology if compiled else lazymodel.arithmetic_mesh)(topology, axes)
    if axes is None:  # one device that does not exist, of unknown kind
        return None if compiled else AbstractMesh((1,), ("model",))
    sizes, names = tuple(axes.values()), tuple(axes)
    if not compiled:
        return AbstractMesh(sizes, names, (AxisType.Auto,) * len(names))
    if (needed := math.prod(sizes)) > jax.device_count():
        raise LazyModelError(
            f"mesh {dict(axes)} has {needed} devices and this machine {jax.device_count()}; "
            "name the devices to compile for with --topology"
        )
    return jax.sharding.Mesh(np.asarray(jax.devices()[:needed]).reshape(sizes), names)


def _model(source: str, arguments: argparse.Namespace, built: lazymodel.WhatIf) -> AbstractModel[Any]:
    options, dtype = storage_options(arguments), arguments.dtype
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
    automatic = isinstance(rules, extra("Auto"))
    if mesh is None and automatic and rules.host is None:
        return model
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("model",)) if mesh is None else mesh
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LazyModelWarning)
        sharded = model.shard(mesh, rules)
    for warning in [] if automatic else caught:
        print(f"lazymodel: warning: {in_options(str(warning.message), {})}", file=sys.stderr)
    return sharded
