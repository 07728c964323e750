"""Tables of MaxText's form, without MaxText; `tests/others` loads its own models by its own tables."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from lazymodel_flax import maxtext

LAYERS, VOCAB, SIZE, HEADS, DIM, EXPERTS, HIDDEN = 4, 20, 8, 2, 6, 3, 10
LAYER = "params-decoder-layers-"


def mapping(hf_config: Any, config: Any, scan_layers: bool) -> dict[Any, Any]:
    """The tensors of each parameter: several for one, one for several, stacked over layers, and over experts."""
    numbers = range(1, 2 * LAYERS, 2)  # every second layer is of another kind
    return {
        "params-embed-embedding": "embed.weight",
        "params-other-kernel": "other.weight",  # of another model
        "params-norm-scale": "norm.weight",
        LAYER + "query-kernel": [f"layers.{n}.q.weight" for n in numbers],
        LAYER + "fused-kernel": [(f"layers.{n}.a.weight", f"layers.{n}.b.weight") for n in numbers],
        (LAYER + "gate", LAYER + "up"): [f"layers.{n}.gate_up.weight" for n in numbers],
        LAYER + "left": [f"layers.{n}.both.weight" for n in numbers],
        LAYER + "right": [f"layers.{n}.both.weight" for n in numbers],
        LAYER + "experts": [[f"layers.{n}.experts.{e}.weight" for n in numbers] for e in range(EXPERTS)],
        LAYER + "constant": None,
    }


def hooks(hf_config: Any, config: Any, scan_layers: bool, saving_to_hf: bool) -> dict[Any, Any]:
    """The functions of whole tensors."""

    def pad(x: Any, shape: Any) -> Any:
        if saving_to_hf:
            return x[: shape[0]]
        padded = np.zeros(shape, dtype=x.dtype)
        padded[: x.shape[0], : x.shape[1]] = x
        return (padded * np.float32(3)).astype(x.dtype)

    def turn(x: Any, shape: Any) -> Any:
        return x.reshape(np.flip(np.array(shape))).T if saving_to_hf else x.T.reshape(shape)

    def interleave(x: Any, shape: Any) -> Any:
        if saving_to_hf:
            return jnp.concatenate((x[..., ::2], x[..., 1::2]), axis=x.ndim - 1)
        halves = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return jax.numpy.stack(halves, axis=-1).reshape(x.shape)

    def fuse(x: Any, shape: Any) -> Any:
        return (x.T[:3], x.T[3:]) if saving_to_hf else np.concatenate(x, axis=0).T

    def columns(x: Any, shape: Any) -> Any:
        if saving_to_hf:
            return jnp.empty(shape, dtype=x[0].dtype).at[..., ::2].set(x[0]).at[..., 1::2].set(x[1])
        return np.stack([x[..., ::2], x[..., 1::2]], axis=-1)

    def shift(x: Any, shape: Any) -> Any:
        return (x - 1.0).reshape(shape) if saving_to_hf else (x + 1.0).reshape(shape)

    half = {LAYER + "left": lambda x, shape: x[:4].T, LAYER + "right": lambda x, shape: x[4:].T}
    whole = {(LAYER + "left", LAYER + "right"): lambda x, shape: np.concatenate([jnp.asarray(x[0]).T, x[1].T])}
    chain = [interleave, turn] if saving_to_hf else [turn, interleave]
    return {
        "params-embed-embedding": pad,
        "params-norm-scale": shift,
        LAYER + "query-kernel": chain,
        LAYER + "fused-kernel": fuse,
        (LAYER + "gate", LAYER + "up"): columns,
        LAYER + "experts": turn,
        **(whole if saving_to_hf else half),
    }


SHAPES: dict[str, tuple[int, ...]] = {
    "embed/embedding": (VOCAB + 4, SIZE),
    "norm/scale": (SIZE,),
    "decoder/layers/query/kernel": (SIZE, LAYERS, HEADS, DIM),
    "decoder/layers/fused/kernel": (SIZE, LAYERS, 5),
    "decoder/layers/gate": (SIZE, LAYERS, HIDDEN),
    "decoder/layers/up": (SIZE, LAYERS, HIDDEN),
    "decoder/layers/left": (SIZE, LAYERS, 4),
    "decoder/layers/right": (SIZE, LAYERS, 4),
    "decoder/layers/experts": (EXPERTS, LAYERS, SIZE, HIDDEN),
    "decoder/layers/constant": (LAYERS,),
    "decoder/layers/rngs/count": (LAYERS,),
}


def tensors(dtype: Any = "float32") -> dict[str, np.ndarray]:
    shapes = {"embed.weight": (VOCAB, SIZE), "norm.weight": (SIZE,), "unused.weight": (3,)}
    layer = {"q": (HEADS * DIM, SIZE), "a": (3, SIZE), "b": (2, SIZE), "gate_up": (SIZE, 2 * HIDDEN)}
    layer |= {"both": (8, SIZE), **{f"experts.{e}": (HIDDEN, SIZE) for e in range(EXPERTS)}}
    for number in range(1, 2 * LAYERS, 2):
        shapes |= {f"layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def expected(named: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The values by the hooks, on whole arrays."""
    made, found = hooks({}, CONFIG, True, False), dict[str, np.ndarray]()
    for keys, source in mapping({}, CONFIG, True).items():
        names = [key.partition("-")[2].replace("-", "/") for key in (keys if isinstance(keys, tuple) else (keys,))]
        if names[0] not in SHAPES or source is None:
            continue
        axes = {"decoder/layers/experts": (0, 1)}.get(names[0], (1,) if isinstance(source, list) else ())
        shape = tuple(extent for axis, extent in enumerate(SHAPES[names[0]]) if axis not in axes)

        def one(name: Any, keys: Any = keys, shape: Any = shape) -> Any:
            if isinstance(name, list):
                return np.stack([one(part) for part in name])
            value = named[name] if isinstance(name, str) else tuple(map(named.__getitem__, name))
            for function in made[keys] if isinstance(made[keys], list) else [made[keys]]:
                value = function(value, shape)
            return np.asarray(value).astype(named["norm.weight"].dtype)  # NumPy's of bfloat16 and 1.0 is float32

        value = np.moveaxis(one(source), range(len(axes)), axes)
        found |= {name: value[..., n] for n, name in enumerate(names)} if len(names) > 1 else {names[0]: value}
    return found


