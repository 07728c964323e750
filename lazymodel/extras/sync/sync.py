"""`Sync`: a sampler model that follows its trainer, planned and compiled once from two models.

Which elements move is decided in `extras/sync/pieces`, and `extras/sync/transfer` has the programs.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from lazymodel._abstract.adapters import adapters
from lazymodel._abstract.framework import Conversion, ModelSpec
from lazymodel._abstract.variable import (
    AbstractVariable,
    automatic_sharding,
    device_shardings,
    matched_paths,
    refuse_deleted,
    sharding_text,
    stays_on_host,
)
from lazymodel._devices.collective import CollectiveScope, agreement
from lazymodel._devices.hardware import compile_lowered, require_live
from lazymodel._errors import LazyModelError, SyncError
from lazymodel._mapping.source import MappedCheckpoint
from lazymodel._mapping.table import WeightMap, map_checkpoint
from lazymodel._programs.jaxprs import as_keys, is_key, stored_as, without_mesh
from lazymodel._show.table import Column, Table, Tabled, change_text, shape_text
from lazymodel._show.text import closest, first_of, format_bytes, listed, parse_bytes, plural
from lazymodel._tensors.casting import refusal
from lazymodel._tensors.lazy import LazyTensor
from lazymodel._tensors.stored import misshapen
from lazymodel.extras.sync.pieces import VariableSource, copies_of
from lazymodel.extras.sync.reshard import live_arrays
from lazymodel.extras.sync.transfer import (
    Group,
    Move,
    Struct,
    device_nbytes,
    grouped_moves,
    held_nbytes,
    routed,
    struct_of,
)

_PART = 8  # of the sampler's bytes on a device, for buffers: with fewer groups, a call waits less often
_LEAST = 1 << 20  # bytes of a device in buffers below which more groups only cost more programs
_Rule = str | Callable[[str], bool]
_SourcesOf = Callable[[CollectiveScope, Group], list[jax.Array]]
_TERMS = {"given": "models differ", "hint": "Call the same Sync in all processes"}


class Sync(Tabled):
    """Moves the weights of a trainer into a sampler with other names, layouts, dtypes and devices.

    It is planned, checked and compiled once. Every call then moves the fewest bytes between devices, in groups of
    variables, into the memory of the sampler's old values. No device ever holds more of a variable than its shards.

    The devices may be the same, a part of them, or others of this process. With several processes they must be the
    same in the same order, and all processes call it.

    Args:
        trainer, sampler: Two models, each abstract with shardings, or live. A live one is only looked at. A sampler
            that `quantize` made is abstract here; a quantized weight has the path that it had before.
        mapping: A `WeightMap` whose tensors are the trainer's variables; or a function of them, as for
            `map_checkpoint`. None for equal paths. It may have views, joins, casts and arithmetic with one number.
        only: The sampler's variables to move: a regular expression of whole paths, or a function of a path. For
            example only LoRA pairs, or what is trained.
        max_device_memory: Bytes of a device, or `"1GiB"`, for buffers. They never take more than an eighth of the
            sampler, or 1 MiB. A variable that takes more moves alone.

    Attributes:
        moved_nbytes: Bytes that devices send to others in a call, all together, without those for scales.
        kept_nbytes: Bytes that stay on their device, from the trainer's values into the sampler's.
        computed_nbytes: Bytes of the sampler's variables, each counted once, that are cast or computed on the way.
        peak_nbytes: Most bytes that a device holds meanwhile: both models, and a group's buffers.
        num_groups: The number of groups.
        compiled: The compiled programs, which groups of one kind share.

    Raises:
        LazyModelError: A variable has no source, another shape, or a dtype that loses values; the mapping does not
            match or needs other computations; devices that JAX cannot move between.

    Example:
        >>> samplers = abstract.shard(Mesh(np.array(jax.devices()[:4]), ("model",)), {".*": P(None, "model")})
        >>> sync = lm.Sync(sharded, samplers)
        >>> sampler = samplers.materialize()
        >>> sampler = sync(model, into=sampler)  # after every few steps of training
        >>> bool((np.asarray(sampler["up"]["kernel"]) == np.asarray(model["up"]["kernel"])).all())
        True
    """

    _words: ClassVar = ("moves", "stays")

    @without_mesh()
    def __init__(
        self,
        trainer: Any,
        sampler: Any,
        mapping: WeightMap | Callable[..., Any] | None = None,
        *,
        only: _Rule | None = None,
        max_device_memory: int | str = "1GiB",
    ) -> None:
        limit = parse_bytes(max_device_memory, name="max_device_memory", at_least=1)
        own = placed_variables(trainer, "trainer")
        self._wanted = placed_variables(sampler, "sampler")
        with agreement(_both(own, self._wanted), done="planned", **_TERMS):
            self._plan(own, sampler, mapping, only, limit)

    def _plan(self, own: Any, sampler: Any, mapping: Any, only: _Rule | None, limit: int) -> None:
        self._read, self._conversions = self._wanted, dict[str, Conversion]()
        if isinstance(sampler, ModelSpec):
            read = sampler.framework.unquantized(sampler, own if mapping is None else ())
            self._read = placed_variables(read, "sampler")
            self._conversions = {each.variable.path: each for each in read.conversions if each.variable.path in read}
        placed, targets, wanted = (
            {path: struct_of(variable) for path, variable in model.items()} for model in (own, self._read, self._wanted)
        )
        chosen = _chosen(only, [path for path, variable in self._read.items() if not stays_on_host(variable)])
        values = _values(own, self._read, mapping, chosen, complete=only is None)
        moves = [_move(path, values[path], targets[path]) for path in chosen if path in values]
        if not moves:
            raise LazyModelError(
                "no variable of the sampler gets a value from the trainer: check `only` and the mapping"
            )
        self._used = {name: own[name] for move in moves for name in move.names}
        limit = min(limit, max(max(device_nbytes(wanted.values()).values()) // _PART, _LEAST))
        self._groups: list[Group] = []
        self._travels: dict[str, tuple[int, int]] = {}  # of each variable, bytes that move, and that stay
        for quantized in (False, True):
            alike = [move for move in moves if (move.path in self._conversions) == quantized]
            self._groups += self._grouped(alike, placed, limit, reuse=not quantized)
        self._parts = {move.path: (move.path,) for move in moves}
        self._parts |= {path: each.paths for path, each in self._conversions.items() if path in self._parts}
        self._shardings: dict[str, Any] = {path: variable.sharding for path, variable in self._wanted.items()}
        self._names = {move.path: move.names for move in moves}
        self._places: dict[str, Any] = {}
        self.moved_nbytes, self.kept_nbytes = map(sum, zip(*self._travels.values(), strict=True))
        steps = {move.path: any(copy.steps for copy in move.copies) for move in moves}
        computed = (path for path in steps if steps[path] or path in self._conversions)
        self.computed_nbytes = sum(self._wanted[part].nbytes for path in computed for part in self._parts[path])
        self.num_groups = len(self._groups)
        programs = {id(group.program): group.program for group in self._groups}
        quantizers = self._quantizers()
        self.compiled = tuple(each for program in programs.values() for each in program.compiled)
        self.compiled += tuple(dict.fromkeys(quantizers.values()))
        held = device_nbytes((*placed.values(), *wanted.values()))
        own = max(nbytes for device, nbytes in held.items() if isinstance(device, jax.Device))
        self.peak_nbytes = own + max(self._spent(group, quantizers) for group in self._groups)

    def _grouped(self, moves: Sequence[Move], placed: Mapping[str, Struct], limit: int, *, reuse: bool) -> list[Group]:
        """The groups in which variables move; notes what travels."""
        for path, route in routed(moves, placed).items():
            self._travels[path] = route.sent_nbytes(), route.sent_nbytes(stays=True)
        return grouped_moves(moves, placed, limit, reuse=reuse)

    @without_mesh()
    def __call__(self, trainer: Any, *, into: Any) -> Any:
        """Moves a trainer's weights into a sampler.

        Args:
            trainer: The live trainer, with the shapes, dtypes and shardings that were planned. It is not changed.
            into: The live sampler. Its values that are replaced are donated: use the result instead.

        Returns:
            The sampler with the new values; a Keras model or an NNX module is changed in place, and returned.

        Raises:
            LazyModelError: An array is deleted, not as planned, or in both models; the sampler is as it was.
            SyncError: A group failed; `sampler` of the error is the sampler, some of whose variables are new.
        """
        given, _ = self._arrays(trainer, self._used, "trainer")
        old, rebuild = self._arrays(into, [part for parts in self._parts.values() for part in parts], "sampler")
        check_apart(given, old)
        return self._move(
            lambda _, group: [given[path] for path in group.sources], old, rebuild, _both(given, old), donate=True
        )

    def _move(self, sources: _SourcesOf, old: Mapping[str, jax.Array], rebuild: Any, both: Any, *, donate: bool) -> Any:
        """The sampler with new values, group by group."""
        moved: dict[int, jax.Array] = {}
        targets: dict[str, jax.Array] = {}
        try:
            with agreement(both, done="moved afterwards", **_TERMS) as stage:
                for group in self._groups:
                    given = sources(stage, group)
                    targets = {part: old[part] for path in group.targets for part in self._parts[path]}
                    room = targets if donate else {part: _room(array) for part, array in targets.items()}
                    stage.meet()
                    new = stage.together(lambda: self._new(group, given, room))  # noqa: B023
                    moved.update(zip(map(id, targets.values()), new, strict=True))
        except Exception as error:
            raise self._failure(error, targets, old, moved, rebuild) from error
        return rebuild(moved)

    def _new(self, group: Group, sources: list[jax.Array], old: Mapping[str, jax.Array]) -> Sequence[jax.Array]:
        """The new arrays of a group; weights of quantized variables move first, and are quantized in their place."""
        if group.targets[0] not in self._conversions:
            return group.program(sources, list(old.values()))
        weights, new = dict(zip(group.targets, group.program(sources, []), strict=True)), list[jax.Array]()
        for path in group.targets:
            for part in self._parts[path]:
                old[part].delete()
            new += self._conversions[path].compute(weights.pop(path), self._shardings).values()
        return new

    def _quantizers(self) -> dict[str, jax.stages.Compiled]:
        """The compiled program of each quantized variable; equal ones share it."""

        @functools.cache
        def compiled(program: Any, struct: jax.ShapeDtypeStruct) -> jax.stages.Compiled:
            return compile_lowered(program.lower(struct), "the program that quantizes variables")

        found: dict[str, jax.stages.Compiled] = {}
        for path in filter(self._conversions.__contains__, self._parts):
            struct = struct_of(self._read[path], automatic_sharding(self._read[path].sharding))
            found[path] = compiled(self._conversions[path].program(cast(Any, struct.sharding), self._shardings), struct)
        return found

    def _spent(self, group: Group, quantizers: Mapping[str, jax.stages.Compiled]) -> int:
        """Bytes of a device while a group moves, in addition to both models."""
        memory = [quantizers[path].memory_analysis() for path in group.targets if path in quantizers]
        weights = sum(map(held_nbytes, group.wanted)) if memory else 0
        return weights + max(group.program.nbytes, *(int(each.temp_size_in_bytes) for each in memory if each), 0)

    def _arrays(
        self, model: Any, wanted: Iterable[str], what: str
    ) -> tuple[dict[str, jax.Array], Callable[[Mapping[int, Any]], Any]]:
        """The live arrays at these paths, checked; and the function that puts others into the model."""
        arrays, same, rebuild = self._live(model, wanted, what)
        variables = self._used if what == "trainer" else self._wanted
        found: dict[str, jax.Array] = {}
        for path in wanted:
            if path not in same:
                raise LazyModelError(f"the {what} has no array {path!r}, which was planned{closest(path, same)}")
            found[path] = as_planned(arrays[same[path]], variables[path], what)
        return found, rebuild

    def _live(self, model: Any, wanted: Iterable[str], what: str) -> Any:
        """As `live_arrays`; quick for a module that was given before, which is changed in place."""
        known, places = self._places.get(what, (None, None))
        if known is None or known() is not model or not places.valid():
            found = (cast(Any, adapter).places(model) for adapter in adapters() if hasattr(adapter, "places"))
            places = next((each for each in found if each is not None), None)
            if places is None:
                return live_arrays(model)
            self._places[what] = weakref.ref(model), places
        arrays = places.arrays()
        if not all(isinstance(arrays.get(path), jax.Array) for path in wanted):
            return live_arrays(model)
        refuse_deleted({path: arrays[path] for path in wanted})

        def rebuild(moved: Mapping[int, Any]) -> Any:
            places.put(moved)
            return model

        return arrays, dict(zip(arrays, arrays, strict=True)), rebuild

    def _failure(
        self, error: Exception, targets: Iterable[str], old: Any, moved: dict[int, Any], rebuild: Any
    ) -> Exception:
        """The error for a group that failed; its donated values are lost, so zeros replace them."""
        lost = [path for path in targets if old[path].is_deleted() and id(old[path]) not in moved]
        if not moved and not lost:
            return SyncError(f"nothing was moved, the sampler is as it was: {error}", None)
        for path in lost:
            moved[id(old[path])] = _zeros(old[path])
        new = [path for path in old if id(old[path]) in moved and path not in lost]
        text = f"{plural(len(new), 'variable')} of the sampler are new"
        text += f" ({listed(map(repr, new))})" if new else ""
        text += f", {listed(map(repr, lost))} are lost" if lost else ""
        return SyncError(
            f"{text}, the others as before: {error}. Call it again with into=error.sampler, or load the sampler again",
            rebuild(moved),
        )

    def table(self) -> Table:
        """A row for each variable that gets a value."""
        written = {part: path for path, parts in self._parts.items() for part in parts}
        nbytes = sum(self._wanted[part].nbytes for part in written)
        title = f"sync: {plural(len(self._names), 'variable')}, {format_bytes(nbytes)}"
        columns = (
            *(Column.names("variable"), Column("shape"), Column("dtype"), Column("trainer → sampler")),
            *map(Column.nbytes, self._words),
            Column.notes("how"),
        )
        rows: list[Any] = []
        for path, names in self._names.items():
            variable = self._read[path]
            sources = [self._used[name] for name in names]
            before = dict.fromkeys(sharding_text(source.sharding) for source in sources)
            how = [f"cast from {source.dtype.name}" for source in sources[:1] if source.dtype != variable.dtype]
            how += [f"of {len(names)}"] if len(names) > 1 else []
            how += [f"quantized, {self._wanted[self._parts[path][0]].dtype}"] if path in self._conversions else []
            sharding = change_text(", ".join(before), sharding_text(variable.sharding))
            cells = shape_text(variable.shape), variable.dtype.name, sharding
            rows.append((path, *cells, *self._travels[path], ", ".join(how)))
        kept = [path for path in self._wanted if path not in written]
        all_of = zip((self.moved_nbytes, self.kept_nbytes), self._words, strict=True)
        lines = [
            f"in all: {', '.join(f'{format_bytes(nbytes)} {word}' for nbytes, word in all_of)}; values of "
            f"{format_bytes(self.computed_nbytes)} are computed",
            f"{plural(self.num_groups, 'group')}, {plural(len(self.compiled), 'program')}; most loaded device: "
            f"{format_bytes(self.peak_nbytes)} at the peak",
        ]
        if kept:
            lines.append(f"{plural(len(kept), 'variable')} of the sampler keep their values: {listed(map(repr, kept))}")
        return Table(title, columns, rows, lines)


def as_planned(array: jax.Array, variable: AbstractVariable, what: str) -> jax.Array:
    """The array of a variable; raises LazyModelError if it has another shape, dtype or sharding than was planned."""
    expected = variable.sharding
    alike = expected == array.sharding or expected is None or expected.is_equivalent_to(array.sharding, array.ndim)
    if not alike or array.shape != variable.shape or array.dtype != variable.dtype:
        kinds = ((v.dtype.name, v.shape, v.sharding) for v in cast(Any, (variable, array)))
        planned, now = (f"{dtype}{list(shape)} on {sharding}" for dtype, shape, sharding in kinds)
        raise LazyModelError(
            f"{variable.path!r} of the {what}: expected {planned}, as planned, found {now}. Make a new lm.Sync for it, "
            "or a new SyncServer and SyncClient"
        )
    return array


def _room(array: jax.Array) -> jax.Array:
    """Memory for a new value."""
    if is_key(array.dtype):
        return _zeros(array)
    return jnp.zeros(array.shape, array.dtype, device=array.sharding)


# Planning -------------------------------------------------------------------------------------------------------------


def _both(trainer: Mapping[str, Any], sampler: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of both models, by names that tell which they are of."""
    models = {"trainer": trainer, "sampler": sampler}
    return {f"{what}: {path}": each for what, model in models.items() for path, each in model.items()}


