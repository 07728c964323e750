"""Runs Keras code abstractly: records variables, the values assigned to them, and weight files.

Every `variable.assign` of an abstract variable is recorded instead of carried out. `_record/files` makes files
return lazy tensors; nothing here decides about devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import sys
import threading
import time
import weakref
from collections import ChainMap
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import keras
import numpy as np

from lazymodel import Adapter, Checkpoint, CheckpointError, LazyModelError, LazyTensor, merge
from lazymodel._remote.path import Location, RemotePath, location
from lazymodel._tensors.byte_reader import FileReader
from lazymodel._tensors.casting import SAFE, UNSAFE, check_mode, converted, refusal
from lazymodel._tensors.lazy import lazy, left_over
from lazymodel._tensors.stored import MismatchedTensor, StoredTensor, misshapen, stored_tensors, unused_tensors, where
from lazymodel.checkpoints._checkpoint import Verify
from lazymodel.extras.inspection.verify import verify_files
from lazymodel_keras import _upstream
from lazymodel_keras._record.files import RemoteFiles, checkpoint_files, open_decoded, whole
from lazymodel_keras._record.initializers import GivenValue, InitialValue, initial_value, value_on_host
from lazymodel_keras._record.leftovers import Leftovers


@dataclasses.dataclass(eq=False)
class RecordedVariable:
    """One abstract variable."""

    reference: weakref.ref[Any]  # weak: variables that Keras drops while building are not materialized
    initial: InitialValue | None = None  # None until its turn, and for adopted variables
    value: Any = None  # the last assigned value, a lazy tensor or an array


class _NoValue:
    """The initializer of an abstract variable, which Keras calls if it reads the value outside of our scope."""

    def __init__(self, recording: Recording, variable: Any, initializer: Any) -> None:
        self._recording, self._variable = weakref.ref(recording), weakref.ref(variable)
        self._given = initializer if isinstance(initializer, GivenValue) else None

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        recording, variable = self._recording(), self._variable()
        if _upstream.in_symbolic_scope():  # shapes only
            return jax.numpy.zeros(shape, dtype) if self._given is None else self._given(shape, dtype)
        if recording is None or variable is None or _upstream.active() is not recording:
            raise has_no_value(variable)
        recording.is_outermost()
        return recording.scope.get_current_value(variable)


def has_no_value(variable: Any) -> LazyModelError:
    """The error for using an abstract variable after the code that built it has ended."""
    return LazyModelError(
        f"variable {getattr(variable, 'path', None)!r} has no value: it was built abstractly, and what built it ended "
        "with an exception, or returned a model without it. Build the model again"
    )


@dataclasses.dataclass(frozen=True)
class OpenedFile:
    """A weight file and the names of the tensors that were requested."""

    tensors: Any
    where: Location
    requested: set[str] = dataclasses.field(default_factory=set[str])

    def __getitem__(self, name: str) -> LazyTensor:
        self.requested.add(name)
        return self.tensors[name]

    @property
    def unused(self) -> list[str]:
        """Names of tensors that nothing requested."""
        return left_over(self.tensors, self.requested)


class _RecordingScope(keras.StatelessScope):
    """A StatelessScope in which variables with a value behave as if there were no scope."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(initialize_variables=False)
        self._recording = recording

    def add_update(self, update: tuple[Any, Any]) -> None:
        # Only variables that existed before, or were materialized meanwhile, come here: ours override `assign`.
        variable, value = update
        _upstream.assign_directly(variable, value)

    def get_current_value(self, variable: Any) -> Any:
        # Some models read a variable while they build (DINOv2 interpolates its position embeddings).
        value = self._recording.known_value(variable)
        return None if value is None else keras.ops.convert_to_tensor(value)


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """Options for loading weights; see `lazymodel_keras.abstract_from_preset`."""

    strict: bool = True
    cast: str = SAFE
    verify: Verify = False
    storage_options: Mapping[str, Any] | None = None
    adapter: Adapter | None = None


