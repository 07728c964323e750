"""Mappings: bytes read are bytes needed, values are NumPy's, findings are named, and tables are their own inverse."""

from __future__ import annotations

import contextlib
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import lazymodel as lm
from lazymodel import From, WeightMap
from tests.trees import named

LAYERS, HIDDEN, HEADS, DIM = 64, 64, 4, 16
MERGED = "(heads dim) model -> model heads dim"


def fused_tensors(rng: np.random.Generator, layers: int = LAYERS) -> dict[str, np.ndarray]:
    """A checkpoint with a tensor for each layer, query, key and value in one."""
    tensors = {"wte.weight": rng.standard_normal((128, HIDDEN)).astype("float32")}
    for layer in range(layers):
        tensors[f"h.{layer}.attn.qkv.weight"] = rng.standard_normal((3 * HEADS * DIM, HIDDEN)).astype("float32")
        tensors[f"h.{layer}.norm.weight"] = rng.standard_normal(HIDDEN).astype("float32")
    return tensors


def stacked_init(key: jax.Array, layers: int = LAYERS) -> dict[str, Any]:
    """A model with all layers in one array each, as a scan needs them."""
    kernel = jnp.zeros((layers, HIDDEN, HEADS, DIM))
    blocks = {"query": kernel, "key": kernel + 1, "value": kernel + 2, "scale": jnp.ones((layers, HIDDEN))}
    return {"embed": jnp.zeros((128, HIDDEN)), "blocks": blocks}


def stacked_values(tensors: dict[str, np.ndarray], layers: int = LAYERS) -> dict[str, np.ndarray]:
    fused = [tensors[f"h.{layer}.attn.qkv.weight"] for layer in range(layers)]
    values = {"embed": tensors["wte.weight"]}
    values["blocks/scale"] = np.stack([tensors[f"h.{layer}.norm.weight"] for layer in range(layers)]) * np.float32(0.5)
    for index, name in enumerate(("query", "key", "value")):
        parts = [np.split(weight, 3)[index].T.reshape(HIDDEN, HEADS, DIM) for weight in fused]
        values[f"blocks/{name}"] = np.stack(parts)
    return values


def table() -> WeightMap:
    fused = From("h.{layer}.attn.qkv.weight")
    return WeightMap(
        {
            "embed": "wte.weight",
            "blocks/scale": From("h.{layer}.norm.weight").scale(0.5).stack("layer"),
            "blocks/query": fused.part(0, of=3).rearrange(MERGED, heads=HEADS).stack("layer"),
            "blocks/key": fused.part(1, of=3).rearrange(MERGED, heads=HEADS).stack("layer"),
            "blocks/value": fused.part(2, of=3).rearrange(MERGED, heads=HEADS).stack("layer"),
        }
    )


def function(weights: Any) -> dict[str, Any]:
    """The same in NumPy."""
    fused = [np.split(weights[f"h.{layer}.attn.qkv.weight"], 3) for layer in range(LAYERS)]
    blocks = {
        name: np.stack([parts[index].T.reshape(HIDDEN, HEADS, DIM) for parts in fused])
        for index, name in enumerate(("query", "key", "value"))
    }
    blocks["scale"] = 0.5 * np.stack([weights[f"h.{layer}.norm.weight"] for layer in range(LAYERS)])
    return {"embed": weights["wte.weight"], "blocks": blocks}


RULES = {"embed": P("model"), "blocks/(query|key|value)": P(None, None, None, "model"), "blocks/scale": P()}


@pytest.mark.parametrize("mapping", [table(), function], ids=["table", "function"])
def test_stacking_64_layers_and_splitting_fused_tensors_reads_each_byte_once(
    tmp_path: Path, mesh8: jax.sharding.Mesh, mapping: Any
) -> None:
    tensors = fused_tensors(np.random.default_rng(0))
    save_file(tensors, tmp_path / "model.safetensors")
    abstract = lm.build_abstract(stacked_init, jax.random.key(0)).shard(mesh8, RULES)
    with lm.open_checkpoint(tmp_path / "model.safetensors") as ckpt:
        mapped = lm.map_checkpoint(ckpt, mapping, abstract)
        assert abstract.plan(mapped).read_nbytes == ckpt.nbytes
        assert mapped.unused == () and mapped.path == ckpt.path
        assert ckpt.bytes_read == 0
        model = abstract.materialize(mapped, initialize="nothing", max_host_memory="2MiB")
        assert ckpt.bytes_read == ckpt.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    for path, expected in stacked_values(tensors).items():
        array = named(model)[path]
        assert array.sharding == abstract[path].sharding
        np.testing.assert_array_equal(array, expected, path)