def placed_variables(model: Any, what: str) -> dict[str, AbstractVariable]:
    """The variables of an abstract or a live model with shardings."""
    if isinstance(model, ModelSpec):
        require_live(model.variables)
        shardings = device_shardings(model.variables)
        used = {path: model.framework.usable_sharding(sharding) or sharding for path, sharding in shardings.items()}
        return {path: dataclasses.replace(each, sharding=used[path]) for path, each in model.items()}
    if model is None or isinstance(model, str):
        raise LazyModelError(f"expected an abstract or a live model as the {what}, got {model!r}")
    arrays, same, _ = live_arrays(model)
    return {  # leaves that are one array now may not be one later
        path: AbstractVariable(path, tuple(array.shape), array.dtype, array.sharding, "live")
        for path, array in ((path, arrays[first]) for path, first in same.items())
    }


def _chosen(only: _Rule | None, paths: Sequence[str]) -> list[str]:
    if only is None:
        return list(paths)
    if callable(only):
        found = [path for path in paths if only(path)]
    else:
        found = matched_paths(only, paths, LazyModelError, "only")
    if not found:
        raise LazyModelError(f"only={only!r} chooses no variable of the sampler: {first_of(paths, 'path')}")
    return found


def _values(
    own: Mapping[str, AbstractVariable],
    wanted: Mapping[str, AbstractVariable],
    mapping: Any,
    chosen: Sequence[str],
    *,
    complete: bool,
) -> Mapping[str, LazyTensor]:
    """The values of the sampler's variables as views of the trainer's."""
    tensors = {path: LazyTensor(VariableSource(path, *variable.stored)) for path, variable in own.items()}
    if mapping is None:
        if absent := [path for path in chosen if path not in tensors]:
            raise LazyModelError(
                f"the trainer has no variable {absent[0]!r} ({len(absent)} of the sampler's {len(wanted)} are missing)"
                f"{closest(absent[0], tensors)}. Pass a mapping, or `only` for the variables that it has; if the "
                "sampler is quantized, pass the abstract model that `quantize` made"
            )
        return tensors
    if not isinstance(mapping, WeightMap):
        values = map_checkpoint(MappedCheckpoint(tensors, None), mapping)
        if unknown := [path for path in values if path not in wanted]:
            raise LazyModelError(
                f"the mapping returns {unknown[0]!r}, which the sampler lacks{closest(unknown[0], wanted)}"
            )
        return values
    values, report = mapping.apply(tensors, wanted)
    if not complete:
        selected = set(chosen)
        for found in (report.unused, report.unmatched):
            found.clear()
        for found in (report.missing, report.ambiguous, report.misshapen):
            for path in [path for path in found if path not in selected]:
                del found[path]
    if problems := report.problems():
        raise LazyModelError(
            "the trainer, as a checkpoint, does not fit the sampler as mapped.\n" + "\n".join(problems) + "\nFix the "
            "table; its `ignore` names variables of the trainer that the sampler does not need"
        )
    return values


