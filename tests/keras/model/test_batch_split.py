"""Within `lk.distribution`, the batch stays split in every layer, where parameters are split over the same axis.

Sizes differ from each other and from the batch, so a collective that has the batch shows in the shapes of a program.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import keras_hub
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
import lazymodel_keras as lk
from tests.large import mostly_large

from ..models import seeded

BATCH, LENGTH, WORDS, WIDTH = 88, 10, 128, 32
ROWS, COLUMNS = "batch", "model"
_SPECS = {
    ".*embeddings": P(COLUMNS, ROWS),
    ".*(query|key|value)/kernel": P(COLUMNS, ROWS, None),
    ".*attention_output/kernel": P(COLUMNS, None, ROWS),
    ".*(gating|gating_2|up)/kernel": P(ROWS, COLUMNS),
    ".*(linear|down)/kernel": P(COLUMNS, ROWS),
}


def rules(variable: lm.AbstractVariable) -> P:
    """FSDP by features, as KerasHub's own layout maps have it."""
    return next((spec for path, spec in _SPECS.items() if re.fullmatch(path, variable.path)), P())


LOGITS: list[Any] = []  # the shardings of logits, as they are compiled


def loss(labels: Any, logits: Any) -> Any:
    jax.debug.inspect_array_sharding(jax.lax.stop_gradient(logits), callback=LOGITS.append)
    return keras.ops.sparse_categorical_crossentropy(labels, logits, from_logits=True)


class Positions(keras.layers.Layer):
    """The embeddings of tokens and of their positions, whose table is not called with a batch."""

    def __init__(self) -> None:
        super().__init__(name="both")
        self.tokens = keras.layers.Embedding(WORDS, WIDTH, name="tokens")
        self.places = keras.layers.Embedding(LENGTH, WIDTH, name="places")

    def build(self, input_shape: Any) -> None:
        self.tokens.build(input_shape)
        self.places.build((LENGTH,))

    def compute_output_shape(self, shape: Any) -> Any:
        return (*shape, WIDTH)

    def call(self, tokens: Any) -> Any:
        return self.tokens(tokens) + self.places(keras.ops.arange(LENGTH))


def _layers() -> list[Any]:
    dense = keras.layers.Dense
    inner = [dense(48, "relu", name="up"), dense(WIDTH, name="down"), dense(56, "relu", name="linear")]
    return [Positions(), *inner, dense(WORDS, name="head_up")]


def functional() -> keras.Model:
    tokens = keras.Input((LENGTH,), dtype="int32")
    value = tokens
    for layer in _layers():
        value = layer(value)
    return keras.Model(tokens, value)


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.parts = _layers()

    def build(self, shape: Any) -> None:
        for part in self.parts:
            part.build(shape)
            shape = part.compute_output_shape(shape)
        self.built = True

    def call(self, value: Any) -> Any:
        for part in self.parts:
            value = part(value)
        return value


def subclassed() -> keras.Model:
    model = Subclassed()
    model.build((None, LENGTH))
    return model


def gemma() -> keras.Model:
    sizes: Any = {"num_query_heads": 8, "num_key_value_heads": 8, "hidden_dim": WIDTH, "intermediate_dim": 48}
    backbone = keras_hub.models.GemmaBackbone(WORDS, num_layers=1, head_dim=16, **sizes)
    return keras_hub.models.GemmaCausalLM(backbone=backbone, preprocessor=None)


def compiled(build: Callable[[], keras.Model], policy: str | None = None) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        if policy is not None:
            keras.config.set_dtype_policy(policy)
        try:
            model = build()
        finally:
            keras.config.set_dtype_policy("float32")
        model.compile(keras.optimizers.SGD(0.1), loss)
        return model

    return make


