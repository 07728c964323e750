"""Recording: Keras code runs as it is, its variables stay abstract, and what it would load is only noted.

Inside a `Recording` every `keras.Variable` is created without a value, every `variable.assign` of such a variable is
noted instead of carried out, and weight files opened by Keras or by KerasHub's converters hand out lazy tensors. What
was noted is turned into an `AbstractModel` by `_model`; nothing here decides about devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import jax
import keras
import numpy as np

from lazymodel import CheckpointError, LazyModelError, LazyTensor, MismatchedTensor, StoredTensor
from lazymodel._casting import SAFE, UNSAFE, check_mode, converted, refusal
from lazymodel._files import FileSource
from lazymodel._lazy import lazy
from lazymodel._stored import stored_tensors, unused_tensors, where
from lazymodel._text import misshapen
from lazymodel.checkpoints._verify import Verify, verify_files
from lazymodel_keras import _upstream, _weight_files
from lazymodel_keras._hugging_face import Leftovers


class GivenValue:
    """The initializer of a variable that was created from an array: returns that array."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        return keras.ops.convert_to_tensor(self.value, dtype=dtype)


@dataclasses.dataclass(eq=False)
class RecordedVariable:
    """What is known about one abstract variable.

    Attributes:
        reference: The variable, weakly: what Keras throws away while building is not materialized.
        initializer: The callable that would initialize it, or a `GivenValue`.
        seed: The seed that a stateful seed generator gave it, drawn when the variable was created; None otherwise.
        value: The last value assigned to it: a lazy tensor or an array; None if there was none.
    """

    reference: weakref.ref[Any]
    initializer: Any
    seed: np.ndarray | None = None
    value: Any = None


@dataclasses.dataclass(frozen=True)
class OpenedFile:
    """A weight file and the names of the tensors that were asked for."""

    tensors: Any
    asked: set[str] = dataclasses.field(default_factory=set[str])

    def __getitem__(self, name: str) -> LazyTensor:
        self.asked.add(name)
        return self.tensors[name]

    @property
    def unused(self) -> list[str]:
        """The names that nothing asked for."""
        return [name for name in self.tensors if name not in self.asked]


class _Names:
    """The names of the tensors of all opened files, to look one up in."""

    def __init__(self, files: Iterable[OpenedFile]) -> None:
        self._files = files

    def __contains__(self, name: object) -> bool:
        return any(name in file.tensors for file in self._files)