def test_a_shard_reads_only_its_own_bytes(tmp_path: Path) -> None:
    tensors = fused_tensors(np.random.default_rng(0), 4)
    save_file(tensors, tmp_path / "model.safetensors")
    abstract = lm.build_abstract(lambda key: stacked_init(key, 4), jax.random.key(0))
    ckpt = lm.open_checkpoint(tmp_path)
    mapped = lm.map_checkpoint(ckpt, table(), abstract)
    values = mapped["blocks/key"][1:3, :, 2].read()
    assert ckpt.bytes_read == values.nbytes == 2 * HIDDEN * DIM * 4
    np.testing.assert_array_equal(values, stacked_values(tensors, 4)["blocks/key"][1:3, :, 2])


def test_materialize_takes_the_models_own_structure() -> None:
    abstract = lm.build_abstract(lambda: {"a": [jnp.zeros(3), jnp.ones(2)]})
    structure: Any = {"a": [np.arange(3.0, dtype="float32"), None]}
    model = abstract.materialize(structure, initialize="missing")
    np.testing.assert_array_equal(np.concatenate(model["a"]), [0, 1, 2, 1, 1])
    with pytest.raises(lm.CheckpointError, match=r"no variable for: 'b/0'"):
        abstract.materialize({"a": structure["a"], "b": [np.zeros(1)]})


def test_a_function_that_asks_for_what_is_not_there() -> None:
    weights = {"layer.weight": np.zeros(2)}
    with pytest.raises(lm.CheckpointError, match=r"has no tensor 'layer.wieght'; closest: 'layer.weight'"):
        lm.map_checkpoint(weights, lambda w: {"a": w["layer.wieght"]})
    mapped = lm.map_checkpoint(weights, lambda w: {"a": w.get("bias")})
    assert dict(mapped) == {} and mapped.unused == ("layer.weight",)


def model_of(**shapes: tuple[int, ...]) -> lm.AbstractModel:
    return lm.build_abstract(
        lambda key: {name.replace("__", "/"): jnp.zeros(shape) for name, shape in shapes.items()}, jax.random.key(0)
    )


def test_everything_wrong_is_named_with_a_suggestion() -> None:
    abstract = model_of(
        dense__kernel=(4, 2), cube=(2, 3, 4), flat=(6,), fused=(4,), gone=(3,), twice__a=(1,), bias=(2,), heads=(2, 3)
    )
    ckpt = {
        "dense.weight": np.zeros((2, 4)),
        "cube": np.zeros((4, 2, 3)),
        "flat": np.zeros((2, 3)),
        "fused": np.zeros(12),
        "h.gone": np.zeros(3),
        "one": np.zeros(1),
        "rope.inv_freq": np.zeros(9),
        "lm_head": np.zeros(5),
        "heads": np.zeros((7, 3)),
    }
    mapping = WeightMap(
        {
            "dense/kernel": "dense.weight",
            "cube": "cube",
            "flat": "flat",
            "fused": "fused",
            "gone": "h.gome",
            "twice/{x}": "one",
            "{y}/a": "one",
            "dense/kernal": "dense.weight",
            "heads": From("heads").part(0, of=2),
        },
        ignore="rope.{x}",
    )
    report = mapping.check(ckpt, abstract)
    assert not report.ok
    assert {path: re.findall(r"\[.*?\]|add \.T|\.rearrange", text) for path, text in report.misshapen.items()} == {
        "dense/kernel": ["[4, 2]", "[2, 4]", "add .T"],
        "cube": ["[2, 3, 4]", "[4, 2, 3]", ".rearrange"],
        "flat": ["[6]", "[2, 3]", ".rearrange"],
        "fused": ["[4]", "[12]", ".rearrange"],
        "heads": ["[7, 3]"],
    }
    assert report.missing == {"gone": " takes 'h.gome'; closest: 'h.gone'"}
    assert report.ambiguous == {"twice/a": " matches 'twice/{x}' and '{y}/a'"}
    assert report.unmatched == {"dense/kernal": "; closest: 'dense/kernel'"}
    assert set(report.unused) == {"h.gone", "one", "lm_head"}, "what is ignored is not unused"
    assert report.unused["h.gone"].startswith("; closest: 'h.gome'")
    assert set(report.unmapped) == {"bias"}
    with pytest.raises(lm.CheckpointError) as error:
        lm.map_checkpoint(ckpt, mapping, abstract)
    assert "1 variables whose tensors the checkpoint lacks:\n  'gone' takes 'h.gome'" in str(error.value)
    with pytest.warns(lm.LazyModelWarning, match="entries that match no variable:\n  'dense/kernal'"):
        assert dict(lm.map_checkpoint(ckpt, mapping, abstract, strict=False)) == {}


