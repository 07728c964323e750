"""Compiled programs kept in a folder, for later processes that would compile the same.

Responsible for what decides a program (versions, devices, settings, arguments, and the function itself), for the files,
and for calling a loaded program in place of its function. `_compile` decides when.

A program that was loaded is never called with other arguments or in another context than it was compiled for: then the
function itself is called, which compiles as usual. Programs are code, so files that another user could have written are
rejected; their hash finds damage only.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import pickle
import platform
import re
import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import jax
from jax.core import Tracer
from jax.experimental import serialize_executable
from jax.extend.core import Primitive

from lazymodel._errors import LazyModelError
from lazymodel._programs.jaxprs import Canonical, equations

_CONFIG: Any = jax.config  # its attributes are made at run time
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # environment variables that change what the compiler does
_NO_SETTING = re.compile("cache|_log_|logging|traceback|explain")  # change no program
_ARGUMENTS, _FUNCTION = "arguments", "the function"  # what a program is, after what is around it
_HIT = "kept: hit"
_SUFFIX = ".program"
_SHORT = 60  # characters of values that a reason may quote; longer ones are hashed
_OTHERS = 0o022  # mode bits with which others may write


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class UndecidedError(Exception):
    """Something that another process could not recognize as equal; says what."""


class Description(Canonical):
    """Canonical forms that are equal in other processes as well, as text."""

    def identity(self, value: object) -> str:
        if isinstance(value, type):
            return f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, Primitive):
            return value.name
        module, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "<locals>")
        if module.partition(".")[0] in ("jax", "jaxlib") and "<locals>" not in name:  # of a generator of random numbers
            return f"{module}.{name}"
        raise UndecidedError(f"it uses {type(value).__module__}.{type(value).__qualname__} objects")

    def jaxpr(self, closed: Any) -> Any:
        known = super().jaxpr(closed)
        if isinstance(known.form, tuple):  # shared ones are described once
            known.form = _digest(self.text(known.form))
        return known.form

    def text(self, form: Any) -> str:
        """A form as text. Raises UndecidedError if objects without a text of their own are in it."""
        text = repr(form)
        if (found := re.search(r"<[^<]* at 0x[^>]*>", text)) is not None:
            raise UndecidedError(f"it uses {found[0]}")
        return text

    def parameter(self, value: Any) -> Any:
        if isinstance(value, set | frozenset):
            return ("set", *sorted(repr(self.parameter(item)) for item in cast("set[Any]", value)))
        if isinstance(value, jax.sharding.NamedSharding):
            return ("sharding", self.parameter(value.mesh), str(value.spec), value.memory_kind)
        if isinstance(value, jax.sharding.Mesh):
            ids = () if value.empty else tuple(device.id for device in value.devices.flat)
            return ("mesh", ids, str(value))
        return super().parameter(value)

    def traced(self, traced: Any) -> str:
        """A function that was traced, with everything that `jax.jit` was given.

        Raises:
            UndecidedError: It calls Python, or has parts that cannot be described.
        """
        if any("callback" in eqn.primitive.name for eqn in equations(traced.jaxpr)):
            raise UndecidedError("it calls back into Python")
        # Donations, shardings, layouts and compiler options are with the jaxpr; JAX has no public name for them.
        return self.text(self.parameter(sorted(traced._params.items())))


# What decides a program -----------------------------------------------------------------------------------------------


@functools.cache
def _is_setting(name: str) -> bool:
    return _NO_SETTING.search(name) is None


def _context() -> tuple[dict[str, Any], Any]:
    """Settings of JAX in this thread and context, under which it would compile something else."""
    settings = {name: value for name, value in _CONFIG.values.items() if _is_setting(name)}
    return settings, jax.sharding.get_abstract_mesh()


def _environment(backend: Any, packages: Sequence[str]) -> dict[str, str]:
    """Everything around a program that decides it, under names for people."""
    kinds = [(each.id, each.device_kind, getattr(each, "coords", None)) for each in backend.devices()]
    return {
        **{name: _version(name) for name in ("jax", "jaxlib", "lazymodel", *packages)},
        "Python": platform.python_version(),
        "devices": f"{backend.platform_version}: {kinds}",
        "processor": _processor() if backend.platform == "cpu" else "",
        **{name: os.environ.get(name, "") for name in _FLAGS},
        "jax.config": repr(_context()),
    }


def _version(package: str) -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return "not installed"


def _processor() -> str:
    """The host's processor, whose instructions programs for the CPU use."""
    text = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        text += "".join(dict.fromkeys(line for line in lines if line.startswith(("model name", "flags", "Features"))))
    return text


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float | complex)


