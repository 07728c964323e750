"""Running something that builds a Keras model, into an abstract model that carries what would be loaded.

Responsible for turning failures to load into one error, for what weight files hold and nothing asked for, and for
changing the layers of a model that was built.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

import keras

from lazymodel import AbstractModel, CheckpointError, LazyModelError, Progress, ShardingError
from lazymodel._abstract.spec import ModelSpec
from lazymodel._errors import warn
from lazymodel._show.progress import ReportTo
from lazymodel._show.text import closest, folded_names, listed
from lazymodel.checkpoints._untrusted import read_json_file, weight_map
from lazymodel.checkpoints._verify import Verify
from lazymodel_keras import _upstream
from lazymodel_keras._model.abstract import extended, from_skeleton
from lazymodel_keras._model.compiled import check
from lazymodel_keras._model.examples import first_batch
from lazymodel_keras._model.skeleton import Skeleton
from lazymodel_keras._record.hugging_face import Leftovers
from lazymodel_keras._record.patches import active
from lazymodel_keras._record.recording import OpenedFile, Recording
from lazymodel_keras._record.remote import RemoteFiles
from lazymodel_keras._record.session import session
from lazymodel_keras._record.weight_files import known_layers
from lazymodel_keras._transform.lora import add_lora, check_lora
from lazymodel_keras._transform.quantize import Filters, check_quantization, quantize


class Materializing(TypedDict, total=False):
    """What is passed on to `AbstractModel.materialize`, and documented there."""

    max_host_memory: int | str | None
    replicas: str | None
    progress: bool | Progress | Callable[[int, int], object] | None
    report: ReportTo


def check_options(function: str, options: Mapping[str, Any], taken: type = Materializing) -> None:
    """Raises LazyModelError where a function was given an argument that nobody takes."""
    names = list(taken.__annotations__)
    for name in options:
        if name not in names:
            raise LazyModelError(f"lazymodel_keras.{function} takes no argument {name!r}{closest(name, names)}")


class KerasModel(Skeleton):
    """What a function builds, whose layers can be changed before it is sharded."""

    def quantize(self, model: Any, how: Any, filters: Filters) -> AbstractModel[Any]:
        check_quantization(how)
        return self._changed(model, "quantize", lambda built: quantize(built, how, filters))

    def lora(self, model: Any, rank: int, targets: str | None) -> AbstractModel[Any]:
        check_lora(rank, targets)
        return self._changed(model, "lora", lambda built: add_lora(built, rank, targets))

    def prepared(
        self, model: Any, what: str, *, inputs: Sequence[Any] = (), batch: int | None, sequence: int | None
    ) -> Any:
        skeleton = self.upcoming()
        if what != "train":
            return model
        check(skeleton.result, what)
        if _upstream.is_built(skeleton.result):
            return model
        data = first_batch(skeleton.result, what, inputs, batch, sequence)
        with contextlib.nullcontext() if active() is skeleton.recording else session(skeleton.recording):
            _upstream.build_for(skeleton.result, data)
        build = self.build

        def rebuild() -> Any:
            assert build is not None
            built = build()
            _upstream.build_for(built, data)
            return built

        filled = KerasModel(build and rebuild, skeleton.recording, skeleton.result, only_own=self.only_own)
        filled.distribution = self.distribution
        filled.add_variables(skeleton.variables)
        self.leave()
        return extended(model, filled)

    def _changed(self, model: ModelSpec, step: str, change: Callable[[Any], None]) -> AbstractModel[Any]:
        """The abstract model of the object after a change; this one builds another object when it needs it."""
        changes = {
            "an optimizer": model.optimized is not None,
            "other initializers": model.recipes is not self.spec.recipes,
            "shardings": dict(model) != dict(self.spec),
        }
        if before := [change for change, is_there in changes.items() if is_there]:
            raise LazyModelError(
                f"{model.name} has {before[0]} already, which are for its variables as they were built: {step} comes "
                "before shard, with_optimizer, reinitialize and rekey"
            )
        if not isinstance(self.present().result, keras.Model):
            raise LazyModelError(f"{step} changes one keras.Model; this is {type(self.result).__name__}")
        build = self.build
        assert build is not None

        def rebuild() -> Any:
            built = build()
            change(built)
            return built

        recording, result = self.give_away()
        recording.began = time.perf_counter()
        with session(recording):
            change(result)
        changed = KerasModel(rebuild, recording, result)
        changed.distribution = self.distribution
        return from_skeleton(changed, quiet=True, spent=model.spent)


def abstract_build(
    build: Any,
    *,
    what: str,
    loads: bool,
    strict: bool = True,
    cast: str = "safe",
    verify: Verify = False,
    storage_options: Mapping[str, Any] | None = None,
) -> AbstractModel[Any]:
    """Runs something that builds a model; failures to load it become one `CheckpointError`, which begins with `what`.

    Where loading is not all that it is for (`loads`), only what fails once a weight file was opened is a failure to
    load, and other errors are the user's own. For `strict`, `cast`, `verify` and `storage_options`, see
    `abstract_from_preset`.
    """
    recording = Recording(verify, cast, RemoteFiles(storage_options))
    result = recorded(recording, build, what, loads=loads)
    return finished(recording, build, result, what, strict=strict, taken=loads)


def finished(
    recording: Recording, build: Callable[[], Any], result: Any, what: str, *, strict: bool = True, taken: bool = False
) -> AbstractModel[Any]:
    """The abstract model of what was recorded of `build`, which returned `result`; see `check_all_used`."""
    check_all_used(recording, what, strict=strict, taken=taken)
    return from_skeleton(KerasModel(build, recording, result))


def recorded(recording: Recording, build: Callable[[], Any], what: str, *, loads: bool) -> Any:
    """What `build` returns, recorded; failures are those of `abstract_build`."""
    try:
        with recording.explaining(what), session(recording):
            return build()
    except (ValueError, KeyError, OSError) as error:
        if not loads and not recording.files:
            raise
        files = ", ".join(recording.files)
        if "could not be loaded" in str(error):  # Keras' loader, which goes on to the end before it raises
            lacking = [
                variable.path
                for variable, recorded in recording.variables()
                if recorded.value is None and keras.backend.is_float_dtype(_upstream.own_dtype(variable))
            ]
            names = listed(folded_names(lacking))
            raise CheckpointError(
                f"{what}: {files} has no matching tensors for {len(lacking)} variables: {names}; "
                "is this the checkpoint of another configuration or version?"
            ) from error
        lacking = isinstance(error, KeyError)
        layers = known_layers(str(error.args[0]), _indexed_names(recording.files.values())) if lacking else ""
        said = f"there is no {error}" if lacking else error
        raise CheckpointError(f"{what} failed{f' ({files})' if files else ''}: {said}{layers}") from error


def _indexed_names(files: Iterable[OpenedFile]) -> list[str]:
    """The tensors that the indexes beside some files list."""
    folders = dict.fromkeys(file.where.parent for file in files)
    indexes = [index for folder in folders for index in folder.glob("*.safetensors.index.json")]
    return [name for index in indexes for name in weight_map(read_json_file(index), index)]


def require_rules(mesh: Any, rules: Any, repair: Any = False) -> None:
    """Raises ShardingError where a mesh comes without rules, or rules or their repair without a mesh."""
    if repair and mesh is None:
        raise ShardingError("repair was given without mesh; it mends rules, so pass mesh and rules, too")
    if (mesh is None) != (rules is None):
        given, lacking = ("rules", "mesh") if mesh is None else ("mesh", "rules")
        raise ShardingError(f"{given} was given without {lacking}; pass both, or neither to use keras.distribution")


def check_all_used(recording: Recording, what: str, *, strict: bool, taken: bool = True) -> None:
    """Warns where weight files hold tensors that nothing asked for, or with `strict` raises CheckpointError.

    What converters leave out on purpose is no matter; what is left of quantized weights is an error in any case.
    `taken` says whether the function that the user called has the parameter `strict`.
    """
    leftovers = Leftovers(recording.files)
    if quantized := leftovers.quantized():
        raise CheckpointError(f"{what}: {'; '.join(quantized)}.")
    messages: list[str] = []
    for path, file in recording.files.items():
        if not path.endswith((".weights.h5", ".keras")):
            continue
        # A layer that took some of its tensors and not all chose to: Keras' own way of loading insists on all of them.
        visited = {name.rpartition("/")[0] for name in file.tensors if name in file.asked}
        names = (name for name in file.unused if not name.startswith("optimizer/"))
        unused = [name for name in names if name.rpartition("/")[0] not in visited]
        if unused:
            messages.append(f"{path} holds {len(unused)} tensors that the model has no variable for: {listed(unused)}")
    messages += leftovers.unexpected()
    if not messages:
        return
    message = f"{what}: {'; '.join(messages)}"
    message += "" if message.endswith("?") else "."
    if strict:
        mend = "Pass strict=False" if taken else "Use lazymodel_keras.abstract_from_preset with strict=False"
        raise CheckpointError(f"{message} {mend} to leave them out.")
    warn(f"{message} They are left out.")
