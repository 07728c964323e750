"""What is noted while Keras code runs abstractly: variables, what would be assigned to them, and weight files.

Every `variable.assign` of an abstract variable is noted instead of carried out. That variables are abstract, and files
hand out lazy tensors, is `_record/session`'s and `_record/weight_files`' matter; nothing here decides about devices.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
import time
import weakref
from collections import ChainMap
from collections.abc import Callable, Generator, Iterable, Iterator
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
from lazymodel_keras._record.patches import active
from lazymodel_keras._record.remote import RemoteFiles


class GivenValue:
    """The initializer of a variable that was created from an array: returns that array."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        return keras.ops.convert_to_tensor(self.value, dtype=dtype)


@dataclasses.dataclass(eq=False)
class RecordedVariable:
    """What is known about one abstract variable."""

    reference: weakref.ref[Any]  # weakly: what Keras throws away while building is not materialized
    initializer: Any  # what would initialize it, or a `GivenValue`
    seed: np.ndarray | None = None  # that a stateful seed generator gave it, drawn when the variable was created
    value: Any = None  # assigned to it last, a lazy tensor or an array

    def current_value(self, variable: Any) -> Any:
        """What stock Keras would have in the abstract variable now, whole; no generator is drawn from again."""
        dtype = _upstream.own_dtype(variable)
        with jax.ensure_compile_time_eval():  # a jitted function that reads it has the value, too
            if self.value is not None:
                return keras.ops.convert_to_tensor(np.asarray(self.value), dtype=dtype)
            initializer = self.initializer
            if self.seed is not None:
                initializer = copy.copy(initializer)
                initializer.seed = jax.numpy.asarray(self.seed)
            value = keras.ops.convert_to_tensor(initializer(tuple(variable.shape), dtype=dtype), dtype=dtype)
        if not isinstance(self.initializer, keras.initializers.Initializer):
            self.value = value  # called again, it might return another
        return value


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
        recorded = self._recording.of(variable)
        if recorded is None or (recorded.value is None and _upstream.value(variable) is not None):
            return None
        return recorded.current_value(variable)


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
        began: The moment of `time.perf_counter()` when what is built began to be, for timelines.
    """

    def __init__(self, verify: Verify = False, cast: str = SAFE, remote: RemoteFiles | None = None) -> None:
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
        self.began = time.perf_counter()
        self._hashed: dict[str, FileSource] = {}  # by absolute path, as they were when their hash was taken
        self._unverified: CheckpointError | None = None
        self._refused: CheckpointError | None = None
        self._decoded: dict[str, DecodedCheckpoint | None] = {}  # by folder

    def of(self, variable: Any) -> RecordedVariable | None:
        """What was recorded of a variable; None for all others."""
        recorded = self.recorded.get(id(variable))
        return recorded if recorded is not None and recorded.reference() is variable else None

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
        """Notes a variable that was just created without a value."""
        recorded = self._note(variable, initializer)
        _upstream.set_initializer(variable, _NoValue(self, variable, initializer))
        if isinstance(getattr(initializer, "seed", None), keras.random.SeedGenerator):
            # Stock Keras draws when it creates the variable; drawing later would give every variable another seed.
            recorded.seed = np.asarray(initializer.seed.next())

    def adopt(self, variable: Any) -> None:
        """Notes what is assigned to a variable that has a value, instead of having it carried out."""
        if _upstream.value(variable) is not None and id(variable) not in self.recorded:
            self._note(variable, None)

    def _note(self, variable: Any, initializer: Any) -> RecordedVariable:
        self.recorded[id(variable)] = recorded = RecordedVariable(weakref.ref(variable), initializer)
        variable.assign = functools.partial(self._assign, recorded)
        return recorded

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
            if other is not None and _upstream.value(value) is None and value.shape == variable.shape:
                # Read from the same tensor, or initialized by the same program: the copy that it would be.
                recorded.value, recorded.initializer, recorded.seed = other.value, other.initializer, other.seed
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