def test_a_layer_that_is_missing_or_too_many() -> None:
    mapping = WeightMap({"w": From("h.{layer}.w").stack("layer")})
    layers = {f"h.{layer}.w": np.zeros(2) for layer in (0, 1, 3)}
    report = mapping.check(layers, model_of(w=(4, 2)))
    assert report.missing["w"].startswith(" takes 'h.2.w'")
    layers["h.2.w"] = np.zeros(2)
    assert mapping.check(layers, model_of(w=(4, 2))).ok
    assert "expects [3, 2], found [4, 2]" in mapping.check(layers, model_of(w=(3, 2))).misshapen["w"]
    # A number that no such checkpoint has is not counted up to; one in another spelling is another name.
    hostile = {"h.0.w": np.zeros(2), "h.999999999.w": np.zeros(2)}
    assert mapping.check(hostile, model_of(w=(4, 2))).missing["w"].startswith(" takes 'h.1.w'")
    spelled = {"h.0.w": np.zeros(2), "h.01.w": np.zeros(2)}
    assert mapping.check(spelled, model_of(w=(4, 2))).missing["w"].startswith(" takes 'h.1.w'")


def test_checking_reads_nothing_even_where_shapes_differ(tmp_path: Path) -> None:
    tensors = {f"h.{n}.w": np.zeros((2, 3 + n)) for n in range(2)} | {"a": np.zeros((2, 2)), "b": np.zeros((2, 3))}
    save_file(tensors, tmp_path / "model.safetensors")
    mapping = WeightMap(
        {
            "stacked": From("h.{n}.w").stack("n"),
            "joined": From("a", "b"),
            "sized": From("a", "b", axis=1, sizes=(3, 2)),
            "axis": From("a").part(0, of=2, axis=5),
        }
    )
    with lm.open_checkpoint(tmp_path) as ckpt:
        found = mapping.check(ckpt, model_of(stacked=(2, 2, 3), joined=(4, 2), sized=(2, 5), axis=(1,))).misshapen
        assert ckpt.bytes_read == 0
    assert "tensors of {n} differ in shape: [2, 3], and number 1 is [2, 4]" in found["stacked"]
    assert "tensors apart from the axis differ in shape: [2], and number 1 is [3]" in found["joined"]
    assert "the tensors have extents (2, 3) along axis 1, not (3, 2)" in found["sized"]
    assert "there is no axis 5 in 2 dimensions" in found["axis"]


def test_captures_paths_before_patterns_and_what_is_left_out() -> None:
    abstract = model_of(
        layers__0__up__kernel=(1,), layers__1__up__kernel=(2,), layers__1__norm=(3,), rngs__a__b=(4,), special=(5,)
    )
    ckpt = {"h.0.up": np.zeros(1), "h.1.up": np.zeros(2), "h.1.n": np.zeros(3), "s": np.zeros(5)}
    mapping = WeightMap(
        {"layers/{n}/up/kernel": "h.{n}.up", "layers/{n}/norm": "h.{n}.n", "rngs/{rest...}": None, "special": "s"}
    )
    mapped = lm.map_checkpoint(ckpt, mapping, abstract)
    assert set(mapped) == set(abstract) - {"rngs/a/b"}
    assert mapped["layers/1/up/kernel"].name == "h.1.up"
    arrays = {path: np.zeros(variable.shape) for path, variable in abstract.items()}
    assert {name: array.shape for name, array in mapping.write(arrays).items()} == {
        name: array.shape for name, array in ckpt.items()
    }