def _leaf(leaf: Any) -> tuple[Any, ...]:
    """What JAX distinguishes an argument by: shape, dtype, weak type, and where it is committed to be, if it is."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        aval: Any = jax.typeof(leaf)
        return aval.shape, aval.dtype, aval.weak_type, None
    given: Any = leaf
    committed = getattr(given, "committed", given.sharding is not None)
    return given.shape, given.dtype, bool(getattr(given, "weak_type", False)), given.sharding if committed else None


def _layout(leaf: Any) -> Any:
    return None if _leaf(leaf)[3] is None else leaf.format.layout


def _fits(leaf: Any, expected: tuple[Any, ...], layout: Any) -> bool:
    found = _leaf(leaf)
    if found[:3] != expected[:3] or (found[3] is None) != (expected[3] is None):
        return False
    same = found[3] is expected[3] or found[3] == expected[3] or found[3].is_equivalent_to(expected[3], len(found[0]))
    return same and (layout is None or _layout(leaf) == layout)


def _static(args: Sequence[Any], dynamic: Sequence[Any]) -> tuple[int, ...]:
    """The places of arguments that a compiled program does not take, since they are static."""

    def same(arg: Any, info: Any) -> bool:
        pairs = zip(jax.tree.leaves(arg), jax.tree.leaves(info), strict=False)
        return jax.tree.structure(arg) == jax.tree.structure(info) and all(
            _is_array(one) and _leaf(one)[:2] == (other.shape, other.dtype) for one, other in pairs
        )

    places = [
        static
        for static in itertools.combinations(range(len(args)), len(args) - len(dynamic))
        if all(map(same, (arg for place, arg in enumerate(args) if place not in static), dynamic))
    ]
    if len(places) != 1:
        raise UndecidedError("static arguments look like others; pass them as keywords")
    return places[0]


class KeptFunction:
    """A jitted function whose program for some arguments was loaded; for others the function itself is called."""

    def __init__(self, function: Any, compiled: jax.stages.Compiled, static: Sequence[int], args: Any, kwargs: Any):
        self._function, self._compiled, self._static = function, compiled, static
        self.lower, self.trace = function.lower, function.trace
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self._names = set(compiled.args_info[1])
        self._fixed, given = self._divided(args, kwargs)
        leaves, self._tree = jax.tree.flatten(given)
        self._expected = [(_leaf(leaf), _layout(leaf)) for leaf in leaves]
        self._context = _context()

    def _divided(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Static arguments, and the others as the program takes them."""
        fixed = [args[place] for place in self._static if place < len(args)]
        fixed += sorted((name, value) for name, value in kwargs.items() if name not in self._names)
        given = tuple(arg for place, arg in enumerate(args) if place not in self._static)
        return fixed, (given, {name: value for name, value in kwargs.items() if name in self._names})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        fixed, given = self._divided(args, kwargs)
        leaves, tree = jax.tree.flatten(given)
        if (
            tree != self._tree
            or fixed != self._fixed
            or any(isinstance(leaf, Tracer) or not _is_array(leaf) for leaf in leaves)
            or not all(_fits(leaf, *expected) for leaf, expected in zip(leaves, self._expected, strict=True))
            or _context() != self._context
        ):
            return self._function(*args, **kwargs)
        return self._compiled(*given[0], **given[1])