class Recording:
    """The record of Keras code that ran abstractly, in one block or several; see `session`.

    Attributes:
        options: How weights are loaded.
        cast: The `cast` of the options, for assigned values.
        remote: The files at URLs.
        keywords: The keyword arguments that constructors have to take, if known; see `_build.Keywords`.
        recorded: The records of variables, by `id` of the variable, in order of creation.
        files: The opened weight files, by path or URL; while `on_loaded` is called, only those of that call.
        problems: Assignments that did not match their variable, as errors and as entries of a report.
        notes: What is loaded otherwise than KerasHub does, on purpose, for the load report.
        on_loaded: If set, called with an object whose weights were just loaded, the name of the call that loaded them,
            for messages, and True if only some of a file's tensors were requested.
        on_made: If set, called before a layer or an optimizer is created.
        loading: True while a call that loads weights is running; only the outermost one counts.
        optimizers: The built optimizers and their variables, both as weak references.
        restart: Restores process-wide sources of draws; see `_upstream.remembered_draws`.
        initialized: Initial values of variables, by path, in order of creation.
        draws: While an initializer is traced, the state of each generator that it has drawn from, with its old value.
        began: The time of `time.perf_counter()` when building began, for timelines.
    """

    def __init__(
        self,
        options: LoadOptions | None = None,
        remote: RemoteFiles | None = None,
        initialized: Mapping[str, Sequence[InitialValue]] | None = None,
    ) -> None:
        self.options = options = options or LoadOptions()
        check_mode(options.cast)
        self.remote = remote or RemoteFiles(options.storage_options)
        self.cast = options.cast
        self.keywords: Any = None
        self.recorded: dict[int, RecordedVariable] = {}
        self.files: dict[str, OpenedFile] = {}
        self.problems: list[tuple[RecordedVariable, CheckpointError, MismatchedTensor]] = []
        self.notes: list[str] = []
        self.on_loaded: Callable[[Any, str, bool], None] | None = None
        self.on_made: Callable[[], None] | None = None
        self.loading = False
        self.optimizers: list[tuple[weakref.ref[Any], list[weakref.ref[Any]]]] = []
        self.scope = _RecordingScope(self)
        self.restart = _upstream.remembered_draws()
        self.initialized: dict[str, list[InitialValue]] = {}
        self.draws: list[tuple[Any, Any]] | None = None
        self._initialized_before = {path: list(values) for path, values in (initialized or {}).items()}
        self._waiting: list[tuple[Any, Any]] = []  # variables created while Keras traced, and their initializers
        self.began = time.perf_counter()
        self._hashed: dict[str, FileReader] = {}  # by absolute path, in the state in which they were hashed
        self._rejected: LazyModelError | None = None
        self._decoded: dict[str, Checkpoint | None] = {}  # by folder
        self.merged = False  # True once the adapter of the options was merged into a checkpoint

    def of(self, variable: Any) -> RecordedVariable | None:
        """Returns the record of a variable; None if it has none."""
        recorded = self.recorded.get(id(variable))
        return recorded if recorded is not None and recorded.reference() is variable else None

    def known_value(self, variable: Any) -> np.ndarray[Any, Any] | None:
        """Returns the value of a recorded variable: what was assigned last, or its initial value; None for others."""
        recorded = self.of(variable)
        if recorded is None or (recorded.value is None and _upstream.value(variable) is not None):
            return None
        if recorded.value is None and recorded.initial is None:  # read before its turn
            self.initialize_waiting()
        dtype = _upstream.own_dtype(variable)
        if recorded.value is not None:
            return np.asarray(recorded.value).astype(jax.numpy.dtype(dtype))
        assert recorded.initial is not None
        return value_on_host(recorded.initial, tuple(variable.shape), dtype)

    def variables(self) -> Iterator[tuple[Any, RecordedVariable]]:
        """Recorded variables that exist and are abstract, or are adopted and assigned to, in order of creation."""
        for recorded in self.recorded.values():
            variable = recorded.reference()
            if variable is not None and (_upstream.value(variable) is None or recorded.value is not None):
                yield variable, recorded

    def open(self, path: str | RemotePath, opener: Callable[[Any], Any], name: str = "") -> OpenedFile:
        """Returns the weight file at a path, checked and opened once: all its tensors read through one descriptor.

        A path may stand for an object, which is passed to `opener`. `name` is a different key than the path.
        """
        where = self.remote.location(path) if isinstance(path, str) else path
        name = name or str(where)
        if name not in self.files:
            self.check_content(where)
            self.files[name] = OpenedFile(opener(where), location(where))
        return self.files[name]

    def decoded(self, path: str | RemotePath) -> Checkpoint | None:
        """The checkpoint in the folder of a file, opened once, if it is quantized or an adapter is merged into it;
        otherwise None.
        """
        folder = str(location(path).parent)
        if folder not in self._decoded:
            try:
                self._decoded[folder] = found = open_decoded(path)
                if self.options.adapter is not None:
                    self._decoded[folder] = merge(found or whole(path), self.options.adapter)
                    self.merged = True
            except CheckpointError as error:
                self.refuse(error)  # converters probe, and catch errors
        return self._decoded[folder]

    def close_files(self) -> None:
        """Closes the open weight files, so that they can be overwritten; tensors open them again when read."""
        for file in self.files.values():
            file.tensors.close()

    def check_content(self, path: str | RemotePath) -> None:
        """Hashes a weight file and the files that belong to it, once, if `verify` is given."""
        if self.options.verify is False:
            return
        if isinstance(path, RemotePath):
            self.refuse_unverified(f"{path}, which is at a URL")
            return
        where = os.path.abspath(path)
        try:
            if where not in self._hashed:
                sources = verify_files(checkpoint_files(where), self.options.verify, os.path.dirname(where))
                self._hashed |= {source.path: source for source in sources}
            self._hashed[where].check_unchanged()
        except CheckpointError as error:
            self.refuse(error)

    def refuse_unverified(self, what: str) -> None:
        """Raises CheckpointError if content is to be verified; for values that are not in a file that can be."""
        if self.options.verify is not False:
            error = CheckpointError(
                f"cannot verify {what}: expected weights in a file on a disk that lazymodel reads itself (.h5, .keras, "
                ".safetensors), found others. Leave verify= out if they are to be trusted."
            )
            self.refuse(error)

    def refuse(self, error: LazyModelError) -> NoReturn:
        """Raises the error that ends the load; `explaining` raises it again, since loaders and converters catch it."""
        self._rejected = self._rejected or error
        raise error

    def unused_tensors(self) -> tuple[StoredTensor, ...]:
        """Tensors of the opened files that nothing requested."""
        opened = (tensor for file in self.files.values() for tensor in unused_tensors(file.tensors, file.unused))
        return (*opened, *Leftovers(self.files).unopened)

    def as_assigned(self, path: str, value: Any, dtype: np.dtype[Any]) -> LazyTensor:
        """Returns the assigned value, in the dtype of the variable; raises CheckpointError if that may lose meaning."""
        tensor = lazy(value, path)
        if why := self.refused_cast(path, value, dtype):
            raise CheckpointError(why)
        return converted(tensor, dtype, SAFE if tensor.file else UNSAFE)

    def refused_cast(self, path: str, value: Any, dtype: np.dtype[Any]) -> str:
        """The reason not to cast a value from a file to a dtype; an empty string if the cast is safe."""
        if not isinstance(value, LazyTensor) or not value.file or value.dtype == dtype:
            return ""
        names = ChainMap(*(file.tensors for file in self.files.values()))
        return refusal(path, value, dtype, where(value), names)

    def add(self, variable: Any, initializer: Any) -> None:
        """Records a variable that was just created without a value, and its initializer.

        Variables created while Keras traces are initialized by `initialize_waiting`, like in Keras itself.
        """
        self._note(variable)
        self._waiting.append((variable, initializer))
        if self.is_outermost() or self._initialized_before.get(variable.path):
            self.initialize_waiting()

    def initialize_waiting(self) -> None:
        """Initializes all variables that were created since the last call."""
        waiting, self._waiting = self._waiting, []
        for variable, initializer in waiting:
            known = self._initialized_before.get(variable.path)
            try:
                initial = known.pop(0) if known else initial_value(variable, initializer)
            except BaseException:
                self.forget(variable)
                raise
            self.initialized.setdefault(variable.path, []).append(initial)
            _upstream.set_initial(variable, _NoValue(self, variable, initial), initial.shape)
            self.recorded[id(variable)].initial = initial

    def end(self) -> None:
        """Makes variables that were not initialized, because building them failed, raise when they are used."""
        for variable, initializer in self._waiting:
            _upstream.set_initial(variable, _NoValue(self, variable, initializer), None)
        self._waiting = []

    def adopt(self, variable: Any) -> None:
        """Records values assigned to a variable that has a value, instead of assigning them."""
        if _upstream.value(variable) is not None and id(variable) not in self.recorded:
            self._note(variable)

    def _note(self, variable: Any) -> None:
        self.recorded[id(variable)] = recorded = RecordedVariable(weakref.ref(variable))
        variable.assign = functools.partial(self._assign, recorded)

    def is_outermost(self) -> bool:
        """Returns True if the running code is in no scope within ours, such as that of Keras tracing a layer."""
        if _upstream.current_scope() is None and _upstream.active() is self:  # after `keras.utils.clear_session`
            _upstream.set_scope(self.scope)
        return _upstream.current_scope() is self.scope

    def _assign(self, recorded: RecordedVariable, value: Any) -> Any:
        """Replaces `variable.assign` while the variable is abstract."""
        variable: Any = recorded.reference()
        if not self.is_outermost():
            if _upstream.current_scope() is None or isinstance(_upstream.current_scope(), _RecordingScope):
                raise has_no_value(variable)
            return type(variable).assign(variable, value)  # Keras is tracing: the value belongs to the nested scope
        if isinstance(value, keras.Variable):
            other = self.of(value)
            alike = (value.shape, _upstream.own_dtype(value)) == (variable.shape, _upstream.own_dtype(variable))
            if other is not None and _upstream.value(value) is None and alike:
                # Read from the same tensor, or initialized by the same program, so it equals the copy.
                recorded.value, recorded.initial = other.value, other.initial
                return value
            value = value.value
        value = value if hasattr(value, "shape") else np.asarray(value)
        if tuple(value.shape) != tuple(variable.shape):
            wrong = misshapen(variable.path, variable.shape, value.shape, where(value))
            error = CheckpointError(f"{wrong}; is this the checkpoint of another configuration?")
            tensor = stored_tensors(value, variable.path)[0]
            mismatch = MismatchedTensor(variable.path, tensor, tuple(variable.shape), tuple(value.shape))
            self.problems.append((recorded, error, mismatch))
            raise error
        if self.cast == UNSAFE and isinstance(value, LazyTensor):
            value = converted(value, jax.numpy.dtype(_upstream.own_dtype(variable)), UNSAFE)
        recorded.value = value
        return value

    @contextlib.contextmanager
    def explaining(self, what: str) -> Generator[None]:
        """Makes a failure to load name the first mismatch that no later assignment fixed, or why a file was rejected.

        Keras tries several ways, and some may fail.
        """
        try:
            try:
                yield
            finally:
                rejected, self._rejected = self._rejected, None  # another file may be loaded in the same block
                if rejected is not None:
                    raise rejected
        except (ValueError, KeyError, OSError) as error:
            left = {id(recorded): problem for recorded, problem, _ in self.problems if recorded.value is None}
            if not left:
                raise
            more = f" ({len(left)} tensors do not match)" if len(left) > 1 else ""
            raise CheckpointError(f"{what}: {next(iter(left.values()))}{more}") from error

    def mismatched_tensors(self, variables: Iterable[Any]) -> tuple[MismatchedTensor, ...]:
        """The tensors that some variables did not get because of their shapes."""
        kept = {id(variable) for variable in variables}
        left = ((recorded, mismatch) for recorded, _, mismatch in self.problems if recorded.value is None)
        return tuple({id(r): mismatch for r, mismatch in left if id(r.reference()) in kept}.values())

    def forget(self, variable: Any) -> None:
        """Removes a variable from the recording: from then on it is an ordinary Keras variable."""
        self.recorded.pop(id(variable), None)
        vars(variable).pop("assign", None)
        _upstream.not_pending(variable)