def test_nested_stacks_and_several_tensors_in_one() -> None:
    rng = np.random.default_rng(0)
    ckpt = {f"h.{layer}.e.{expert}.{half}": rng.random((3, 5)) for layer in range(2) for expert in range(4)
            for half in ("gate", "up")}  # fmt: skip
    entry = From("h.{l}.e.{x}.gate", "h.{l}.e.{x}.up", axis=0, sizes=(3, 3)).T.stack("x").stack("l", axis=1)
    mapping = WeightMap({"experts": entry})
    abstract = model_of(experts=(4, 2, 5, 6))
    value = lm.map_checkpoint(ckpt, mapping, abstract)["experts"].read()
    expected = [
        [np.concatenate([ckpt[f"h.{layer}.e.{x}.gate"], ckpt[f"h.{layer}.e.{x}.up"]]).T for layer in range(2)]
        for x in range(4)
    ]
    np.testing.assert_array_equal(value, expected)
    written = mapping.write({"experts": value})
    assert written.keys() == ckpt.keys()
    for name, array in ckpt.items():
        np.testing.assert_array_equal(written[name], array)


def test_functions_and_chosen_layers(tmp_path: Path) -> None:
    """Every second layer, of which a function makes two variables, or another one shifts the numbers."""
    rng = np.random.default_rng(0)
    tensors = {f"h.{n}.{name}": rng.random((6, 4), "float32") for n in range(6) for name in ("w", "norm")}
    save_file(tensors, tmp_path / "hf.safetensors")
    split, join = (lambda w: [w[:, ::2].T, w[:, 1::2]]), (lambda pair: np.stack([pair[0].T, pair[1]], -1))
    numbers = range(1, 6, 2)
    entries = {
        name: From("h.{n}.w").apply(split, lambda pair: join(pair).reshape(6, 4), output=index, of=2)
        .stack("n", axis=1, values=numbers)
        for index, name in enumerate("ab")
    }  # fmt: skip
    entries["norm"] = From("h.{n}.norm").apply(lambda w: w + 1, lambda w: w - 1).stack("n", values=numbers)
    table, abstract = WeightMap(entries, ignore="h.{n}.{name}"), model_of(a=(2, 3, 6), b=(6, 3, 2), norm=(3, 6, 4))
    with lm.open_checkpoint(tmp_path / "hf.safetensors") as checkpoint:
        report = table.check(checkpoint, abstract)
        assert report.ok and not report.one_way and checkpoint.bytes_read == 0
        mapped = lm.map_checkpoint(checkpoint, table, abstract)
        values = {path: tensor.read() for path, tensor in mapped.items()}
        mapped["norm"][0].read()
        assert checkpoint.bytes_read == 6 * 3 * 4 * (4 + 4) + 6 * 4 * 4  # columns, whole layers, one layer
    np.testing.assert_array_equal(values["a"], np.stack([tensors[f"h.{n}.w"][:, ::2].T for n in numbers], 1))
    np.testing.assert_array_equal(values["norm"], np.stack([tensors[f"h.{n}.norm"] + 1 for n in numbers]))
    written = table.write(values)
    assert written.keys() == {f"h.{n}.{name}" for n in numbers for name in ("w", "norm")}
    for n in numbers:
        np.testing.assert_array_equal(written[f"h.{n}.w"], tensors[f"h.{n}.w"])
    assert str(entries["a"]).endswith(".stack('n', axis=1, values=('1', '3', '5'))")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WeightMap({"a": "h.{n}.w"}), r"entry 'a': \{n\} of 'h.\{n\}.w' is neither in the path nor stacked"),
        (lambda: WeightMap({"{n}/a": From("h.{n}.w").stack("n")}), r"\{n\} is stacked, so it cannot be in the path"),
        (lambda: From("w").stack("n"), r"there is no \{n\} in w"),
        (lambda: From("w.{n}").stack("n", values=()), "takes at least one value"),
        (lambda: From("w").part(3, of=3), "part 3 of 3 does not exist"),
        (lambda: From("w").apply(np.split, output=2, of=2), "output 2 of 2 does not exist"),
        (lambda: From("w").rearrange("a b -> a"), "every axis is named once on either side"),
        (lambda: From("w").rearrange("(a b -> b a"), "expected axis names and parentheses"),
        (lambda: From("w").rearrange("a b -> b a", c=3), "has no axis 'c'"),
        (lambda: From("w").rearrange("a b"), "takes 'before -> after'"),
        (lambda: From("w").transpose(0, 2), r"transpose\(0, 2\) is no order of axes"),
        (lambda: From("w").scale(0), "a finite number that is not 0"),
        (lambda: From("w{1}"), "a capture is a name in braces"),
        (lambda: From(), "takes names of tensors"),
        (lambda: WeightMap({"a": 3}), "expected a From, a name or None, found 3"),  # type: ignore[dict-item]
    ],
)
def test_tables_that_cannot_be(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(lm.LazyModelError, match=message):
        make()


PARTS = {"a": From("x").part(0, of=2), "b": From("x").part(1, of=2)}
UNEVEN = {"a": From("x").part(0, of=(2, 3)), "b": From("x").part(1, of=(2, 3))}


@pytest.mark.parametrize(
    ("entries", "shapes", "message"),
    [
        ({"a": From("x", "y")}, {"a": 4}, "nothing says where 'x' ends; give From the sizes"),
        ({"a": From("x", "y", sizes=(2, 2))}, {"a": 4}, ""),
        ({"a": From("x").part(0, of=2)}, {"a": 1}, "'a' is a part of 'x' .axis 0., and no variable gives part 1"),
        (PARTS, {"a": 1, "b": 1}, ""),
        ({"a": From("x").apply(np.negative)}, {"a": 2}, "nothing reverses the function of .apply"),
        ({"a": From("x").apply(np.negative, np.linalg.inv)}, {"a": 2}, "inv raised LinAlgError: 1-dim"),
        ({"a": "x", "b": "x"}, {"a": 2, "b": 2}, "both 'a' and 'b' would be written to 'x'; end the entry"),
        ({"a": "x", "b": From("x").unsaved()}, {"a": 2, "b": 2}, ""),
        ({"a": "x"}, {"a": 2, "b": 9}, "variable 'b' has no entry in the table"),
    ],
)
def test_a_check_says_whether_a_table_that_loads_can_be_saved(
    entries: dict[str, Any], shapes: dict[str, int], message: str
) -> None:
    mapping, abstract = WeightMap(entries, ignore="y"), model_of(**{path: (size,) for path, size in shapes.items()})
    checkpoint = {"x": np.ones(2), "y": np.ones(2)}
    report = mapping.check(checkpoint, abstract)
    assert report.ok and lm.map_checkpoint(checkpoint, mapping, abstract)
    assert re.search(message, report.one_way) and report.one_way in str(report)
    assert bool(message) == bool(report.one_way)
    arrays = {path: np.ones(size) for path, size in shapes.items()}
    with pytest.raises(lm.LazyModelError, match=message) if message else contextlib.nullcontext():
        mapping.write(arrays)


@pytest.mark.parametrize(
    ("entries", "shapes", "message"),
    [
        ({"a": From("x", "y", sizes=(1, 2))}, {"a": (4,)}, r"sizes \(1, 2\) do not add up to the 4 of"),
        ({"{n}": From("x").part(0, of=2)}, {"a": (4,), "b": (4,)}, "both 'a' and 'b' would be written to part 0 of"),
        ({"{x}": "x", "{y}": "y"}, {"b": (4,)}, "variable 'b' matches '{x}' and '{y}'; leave one of them out"),
        (UNEVEN, {"a": (2,), "b": (2,)}, r"parts have extents \[2, 2\] along axis 0, expected \[2, 3\]"),
        ({"a": From("x").rearrange("(h d) -> h d", h=3)}, {"a": (2, 4)}, "the 2 of"),
        ({"a": From("x").transpose(1, 0)}, {"a": (2, 4, 2)}, "does not give 3 dimensions"),
    ],
)
def test_arrays_that_an_entry_cannot_have_made(entries: Any, shapes: Any, message: str) -> None:
    with pytest.raises(lm.LazyModelError, match=message):
        WeightMap(entries).write({path: np.zeros(shape) for path, shape in shapes.items()})


def test_a_tensor_that_two_variables_share_is_written_once() -> None:
    mapping = WeightMap({"embed": "wte", "head": From("wte").T.unsaved()})
    ckpt = {"wte": np.arange(6.0).reshape(2, 3)}
    mapped = lm.map_checkpoint(ckpt, mapping, model_of(embed=(2, 3), head=(3, 2)))
    np.testing.assert_array_equal(mapped["head"].read(), ckpt["wte"].T)
    written = mapping.write({path: tensor.read() for path, tensor in mapped.items()})
    assert list(written) == ["wte"]
    np.testing.assert_array_equal(written["wte"], ckpt["wte"])


# The inverse ----------------------------------------------------------------------------------------------------------


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[From], dict[str, np.ndarray]]:
    """Entries that together take everything of some tensors, through random steps."""
    ndim = draw(st.integers(1, 3))
    shape = tuple(draw(st.integers(1, 3)) * draw(st.sampled_from([1, 2])) for _ in range(ndim))
    layers = draw(st.sampled_from([0, 1, 3]))
    name = "h.{layer}.w" if layers else "w"
    sources = [From(name)]
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["transpose", "part", "split", "merge", "scale"]))
        example = _apply(sources[0], np.zeros(shape))
        axis = draw(st.integers(-example.ndim, example.ndim - 1)) if example.ndim else 0
        axes = [f"a{n}" for n in range(example.ndim)]
        if kind == "transpose":
            order = draw(st.permutations(range(example.ndim)))
            sources = [source.transpose(*order) for source in sources]
        elif kind == "scale":
            sources = [source.scale(0.25) for source in sources]
        elif kind == "part" and len(sources) == 1:
            extent = example.shape[axis]
            count = draw(st.sampled_from([n for n in range(1, extent + 1) if extent % n == 0]))
            of: Any = count if draw(st.booleans()) else [extent - 1, 1][: 2 if extent > 1 else 0] or [extent]
            sources = [sources[0].part(index, of, axis) for index in range(of if isinstance(of, int) else len(of))]
            if not isinstance(of, int):
                break  # their shapes differ, so no one pattern is for all of them
        elif kind == "split":
            size = draw(st.sampled_from([n for n in (1, 2, 3) if example.shape[axis] % n == 0]))
            after = [*axes]
            before = [*axes]
            before[axis], after[axis] = "(x y)", draw(st.sampled_from(["x y", "y x"]))
            sources = [s.rearrange(f"{' '.join(before)} -> {' '.join(after)}", x=size) for s in sources]
        elif kind == "merge" and example.ndim > 1:
            sizes = dict(zip(axes, example.shape, strict=True))
            order = draw(st.permutations(axes))
            pattern = f"{' '.join(axes)} -> ({order[0]} {order[1]}) {' '.join(order[2:])}"
            sources = [source.rearrange(pattern, **{order[0]: sizes[order[0]]}) for source in sources]
    if layers:
        sources = [source.stack("layer", axis=0) for source in sources]
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    names = [f"h.{layer}.w" for layer in range(layers)] or ["w"]
    return sources, {name: rng.standard_normal(shape).astype("float32") for name in names}


