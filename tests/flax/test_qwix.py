"""NNX modules quantized, and given LoRA pairs, while they are loaded: equal to Qwix on the loaded model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from lazymodel_flax import adapter
from tests.compile_events import compile_events
from tests.core.trace._eager import same_bytes
from tests.large import mostly_large
from tests.processes import free_address, printed, run_workers
from tests.small import make_small

optax, qwix = pytest.importorskip("optax"), pytest.importorskip("qwix")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Qwix itself calls what Flax has deprecated
TOKENS = jnp.ones((1, 4), "int32")
OPERATIONS = ("dot_general", "einsum")
DIM, HIDDEN, HEADS = 16, 32, 8
OF_KERNELS = {
    ".*/q_proj/kernel": P(None, "model"),
    ".*/o_proj/kernel": P("model"),
    "(.*/up|head)/kernel": P(None, "model"),
    ".*/down/kernel": P("model"),
}
RULES = {**OF_KERNELS, ".*": P()}


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        names = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        self.norm = nnx.LayerNorm(DIM, rngs=rngs)
        self.q_proj = nnx.Einsum("btd,dnh->btnh", (DIM, HEADS, 4), rngs=rngs)
        self.o_proj = nnx.LinearGeneral((HEADS, 4), DIM, axis=(-2, -1), rngs=rngs)
        self.up = nnx.Linear(DIM, HIDDEN, kernel_init=names, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, DIM, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.o_proj(self.q_proj(self.norm(x)))
        return x + self.down(nnx.gelu(self.up(x)))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, layers: int = 2) -> None:
        self.embed = nnx.Embed(64, DIM, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(layers)])
        self.head = nnx.Linear(DIM, 64, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture(autouse=True)
def plain() -> Any:
    with nnx.use_eager_sharding(False):  # the axis names are logical ones
        yield


@pytest.fixture(scope="module")
def loaded() -> Model:
    with nnx.use_eager_sharding(False):
        return Model(nnx.Rngs(7))


@pytest.fixture(scope="module")
def checkpoint(loaded: Model, tmp_path_factory: pytest.TempPathFactory) -> lm.Checkpoint:
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    lm.save(loaded, path)
    return lm.open_checkpoint(path)


@pytest.fixture(scope="module")
def abstract() -> lm.AbstractModel[Any]:
    with nnx.use_eager_sharding(False):
        return lm.build_abstract(Model, nnx.Rngs(0))


def assert_same(ours: Any, stock: Any) -> None:
    """Equal paths, bits, kinds of variables, and axis names."""
    found, expected = adapter.arrays(ours), adapter.arrays(stock)
    assert found is not None
    assert expected is not None
    assert list(found) == list(expected)
    for path, array in expected.items():
        assert same_bytes(found[path], array), path
    pairs = [
        jax.tree.leaves(nnx.split(each)[1], is_leaf=lambda x: isinstance(x, nnx.Variable)) for each in (ours, stock)
    ]
    for one, other in zip(*pairs, strict=True):
        assert type(one) is type(other)
        assert one.get_metadata("out_sharding", 0) == other.get_metadata("out_sharding", 0)


def rule(**options: Any) -> Any:
    return qwix.QuantizationRule(**options)


def quantized_by_qwix(model: Any, rules: list[Any], inputs: Any = TOKENS) -> Any:
    """In one program: operations one by one would be compiled one by one."""
    return nnx.jit(lambda model: qwix.quantize_model(model, qwix.PtqProvider(rules), inputs))(model)


ASYMMETRIC = [rule(weight_qtype="int8", weight_calibration_method="minmax")]
HOW: dict[str, tuple[Callable[[], Any], list[Any]]] = {
    "int8": (lambda: "int8", [rule(weight_qtype="int8", op_names=OPERATIONS)]),
    "int4": (lambda: "int4", [rule(weight_qtype="int4", op_names=OPERATIONS)]),
    "float8": (lambda: "float8", [rule(weight_qtype="float8_e4m3fn", op_names=OPERATIONS)]),
    "tiles": (lambda: [rule(weight_qtype="nf4", tile_size=4)], [rule(weight_qtype="nf4", tile_size=4)]),
    "zero points": (lambda: qwix.PtqProvider(ASYMMETRIC), ASYMMETRIC),
}


# "tiles" are also below, of int8.
@pytest.mark.parametrize("name", mostly_large(HOW, ["int8", "zero points"]))
def test_equals_quantizing_the_loaded_model(
    abstract: Any, loaded: Model, checkpoint: lm.Checkpoint, mesh8: Mesh, name: str
) -> None:
    how, rules = HOW[name]
    stock = quantized_by_qwix(loaded, rules)
    quantized = abstract.quantize(how(), inputs=(TOKENS,))
    ours = quantized.shard(mesh8, RULES).materialize(checkpoint)
    assert_same(ours, stock)
    if name == "int8":
        whole = quantized.materialize(checkpoint)
        assert_same(whole, stock)
        assert same_bytes(*(nnx.jit(lambda model: model(TOKENS))(each) for each in (whole, stock)))
    assert quantized.nbytes == sum(array.nbytes for array in adapter.arrays(ours).values())
    if name != "tiles":  # `quantize_params` has the same values, for kernels that are not cast before they are used
        params = {"kernel": loaded.layers[0].up.kernel.get_value()}
        stored = qwix.quantize_params(params, {"kernel": stock.layers[0].up.kernel})["kernel"].array
        assert same_bytes(ours.layers[0].up.kernel.array.qvalue.get_value(), stored.qvalue)


@pytest.mark.parametrize("name", mostly_large(HOW, ["zero points"]))
def test_a_sampler_is_quantized_on_the_way(abstract: Any, loaded: Model, mesh8: Mesh, name: str) -> None:
    here, there = (Mesh(half, ("model",)) for half in np.split(mesh8.devices.ravel(), 2))
    trainer = lm.reshard(loaded, NamedSharding(here, P()))
    quantized = abstract.quantize(HOW[name][0](), inputs=(TOKENS,)).shard(there, RULES)
    sync = lm.Sync(trainer, quantized, max_device_memory="2KiB")
    assert sync.num_groups > 3 and "quantized" in str(sync)
    sampler = sync(trainer, into=quantized.materialize())
    with compile_events() as events:
        sampler = sync(trainer, into=sampler)
    assert not events
    assert_same(sampler, quantized.materialize(trainer))
    as_it_is = lm.Sync(quantized, quantized)
    assert as_it_is.computed_nbytes == 0
    with pytest.raises(lm.LazyModelError, match="abstract model that `quantize` made"):
        lm.Sync(trainer, sampler)


def test_a_sampler_whose_quantization_fails(
    abstract: Any, loaded: Model, mesh8: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized = abstract.quantize("int8", "head", inputs=(TOKENS,)).shard(mesh8, RULES)
    assert quantized.num_parameters == abstract.num_parameters
    trainer = lm.reshard(loaded, NamedSharding(mesh8, P()))
    sync, sampler = lm.Sync(trainer, quantized, only="head/kernel"), quantized.materialize()
    monkeypatch.setattr(jax, "block_until_ready", lambda _: 1 / 0)
    with pytest.raises(lm.SyncError, match="head/kernel/array/qvalue.* are lost") as error:
        sync(trainer, into=sampler)
    monkeypatch.undo()
    rest = error.value.sampler
    assert not rest.head.kernel.array.qvalue.get_value().any()
    head = quantized.materialize(trainer).head.kernel
    assert_same(sync(trainer, into=rest).head.kernel.array, head.array)


@pytest.mark.large  # that processes fail together is also in extras/sync
@pytest.mark.timeout(90)
def test_a_sampler_of_several_processes_is_quantized_on_the_way(tmp_path: Path) -> None:
    """If one of them fails, the others have the sampler as far as it got, too."""
    worker, address = Path(__file__).with_name("_quantized_sync_worker.py"), free_address()
    codes = run_workers(worker, [(process, 2, address) for process in range(2)], tmp_path, patience=80)
    assert codes == [0, 0], printed(tmp_path, 2)


def test_initial_values_are_quantized(abstract: Any, mesh8: Mesh) -> None:
    quantized = abstract.shard(mesh8, RULES).quantize("int8", inputs=(jax.ShapeDtypeStruct((1, 4), "int32"),))
    stock = quantized_by_qwix(Model(nnx.Rngs(0)), HOW["int8"][1])
    assert_same(quantized.materialize(), stock)
    key = lm.path_key(jax.random.key(1), "head/kernel")
    again = quantized.rekey(1).reinitialize("head/kernel", jax.nn.initializers.normal(), key=1)
    assert again["head/kernel/array/qvalue"].origin != quantized["head/kernel/array/qvalue"].origin
    expected = qwix.quantize(jax.nn.initializers.normal()(key, (DIM, 64)), "int8", channelwise_axes=[1])
    assert same_bytes(again.materialize().head.kernel.array.qvalue.get_value(), expected.qvalue)


@pytest.mark.parametrize("quantized", mostly_large([False, True], [True]))
def test_pairs_equal_those_of_qwix(
    abstract: Any, loaded: Model, checkpoint: lm.Checkpoint, mesh8: Mesh, quantized: bool
) -> None:
    weights = {"weight_qtype": "int8", "op_names": OPERATIONS} if quantized else {}
    targets = "layers/[0-9]+/(q_proj|o_proj|up)"
    rules = [
        qwix.LoraRule(module_path=targets, rank=3, alpha=3.0, **weights),
        *([rule(**weights)] if quantized else []),
    ]
    stock = qwix.apply_lora_to_model(loaded, qwix.LoraProvider(rules), TOKENS, rngs=nnx.Rngs(5))
    start = abstract.quantize("int8", inputs=(TOKENS,)) if quantized else abstract
    tuned = start.lora(3, f"{targets}/kernel", inputs={"tokens": TOKENS, "rngs": nnx.Rngs(5)})
    whole = tuned.materialize(checkpoint, initialize="missing")
    assert_same(whole, stock)
    assert same_bytes(whole(TOKENS), stock(TOKENS))
    sharded = tuned.shard(mesh8, OF_KERNELS)
    assert_same(sharded.materialize(checkpoint, initialize="missing"), stock)
    assert {path for path, v in sharded.items() if v.trainable} == {path for path in sharded if "_lora_" in path}
    specs = {
        path.removeprefix("layers/0/"): sharded[path].spec for path in sharded if "layers/0" in path and "lora" in path
    }
    assert specs == {
        "o_proj/kernel_lora_a": P("model"),  # of both dimensions that are contracted
        "o_proj/kernel_lora_b": P(),
        "q_proj/kernel_lora_a": P(),
        "q_proj/kernel_lora_b": P(None, "model"),
        "up/kernel_lora_a": P(),
        "up/kernel_lora_b": P(None, "model"),
    }
    # A provider does the same in one step.
    once = abstract.lora(qwix.LoraProvider(rules), inputs={"tokens": TOKENS, "rngs": nnx.Rngs(5)})
    assert_same(once.materialize(checkpoint, initialize="missing"), stock)


def test_default_pairs(abstract: Any, loaded: Model) -> None:
    provider = qwix.LoraProvider(module_path=".*/q_proj", rank=2, alpha=2.0)
    with pytest.warns(UserWarning, match="rngs must be provided"):
        stock = qwix.apply_lora_to_model(loaded, provider, TOKENS)
    assert_same(abstract.lora(2, inputs=(TOKENS,)).materialize(loaded, initialize="missing"), stock)


@pytest.mark.parametrize("load", mostly_large([True, False], [True]))
def test_few_kernels_are_in_floating_point(mesh8: Mesh, monkeypatch: pytest.MonkeyPatch, load: bool) -> None:
    kernel = DIM * HIDDEN * 4
    make_small(monkeypatch, ahead=1)  # a turn for every kernel
    deep = lm.build_abstract(Model, nnx.Rngs(0), layers=8)
    checkpoint = (
        {path: np.asarray(array) for path, array in adapter.arrays(deep.materialize()).items()} if load else None
    )
    before = {id(array) for array in jax.live_arrays()}
    peaks: list[int] = []

    def watch(done: int, total: int) -> None:
        live = [array for array in jax.live_arrays() if id(array) not in before and array.dtype == np.float32]
        peaks.append(sum(array.nbytes for array in live if array.ndim > 1 and array.shape[0] in (DIM, HEADS, HIDDEN)))

    quantized = deep.quantize("int8", inputs=(TOKENS,)).shard(mesh8, RULES)
    watch(0, 0)
    assert peaks == [0], "nothing is allocated before it is wanted"
    model = quantized.materialize(checkpoint, progress=watch)
    assert len(peaks) > 32
    assert max(peaks) <= 4 * kernel < 8 * 3 * kernel
    del model


def test_the_plan_is_what_is_materialized(abstract: Any, checkpoint: lm.Checkpoint, mesh8: Mesh) -> None:
    reports: list[lm.LoadReport] = []
    quantized = abstract.quantize("int8", inputs=(TOKENS,)).shard(mesh8, RULES)
    plan = quantized.plan(checkpoint)
    arrays = adapter.arrays(quantized.materialize(checkpoint, report=reports.append))
    assert plan.read_nbytes == reports[0].read_nbytes == reports[0].needed_nbytes
    assert plan.device_nbytes == sum(array.addressable_shards[0].data.nbytes for array in arrays.values())
    rows = {row.path: row for row in plan.rows}
    assert list(rows) == list(arrays)
    for path, array in arrays.items():
        assert array.sharding.spec == quantized[path].spec
        assert (rows[path].shard_nbytes, rows[path].action) == (array.addressable_shards[0].data.nbytes, "load")
    largest = max(v.shard_nbytes for path, v in abstract.shard(mesh8, RULES).items() if path.endswith("kernel"))
    assert plan.device_nbytes < plan.peak_nbytes <= plan.device_nbytes + largest
    assert {row.path for row in reports[0].rows} == set(abstract)
    streamed = dict(quantized.stream(checkpoint))
    assert all(same_bytes(streamed[path], array) for path, array in arrays.items())


def test_the_scale_follows_the_kernel(abstract: Any, mesh8: Mesh) -> None:
    quantized = abstract.quantize([rule(weight_qtype="int8", tile_size=4)], inputs=(TOKENS,)).shard(mesh8, RULES)
    found = {path: v.spec for path, v in quantized.items() if path.startswith(("layers/1", "head")) and "array" in path}
    assert found == {
        "head/kernel/array/qvalue": P(None, "model"),
        "head/kernel/array/scale": P(None, "model"),
        "layers/1/down/kernel/array/qvalue": P("model"),
        "layers/1/down/kernel/array/scale": P("model"),  # 8 tiles
        "layers/1/o_proj/kernel/array/qvalue": P("model"),
        "layers/1/o_proj/kernel/array/scale": P(),  # tiles are of the last dimension that is contracted
        "layers/1/q_proj/kernel/array/qvalue": P(None, "model"),
        "layers/1/q_proj/kernel/array/scale": P(None, "model"),
        "layers/1/up/kernel/array/qvalue": P(None, "model"),
        "layers/1/up/kernel/array/scale": P(None, "model"),
    }
    logical = abstract.quantize("int8", inputs=(TOKENS,)).lora(2, ".*/up/kernel", inputs=(TOKENS,))
    logical = logical.shard(mesh8, [("mlp", "model"), ("embed", None)])
    names = ("array/qvalue", "array/scale")
    assert [logical[f"layers/0/up/kernel/{name}"].spec for name in names] == [P(None, "model")] * 2
    assert logical["layers/0/up/kernel_lora_b"].spec == P(None, "model")


def test_axes_and_memory_kinds(abstract: Any, loaded: Model, checkpoint: lm.Checkpoint) -> None:
    explicit = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Explicit,))
    rules = {".*/up/kernel": lm.Host(P(None, "model")), **RULES}
    quantized = abstract.quantize([rule(weight_qtype="int8", tile_size=4)], inputs=(TOKENS,)).shard(explicit, rules)
    model = quantized.materialize(checkpoint)
    stock = quantized_by_qwix(loaded, [rule(weight_qtype="int8", tile_size=4)])
    assert_same(model, stock)
    assert model.layers[0].up.kernel.array.qvalue.get_value().sharding.memory_kind == "pinned_host"
    assert model.head.kernel.array.qvalue.get_value().sharding == jax.sharding.NamedSharding(explicit, P(None, "model"))


def test_only_pairs_are_trained(abstract: Any, checkpoint: lm.Checkpoint, mesh8: Mesh, tmp_path: Path) -> None:
    tuned = abstract.quantize("int8", inputs=(TOKENS,)).lora(2, inputs=(TOKENS,)).with_optimizer(optax.adamw(1e-2))
    tuned = tuned.shard(mesh8, OF_KERNELS)
    assert tuned["optimizer/0/mu/layers/0/q_proj/kernel_lora_b"].spec == P(None, "model")
    model, optimizer = tuned.materialize(checkpoint, initialize="missing")
    assert_same(optimizer, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.LoRAParam))
    before = {path: np.asarray(array) for path, array in adapter.arrays(model).items()}

    @nnx.jit
    def step(model: Model, optimizer: nnx.Optimizer) -> None:
        wrt = nnx.DiffState(0, nnx.LoRAParam)
        optimizer.update(model, nnx.grad(lambda model: jnp.mean(model(TOKENS) ** 2), argnums=wrt)(model))

    step(model, optimizer)
    changed = {path for path, array in adapter.arrays(model).items() if not same_bytes(np.asarray(array), before[path])}
    assert changed == {f"layers/{layer}/q_proj/kernel_lora_{one}" for layer in range(2) for one in "ab"}
    lm.save_step((model, optimizer), tmp_path, 1)
    again, state = lm.restore(tuned, tmp_path)
    assert_same(again, model)
    assert_same(state, optimizer)


@pytest.mark.parametrize("current", mostly_large(["explicit", "fewer"], ["fewer"]))
def test_the_mesh_of_the_context_does_not_matter(abstract: Any, mesh8: Mesh, current: str) -> None:
    def made() -> Any:
        quantized = abstract.quantize([rule(weight_qtype="int8", tile_size=4)], inputs=(TOKENS,))
        return quantized.lora(2, inputs=(TOKENS,)).shard(mesh8, RULES).materialize()

    expected, count = made(), 8 if current == "explicit" else 2
    with jax.set_mesh(jax.make_mesh((count,), ("model",), devices=jax.devices()[-count:])):
        assert_same(made(), expected)


def test_quantized_checkpoints_are_loaded_as_they_are(abstract: Any, checkpoint: lm.Checkpoint, tmp_path: Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    for how, name, options in (("int8", "model.safetensors", {}), ("int4", "steps", {"format": "orbax"})):
        quantized = abstract.quantize(how, inputs=(TOKENS,))
        model = quantized.materialize(checkpoint)
        lm.save(model, tmp_path / name, **options)
        saved = lm.open_checkpoint(tmp_path / name)
        assert_same(quantized.materialize(saved, initialize="nothing"), model)
        assert_same(lm.restore(quantized, tmp_path / name), model)
        assert {row.action for row in quantized.plan(saved).rows} == {"load"}
    mapping = lm.WeightMap({"{rest...}": lm.From("model.{rest...}")})
    renamed = lm.map_checkpoint({f"model.{name}": checkpoint[name] for name in checkpoint}, mapping, quantized)
    assert_same(quantized.materialize(renamed), model)


class Reshaped(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (16, HEADS * 4)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.einsum("bd,dnh->bnh", x, jnp.reshape(self.kernel[...], (16, HEADS, 4)))


def test_a_kernel_may_be_used_in_another_shape(mesh8: Mesh) -> None:
    x = jax.ShapeDtypeStruct((1, 16), "float32")
    quantized = lm.build_abstract(Reshaped, nnx.Rngs(0)).quantize("int8", inputs=(x,)).shard(mesh8, {".*": P("model")})
    assert quantized["kernel/array/qvalue"].spec == P("model")
    kernel = Reshaped(nnx.Rngs(0)).kernel[...].reshape(16, HEADS, 4)
    expected = qwix.quantize(kernel, "int8", channelwise_axes=[1, 2])
    found = quantized.materialize().kernel.array
    assert same_bytes(found.qvalue.get_value(), expected.qvalue)
    assert same_bytes(found.scale.get_value(), expected.scale)


class Scanned(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        make = nnx.vmap(lambda rngs: nnx.Linear(HEADS, HEADS, rngs=rngs), in_axes=(0,), out_axes=0)
        self.layers = nnx.split_rngs(splits=3)(make)(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


def test_scanned_layers_are_quantized_one_by_one(mesh8: Mesh) -> None:
    x = jnp.ones((1, HEADS))
    stock = quantized_by_qwix(Scanned(nnx.Rngs(0)), HOW["int8"][1], x)
    abstract = lm.build_abstract(Scanned, nnx.Rngs(0)).quantize("int8", inputs=(x,))
    assert abstract["layers/kernel/array/scale"].shape == (3, 1, HEADS)
    ours = abstract.shard(mesh8, {".*kernel": P(None, None, "model"), ".*": P()}).materialize()
    assert_same(ours, stock)


class Tied(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed, self.linear = nnx.Embed(8, DIM, rngs=rngs), nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.embed.attend(self.linear(self.embed(tokens)))


def test_a_table_that_is_also_the_head_stays() -> None:
    stock = qwix.quantize_model(Tied(nnx.Rngs(0)), qwix.PtqProvider(HOW["int8"][1]), TOKENS)
    abstract = lm.build_abstract(Tied, nnx.Rngs(0))
    ours = abstract.quantize("int8", inputs=(TOKENS,)).materialize()
    assert_same(ours, stock)
    assert same_bytes(ours(TOKENS), stock(TOKENS))
    with pytest.raises(lm.LazyModelError, match="'embed/embedding' is used transposed"):
        abstract.quantize(qwix.PtqProvider(HOW["int8"][1]), inputs=(TOKENS,))


def test_models_that_know_their_inputs(loaded: Model) -> None:
    class Knowing(Model):
        def get_model_input(self) -> dict[str, Any]:
            return {"tokens": TOKENS}

    abstract = lm.build_abstract(Knowing, nnx.Rngs(0)).quantize("int8", "layers/1/.*")
    quantized = {path.split("/kernel")[0] for path in abstract if path.endswith("qvalue")}
    assert quantized == {f"layers/1/{name}" for name in ("q_proj", "o_proj", "up", "down")}


INPUTS = {"inputs": (TOKENS,)}
Change = Callable[[Any], Any]
ERRORS: dict[str, Change] = {
    "quantize takes 'int8', 'int4', 'float8', a list": lambda a: a.quantize("int3", **INPUTS),
    "Give its arguments, arrays or jax.ShapeDtypeStruct: inputs=": lambda a: a.quantize("int8"),
    "filters are a regex of module paths": lambda a: a.quantize("int8", lambda layer: True, **INPUTS),
    r"filters: '\(\?:\(\)' is not a regular expression": lambda a: a.quantize("int8", "(", **INPUTS),
    "a provider of Qwix has rules": lambda a: a.quantize(qwix.PtqProvider(HOW["int8"][1]), "head", **INPUTS),
    "changes nothing: its rules match no kernel of Model": lambda a: a.quantize("int8", "nothing", **INPUTS),
    "is quantized already; quantize comes before lora": lambda a: a.quantize("int8", **INPUTS).quantize(
        "int8", **INPUTS
    ),
    "has an optimizer already": lambda a: a.with_optimizer(optax.sgd(1.0)).quantize("int8", **INPUTS),
    "'head/dot_general0_lhs_scale/array', .* once it runs": lambda a: a.quantize(
        [rule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)], **INPUTS
    ),
    "the rank of a LoRA is a positive integer": lambda a: a.lora(0, **INPUTS),
    "has no LoRA targets: expected kernels that match 'haed/kernel'.*head/kernel": lambda a: a.lora(
        2, "haed/kernel", **INPUTS
    ),
    "lora changes nothing": lambda a: a.lora(2, "embed/.*", **INPUTS),
    "a qwix.LoraProvider has rules": lambda a: a.lora(qwix.LoraProvider(rank=1, alpha=1.0), ".*", **INPUTS),
    "has LoRA pairs already; quantize comes before lora": lambda a: a.lora(2, **INPUTS).quantize("int8", **INPUTS),
    "has LoRA pairs already: give lora one regex": lambda a: a.lora(2, **INPUTS).lora(2, ".*/up/kernel", **INPUTS),
    "quantized by a provider, whose rules": lambda a: a.quantize(qwix.PtqProvider(ASYMMETRIC), **INPUTS).lora(
        2, **INPUTS
    ),
    "rngs among the inputs are an nnx.Rngs": lambda a: a.lora(2, inputs={"tokens": TOKENS, "rngs": 0}),
    "run the model before quantize": lambda a: a.quantize("int8", **INPUTS).run(lambda model, x: model(x), TOKENS),
    "computed from the values of other variables": lambda a: lm.save(a.quantize("int8", **INPUTS), "x.safetensors"),
}


def test_statistics_are_those_of_what_is_materialized(abstract: Any, checkpoint: lm.Checkpoint) -> None:
    quantized = abstract.quantize("int8", "head", **INPUTS)
    for given in (None, checkpoint):
        assert lm.statistics(quantized, given).to_dict() == lm.statistics(quantized.materialize(given)).to_dict()


@pytest.mark.parametrize("message", ERRORS)
def test_errors(abstract: Any, message: str) -> None:
    with pytest.raises(lm.LazyModelError, match=message):
        ERRORS[message](abstract)


def test_errors_of_the_call_say_so(abstract: Any) -> None:
    with pytest.raises(ValueError, match="integer") as caught:
        abstract.quantize("int8", inputs=(jnp.ones((1, 4)),))
    assert "while Qwix called Model with" in "".join(caught.value.__notes__)


def test_other_models() -> None:
    with pytest.raises(lm.LazyModelError, match="only Keras models and NNX modules are quantized as a step"):
        lm.build_abstract(lambda key: jax.random.normal(key, (4, 4)), jax.random.key(0)).quantize("int8")
    with pytest.raises(lm.LazyModelError, match="Qwix changes one nnx.Module"), nnx.var_defaults(ref=True):
        lm.build_abstract(nnx.Linear, 4, 4, rngs=nnx.Rngs(0)).quantize("int8", inputs=(jnp.ones((1, 4)),))