class _RecordingScope(keras.StatelessScope):
    """A StatelessScope in which variables that have a value behave as if there were no scope."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(initialize_variables=False)
        self._recording = recording

    def add_update(self, update: tuple[Any, Any]) -> None:
        # Only variables that existed before, or were materialized meanwhile, get here: ours shadow `assign`.
        variable, value = update
        variable._direct_assign(value)

    def get_current_value(self, variable: Any) -> Any:
        # Some models read a variable while they build (DINOv2 interpolates its position embeddings).
        recorded = self._recording.recorded.get(id(variable))
        if recorded is None or recorded.reference() is not variable or recorded.value is None:
            return None
        return keras.ops.convert_to_tensor(np.asarray(recorded.value), dtype=variable._dtype)


class Recording:
    """One stretch of Keras code run abstractly; use it as a context manager.

    Args:
        verify: Whether weight files are hashed before anything of them is believed; as in `lazymodel.open_checkpoint`.
        cast: Whether what is assigned may lose what it means: `"safe"` or `"unsafe"`, as in
            `AbstractModel.materialize`.

    Attributes:
        recorded: What was recorded, by `id` of the variable, in order of creation.
        files: The weight files that were opened, by path; while `on_loaded` is called, those of that call.
        problems: Assignments that did not fit their variable, as errors and as what a report says.
        on_loaded: Where it is wanted at once, called with an object whose weights were just loaded, what loaded them,
            for messages, and whether only some of a file's tensors were wanted.
        loading: Whether a call that loads weights is running; only the outermost one counts.
        optimizers: The optimizers that were built, and for which variables, both weakly.
    """

    def __init__(self, verify: Verify = False, cast: str = SAFE) -> None:
        check_mode(cast)
        self.verify = verify
        self.cast = cast
        self.recorded: dict[int, RecordedVariable] = {}
        self.files: dict[str, OpenedFile] = {}
        self.problems: list[tuple[RecordedVariable, CheckpointError, MismatchedTensor]] = []
        self.on_loaded: Callable[[Any, str, bool], None] | None = None
        self.loading = False
        self.optimizers: list[tuple[weakref.ref[Any], list[weakref.ref[Any]]]] = []
        self.scope = _RecordingScope(self)
        self._hashed: dict[str, FileSource] = {}  # by absolute path, as they were when their hash was taken
        self._unverified: CheckpointError | None = None
        self._refused: CheckpointError | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Recording:
        _require_supported_mode()
        if active() is not None:
            raise LazyModelError("models are already being built abstractly here; leave the outer block first")
        with contextlib.ExitStack() as stack:
            stack.enter_context(_patches.needed())
            pending = _upstream.pending_variables()
            _upstream.set_pending_variables([])
            stack.callback(_upstream.set_pending_variables, pending)
            stack.enter_context(self.scope)
            _thread.recording = self
            stack.callback(setattr, _thread, "recording", None)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
        # A global seed generator that was first needed in here belongs to the process, not to the model.
        state = _upstream.global_seed_state()
        recorded = self.recorded.get(id(state))
        if recorded is not None:
            self.forget(state)
            state._initialize_with_initializer(recorded.initializer)
            if recorded.value is not None:
                state.assign(recorded.value)

    def variables(self) -> Iterator[tuple[Any, RecordedVariable]]:
        """The recorded variables that are still alive and to be given a value, in order of creation.

        These are the abstract ones, and of the adopted ones those that something was assigned to.
        """
        for recorded in self.recorded.values():
            variable = recorded.reference()
            if variable is not None and (variable._value is None or recorded.value is not None):
                yield variable, recorded

    def open(self, path: str, opener: Callable[[str], Any]) -> OpenedFile:
        """The weight file at a path, opened once: every tensor that is handed out reads through one descriptor.

        Raises:
            CheckpointError: It is missing, truncated, a Git LFS pointer, …; or its hash, or that of another file of
                its checkpoint, is not the one that is stated, or nobody states one.
        """
        if path not in self.files:
            self.check_content(path)
            self.files[path] = OpenedFile(opener(path))
        return self.files[path]

    def close_files(self) -> None:
        """Closes the weight files that are open, so that they can be written again; tensors open them when read."""
        for file in self.files.values():
            file.tensors.close()

    def check_content(self, path: str) -> None:
        """Hashes a weight file and what belongs to it, once, where that is wanted; see `open`."""
        if self.verify is False:
            return
        where = os.path.abspath(path)
        try:
            if where not in self._hashed:
                sources = verify_files(_weight_files.checkpoint_files(where), self.verify, os.path.dirname(where))
                self._hashed |= {source.path: source for source in sources}
            self._hashed[where].check_unchanged()
        except CheckpointError as error:
            self._unverified = self._unverified or error
            raise

    def refuse_unverified(self, what: str) -> None:
        """Raises CheckpointError where content is to be verified; for values that come from no file that can be."""
        if self.verify is not False:
            self._unverified = CheckpointError(
                f"cannot verify {what}: expected weights in a file that lazymodel reads itself (.h5, .keras, "
                ".safetensors), found others. Leave verify= out if they are to be trusted."
            )
            raise self._unverified

    def refuse(self, error: CheckpointError) -> None:
        """Raises an error for a file that nothing may be taken from, and once more from `require_verified`."""
        self._refused = error
        raise error

    def require_verified(self) -> None:
        """Raises what files were refused with, their hash or `refuse`, which loaders may take for any failure."""
        if self._unverified is not None:
            raise self._unverified
        if (refused := self._refused) is not None:
            self._refused = None  # another file may be loaded in the same block
            raise refused

    def unused_tensors(self) -> tuple[StoredTensor, ...]:
        """What the opened files hold and nothing asked for."""
        opened = (tensor for file in self.files.values() for tensor in unused_tensors(file.tensors, file.unused))
        return (*opened, *Leftovers(self.files).unopened)

    def as_assigned(self, path: str, value: Any, dtype: np.dtype[Any]) -> LazyTensor:
        """What was assigned to a variable, in its dtype.

        Raises:
            CheckpointError: It comes from a file, and the cast can lose what it means.
        """
        tensor = lazy(value, path)
        if why := self.refused_cast(path, value, dtype):
            raise CheckpointError(why)
        return converted(tensor, dtype, SAFE if tensor.file else UNSAFE)

    def refused_cast(self, path: str, value: Any, dtype: np.dtype[Any]) -> str:
        """Why a value from a file is not cast to a dtype; an empty string where it may be."""
        if not isinstance(value, LazyTensor) or not value.file or value.dtype == dtype:
            return ""
        return refusal(path, value, dtype, where(value), _Names(self.files.values()))

    def add(self, variable: Any, initializer: Any) -> None:
        """Notes a variable that was just created without a value."""
        recorded = RecordedVariable(weakref.ref(variable), initializer)
        if isinstance(getattr(initializer, "seed", None), keras.random.SeedGenerator):
            # Stock Keras draws when it creates the variable; drawing later would give every variable another seed.
            recorded.seed = np.asarray(initializer.seed.next())
        self.recorded[id(variable)] = recorded
        variable.assign = functools.partial(self._assign, recorded)

    def adopt(self, variable: Any) -> None:
        """Notes what is assigned to a variable that has a value, instead of having it carried out."""
        if variable._value is not None and id(variable) not in self.recorded:
            recorded = RecordedVariable(weakref.ref(variable), None)
            self.recorded[id(variable)] = recorded
            variable.assign = functools.partial(self._assign, recorded)

    def holds_nothing_for(self, variable: Any) -> bool:
        """Whether a variable is recorded and nothing was assigned to it."""
        recorded = self.recorded.get(id(variable))
        return recorded is not None and recorded.reference() is variable and recorded.value is None

    def _assign(self, recorded: RecordedVariable, value: Any) -> Any:
        """What `variable.assign` does while the variable is abstract."""
        variable: Any = recorded.reference()
        if _upstream.current_scope() is not self.scope:
            return type(variable).assign(variable, value)  # Keras is tracing: the value belongs to the nested scope
        if isinstance(value, keras.Variable):
            other = self.recorded.get(id(value))
            if other is not None and value._value is None and value.shape == variable.shape:
                # Read from the same tensor, or initialized by the same program: the copy that it would be.
                recorded.value, recorded.initializer, recorded.seed = other.value, other.initializer, other.seed
                return value
            value = value.value
        if not isinstance(value, LazyTensor):
            value = value if hasattr(value, "shape") else np.asarray(value)
        if tuple(value.shape) != tuple(variable.shape):
            misfit = misshapen(variable.path, variable.shape, value.shape, where(value))
            error = CheckpointError(f"{misfit}; is this the checkpoint of another configuration?")
            tensor = stored_tensors(value, variable.path)[0]
            misfit = MismatchedTensor(variable.path, tensor, tuple(variable.shape), tuple(value.shape))
            self.problems.append((recorded, error, misfit))
            raise error
        if self.cast == UNSAFE and isinstance(value, LazyTensor):
            value = converted(value, jax.numpy.dtype(variable._dtype), UNSAFE)
        recorded.value = value
        return value

    def unresolved_problems(self) -> list[CheckpointError]:
        """Mismatches that no later assignment made good; Keras' loader tries several ways, and some may fail."""
        return list({id(recorded): error for recorded, error, _ in self.problems if recorded.value is None}.values())

    def mismatched_tensors(self, variables: Iterable[Any]) -> tuple[MismatchedTensor, ...]:
        """The tensors that some variables were left without because of their shapes."""
        kept = {id(variable) for variable in variables}
        found = {
            id(recorded): misfit
            for recorded, _, misfit in self.problems
            if recorded.value is None and id(recorded.reference()) in kept
        }
        return tuple(found.values())

    def forget(self, variable: Any) -> None:
        """Takes a variable out of the recording: from now on it is an ordinary Keras variable."""
        self.recorded.pop(id(variable), None)
        vars(variable).pop("assign", None)
        pending = _upstream.pending_variables()
        if pending:
            _upstream.set_pending_variables([other for other in pending if other is not variable])


