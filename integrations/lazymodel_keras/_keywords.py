"""Keyword arguments that nobody takes, refused before anything is built, with the name that was probably meant.

KerasHub hands what its loaders do not know on to a constructor, this to the constructors above it, and Keras'
functional model at the end of them drops it without a word: a mistyped `mesh=` would load the model unsharded.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from lazymodel import LazyModelError
from lazymodel._show.text import closest
from lazymodel_keras import _upstream
from lazymodel_keras._record.patches import active

# What every Keras object is configured with, whether or not its constructor names it.
_OF_KERAS = frozenset({"name", "trainable", "dtype"})
_TYPO = 0.75  # how alike a name of ours must be where we cannot know what else is taken: mseh is, rules_file is not


_STEP = "a step: lazymodel_keras.abstract_from_preset(cls, preset).{}.shard(mesh, rules).materialize()"
_OURS = {
    **dict.fromkeys(("mesh", "rules", "on_unmatched", "large", "repair"), "an argument of AbstractModel.shard"),
    **dict.fromkeys(
        ("max_host_memory", "replicas", "compile", "progress", "report"), "an argument of AbstractModel.materialize"
    ),
    **dict.fromkeys(
        ("strict", "cast", "verify", "storage_options"), "an argument of lazymodel_keras.abstract_from_preset"
    ),
}
_STEPS = {
    **dict.fromkeys(("quantize", "quantize_filters"), _STEP.format("quantize('int8')")),
    **dict.fromkeys(("lora", "lora_rank", "lora_targets"), _STEP.format("lora(8)")),
}


def ours(*here: str, taker: str = "") -> dict[str, str]:
    """What may have been meant by an argument that nobody takes: our names, and what takes them; "" is the call itself.

    Those of `here` (none means all but steps) are for `taker`.
    """
    return {**_OURS, **dict.fromkeys(here or _OURS, f"an argument of {taker}" if taker else ""), **_STEPS}


def check_class(cls: Any) -> None:
    """Raises LazyModelError for what is no class with `from_preset`, such as the name of one."""
    if inspect.isclass(cls) and callable(getattr(cls, "from_preset", None)):
        return
    models: Any = _upstream.hub_models()
    names = [] if models is None else [name for name in vars(models) if inspect.isclass(getattr(models, name))]
    if isinstance(cls, str) and (name := cls.rpartition(".")[2]) in names:
        mend = f"pass the class itself, keras_hub.models.{name}"
    elif isinstance(cls, str):
        mend = f"pass the class itself, not a name{closest(cls, names)}"
    elif inspect.isclass(type(cls)) and hasattr(type(cls), "from_preset"):
        mend = f"pass its class, {type(cls).__name__}"
    else:
        mend = "pass a class that has from_preset"
    raise LazyModelError(f"expected a KerasHub class, such as keras_hub.models.GemmaCausalLM; got {cls!r}: {mend}")


def check_from_preset(cls: Any, preset: Any, given: Iterable[str], ours: Mapping[str, str]) -> None:
    """Raises LazyModelError where `cls.from_preset(preset, …)`, given these names, would drop a keyword argument.

    `cls` may be a class above the one that the preset's configuration says is made. For `ours`, see the function.
    """
    given = list(given)
    if not set(given) - _OF_KERAS:
        return
    if (recording := active()) is not None and recording.remote.holds(preset):
        preset = recording.remote.folder(preset, cls)
    made, backbone = _upstream.classes_of_preset(cls, preset)
    names, all_known = taken_names([made.from_preset.__func__, *constructors(made)])
    of_backbone = set[str]() if backbone is None else taken_names(constructors(backbone))[0]
    # A task's loader gives some to the backbone, whatever the task's own constructor takes.
    names |= _OF_KERAS | (of_backbone & _upstream.backbone_keywords())
    if backbone is not None:
        names.add("preprocessor")  # None is none, for a task that has none as well
    for name in given:
        if name in names or not (all_known or difflib.get_close_matches(_letters(name), map(_letters, ours), 1, _TYPO)):
            continue
        if backbone is not None and name in of_backbone:
            mend = f"; {backbone.__name__} takes it, so make that with it, and give it as backbone="
        elif ours.get(name):
            mend = f"; it is {ours[name]}"
        else:
            mend = closest(name, [*ours, *filter(str.isidentifier, names)])
        raise LazyModelError(f"{made.__name__}.from_preset takes no argument {name!r}{mend}")


def check_constructor(cls: Any, given: Iterable[str]) -> None:
    """Raises LazyModelError where the constructor of a backbone or task of KerasHub would drop a keyword argument."""
    models = _upstream.hub_models()
    if models is None or not inspect.isclass(cls) or not issubclass(cls, models.Backbone | models.Task):
        return
    names, all_known = taken_names(constructors(cls))
    unknown = [name for name in given if name not in names | _OF_KERAS]
    if unknown and all_known:
        mend = closest(unknown[0], filter(str.isidentifier, names))
        raise LazyModelError(f"{cls.__name__} takes no argument {unknown[0]!r}{mend}")


def taken_names(functions: Iterable[Any]) -> tuple[set[str], bool]:
    """The keyword arguments that functions take, each passing on what it does not name, and whether these are all.

    A name counts as taken, too, if a function looks for it in its `**kwargs`: it is among the constants of its code.
    They are not all if a function outside KerasHub takes any name, and may do something else than pass it on.
    """
    names: set[str] = set()
    all_known = True
    for function in functions:
        function = inspect.unwrap(function)
        parameters = list(inspect.signature(function).parameters.values())[1:]
        names |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            continue
        names |= {constant for constant in function.__code__.co_consts if isinstance(constant, str)}
        all_known = all_known and function.__module__.split(".")[0] in ("keras", "keras_hub")
    return names, all_known


def constructors(cls: type) -> list[Any]:
    """The constructors that a Keras model's class runs, from its own to the last before Keras' own."""
    found: list[Any] = []
    for base in cls.__mro__:
        # Keras puts its functional model between `keras.Model` and the class when that is first used as one.
        if base in (keras.Model, keras.layers.Layer, object) or base.__module__.split(".")[0] == "keras":
            break
        if "__init__" in vars(base):
            found.append(vars(base)["__init__"])
    return found


def _letters(name: str) -> str:
    return name.replace("_", "").lower()