# Files ----------------------------------------------------------------------------------------------------------------


def check_folder(folder: str | os.PathLike[str]) -> Path:
    """Makes the folder if there is none. Raises LazyModelError if others may write to it, or it is none."""
    path = Path(folder).expanduser()
    if "://" in os.fspath(folder):
        raise LazyModelError(f"keep={os.fspath(folder)!r}: expected a folder on a disk, found a URL")
    try:
        path.mkdir(0o700, parents=True, exist_ok=True)
        _check_owner(path, os.stat(path))
    except OSError as error:
        raise LazyModelError(f"keep={str(path)!r}: cannot make or open this folder: {error}") from error
    return path


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in (0, os.geteuid()):
        raise LazyModelError(
            f"{path} belongs to user {found.st_uid}: programs are code, and this one could be another user's. Expected "
            f"a folder and files of your own (user {os.geteuid()}) for keep="
        )
    if found.st_mode & _OTHERS:
        raise LazyModelError(
            f"{path} can be written by other users (mode {stat.S_IMODE(found.st_mode):o}): programs are code, and this "
            f"one could be another user's. If you trust its content, run: chmod -R go-w {path}"
        )


def _read(path: Path) -> tuple[dict[str, str], bytes]:
    """What decided a kept program, and the program; raises ValueError if the file is damaged."""
    with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb") as file:
        _check_owner(path, os.fstat(file.fileno()))
        hashed, content = file.readline().strip(), file.read()
    if hashlib.sha256(content).hexdigest().encode() != hashed:
        raise ValueError("damaged")
    header, _, program = content.partition(b"\n")
    return json.loads(header), program