_thread = threading.local()  # like Keras' own global state


def active() -> Recording | None:
    """The recording that is running in this thread, if any."""
    return getattr(_thread, "recording", None)


def _initialize_variable(
    original: Any, self: Any, initializer: Any, shape: Any = None, dtype: Any = None, *args: Any, **kwargs: Any
) -> None:
    """`keras.Variable.__init__` while recordings run in some thread."""
    recording = active()
    if recording is None or _upstream.current_scope() is not recording.scope:
        original(self, initializer, shape, dtype, *args, **kwargs)
        if recording is not None and self._value is None:
            recording.add(self, self._initializer)  # made while Keras traces a layer: abstract like all others
        return
    if not callable(initializer) and not isinstance(initializer, str):
        # Keras refuses to create a variable from an array in a StatelessScope; an initializer that returns it is fine.
        value = initializer.value if isinstance(initializer, keras.Variable) else initializer
        array = (
            value
            if hasattr(value, "shape") and hasattr(value, "dtype")
            else self._convert_to_tensor(value, dtype=dtype)
        )
        initializer, shape = GivenValue(array), tuple(array.shape)
        dtype = keras.backend.standardize_dtype(array.dtype) if dtype is None else dtype
    original(self, initializer, shape, dtype, *args, **kwargs)
    recording.add(self, self._initializer)