def recording_problem() -> str:
    """Returns why this thread's Keras code cannot be recorded; an empty string if it can be."""
    if keras.backend.backend() != "jax":
        return (
            f"lazymodel needs Keras on JAX; the backend is {keras.backend.backend()!r}. "
            "Set KERAS_BACKEND=jax before Keras is imported."
        )
    if keras.config.is_nnx_enabled():
        return (
            "Keras is in NNX mode, which allocates every variable when it is created. Unset KERAS_NNX_ENABLED, and "
            "nnx_enabled in keras.json, before Keras is imported."
        )
    if _upstream.active() is not None:
        return "models are already being built abstractly here; leave the outer block first"
    return ""


_freezing = threading.Lock()  # held while `quick_collections` is at work in any thread
_frozen_elsewhere = threading.Event()


@contextlib.contextmanager
def quick_collections() -> Generator[None]:
    """Keeps the garbage collector from checking objects that exist already.

    Keras also collects garbage whenever a layer releases a variable, to free its memory at once: half a second for each
    layer of a large program. Abstract variables have no memory.
    """
    if not _freezing.acquire(blocking=False):
        yield
        return
    try:
        # Python counts them one by one, a quarter of a second for millions: so only until there are some.
        if not _frozen_elsewhere.is_set() and gc.get_freeze_count():
            _frozen_elsewhere.set()
        if _frozen_elsewhere.is_set():
            yield  # frozen by other code, which we must not undo
            return
        gc.freeze()
        try:
            yield
        finally:
            gc.unfreeze()
    finally:
        _freezing.release()