def _write(path: Path, parts: Mapping[str, str], program: bytes) -> None:
    content = json.dumps(parts).encode() + b"\n" + program
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:  # mode 600
        try:
            file.write(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _change(name: str, before: str, now: str) -> str:
    return f"{name} {before or 'none'} -> {now or 'none'}" if len(before + now) <= _SHORT else f"{name} changed"


class Keeper:
    """One program: loaded from a folder, or kept there after it was compiled.

    Attributes:
        state: `"kept: hit"`, or why nothing was loaded or kept.
        function: The function to call, which calls the loaded program if there is one; from `lower` on.
    """

    state, function = "", None

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = check_folder(folder)
        self._parts: dict[str, str] | None = None

    def lower(
        self,
        name: str,
        function: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        decided: Callable[[], str] | None = None,
        packages: Sequence[str] = (),
    ) -> jax.stages.Lowered | jax.stages.Compiled:
        """The loaded program, or the lowered function.

        Args:
            name: Describes the function; files of the same name are compared, to say what differs.
            function: A function of `jax.jit`.
            args: Its arguments, as structs or values.
            kwargs: Its keywords, likewise.
            decided: A text that decides what the function computes, with the versions of `packages`; it may raise
                UndecidedError. Without one, the function is traced.
            packages: Names of distributions.
        """
        self.function, self._args, self._kwargs, traced = function, args, kwargs, None
        try:
            if jax.process_count() > 1:
                raise UndecidedError("there is more than one process")
            identity = ""
            if decided is not None:
                with contextlib.suppress(UndecidedError):
                    identity = "model: " + decided()
            if not identity:
                traced = function.trace(*args, **kwargs) if hasattr(function, "trace") else None
                if not isinstance(traced, jax.stages.Traced):
                    raise LazyModelError(
                        f"keep= is for functions of jax.jit, and {name} is of {type(function).__module__}: pass "
                        "jax.jit of a function of its arrays, as Compile(...).of(flax.nnx.split) does"
                    )
                identity = Description().traced(traced)
            self._trees = traced is None  # a later process has no trace, from which to take them
            self._find(name, identity, traced, packages)
        except UndecidedError as error:
            self.reject(str(error))
        if self.state == _HIT:
            return self.function._compiled
        lowered = function.lower(*args, **kwargs) if traced is None else traced.lower()
        if self._parts is not None:
            try:
                self._places = _static(args, lowered.args_info[0])
            except UndecidedError as error:
                self.reject(str(error))
        return lowered

    def reject(self, reason: str) -> None:
        """The program is not kept."""
        self._parts, self.state = None, f"not kept: {reason}"

    def _find(self, name: str, identity: str, traced: Any, packages: Sequence[str]) -> None:
        every, tree = jax.tree.flatten((self._args, dict(self._kwargs)))
        leaves, describe = [leaf for leaf in every if _is_array(leaf)], Description()
        forms = [(*_leaf(leaf)[:3], describe.parameter(_leaf(leaf)[3])) for leaf in leaves]
        arguments = describe.text((forms, list(map(_layout, leaves))))
        if traced is None:  # the structure and static arguments; a trace has them
            values = [describe.parameter(leaf) for leaf in every if not hasattr(leaf, "dtype")]
            identity += describe.text((tree, values))
        default = _CONFIG.jax_default_device  # a device, the name of a platform, or None
        committed = [device for each in map(_leaf, leaves) if each[3] for device in each[3].device_set]
        (device, *_) = committed or ([default] if hasattr(default, "client") else jax.devices(default))
        backend: Any = device.client
        parts = {**_environment(backend, packages), _ARGUMENTS: arguments, _FUNCTION: identity}
        parts = {key: value if len(value) <= _SHORT else _digest(value) for key, value in parts.items()}
        self._parts = parts
        slot = re.sub(r"\W+", "_", name)[:80]
        self._path = self._folder / f"{slot}-{_digest(json.dumps(parts))[:32]}{_SUFFIX}"
        try:
            found, program = _read(self._path)
            if found != parts:
                raise ValueError("damaged")
            payload, trees, places, ids = pickle.loads(program)
            in_tree, out_tree = trees if traced is None else (traced.in_tree, traced.out_tree)
            devices = {device.id: device for device in backend.devices()}
            compiled = serialize_executable.deserialize_and_load(
                payload, in_tree, out_tree, backend, [devices[each] for each in ids]
            )
            self.function = KeptFunction(self.function, compiled, places, self._args, self._kwargs)
            self.state = _HIT
        except FileNotFoundError:
            self.state = f"kept: {self._difference(slot)}"
        except LazyModelError:
            raise
        except Exception as error:
            self.state = f"kept: {self._path.name} cannot be loaded: {error}"

    def _difference(self, slot: str) -> str:
        """Why none of the kept programs is this one: how the most similar one differs."""
        assert self._parts is not None
        differences: list[list[str]] = []
        for path in self._folder.glob(f"{slot}-*{_SUFFIX}"):
            with contextlib.suppress(OSError, ValueError):
                found = _read(path)[0]
                names = [name for name, value in self._parts.items() if found.get(name) != value]
                if _ARGUMENTS in names:  # with others, it computes something else in any case
                    names = [name for name in names if name != _FUNCTION]
                differences.append([_change(name, found.get(name, ""), self._parts[name]) for name in names])
        return ", ".join(min(differences, key=len, default=["no program yet"]))

    def store(self, compiled: jax.stages.Compiled) -> None:
        """Keeps a program that was compiled; a failure is noted in `state`, and does no harm."""
        if self._parts is None or self.state == _HIT:
            return
        try:
            payload, in_tree, out_tree = serialize_executable.serialize(compiled)
            trees = (in_tree, out_tree) if self._trees else None
            executable: Any = compiled.runtime_executable()
            ids = [device.id for device in executable.local_devices()]
            _write(self._path, self._parts, pickle.dumps((payload, trees, self._places, ids)))
        except Exception as error:  # JAX cannot serialize every program, and a disk may be full
            self.state = f"not kept: {error}"