CONFIG: Any = types.SimpleNamespace(model_name="tiny-Instruct", scan_layers=True, param_scan_axis=1)


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules with the names of MaxText's."""
    root, of_maxtext = "maxtext.checkpoint_conversion.utils", types.ModuleType
    parts = ["maxtext", "maxtext.checkpoint_conversion", root, "maxtext.utils"]
    found: dict[str, dict[str, Any]] = {part: {} for part in parts}
    found["maxtext.utils.globals"] = {"HF_IDS": {}}
    found[f"{root}.param_mapping"] = {"PARAM_MAPPING": {"tiny": mapping}, "HOOK_FNS": {"tiny": hooks}}
    found[f"{root}.hf_model_configs"] = {"HF_MODEL_CONFIGS": {"tiny": types.SimpleNamespace(to_dict=dict)}}
    found[f"{root}.tensor_handling"] = {"stacked_axes": lambda key, config, depth: tuple(range(depth))}
    for name, content in found.items():
        module = of_maxtext(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)


def abstract(dtype: Any = "float32") -> Any:
    tree = {path: jax.ShapeDtypeStruct(shape, dtype) for path, shape in SHAPES.items()}
    return lm.build_abstract(lambda: {path: jnp.zeros(leaf.shape, leaf.dtype) for path, leaf in tree.items()})