@contextlib.contextmanager
def session(recording: Recording) -> Generator[Recording]:
    """Records this thread's Keras code within the block; one recording may have several such blocks.

    Raises LazyModelError if another recording is running in this thread, or Keras cannot be recorded.
    """
    if problem := recording_problem():
        raise LazyModelError(problem)
    try:
        with (
            _upstream.recording_patches.needed(recording),
            quick_collections(),
            _upstream.no_pending_variables(),
            recording.scope,
        ):
            yield recording
            gc.collect()  # variables in cycles that Keras dropped, which would be there in one run and not in another
            recording.initialize_waiting()
    finally:
        recording.end()
        # A global seed generator that was created in the block belongs to the process, not to the model.
        state = _upstream.global_seed_state()
        if (value := recording.known_value(state)) is not None:
            recording.forget(state)
            _upstream.initialize(state, GivenValue(value))


def record(build: Callable[[], Any], first: Recording | None = None) -> tuple[Recording, Any]:
    """Runs a build function abstractly; after a `first` run, with its files at URLs and its initial values."""
    new = Recording() if first is None else Recording(remote=first.remote, initialized=first.initialized)
    with session(new) as recording:
        return recording, build()


@_upstream.while_recording(_upstream.VariableBase, "__init__")
def _initialize(
    recording: Recording,
    original: Any,
    self: Any,
    initializer: Any,
    shape: Any = None,
    dtype: Any = None,
    *rest: Any,
    **options: Any,
) -> None:
    ours = recording.is_outermost()
    if ours and not callable(initializer) and not isinstance(initializer, str):
        # Keras does not create a variable from an array in a StatelessScope, but from an initializer that returns it.
        array = initializer.value if isinstance(initializer, keras.Variable) else initializer
        if not (hasattr(array, "shape") and hasattr(array, "dtype")):
            array = _upstream.as_tensor(self, array, dtype)
        initializer, shape = GivenValue(array), tuple(array.shape)
        if dtype is None:  # JAX has no 64 bits unless they are enabled
            dtype = jax.dtypes.canonicalize_dtype(keras.backend.standardize_dtype(array.dtype)).name
    original(self, initializer, shape, dtype, *rest, **options)
    if ours or _upstream.value(self) is None:  # created while Keras traces a layer: also abstract
        recording.add(self, _upstream.initializer(self))


