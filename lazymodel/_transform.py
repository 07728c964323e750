"""Methods that make another abstract model: `quantize`, `lora`, `with_optimizer`, `reinitialize` and `rekey`.

The framework quantizes and adds LoRA pairs. An optimizer's state and other initializers are traced like any init
function (`_trace`), so they run as the same programs, equal bit for bit to calling them eagerly. An optimizer is any
object with an `init` function that takes a pytree of parameters; nothing here imports Optax.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

import jax
import numpy as np

from lazymodel._abstract.framework import (
    AnyModel,
    Framework,
    LoweredFunction,
    ModelSpec,
    Optimized,
    Optimizer,
    Training,
)  # fmt: skip
from lazymodel._abstract.pairs import LoraPair
from lazymodel._abstract.variable import OPTIMIZER, AbstractVariable, Template, rule_path
from lazymodel._errors import LazyModelError, TraceError
from lazymodel._programs.jaxprs import is_key, key_data
from lazymodel._programs.programs import InitRecipe, given_recipe
from lazymodel._sharding.follow import follow, from_read
from lazymodel._show.text import closest
from lazymodel._trace.errors import on_host
from lazymodel._trace.function import flattened, trace_function


def quantize(
    model: AnyModel,
    how: Any,
    filters: str | Sequence[str] | Callable[[Any], bool] | None = None,
    *,
    inputs: tuple[Any, ...] | Mapping[str, Any] | None = None,
) -> AnyModel:
    """The quantized model: a kernel is quantized while it is read, so that few exist whole in floating point, or none.

    The materialized model is equal bit for bit to the framework's own quantization of the loaded model.

    - A Keras model without other changes: before `lora`, `shard`, `with_optimizer`, `reinitialize`. No kernel exists
      whole in floating point. `"int4"` stores the kernels of `EinsumDense` as matrices, so rules for their float shapes
      do not fit; `lazymodel.auto()` does.
    - An NNX module, by Qwix (`pip install qwix`): before `lora` and `with_optimizer`. A kernel becomes
      `kernel/array/qvalue`, `kernel/array/scale` and perhaps `kernel/array/zero_point`, split like it. It is read or
      initialized on its devices and quantized there, like by `qwix.quantize_model`, one after the other. A checkpoint
      has the kernels, or all of what replaces them.

    Args:
        how: `"int8"`, `"int4"`, `"float8"` or a `keras.quantizers.QuantizationConfig`. For NNX, these quantize weights
            alone, with a scale for each output channel, of matrix products and einsums; or a list of
            `qwix.QuantizationRule`, or a provider, such as `qwix.PtqProvider(rules)`. Schemes that calibrate with
            data (GPTQ, AWQ, static ranges of activations) need the loaded model. The user's own quantizer in a
            configuration is run at once, with one layer's weights read at a time.
        filters: Selects layers, like the `filters` of `keras.Model.quantize`. For NNX, a regex of module paths
            (`re.fullmatch`), or a list of them.
        inputs: For NNX, arguments of a call of the module, from which Qwix finds the kernels: a tuple, or a dict of
            keyword arguments; arrays or `jax.ShapeDtypeStruct`. The call is traced. None is what the module's method
            `get_model_input` returns, which Tunix' models have.

    Raises:
        LazyModelError: The model has no layers that can be quantized in this way, or has other changes already; or Qwix
            is not installed.

    Example:
        >>> abstract = lk.abstract_from_preset(keras_hub.models.GemmaBackbone, "preset")
        >>> abstract.quantize("int8").nbytes < abstract.nbytes / 2
        True
    """
    _refuse_optimizer(model, "quantize")
    return model.framework.quantize(model, how, filters, inputs)


def lora(
    model: AnyModel,
    rank: Any,
    targets: str | None = None,
    *,
    inputs: tuple[Any, ...] | Mapping[str, Any] | None = None,
) -> AnyModel:
    """The model with LoRA pairs, initialized on their devices and split like their kernels unless a rule matches them.

    Only the pairs are trained. It comes after `quantize`, and before `with_optimizer`.

    - A Keras model, like `model.backbone.enable_lora(rank)` after loading: also before `shard` and `reinitialize`.
    - An NNX module, like `qwix.apply_lora_to_model` after loading: the kernel `…/kernel` gets `…/kernel_lora_a` and
      `…/kernel_lora_b`, of the kind `nnx.LoRAParam`. Qwix multiplies their product by `alpha / rank`, which is 1 here.

    Args:
        rank: The rank of the pairs. For NNX also a `qwix.LoraProvider`, which may quantize, too.
        targets: Regex of whole paths (`re.fullmatch`): the layers whose kernel or embeddings it matches get a pair.
            None is the query and value projections, or the default of the backbone.
        inputs: As for `quantize`, of the same call. A dict may have an `nnx.Rngs` as `rngs`, from which pairs are
            drawn; without it they are those of `nnx.Rngs(10003)`, Qwix' default.

    Raises:
        LazyModelError: The rank is not a positive integer, no layer is a target, a target cannot have a pair, or the
            model has other changes already; or Qwix is not installed.

    Example:
        >>> tuned = lk.abstract_from_preset(keras_hub.models.GemmaBackbone, "preset").lora(4).shard(mesh, lm.auto())
        >>> [variable.shape for variable in tuned.values() if variable.trainable][:2]
        [(2, 16, 4), (4, 8)]
    """
    _refuse_optimizer(model, "lora")
    return model.framework.lora(model, rank, targets, inputs)


def _refuse_optimizer(model: ModelSpec, step: str) -> None:
    if model.optimized is not None:
        raise LazyModelError(f"{model.name} has an optimizer already; {step} comes before with_optimizer")


def with_optimizer(
    model: AnyModel,
    optimizer: Optimizer,
    trained: Callable[[AbstractVariable], bool] | str | None = None,
    *,
    memory_kind: str | None = None,
) -> AnyModel:
    """The model with the initial state of an optimizer, as further variables.

    Paths are `optimizer/` and the place in the state: `optimizer/0/mu/layers/0/kernel`. State with its parameter's
    shape is sharded like it, whenever `shard` is called; factored state, as in Adafactor, by the rest of its spec;
    step counts and the like are replicated. Nothing is allocated until `materialize`, which then returns

    - for a JAX function, an Equinox module or a Keras model, (model, state), where `state` is `optimizer.init(params)`;
      `params` is the model's tree with None for what is not trained, as of `eqx.filter(model, eqx.is_inexact_array)`.
    - for Linen, (variables, state), where `params` is `variables["params"]`.
    - for NNX, (module, optimizer), an `nnx.Optimizer` of the trained variables.

    State that is a function of the parameters' values, such as a copy, is computed from the materialized parameters.
    `materialize(checkpoint)` takes state from a checkpoint that contains it.

    Args:
        optimizer: An Optax gradient transformation.
        trained: The variables that it gets: a path regex (`re.fullmatch`) or a function of a variable; None is every
            trainable one. Integers, masks and keys are never trained.
        memory_kind: The memory of the parameters' state: `"pinned_host"` keeps it in the hosts' memory, from which a
            training step moves it (`docs/host_memory.md`). None is the devices' own, even if parameters are elsewhere.

    Raises:
        LazyModelError: There is an optimizer already, or nothing to train.
        ShardingError: The devices have no memory of this kind.
        TraceError: The optimizer's `init` needs values that tracing does not have.

    Example:
        >>> trained = sharded.with_optimizer(optax.adamw(1e-3))
        >>> trained["optimizer/0/mu/up/kernel"].spec
        P(None, 'model')
        >>> model, state = trained.materialize()
    """
    if not callable(getattr(optimizer, "init", None)):
        takes = "with_optimizer takes an Optax gradient transformation, or an object with init(params)"
        raise LazyModelError(f"{takes}; got {optimizer!r}")
    if model.optimized is not None:
        raise LazyModelError(f"{model.name} has an optimizer already; chain transformations, or start from the model")
    paths = _trained(model, trained)
    structs = {path: dataclasses.replace(model[path], sharding=None, layout=None).struct for path in paths}
    started: list[Training] = []

    def start(parameters: Mapping[str, Any]) -> Any:
        started.append(model.framework.start_training(model.variables, optimizer, parameters))
        return started[-1].state

    def path_of(keys: Sequence[Any]) -> str:
        return OPTIMIZER + started[-1].path_of(keys)

    def derive(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        return flattened(start(parameters), path_of).arrays

    traced = trace_function(start, (structs,), {}, name=model.name, path_of=path_of, derive=derive)
    if taken := [path for path in traced if path in model.variables]:
        raise LazyModelError(f"{model.name} has a variable of its own at {taken[0]!r}, where optimizer state would go")
    state: dict[str, AbstractVariable] = {}
    for path, variable in traced.items():
        origin = "value" if variable.origin == "constant" else variable.origin
        follows = _parameter(rule_path(path.removeprefix(OPTIMIZER)), started[0].parameters)
        state[path] = dataclasses.replace(variable, origin=origin, trainable=False, follows=follows)
    on_host = {path: source for path, source in traced.sources.items() if traced[path].on_host}
    constants = (path for path in traced.sources if path not in on_host)
    starts = (given_recipe(path, np.asarray(traced.sources[path]), "value") for path in constants)
    return dataclasses.replace(
        model,
        variables={**model.variables, **follow(state, model.variables, memory_kind=memory_kind)},
        recipes=(*model.recipes, *traced.recipes, *starts),
        sources={**model.sources, **on_host},
        framework=_WithState(model, started[0], traced.framework),
        derived=traced.derived,
        equal={**model.equal, **traced.equal},
        numbers={**model.numbers, **traced.numbers},
        optimized=Optimized(paths, model, memory_kind),
    )


class _WithState(Framework):
    """The framework of a model and of its optimizer's state."""

    def __init__(self, model: ModelSpec, training: Training, state: Framework) -> None:
        super().__init__(lambda leaves: (model.framework.structure(leaves), state.structure(leaves)))
        self._model, self._training, self._state = model, training, state

    def _own(self, by_path: Mapping[str, Any]) -> dict[str, Any]:
        return {path: by_path[path] for path in (*self._model, *self._model.numbers) if path in by_path}

    def check_placed(self, variables: Mapping[str, AbstractVariable]) -> None:
        self._model.framework.check_placed(self._own(variables))

    def check_sharded(self, variables: Mapping[str, AbstractVariable]) -> None:
        self._model.framework.check_sharded(self._own(variables))

    def rebuild(self, arrays: Mapping[str, jax.Array]) -> Any:
        model = self._model.framework.rebuild(self._own(arrays))
        return self._training.finish(model, self._state.structure(arrays))

    def lora_pairs(self, variables: Mapping[str, AbstractVariable]) -> list[LoraPair]:
        return self._model.framework.lora_pairs(self._own(variables))

    @contextlib.contextmanager
    def outlined(self, structs: Mapping[str, jax.ShapeDtypeStruct]) -> Generator[Any]:
        outline = self._model.framework.outline
        state = self._state.structure({path: outline(struct) for path, struct in structs.items()})
        with self._model.framework.outlined(self._own(structs)) as model:
            yield self._training.finish(model, state)

    def traceable(self) -> Callable[[Mapping[str, Any]], contextlib.AbstractContextManager[Any]]:
        model = self._model.framework.traceable()

        @contextlib.contextmanager
        def both(arrays: Mapping[str, Any]) -> Generator[Any]:
            with model(self._own(arrays)) as built:
                yield self._training.finish(built, self._state.structure(arrays))

        return both

    def usable_sharding(self, sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
        return self._model.framework.usable_sharding(sharding)

    def lowered(self, what: str, structs: Mapping[str, jax.ShapeDtypeStruct], **call: Any) -> Sequence[LoweredFunction]:
        return self._model.framework.lowered(what, self._own(structs), **call)


def _parameter(name: str, parameters: Mapping[str, str]) -> str:
    """The parameter whose place in the tree ends a leaf's name, such as `0/mu/layers/0/kernel`; or an empty string."""
    while name not in parameters:
        _, slash, name = name.partition("/")
        if not slash:
            return parameters.get("", "")  # the tree is a single array
    return parameters[name]


def _trained(model: ModelSpec, trained: Callable[[AbstractVariable], bool] | str | None) -> tuple[str, ...]:
    """The paths of the parameters that the optimizer gets."""
    candidates = [variable for variable in model.values() if jax.numpy.issubdtype(variable.dtype, np.inexact)]
    if isinstance(trained, str):
        return tuple(_matched(model, trained, candidates))
    if trained is not None and not callable(trained):
        raise LazyModelError(f"trained is a path regex or a function of a variable; got {trained!r}")
    chosen = [variable.path for variable in candidates if (trained(variable) if trained else variable.trainable)]
    if not chosen:
        what = "that is trainable" if trained is None else "that the given function chooses"
        raise LazyModelError(f"{model.name} has no floating-point variable {what}, so there is nothing to optimize")
    return tuple(chosen)


def _matched(model: ModelSpec, pattern: str, candidates: Iterable[AbstractVariable]) -> list[str]:
    """The paths of the candidates that a path regex matches; raises LazyModelError if there are none."""
    template = Template(pattern, regex=True)
    found = [variable.path for variable in candidates if template.match(rule_path(variable.path)) is not None]
    if not found:
        raise LazyModelError(f"no variable of {model.name} matches {pattern!r}{closest(pattern, model)}")
    return found


Initializer: TypeAlias = "Callable[..., Any]"


@runtime_checkable
class Rescaling(Protocol):
    """Factors of initial values, such as `lazymodel.Mup`."""

    def rescaled(self, model: AnyModel, /) -> AnyModel: ...


InitRules: TypeAlias = "Mapping[str, Initializer] | Callable[[AbstractVariable], Initializer | None]"


def path_key(key: jax.Array, path: str) -> jax.Array:
    """The key of one variable: depends only on a key and the variable's path, not on other variables.

    It is `fold_in(fold_in(key, a), b)`, where `a` and `b` are the first and the second four bytes, as big-endian
    integers, of the SHA-256 digest of the path in UTF-8.

    Args:
        key: A typed key, such as `jax.random.key(0)`.
        path: The variable's path.

    Returns:
        A key of the same kind.

    Example:
        >>> key = lm.path_key(jax.random.key(0), "up/kernel")
        >>> bool((abstract.rekey(0).materialize()["up"]["kernel"] == jax.random.normal(key, (64, 256))).all())
        True
    """
    for part in np.frombuffer(hashlib.sha256(path.encode()).digest()[:8], ">u4"):
        key = jax.random.fold_in(key, np.uint32(part))
    return key


def reinitialize(
    model: AnyModel,
    rules: str | InitRules | Rescaling,
    initializer: Initializer | None = None,
    *,
    key: jax.Array | int | None = None,
) -> AnyModel:
    """Gives variables another initializer, which runs like any other: sharded, one program for each kind.

    A variable's key is `lazymodel.path_key(key, path)`, so its values do not change when others are added, removed or
    renamed, and are bit for bit those of `initializer(path_key(key, path), shape, dtype)`. Variables that begin equal
    stay equal, with the key of the first that is matched. Variables that no rule matches keep their initializers and
    keys. A variable that was built with a weight is initialized from now on; a
    checkpoint given to `materialize` still takes precedence over any initializer. Optimizer state starts as its
    optimizer defines, from the new values if it depends on them.

    Args:
        rules: A path regex (`re.fullmatch`) and an initializer; or a mapping of them, in which the first match is used;
            or a callable that takes a variable and returns an initializer or None. In a pattern, `{layer}` captures
            text without `/` and `.`. Or a result of `lazymodel.mup`: it multiplies the model's own initial values by
            its factors, with unchanged keys and kinds of distributions.
        initializer: Any of `jax.nn.initializers`, of `lazymodel.initializers`, or a callable of key, shape and
            dtype that JAX can trace. If it has further parameters named `path`, or like the pattern's captures, it
            gets these, with captured numbers as ints.
        key: A typed key, or its seed; needed if an initializer draws random values.

    Raises:
        LazyModelError: A pattern matches nothing, an initializer returns another shape or dtype, or a key is
            missing.

    Example:
        >>> abstract.reinitialize(".*/kernel", jax.nn.initializers.lecun_normal(), key=0)["up/kernel"].origin
        'truncated_normal'
    """
    if isinstance(rules, Rescaling):
        if initializer is not None or key is not None:
            raise LazyModelError(
                "muP multiplies the model's own values and takes no initializer or key; rekey draws others"
            )
        read = rules.rescaled(model.as_read())
        return from_read(dataclasses.replace(model, recipes=read.recipes, sources=read.sources), read)
    key = _checked_key(key)
    changed, model = model, model.as_read()
    chosen, alike = _choose(model, rules, initializer), model.alike()
    absent = jax.ShapeDtypeStruct((), jax.eval_shape(jax.random.key, 0).dtype)

    def compute(key: jax.Array) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for path, choice in chosen.items():
            if path not in result:
                result |= dict.fromkeys(alike.get(path, [path]), _initial(model[path], choice, path_key(key, path)))
        return result

    try:
        traced = trace_function(compute, (absent if key is None else key,), {}, name=model.name)
    except TraceError as error:
        if key is None and "ShapeDtypeStruct" in str(error):
            raise LazyModelError(
                f"{error.args[0].split(' ')[0]} gets random values, and no key was given: pass "
                "key=jax.random.key(seed) to reinitialize"
            ) from error
        raise
    variables = dict(model.variables)
    for path in traced:
        variables[path] = dataclasses.replace(variables[path], origin=traced[path].origin)
    kept = ([path for path in recipe.paths if path not in traced] for recipe in model.recipes)
    recipes = [recipe.restricted_to(paths) for recipe, paths in zip(model.recipes, kept, strict=True) if paths]
    sources = {path: source for path, source in model.sources.items() if path not in traced}
    recipes, sources = (*recipes, *traced.recipes), {**sources, **traced.sources}
    return from_read(dataclasses.replace(changed, recipes=recipes, sources=sources), variables)


def rekey(model: AnyModel, key: jax.Array | int, pattern: str = ".*") -> AnyModel:
    """Draws the values of the model's own initializers from keys by path, `lazymodel.path_key(key, path)`.

    By default a model's keys depend on the order in which it creates its variables, so adding one changes all later
    ones. Keys by path do not. A variable whose initializer takes several keys gets them folded from its own by
    0, 1, …; variables that are slices of one random array, or begin equal, have the key of the first. Keys that the
    model holds, such as dropout's, do not change.

    Args:
        key: A typed key, or its seed.
        pattern: Path regex (`re.fullmatch`) of the variables.

    Raises:
        LazyModelError: The pattern matches nothing, or the key has another generator than the model's.

    Example:
        >>> alone = lm.build_abstract(lambda key: {"up": init(key)["up"]}, jax.random.key(0))
        >>> kernels = [model.rekey(1).materialize()["up"]["kernel"] for model in (abstract, alone)]
        >>> bool((kernels[0] == kernels[1]).all())
        True
    """
    checked = _checked_key(key)
    if checked is None:
        raise LazyModelError("rekey needs a key, such as jax.random.key(0)")
    read = model.as_read()
    matched = set(_matched(read, pattern, (variable for variable in read.values() if not variable.is_key)))
    recipes, alike = list[InitRecipe](), model.alike()
    with on_host():
        for recipe in model.recipes:
            random = any(dtype is not None for dtype in recipe.keys)
            if not random or not matched.intersection(recipe.paths):
                recipes.append(recipe)
                continue
            together = dict.fromkeys(each for path in recipe.paths for each in alike.get(path, [path]))
            if apart := [path for path in together if path not in matched]:
                raise LazyModelError(
                    f"{recipe.paths[0]!r} and {apart[0]!r} are cut from one random array, so both change with its key; "
                    f"make the pattern {pattern!r} match both, or neither"
                )
            first = model.equal.get(recipe.paths[0], recipe.paths[0])
            recipes.append(dataclasses.replace(recipe, inputs=_rekeyed(recipe, path_key(checked, first))))
    return dataclasses.replace(model, recipes=tuple(recipes))


def _rekeyed(recipe: InitRecipe, base: jax.Array) -> tuple[np.ndarray[Any, Any], ...]:
    """The recipe's inputs with keys by path: the key of the path, or keys folded from it if there are several."""
    inputs = list(recipe.inputs)
    keys = [(index, dtype) for index, dtype in enumerate(recipe.keys) if dtype is not None]
    for number, (index, dtype) in enumerate(keys):
        if dtype != base.dtype:
            raise LazyModelError(f"{recipe.paths[0]!r} is initialized with a {dtype}; the key given is a {base.dtype}")
        own = jax.random.fold_in(base, number) if len(keys) > 1 else base
        shape = inputs[index].shape[:-1]
        inputs[index] = key_data(jax.random.split(own, shape) if shape else own)
    return tuple(inputs)


def _checked_key(key: Any) -> jax.Array | None:
    if key is None:
        return None
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        return jax.random.key(int(key))
    if not isinstance(key, jax.Array) or not is_key(key.dtype) or key.shape != ():
        found = f"{key.dtype}{list(key.shape)}" if isinstance(key, jax.Array) else repr(key)
        raise LazyModelError(
            f"key is one typed key, such as jax.random.key(0), or its seed; got {found}. Raw keys become typed with "
            "jax.random.wrap_key_data"
        )
    return key


# Rules ----------------------------------------------------------------------------------------------------------------

_Choice: TypeAlias = "tuple[Initializer, Mapping[str, str | int]]"  # with the captures of its pattern, numbers as ints


def _choose(model: ModelSpec, rules: Any, initializer: Initializer | None) -> dict[str, _Choice]:
    """Path → initializer, for each variable that gets a new one."""
    if isinstance(rules, str):
        if initializer is None:
            raise LazyModelError(f"which initializer for {rules!r}? Such as jax.nn.initializers.normal(0.02)")
        rules = {rules: initializer}
    elif initializer is not None:
        raise LazyModelError("an initializer goes with one pattern; a mapping of patterns has its own")
    chosen: dict[str, _Choice] = {}
    if isinstance(rules, Mapping):
        chosen = _choose_by_pattern(model, cast("Mapping[str, Any]", rules))
    elif callable(rules):
        rule = cast("Callable[[AbstractVariable], Initializer | None]", rules)
        found = {path: rule(variable) for path, variable in model.items() if variable.follows is None}
        chosen = {path: (answer, {}) for path, answer in found.items() if answer is not None}
        if not chosen:
            raise LazyModelError(f"the rule gave no variable of {model.name} an initializer: all its answers are None")
    else:
        raise LazyModelError(
            f"rules are a path regex and an initializer, a mapping of them, or a callable of a variable; got {rules!r}"
        )
    for path, (choice, _) in chosen.items():
        if not callable(choice):
            what = "an initializer is a callable of key, shape and dtype, such as jax.nn.initializers.zeros"
            raise LazyModelError(f"{path!r}: {what}; got {choice!r}")
        if is_key(dtype := model[path].dtype):
            what = f"is a PRNG key ({dtype}), which has no initializer"
            raise LazyModelError(f"{path!r} {what}; leave it out of the pattern")
    return chosen


def _choose_by_pattern(model: ModelSpec, rules: Mapping[str, Any]) -> dict[str, _Choice]:
    templates = {pattern: Template(pattern, regex=True) for pattern in rules}
    alive: set[str] = set()
    chosen: dict[str, _Choice] = {}
    for path, variable in model.items():
        for pattern, template in templates.items() if variable.follows is None else ():
            match = template.match(rule_path(path))
            if match is None:
                continue
            alive.add(pattern)
            captures = {name: int(text) if text.isdecimal() else text for name, text in match.items()}
            chosen.setdefault(path, (rules[pattern], captures))
    if dead := [pattern for pattern in rules if pattern not in alive]:
        if state := [path for path in model if templates[dead[0]].match(rule_path(path)) is not None]:
            what = f"{dead[0]!r} matches only optimizer state, such as {state[0]!r}"
            raise LazyModelError(f"{what}, which starts as the optimizer says")
        what = f"no variable of {model.name} matches {', '.join(map(repr, dead))}{closest(dead[0], model)}"
        raise LazyModelError(f"{what}. A pattern matches a whole path.")
    return chosen


def _initial(variable: AbstractVariable, choice: _Choice, key: jax.Array) -> Any:
    """The variable's traced value."""
    initializer, captures = choice
    known: dict[str, Any] = {**captures, "path": variable.path}
    expected = f"{variable.dtype.name}{list(variable.shape)}"
    try:
        value = initializer(key, variable.shape, variable.dtype, **_parameters(variable, initializer, known))
    except (LazyModelError, jax.errors.JAXTypeError, jax.errors.JAXIndexError):
        raise  # errors of tracing
    except (TypeError, ValueError) as error:
        raise LazyModelError(
            f"{variable.path!r}: its initializer cannot make {expected}: {type(error).__name__}: {error} Give it "
            "another one, such as jax.nn.initializers.zeros or normal(stddev)"
        ) from error
    except Exception as error:
        error.add_note(f"while initializing {variable.path!r}, {expected}")
        raise
    if not isinstance(value, (jax.Array, np.ndarray)):
        raise LazyModelError(f"{variable.path!r}: its initializer returned no array but {type(value).__name__}")
    if (found := f"{np.dtype(value.dtype).name}{list(value.shape)}") != expected:
        raise LazyModelError(
            f"{variable.path!r}: expected {expected}, and its initializer returned {found}; it is called with key, "
            "shape and dtype, and has to return an array with these"
        )
    return value


def _parameters(variable: AbstractVariable, initializer: Initializer, known: Mapping[str, Any]) -> dict[str, Any]:
    """Further arguments of a callable after key, shape and dtype: `path`, and captures."""
    try:
        parameters = list(inspect.signature(initializer).parameters.values())[3:]
    except (TypeError, ValueError):  # built in C: its parameters are unknown
        return {}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]
    if missing := [name for name in needed if name not in known]:
        raise LazyModelError(
            f"{variable.path!r}: its initializer needs {missing[0]!r}, which its pattern does not capture; "
            f"write {{{missing[0]}}} where the path has it"
        )
    return {parameter.name: known[parameter.name] for parameter in parameters if parameter.name in known}
