"""`WeightMap.recorded`: the table of KerasHub's converters, in both directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis
import jax.numpy as jnp
import keras
import keras_hub
import numpy as np
import pytest
from hypothesis import strategies as st
from safetensors.numpy import save_file

import lazymodel as lm
import lazymodel_keras as lk
from lazymodel._tensors.lazy import lazy
from lazymodel.extras.tables.recorded import recorded
from tests.keras.models import save_hugging_face

QUERY = 'lm.From("model.layers.{layer}.self_attn.q_proj.weight").rearrange("(axis0 axis1) axis2 -> axis2 axis0 axis1")'


def check(abstract: Any, checkpoint: Any) -> lm.WeightMap:
    """The table gives all variables the values that the loader gives them, and gives the checkpoint back."""
    table = lm.WeightMap.recorded(abstract)
    found = lm.map_checkpoint(checkpoint, table, abstract)
    values = {path: value for path, value in abstract.sources.items() if getattr(value, "file", None)}
    assert found.keys() == values.keys()
    for path, value in values.items():
        np.testing.assert_array_equal(np.asarray(found[path]), np.asarray(value), err_msg=path)
    return table


@pytest.mark.parametrize(
    ("name", "cls"), [("llama3", "Llama3Backbone"), ("bert", "BertBackbone"), ("vit", "ViTBackbone")]
)
def test_the_table_of_a_converter(name: str, cls: str, tmp_path: Path) -> None:
    folder = save_hugging_face(tmp_path / name, name)
    checkpoint = lm.open_checkpoint(folder)
    abstract = lk.abstract_from_preset(getattr(keras_hub.models, cls), str(folder))
    reads = checkpoint.bytes_read
    table = lm.WeightMap.recorded(abstract)
    assert checkpoint.bytes_read == reads
    assert eval(str(check(abstract, checkpoint)), {"lm": lm}).check(checkpoint, abstract).one_way == ""
    if name == "llama3":
        assert f'/query/kernel": {QUERY}' in str(table)
        assert str(table).count("layers.{layer}.") == 9 and "layers.1." not in str(table)
        lm.save(abstract.materialize(), tmp_path / "again.safetensors", mapping=table)
        again = lm.open_checkpoint(tmp_path / "again.safetensors")
        assert set(again) == set(checkpoint)
        assert all(np.array_equal(np.asarray(again[name]), np.asarray(checkpoint[name])) for name in again)


def assigned(*values: Any) -> Any:
    """The abstract model of a layer whose variables get these values."""

    def build() -> keras.Model:
        layer = keras.layers.Layer(name="layer")
        for index, value in enumerate(values):
            layer.add_weight(name=f"v{index}", shape=value.shape).assign(value)
        model = keras.Sequential([layer], name="model")
        return model

    return lm.build_abstract(build)


@st.composite
def rearranged(draw: st.DrawFn) -> tuple[tuple[int, ...], Any]:
    """A shape, and a function that cuts, transposes, splits and merges axes of a tensor of this shape.

    No entry makes (2, 3) of (3, 2) by a reshape: all sizes are powers of two.
    """
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=3)))
    cuts = draw(st.sampled_from([(axis, n) for axis, size in enumerate(shape) for n in (1, 2, 4) if size % n == 0]))
    seed = draw(st.integers(0, 1000))

    def change(tensor: Any) -> list[Any]:
        parts: list[Any] = []
        for part in np.split(tensor, cuts[1], cuts[0]):
            rng = np.random.default_rng(seed)  # alike for all
            for _ in range(rng.integers(4)):
                part = np.transpose(part, rng.permutation(part.ndim))
                axis = int(rng.integers(part.ndim))
                size = part.shape[axis]
                inner = int(rng.choice([n for n in (1, 2, 4) if size % n == 0]))
                if rng.integers(2) or axis + 1 == part.ndim:
                    part = np.reshape(part, (*part.shape[:axis], size // inner, inner, *part.shape[axis + 1 :]))
                else:
                    part = np.reshape(part, (*part.shape[:axis], size * part.shape[axis + 1], *part.shape[axis + 2 :]))
            parts.append(part)
        return parts

    return shape, change


@hypothesis.given(rearranged())
@hypothesis.settings(max_examples=25)
def test_any_rearrangement_is_recorded(tmp_path_factory: pytest.TempPathFactory, case: tuple[Any, Any]) -> None:
    shape, change = case
    file = tmp_path_factory.mktemp("t") / "t.safetensors"
    save_file({"t": np.arange(np.prod(shape), dtype="float32").reshape(shape)}, file)
    checkpoint = lm.open_checkpoint(file)
    abstract = assigned(*change(checkpoint["t"]))
    report = check(abstract, checkpoint).check(checkpoint, abstract)
    assert report.ok and report.one_way == ""


def test_what_no_entry_makes(tmp_path: Path) -> None:
    save_file(
        {"t": np.arange(24, dtype="float32").reshape(4, 6), "u": np.ones((4, 6), "float32")}, tmp_path / "t.safetensors"
    )
    t, u = lm.open_checkpoint(tmp_path / "t.safetensors").values()
    values = [t[:3], t[::-1], t + 1.0, np.concatenate([t, u]), t[:, ::2], np.ones(3, "float32"), u, u.T]
    table = lm.WeightMap.recorded(assigned(*values))
    assert "\n".join(["# No entry makes:", *(f"#   layer/v{index}" for index in range(5))]) in str(table)
    assert '"layer/v5": None' in str(table)
    assert '"layer/v6": "u",' in str(table)
    assert '"layer/v7": lm.From("u").T.unsaved(),' in str(table)
    with pytest.raises(lm.LazyModelError, match="model loads no variables by itself"):
        lm.WeightMap.recorded(assigned(np.ones(3)))
    with pytest.raises(lm.LazyModelError, match="a table is for an abstract model"):
        lm.WeightMap.recorded({})


def test_tensors_of_one_name_in_two_files(tmp_path: Path) -> None:
    for name in "ab":
        tensors = {"t": np.full((2, 3), ord(name), "float32"), name: np.ones(2, "float32")}
        save_file(tensors, tmp_path / f"{name}.safetensors")
    files = [lm.open_checkpoint(tmp_path / f"{name}.safetensors") for name in "ab"]
    table = lm.WeightMap.recorded(assigned(*(file["t"] for file in files), files[0]["a"]))
    assert str(table).endswith("# No entry makes:\n#   layer/v0\n#   layer/v1")
    assert '"layer/v2": "a"' in str(table)


def test_layers_that_are_alike_are_one_entry() -> None:
    """In layers and experts; what differs in more than the number, or matches another variable, is not folded."""
    rng = np.random.default_rng(0)
    stored = {f"h.{n}.e.{e}.w": rng.random((2, 3), "float32") for n in range(2) for e in range(3)}
    stored |= {f"h.{n}.{name}": rng.random((2, 2), "float32") for n in range(3) for name in "abc"}
    tensors = {name: lazy(array, name) for name, array in stored.items()}
    values: dict[str, Any] = {
        **{f"layers_{n}/experts/{e}/w": tensors[f"h.{n}.e.{e}.w"].T for n in range(2) for e in range(3)},
        **{f"layers_{n}/a": tensors[f"h.{2 - n}.a"] for n in range(3)},  # other numbers
        **{f"layers_{n}/b": tensors[f"h.{n}.b"].T if n else tensors[f"h.{n}.b"] for n in range(3)},  # another step
        **{f"layers_{n}/c": tensors[f"h.{n}.c"] for n in range(3)},
    }
    entries, left = recorded(values | {f"layers_{n}/seed": None for n in range(3)}, tensors, [*values, "layers_x/c"])
    assert not left
    assert [path for path in entries if "{" in path] == ["layers_{layer}/experts/{expert}/w"]
    model = lm.build_abstract(lambda: {path: jnp.zeros(value.shape) for path, value in values.items()})
    weights = lm.WeightMap({path: entry for path, entry in entries.items() if entry is not None})
    found = lm.map_checkpoint(stored, weights, model)
    for path in model:
        np.testing.assert_array_equal(np.asarray(found[path]), np.asarray(values[path]), err_msg=path)
    folded, _ = recorded(values, tensors, values)
    assert [path for path in folded if "{" in path] == ["layers_{layer}/experts/{expert}/w", "layers_{layer}/c"]