def _move(path: str, tensor: LazyTensor, target: Struct) -> Move:
    """How a variable gets its value; raises LazyModelError if shapes differ, or a cast would lose values."""
    shape, dtype = stored_as(target.shape, target.dtype)
    if tensor.shape != shape:
        raise LazyModelError(
            f"{misshapen(path, shape, tensor.shape, 'the trainer')}; pass a mapping that makes this shape"
        )
    if refusal(path, tensor, dtype, ""):
        raise LazyModelError(
            f"{path!r}: expected {dtype.name}, found {tensor.dtype.name} in the trainer: a cast would lose values. If "
            "the sampler is quantized, pass the abstract model that `quantize` made, which knows how"
        )
    return Move(path, target, *copies_of(path, tensor.astype(dtype), shape))


def check_apart(given: Mapping[str, jax.Array], old: Mapping[str, jax.Array]) -> None:
    """Raises LazyModelError for an array that would be donated while something else needs it."""
    first = {id(array): path for path, array in given.items()}
    seen: dict[int, str] = {}
    for path, array in old.items():
        if (other := first.get(id(array))) is not None:
            raise LazyModelError(
                f"{path!r} of the sampler is the trainer's own array {other!r}, which would be donated: begin with a "
                "copy, jax.tree.map(jax.numpy.copy, sampler)"
            )
        if (other := seen.setdefault(id(array), path)) != path:
            raise LazyModelError(
                f"{path!r} and {other!r} of the sampler are one array, which would be donated twice: begin with a "
                "copy, jax.tree.map(jax.numpy.copy, sampler)"
            )


def _zeros(array: jax.Array) -> jax.Array:
    """Zeros of a deleted array's shape, dtype and sharding."""
    shape, dtype = stored_as(array.shape, array.dtype)
    zeros = np.broadcast_to(np.zeros((), dtype), shape)
    made = jax.make_array_from_callback(shape, array.sharding, lambda index: np.ascontiguousarray(zeros[index]))
    return as_keys(made, array.dtype)