class SharedPatches:
    """Patches that are installed while at least one thread needs them; each has to act in those threads only."""

    def __init__(self, install: Callable[[contextlib.ExitStack], None]) -> None:
        self._install = install
        self._lock = threading.Lock()
        self._users = 0
        self._undo = contextlib.ExitStack()

    @contextlib.contextmanager
    def needed(self) -> Generator[None, None, None]:
        """Keeps the patches installed for a while."""
        with self._lock:
            if self._users == 0:
                with contextlib.ExitStack() as undo:
                    self._install(undo)
                    self._undo = undo.pop_all()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._undo.close()


def replace(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Sets an attribute until `undo` closes."""
    undo.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, value)


def _install(undo: contextlib.ExitStack) -> None:
    original = _upstream.VariableBase.__init__

    @functools.wraps(original)
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        _initialize_variable(original, self, *args, **kwargs)

    replace(undo, _upstream.VariableBase, "__init__", initialize)
    original_build = _upstream.OptimizerBase.build

    @functools.wraps(original_build)
    def build(self: Any, variables: Any) -> None:
        original_build(self, variables)
        recording = active()
        if recording is not None:
            recording.optimizers.append((weakref.ref(self), [weakref.ref(variable) for variable in variables]))

    replace(undo, _upstream.OptimizerBase, "build", build)
    original_copy = _upstream.OPS.copy

    @functools.wraps(original_copy)
    def copy(x: Any) -> Any:
        # ScheduleFreeAdamW assigns copies of the variables to its own. What is assigned may as well be the variable:
        # it has no value yet. Others may keep the copy, so they are given one.
        recording = active()
        abstract = recording is not None and isinstance(x, keras.Variable) and id(x) in recording.recorded
        building = abstract and isinstance(sys._getframe(1).f_locals.get("self"), keras.Optimizer)
        return x if building and x._value is None else original_copy(x)

    replace(undo, _upstream.OPS, "copy", copy)
    _weight_files.patch(undo, active)
    from lazymodel_keras import _mxfp4, _quantize  # which build on this module

    _mxfp4.patch(undo, active)
    _quantize.patch(undo, active)


_patches = SharedPatches(_install)


def _require_supported_mode() -> None:
    if keras.backend.backend() != "jax":
        raise LazyModelError(
            f"lazymodel needs Keras on JAX; the backend is {keras.backend.backend()!r}. "
            "Set KERAS_BACKEND=jax before Keras is imported."
        )
    if keras.config.is_nnx_enabled():
        raise LazyModelError("Keras' NNX mode allocates every variable when it is created; unset KERAS_NNX_ENABLED")