def data(model: Any) -> tuple[Any, Any]:
    tokens = np.random.default_rng(0).integers(1, WORDS, (BATCH, LENGTH)).astype("int32")
    is_task = isinstance(model, keras_hub.models.Task)
    return {"token_ids": tokens, "padding_mask": np.ones_like(tokens)} if is_task else tokens, tokens


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The texts of programs that are compiled ahead."""
    texts: list[str] = []
    compile_it = jax.stages.Lowered.compile

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        done = compile_it(self, *args, **kwargs)
        texts.append(done.as_text() or "")
        return done

    monkeypatch.setattr(jax.stages.Lowered, "compile", noting)
    LOGITS.clear()
    yield texts
    LOGITS.clear()


def gathered(text: str) -> list[str]:
    """Collectives of numbers that have the whole batch, also flattened with the tokens; token ids may be gathered."""
    found = re.findall(r"= ([^=]*?) (all-gather|all-to-all|all-reduce|collective-permute)(?:-start)?\(", text)
    shapes = [(name, shape) for results, name in found for shape in re.findall(r"\w*f\d+\[[\d,]+\]", results)]
    return [
        f"{name} {shape}" for name, shape in shapes if {str(BATCH), str(BATCH * LENGTH)} & {*re.split(r"\D+", shape)}
    ]


CASES: dict[str, tuple[Callable[[], keras.Model], str | None, Callable[[Any], Any]]] = {
    "functional": (functional, None, lambda abstract: abstract),
    "subclassed": (subclassed, None, lambda abstract: abstract),
    "kerashub": (gemma, None, lambda abstract: abstract),
    "mixed precision": (functional, "mixed_bfloat16", lambda abstract: abstract),
    "lora": (functional, None, lambda abstract: abstract.lora(4, ".*(up|down|linear)/kernel")),
    "int8": (functional, None, lambda abstract: abstract.quantize("int8").lora(4, ".*(up|down|linear)/kernel")),
}


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method:UserWarning")
@pytest.mark.parametrize(
    ("case", "columns"),
    mostly_large(
        [*itertools.product(CASES, (1, 2))],
        [("subclassed", 1), ("kerashub", 2), ("int8", 2)],  # which has pairs, too
    ),
)
def test_no_collective_has_the_whole_batch(case: str, columns: int, programs: list[str]) -> None:
    build, policy, change = CASES[case]
    mesh = Mesh(np.array(jax.devices()).reshape(-1, columns), (ROWS, COLUMNS))
    abstract = change(seeded(lambda: lm.build_abstract(compiled(build, policy))))
    inputs, labels = data(abstract.framework.unfilled().result)
    with lk.distribution(mesh).scope():
        model = abstract.shard(mesh, rules).materialize(compile=lm.Compile("train", inputs, labels))
        (step,) = [text for text in programs if "all-reduce" in text]
        assert gathered(step) == []
        found = model.fit(inputs, labels, batch_size=BATCH, shuffle=False, verbose=0, epochs=2).history["loss"]
    assert all(isinstance(each, NamedSharding) and each.spec[0] == ROWS for each in LOGITS)
    if columns > 1 and case == "kerashub":  # the tied table is called twice; logits are split by words as well
        assert {tuple(each.spec) for each in LOGITS} == {(ROWS, None, COLUMNS)}
    alone = abstract.materialize()
    expected = alone.fit(inputs, labels, batch_size=BATCH, shuffle=False, verbose=0, epochs=2).history["loss"]
    np.testing.assert_allclose(found, expected, rtol=2e-2 if policy else 1e-5)


def test_other_programs_are_left_alone(mesh42: Mesh) -> None:
    """Also after training: a batch that does not divide, and layers that are called by themselves."""
    model: Any = lm.build_abstract(compiled(functional)).shard(mesh42, rules).materialize()
    inputs, labels = data(model)

    def call(tokens: Any) -> Any:
        groups = model.trainable_variables, model.non_trainable_variables
        return model.stateless_call(*([v.value for v in group] for group in groups), tokens)[0]

    with lk.distribution(mesh42).scope():
        model.fit(inputs, labels, batch_size=BATCH, verbose=0)
        assert model.predict(inputs, batch_size=BATCH, verbose=0).shape == (BATCH, LENGTH, WORDS)
        few = jax.jit(call)(inputs[:3])
    np.testing.assert_allclose(few, model(inputs[:3]), rtol=1e-5, atol=1e-6)