@_upstream.while_recording(keras.StatelessScope, "__exit__")
def _exit(recording: Recording, original: Any, self: Any, *exception: Any) -> None:
    original(self, *exception)
    if _upstream.current_scope() is recording.scope and self.initialize_variables:
        recording.initialize_waiting()


@_upstream.while_recording(_upstream.OptimizerBase, "build")
def _build(recording: Recording, original: Any, self: Any, variables: Any) -> None:
    original(self, variables)
    recording.optimizers.append((weakref.ref(self), [weakref.ref(variable) for variable in variables]))


@_upstream.while_recording(lambda: _upstream.COPY_OWNERS, "copy")
def _copy(recording: Recording, original: Any, x: Any) -> Any:
    # ScheduleFreeAdamW assigns copies of the variables to its own. The assigned value can be the variable itself, which
    # has no value yet. Other callers may keep the copy, so they get one.
    abstract = recording.of(x) is not None and _upstream.value(x) is None
    building = abstract and isinstance(sys._getframe(2).f_locals.get("self"), keras.Optimizer)
    return x if building else original(x)


@_upstream.while_recording(keras.Operation, "__new__")
@_upstream.while_recording(_upstream.OptimizerBase, "__init__")
def _announce(recording: Recording, original: Any, *args: Any, **kwargs: Any) -> Any:
    recording.is_outermost()
    if recording.on_made is not None:
        recording.on_made()
    return original(*args, **kwargs)