def test_a_mapping_goes_to_other_processes() -> None:
    fused = From("w").transpose(1, 0).rearrange("(a b) c -> b a c", a=2).scale(0.5)
    ckpt = {"w": np.arange(24, dtype="float32").reshape(6, 4)}
    abstract = model_of(v=(2, 2, 6))
    there = pickle.loads(pickle.dumps(WeightMap({"v": fused})))
    mapped = lm.map_checkpoint(ckpt, there, abstract)
    np.testing.assert_array_equal(mapped["v"].read(), ckpt["w"].T.reshape(2, 2, 6).transpose(1, 0, 2) / 2)
    np.testing.assert_array_equal(np.asarray(there.write(dict(mapped))["w"]), ckpt["w"])


@settings(max_examples=150, deadline=None)
@given(chains())
def test_writing_undoes_reading(chain: tuple[list[From], dict[str, np.ndarray]]) -> None:
    sources, ckpt = chain
    mapping = WeightMap({f"v{index}": source for index, source in enumerate(sources)})
    first = next(iter(ckpt.values()))
    shapes = {}
    for index, source in enumerate(sources):
        layers = [_apply(source, array) for array in ckpt.values()]
        shapes[f"v{index}"] = (np.stack(layers) if "{layer}" in source.names[0] else layers[0]).shape
    abstract = model_of(**shapes)
    mapped = lm.map_checkpoint(ckpt, mapping, abstract)
    written = mapping.write(dict(mapped))  # lazily, as `save` does
    eager = mapping.write({path: tensor.read() for path, tensor in mapped.items()})
    assert written.keys() == eager.keys() == ckpt.keys()
    for name, array in ckpt.items():
        np.testing.assert_array_equal(eager[name], array)
        np.testing.assert_array_equal(np.asarray(written[name]), array)
    assert sum(math.prod(shape) for shape in shapes.values()) == first.size * len(ckpt)


