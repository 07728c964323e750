"""What is noted while Keras code runs abstractly: variables, what would be assigned to them, and weight files.

Every `variable.assign` of an abstract variable is noted instead of carried out. That variables are abstract, and files
hand out lazy tensors, is `_record/session`'s and `_record/weight_files`' matter; nothing here decides about devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
import weakref
from collections import ChainMap
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import keras
import numpy as np

from lazymodel import CheckpointError, LazyModelError, LazyTensor
from lazymodel._remote.path import Location, RemotePath
from lazymodel._tensors.casting import SAFE, UNSAFE, check_mode, converted, refusal
from lazymodel._tensors.files import FileSource
from lazymodel._tensors.lazy import lazy
from lazymodel._tensors.stored import (
    MismatchedTensor,
    StoredTensor,
    misshapen,
    stored_tensors,
    unused_tensors,
    where,
)
from lazymodel.checkpoints._decoded import DecodedCheckpoint
from lazymodel.checkpoints._verify import Verify, verify_files
from lazymodel_keras import _upstream
from lazymodel_keras._record.hugging_face import Leftovers, checkpoint_files, open_decoded
from lazymodel_keras._record.initializers import GivenValue, InitialValue, initial_value, value_on_host
from lazymodel_keras._record.patches import active
from lazymodel_keras._record.remote import RemoteFiles


@dataclasses.dataclass(eq=False)
class RecordedVariable:
    """What is known about one abstract variable."""

    reference: weakref.ref[Any]  # weakly: what Keras throws away while building is not materialized
    initial: InitialValue | None = None  # None until its turn has come, and for what is adopted
    value: Any = None  # assigned to it last, a lazy tensor or an array


class _NoValue:
    """The initializer of an abstract variable, which Keras calls where it reads the value outside of our scope."""

    def __init__(self, recording: Recording, variable: Any, initializer: Any) -> None:
        self._recording, self._variable = weakref.ref(recording), weakref.ref(variable)
        self._given = initializer if isinstance(initializer, GivenValue) else None

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        recording, variable = self._recording(), self._variable()
        if _upstream.in_symbolic_scope():  # shapes only
            return jax.numpy.zeros(shape, dtype) if self._given is None else self._given(shape, dtype)
        if recording is None or variable is None or active() is not recording:
            raise has_no_value(variable)
        recording.is_outermost()
        return recording.scope.get_current_value(variable)


def has_no_value(variable: Any) -> LazyModelError:
    """The error where an abstract variable is used once what built it is over."""
    return LazyModelError(
        f"variable {getattr(variable, 'path', None)!r} has no value: it was built abstractly, and what built it ended "
        "with an exception, or returned a model without it. Build the model again"
    )


@dataclasses.dataclass(frozen=True)
class OpenedFile:
    """A weight file and the names of the tensors that were asked for."""

    tensors: Any
    where: Location
    asked: set[str] = dataclasses.field(default_factory=set[str])

    def __getitem__(self, name: str) -> LazyTensor:
        self.asked.add(name)
        return self.tensors[name]

    @property
    def unused(self) -> list[str]:
        """The names that nothing asked for."""
        return [name for name in self.tensors if name not in self.asked]


class _RecordingScope(keras.StatelessScope):
    """A StatelessScope in which variables that have a value behave as if there were no scope."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(initialize_variables=False)
        self._recording = recording

    def add_update(self, update: tuple[Any, Any]) -> None:
        # Only variables that existed before, or were materialized meanwhile, get here: ours shadow `assign`.
        variable, value = update
        _upstream.assign_directly(variable, value)

    def get_current_value(self, variable: Any) -> Any:
        # Some models read a variable while they build (DINOv2 interpolates its position embeddings).
        value = self._recording.known_value(variable)
        return None if value is None else keras.ops.convert_to_tensor(value)