@pytest.mark.parametrize("dtype", ["float32", ml_dtypes.bfloat16])
def test_a_table_goes_both_ways(dtype: Any, tmp_path: Path, mesh8: Mesh) -> None:
    named = tensors(dtype)
    lm.save(named, tmp_path / "hf.safetensors")
    model = abstract(dtype).shard(mesh8, lm.auto())
    with lm.open_checkpoint(tmp_path / "hf.safetensors") as checkpoint:
        table = maxtext.weight_map(CONFIG, checkpoint, model)
        report = table.check(checkpoint, model)
        assert report.ok and not report.one_way and checkpoint.bytes_read == 0
        assert set(report.ignored) == {"unused.weight"}
        loaded = model.materialize(lm.map_checkpoint(checkpoint, table, model), initialize="missing")
    values = expected(named)
    assert values.keys() | set(report.left_out) == SHAPES.keys()
    for path, value in values.items():
        np.testing.assert_array_equal(np.asarray(loaded[path]), value, path)
        assert loaded[path].dtype == value.dtype
    lm.save(loaded, tmp_path / "again", mapping=table)
    with lm.open_checkpoint(tmp_path / "again") as again:
        assert again.keys() == named.keys() - {"unused.weight"}
        for name in again:
            exact = {"embed.weight": (named[name] * np.float32(3)).astype(dtype)}  # as the hook has it
            exact["norm.weight"] = ((named[name] + 1.0).astype(dtype) - 1.0).astype(dtype)
            np.testing.assert_array_equal(again[name].read(), exact.get(name, named[name]), name)


def test_its_loader_of_safetensors(tmp_path: Path) -> None:
    named = tensors(ml_dtypes.bfloat16)
    lm.save(named, tmp_path, format="safetensors", max_shard_size=2048)
    mesh = Mesh(np.array(jax.devices()).reshape(8), ("fsdp",))
    values, tree = expected(named), dict[str, Any]()
    for path, value in values.items():
        spec = P("fsdp") if value.shape[0] == SIZE else P()
        leaf = jax.ShapeDtypeStruct(value.shape, "float32", sharding=NamedSharding(mesh, spec))
        *parents, name = path.split("/")
        inner = tree
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[name] = leaf
    for params in (nnx.State(tree), {"params": tree}):
        _, loaded = maxtext.load_safetensors_dynamic_state(str(tmp_path), params, CONFIG)
        assert jax.tree.structure(loaded) == jax.tree.structure({"params": tree})
        for path, leaf in jax.tree_util.tree_leaves_with_path(loaded["params"]):
            value = values["/".join(key.key for key in path)]
            np.testing.assert_array_equal(np.asarray(leaf), value.astype("float32"))
            spec = P("fsdp") if value.shape[0] == SIZE else P()
            assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), leaf.ndim)


def test_merged_adapters_load(tmp_path: Path) -> None:
    rng, name = np.random.default_rng(0), "base_model.model.layers.3.q"
    pairs = {f"{name}.lora_A.weight": rng.random((2, SIZE)), f"{name}.lora_B.weight": rng.random((HEADS * DIM, 2))}
    lm.save({key: value.astype("float32") for key, value in pairs.items()}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 2}')
    merged = lm.merge(tensors(), lm.open_adapter(tmp_path))
    table = maxtext.weight_map(CONFIG, merged, abstract())
    mapped = lm.map_checkpoint(merged, table, abstract())
    value = expected({name: np.asarray(tensor) for name, tensor in merged.items()})["decoder/layers/query/kernel"]
    np.testing.assert_array_equal(np.asarray(mapped["decoder/layers/query/kernel"]), value)


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    named, other = tensors(), types.SimpleNamespace(model_name="other")
    with pytest.raises(lm.LazyModelError, match=r"MaxText has no table for 'other'; it has tiny"):
        maxtext.weight_map(other, named, abstract())
    del named["layers.3.q.weight"]
    with pytest.raises(lm.CheckpointError, match=r"expected 'layers.3.q.weight' for 'decoder/layers/query/kernel'"):
        maxtext.weight_map(CONFIG, named, abstract())
    named["layers.3.q.weight"] = np.zeros((3, 5), "float32")
    table = maxtext.weight_map(CONFIG, named, abstract())
    with pytest.raises(lm.CheckpointError, match=r"raised ValueError: cannot reshape array of size 15 into shape"):
        lm.map_checkpoint(named, table, abstract())
    monkeypatch.setitem(sys.modules, "maxtext", None)
    monkeypatch.delitem(sys.modules, "maxtext.checkpoint_conversion.utils.param_mapping")
    with pytest.raises(lm.LazyModelError, match="not installed: pip install maxtext"):
        maxtext.weight_map(CONFIG, named, abstract())