def _apply(source: From, array: np.ndarray) -> np.ndarray:
    value = array
    for step in source._steps:
        value = step.apply(value) if hasattr(step, "apply") else value
    return value


def test_sizes_come_from_the_variables_shape() -> None:
    rng = np.random.default_rng(0)
    ckpt = {f"h.{n}.{name}": rng.random((12, 6 if name == "q" else 12)) for n in range(3) for name in ("q", "o")}
    mapping = WeightMap(
        {
            "{n}/q": From("h.{n}.q").rearrange("(heads dim) model -> heads model dim"),
            "o": From("h.{n}.o").T.rearrange("(heads dim) model -> heads dim model").scale(0.5).stack("n", axis=1),
            "part": From("h.0.o").rearrange("(two heads dim) model -> two heads (dim model)", dim=3).part(1, of=2),
            "merged": From("h.0.q").rearrange("(heads dim) model -> model (dim heads)"),
        }
    )
    shapes = {f"{n}__q": (4, 6, 3) for n in range(3)} | {"o": (4, 3, 3, 12), "part": (1, 2, 36), "merged": (6, 12)}
    report = mapping.check(ckpt, model_of(**shapes))
    assert report.misshapen.keys() == {"merged"} and "needs the sizes of all but one of heads, dim" in str(report)
    mapped = mapping.apply(ckpt, model_of(**shapes))[0]
    np.testing.assert_array_equal(mapped["1/q"], ckpt["h.1.q"].reshape(4, 3, 6).transpose(0, 2, 1))
    expected = np.stack([ckpt[f"h.{n}.o"].T.reshape(4, 3, 12) / 2 for n in range(3)], 1)
    np.testing.assert_array_equal(mapped["o"], expected)
    np.testing.assert_array_equal(mapped["part"], ckpt["h.0.o"].reshape(2, 2, 36)[1:])
    # What the variable asks for and the tensor has not is told in the tensor's terms.
    wrong = mapping.check(ckpt, model_of(o=(4, 2, 3, 12))).misshapen["o"]
    assert "expects [4, 2, 3, 12], found [4, 3, 3, 12]" in wrong


def test_what_is_alike_is_one_line_of_a_report() -> None:
    ckpt = {f"h.{n}.{name}": np.zeros(2) for n in range(20) for name in ("w", "rope", *"abcdefghijk")}
    mapping = WeightMap({"layers/{n}/w": "h.{n}.v", "rngs/{x}": None}, ignore="h.{n}.rope")
    abstract = model_of(**{f"layers__{n}__w": (2,) for n in range(20)}, rngs__0=(1,), rngs__1=(1,))
    text = str(mapping.check(ckpt, abstract))
    assert (
        "20 variables whose tensors the checkpoint lacks:\n  'layers/{0..19}/w' (20), the first takes 'h.0.v'" in text
    )
    assert "240 tensors that no entry takes:\n  'h.{0..19}.w' (20)\n" in text
    assert "… and 4 more" in text
    assert text.endswith(
        "2 variables that the table leaves out, which are initialized:\n  'rngs/{0..1}' (2)\n"
        "20 tensors that the table ignores:\n  'h.{0..19}.rope' (20)"
    )