class Recording:
    """What was noted in one stretch of Keras code that ran abstractly, or several; see `_record/session`.

    Attributes:
        verify: As in `lazymodel.open_checkpoint`, for every weight file.
        cast: As in `AbstractModel.materialize`, for what is assigned.
        remote: The files at URLs.
        recorded: What was recorded, by `id` of the variable, in order of creation.
        files: The weight files that were opened, by path or URL; while `on_loaded` is called, those of that call.
        problems: Assignments that did not fit their variable, as errors and as what a report says.
        on_loaded: Where it is wanted at once, called with an object whose weights were just loaded, what loaded them,
            for messages, and whether only some of a file's tensors were wanted.
        on_made: Where it is wanted, called before a layer or an optimizer is made.
        loading: Whether a call that loads weights is running; only the outermost one counts.
        optimizers: The optimizers that were built, and for which variables, both weakly.
        restart: Puts back what is drawn from process-wide sources; see `_upstream.remembered_draws`.
        initialized: What variables are initialized with, by path, in order of creation.
        draws: While an initializer is traced, the state of each generator that it has drawn from, and what it was.
        began: The moment of `time.perf_counter()` when what is built began to be, for timelines.
    """

    def __init__(
        self,
        verify: Verify = False,
        cast: str = SAFE,
        remote: RemoteFiles | None = None,
        initialized: Mapping[str, Sequence[InitialValue]] | None = None,
    ) -> None:
        check_mode(cast)
        self.remote = remote or RemoteFiles()
        self.verify, self.cast = verify, cast
        self.recorded: dict[int, RecordedVariable] = {}
        self.files: dict[str, OpenedFile] = {}
        self.problems: list[tuple[RecordedVariable, CheckpointError, MismatchedTensor]] = []
        self.on_loaded: Callable[[Any, str, bool], None] | None = None
        self.on_made: Callable[[], None] | None = None
        self.loading = False
        self.optimizers: list[tuple[weakref.ref[Any], list[weakref.ref[Any]]]] = []
        self.scope = _RecordingScope(self)
        self.restart = _upstream.remembered_draws()
        self.initialized: dict[str, list[InitialValue]] = {}
        self.draws: list[tuple[Any, Any]] | None = None
        self._initialized_before = {path: list(values) for path, values in (initialized or {}).items()}
        self._waiting: list[tuple[Any, Any]] = []  # variables made while Keras traced, and their initializers
        self.began = time.perf_counter()
        self._hashed: dict[str, FileSource] = {}  # by absolute path, as they were when their hash was taken
        self._unverified: CheckpointError | None = None
        self._refused: CheckpointError | None = None
        self._decoded: dict[str, DecodedCheckpoint | None] = {}  # by folder

    def of(self, variable: Any) -> RecordedVariable | None:
        """What was recorded of a variable; None for all others."""
        recorded = self.recorded.get(id(variable))
        return recorded if recorded is not None and recorded.reference() is variable else None

    def known_value(self, variable: Any) -> np.ndarray[Any, Any] | None:
        """What a recorded variable holds, whole: what was assigned last, or its initial value; None for all others."""
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
        """The recorded variables that are alive and abstract, or adopted and assigned to, in order of creation."""
        for recorded in self.recorded.values():
            variable = recorded.reference()
            if variable is not None and (_upstream.value(variable) is None or recorded.value is not None):
                yield variable, recorded

    def open(self, path: str | RemotePath, opener: Callable[[Any], Any]) -> OpenedFile:
        """The weight file at a path, checked and opened once: all its tensors read through one descriptor.

        A path may stand for an object; what opens files is given that.
        """
        where = self.remote.location(path) if isinstance(path, str) else path
        name = str(where)
        if name not in self.files:
            self.check_content(where)
            self.files[name] = OpenedFile(opener(where), Path(where) if isinstance(where, str) else where)
        return self.files[name]

    def decoded(self, path: str | RemotePath) -> DecodedCheckpoint | None:
        """The quantized checkpoint in the folder of a file, opened once; None where nothing says that it is one."""
        folder = str((Path(path) if isinstance(path, str) else path).parent)
        if folder not in self._decoded:
            try:
                self._decoded[folder] = open_decoded(path)
            except CheckpointError as error:
                self.refuse(error)  # converters probe
        return self._decoded[folder]

    def close_files(self) -> None:
        """Closes the weight files that are open, so that they can be written again; tensors open them when read."""
        for file in self.files.values():
            file.tensors.close()

    def check_content(self, path: str | RemotePath) -> None:
        """Hashes a weight file and what belongs to it, once, where that is wanted."""
        if self.verify is False:
            return
        if isinstance(path, RemotePath):
            self.refuse_unverified(f"{path}, which is at a URL")
            return
        where = os.path.abspath(path)
        try:
            if where not in self._hashed:
                sources = verify_files(checkpoint_files(where), self.verify, os.path.dirname(where))
                self._hashed |= {source.path: source for source in sources}
            self._hashed[where].check_unchanged()
        except CheckpointError as error:
            self._unverified = self._unverified or error
            raise

    def refuse_unverified(self, what: str) -> None:
        """Raises CheckpointError where content is to be verified; for values that come from no file that can be."""
        if self.verify is not False:
            self._unverified = CheckpointError(
                f"cannot verify {what}: expected weights in a file on a disk that lazymodel reads itself (.h5, .keras, "
                ".safetensors), found others. Leave verify= out if they are to be trusted."
            )
            raise self._unverified

    def refuse(self, error: CheckpointError) -> NoReturn:
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
        """What was assigned to a variable, in its dtype; raises CheckpointError where that can lose what it means."""
        tensor = lazy(value, path)
        if why := self.refused_cast(path, value, dtype):
            raise CheckpointError(why)
        return converted(tensor, dtype, SAFE if tensor.file else UNSAFE)

    def refused_cast(self, path: str, value: Any, dtype: np.dtype[Any]) -> str:
        """Why a value from a file is not cast to a dtype; an empty string where it may be."""
        if not isinstance(value, LazyTensor) or not value.file or value.dtype == dtype:
            return ""
        names = ChainMap(*(file.tensors for file in self.files.values()))
        return refusal(path, value, dtype, where(value), names)

    def add(self, variable: Any, initializer: Any) -> None:
        """Notes a variable that was just created without a value, and what it is initialized with.

        What is created while Keras traces is initialized by `initialize_waiting`, as by Keras itself.
        """
        self._note(variable)
        self._waiting.append((variable, initializer))
        if self.is_outermost() or self._initialized_before.get(variable.path):
            self.initialize_waiting()

    def initialize_waiting(self) -> None:
        """Has the turn come of all variables that were created since."""
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
        """Has variables whose turn did not come, since what builds them failed, raise where they are used."""
        for variable, initializer in self._waiting:
            _upstream.set_initial(variable, _NoValue(self, variable, initializer), None)
        self._waiting = []

    def adopt(self, variable: Any) -> None:
        """Notes what is assigned to a variable that has a value, instead of having it carried out."""
        if _upstream.value(variable) is not None and id(variable) not in self.recorded:
            self._note(variable)

    def _note(self, variable: Any) -> None:
        self.recorded[id(variable)] = recorded = RecordedVariable(weakref.ref(variable))
        variable.assign = functools.partial(self._assign, recorded)

    def is_outermost(self) -> bool:
        """Whether the code that runs is in no scope that is nested in ours, such as where Keras traces a layer."""
        if _upstream.current_scope() is None and active() is self:  # after `keras.utils.clear_session`
            _upstream.set_scope(self.scope)
        return _upstream.current_scope() is self.scope

    def holds_nothing_for(self, variable: Any) -> bool:
        """Whether a variable is recorded and nothing was assigned to it."""
        recorded = self.of(variable)
        return recorded is not None and recorded.value is None

    def _assign(self, recorded: RecordedVariable, value: Any) -> Any:
        """What `variable.assign` does while the variable is abstract."""
        variable: Any = recorded.reference()
        if not self.is_outermost():
            if _upstream.current_scope() is None or isinstance(_upstream.current_scope(), _RecordingScope):
                raise has_no_value(variable)
            return type(variable).assign(variable, value)  # Keras is tracing: the value belongs to the nested scope
        if isinstance(value, keras.Variable):
            other = self.of(value)
            alike = (value.shape, _upstream.own_dtype(value)) == (variable.shape, _upstream.own_dtype(variable))
            if other is not None and _upstream.value(value) is None and alike:
                # Read from the same tensor, or initialized by the same program: the copy that it would be.
                recorded.value, recorded.initial = other.value, other.initial
                return value
            value = value.value
        value = value if hasattr(value, "shape") else np.asarray(value)
        if tuple(value.shape) != tuple(variable.shape):
            wrong = misshapen(variable.path, variable.shape, value.shape, where(value))
            error = CheckpointError(f"{wrong}; is this the checkpoint of another configuration?")
            tensor = stored_tensors(value, variable.path)[0]
            misfit = MismatchedTensor(variable.path, tensor, tuple(variable.shape), tuple(value.shape))
            self.problems.append((recorded, error, misfit))
            raise error
        if self.cast == UNSAFE and isinstance(value, LazyTensor):
            value = converted(value, jax.numpy.dtype(_upstream.own_dtype(variable)), UNSAFE)
        recorded.value = value
        return value

    @contextlib.contextmanager
    def explaining(self, what: str) -> Generator[None]:
        """Has a failure to load name the first mismatch that no later assignment made good, or why a file was refused.

        Keras tries several ways, and some may fail.
        """
        try:
            try:
                yield
            finally:
                self.require_verified()
        except (ValueError, KeyError, OSError) as error:
            left = {id(recorded): problem for recorded, problem, _ in self.problems if recorded.value is None}
            if not left:
                raise
            more = f" ({len(left)} tensors do not match)" if len(left) > 1 else ""
            raise CheckpointError(f"{what}: {next(iter(left.values()))}{more}") from error

    def mismatched_tensors(self, variables: Iterable[Any]) -> tuple[MismatchedTensor, ...]:
        """The tensors that some variables were left without because of their shapes."""
        kept = {id(variable) for variable in variables}
        left = ((recorded, misfit) for recorded, _, misfit in self.problems if recorded.value is None)
        return tuple({id(r): misfit for r, misfit in left if id(r.reference()) in kept}.values())

    def forget(self, variable: Any) -> None:
        """Takes a variable out of the recording: from now on it is an ordinary Keras variable."""
        self.recorded.pop(id(variable), None)
        vars(variable).pop("assign", None)
        _upstream.not_pending(variable)
