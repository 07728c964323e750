"""What `run` reads and holds: each variable once if it can be, two layers at a time, and no more than is allowed."""

from __future__ import annotations

import gc
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import lazymodel as lm
from tests.core.materialize._variables import bytes_read
from tests.extras.run.models import assert_equal, block, decoder, forward, norms_of, rows, scanned, tokens
from tests.extras.run.test_run import body, ran
from tests.foreign_memory import foreign_memory

pytestmark = pytest.mark.usefixtures("no_thread_is_left")
LAYERS = 8


@pytest.fixture(scope="module")
def listed() -> Any:
    return lm.build_abstract(decoder(LAYERS), jax.random.key(0))


@pytest.fixture(scope="module")
def stacked() -> Any:
    return lm.build_abstract(decoder(LAYERS, stacked=True), jax.random.key(0))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, listed: Any, stacked: Any) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("run")
    for name, abstract in (("listed", listed), ("stacked", stacked)):
        lm.save(abstract, folder / f"{name}.safetensors")
    return folder / "listed.safetensors", folder / "stacked.safetensors"


class Live:
    """The most bytes of arrays that exist whenever a variable has arrived, beyond those before."""

    def __init__(self) -> None:
        gc.collect()
        self.before, self.most = self._now(), 0

    def _now(self) -> int:
        return sum(array.nbytes for array in jax.live_arrays())

    def __call__(self, done: int, total: int) -> None:
        self.done, self.total = done, total
        self.most = max(self.most, self._now() - self.before)


def test_each_variable_is_read_once(listed: Any, saved: tuple[Path, Path]) -> None:
    checkpoint = lm.open_checkpoint(saved[0])
    _, report = ran(listed, forward, tokens(), checkpoint=checkpoint)
    # The embedding is the head as well: at the beginning only rows of it are read.
    assert bytes_read(checkpoint) == report.read_nbytes == report.loaded_nbytes == listed.nbytes + rows(listed)
    assert (report.again_nbytes, report.made_nbytes) == (0, 0)


def test_a_variable_is_read_again_or_kept_for_a_later_use(listed: Any, saved: tuple[Path, Path]) -> None:
    def function(model: Any, tokens: Any) -> jax.Array:
        return forward(model, tokens) @ model["embedding"] @ model["layers"][0]["qkv"]

    for limit, again in ((None, listed["layers/0/qkv"].nbytes), ("1GiB", 0)):
        checkpoint = lm.open_checkpoint(saved[0])
        _, report = ran(listed, function, tokens(), checkpoint=checkpoint, max_device_memory=limit)
        assert report.again_nbytes == again
        assert bytes_read(checkpoint) == listed.nbytes + rows(listed) + again


@pytest.mark.parametrize(
    "of_tokens",
    [
        lambda table, tokens: table[tokens],
        pytest.param(lambda table, tokens: table[-1 - tokens[None] % 7], marks=pytest.mark.large),
        pytest.param(lambda table, tokens: jnp.take(table, tokens + 90, axis=0, mode="clip"), marks=pytest.mark.large),
        lambda table, tokens: table[8:72][tokens % 16],
        lambda table, tokens: jax.vmap(lambda some: table[some])(tokens.reshape(3, 4)),
    ],
)
def test_only_rows_at_known_indices_are_read(listed: Any, saved: tuple[Path, Path], of_tokens: Any) -> None:
    function = lambda model, tokens: jnp.tanh(of_tokens(model["embedding"], tokens) @ model["layers"][0]["qkv"])  # noqa: E731
    checkpoint = lm.open_checkpoint(saved[0])
    found, _ = ran(listed, function, tokens(), checkpoint=checkpoint)
    assert bytes_read(checkpoint) == rows(listed) + listed["layers/0/qkv"].nbytes
    assert_equal(found, function(listed.materialize(), tokens()))
    assert_equal(ran(listed, function, tokens())[0], found)  # of initial values


@pytest.mark.parametrize(
    "of_tokens",
    [
        lambda table, tokens: jnp.take(table, tokens + 90, axis=0),  # NaN out of range
        lambda table, tokens: table[jnp.argmax(table[0]) + tokens % 2],  # indices that depend on a variable
        pytest.param(lambda table, tokens: table[tokens, tokens % 4], marks=pytest.mark.large),
        pytest.param(lambda table, tokens: table.T[tokens % 4], marks=pytest.mark.large),
        lambda table, tokens: table[jnp.tile(tokens, 5)],  # more than half of the rows
    ],
)
def test_other_tables_are_read_whole(listed: Any, saved: tuple[Path, Path], of_tokens: Any) -> None:
    function = lambda model, tokens: of_tokens(model["embedding"], tokens)  # noqa: E731
    checkpoint = lm.open_checkpoint(saved[0])
    found, _ = ran(listed, function, tokens(), checkpoint=checkpoint)
    assert bytes_read(checkpoint) >= listed["embedding"].nbytes
    np.testing.assert_array_equal(found, function(listed.materialize(checkpoint), tokens()))


def test_layers_of_a_stack_are_read_one_by_one(stacked: Any, saved: tuple[Path, Path]) -> None:
    checkpoint = lm.open_checkpoint(saved[1])
    layers = sum(variable.nbytes for path, variable in stacked.items() if path.startswith("layers"))
    _, report = ran(stacked, scanned, tokens(), checkpoint=checkpoint)
    assert bytes_read(checkpoint) == report.loaded_nbytes == stacked.nbytes + rows(stacked)
    assert report.whole == ()
    assert report.rows[1].calls in (LAYERS, LAYERS - 1)
    assert report.rows[1].variables_nbytes <= layers // LAYERS


def test_what_is_taken_whole_is_said(stacked: Any) -> None:
    def function(model: Any, tokens: Any) -> jax.Array:
        return jax.lax.fori_loop(
            0, LAYERS, lambda i, x: jnp.tanh(x @ model["layers"]["out"][i]), model["embedding"][tokens]
        )

    _, report = ran(stacked, function, tokens())
    (row,) = report.whole
    assert (row.paths, row.nbytes) == (("layers/out",), stacked["layers/out"].nbytes)
    assert "taken by" in row.reason and "layers/out" in str(report)
    drawn = lm.build_abstract(
        lambda key: jax.vmap(lambda key: jax.random.normal(key, (8, 8)))(jax.random.split(key, 3)), jax.random.key(0)
    )
    step = lambda w: jax.lax.scan(lambda x, row: (x @ row, None), jnp.ones((2, 8)), w)[0]  # noqa: E731
    found, report = ran(drawn, step)
    assert_equal(found, step(drawn.materialize()))
    assert report.whole[0].nbytes == drawn.nbytes and len(report.rows) == 2 and report.calls == 3


@pytest.mark.parametrize("function", [forward, norms_of(forward)], ids=["forward", "norms"])
def test_no_more_is_held_than_said(listed: Any, saved: tuple[Path, Path], function: Any) -> None:
    checkpoint, given = lm.open_checkpoint(saved[0]), tokens()
    ran(listed, function, given, checkpoint=checkpoint)  # JAX' own constants exist from here on
    live = Live()
    _, report = ran(listed, function, given, checkpoint=checkpoint, progress=live)
    assert live.most <= report.peak_nbytes
    assert live.done == live.total == report.loaded_nbytes
    if function is forward:
        largest = sorted((row.variables_nbytes for row in report.rows), reverse=True)
        assert report.peak_nbytes < 2 * largest[0] + 16384 < listed.nbytes


def test_gradients_do_not_accumulate(listed: Any, stacked: Any, saved: tuple[Path, Path]) -> None:
    def narrow(model: Any, tokens: Any) -> jax.Array:  # casts of the weights are computed again, and not kept
        return forward(jax.tree.map(lambda w: w.astype("bfloat16"), model), tokens).astype("float32")

    for abstract, function, path in ((listed, narrow, saved[0]), (stacked, scanned, saved[1])):
        few = tokens(2)  # so that variables are what matters
        _, report = ran(abstract, norms_of(function), few, checkpoint=lm.open_checkpoint(path))
        # The gradient of the embedding waits, from its use as the head to that at the beginning.
        layer = sum(variable.nbytes for path, variable in abstract.items() if path.startswith("layers")) // LAYERS
        # Without reducing them at once, live values would include gradients of all layers.
        assert max(row.live_nbytes for row in report.rows) < 2 * abstract["embedding"].nbytes + 2 * layer


def test_checkpoint_keeps_the_inputs_of_layers_only(listed: Any) -> None:
    plain, again = (body(each) for each in (block, jax.checkpoint(block)))
    live = [max(row.live_nbytes for row in ran(listed, norms_of(f), tokens(48))[1].rows) for f in (plain, again)]
    assert live[1] < live[0] / 3


def test_a_short_scan_over_rows_of_a_variable_is_one_program(listed: Any) -> None:
    step = lambda x, scale: (jnp.tanh(x) * scale, None)  # noqa: E731
    function = lambda model, x: jax.lax.scan(step, x, model["norm"])[0]  # noqa: E731
    found, report = ran(listed, function, jnp.ones(3))
    assert_equal(found, jax.jit(function)(listed.materialize(), jnp.ones(3)))
    assert report.calls == 1


def test_variables_in_the_host_s_memory(mesh8: Any, saved: tuple[Path, Path]) -> None:
    abstract = lm.build_abstract(decoder(LAYERS, stacked=True), jax.random.key(0)).shard(
        mesh8, {".*up": lm.Host(P(None, None, "model")), ".*": P()}
    )
    checkpoint = lm.open_checkpoint(saved[1])

    def function(model: Any, tokens: Any) -> jax.Array:
        return scanned(jax.tree.map(lambda w: jax.device_put(w, jax.memory.Space.Device), model), tokens)

    found, report = ran(abstract, function, tokens(), checkpoint=checkpoint)
    whole = jax.jit(function)(abstract.materialize(checkpoint), tokens())
    assert_equal(jax.device_get(found), jax.device_get(whole))
    assert report.whole == ()


@pytest.mark.parametrize("seed", range(3))
def test_devices_with_memory_of_their_own(listed: Any, saved: tuple[Path, Path], seed: int) -> None:
    expected = jax.jit(forward)(listed.materialize(), tokens())
    given, checkpoint = tokens(), lm.open_checkpoint(saved[0])
    with foreign_memory(seed):
        found, _ = ran(listed, forward, given, checkpoint=checkpoint)
        found = np.array(found)
    np.testing.assert_allclose(found, expected, 0, 1e-5 * float(jnp.abs(expected).max()))


def test_smaller_stretches_fit(listed: Any) -> None:
    expected = jax.jit(norms_of(forward))(listed.materialize(), tokens())
    _, plain = ran(listed, norms_of(forward), tokens())
    with pytest.raises(lm.DoesNotFitError, match="needs at least") as raised:
        listed.run(norms_of(forward), tokens(), max_device_memory=1000)
    least = raised.value.needed_nbytes
    assert raised.value.limit_nbytes == 1000
    assert least is not None and least < plain.peak_nbytes
    with pytest.raises(lm.DoesNotFitError):
        listed.run(norms_of(forward), tokens(), max_device_memory=least - 1)
    for limit in (least, plain.peak_nbytes, 1 << 30):
        found, report = ran(listed, norms_of(forward), tokens(), max_device_memory=limit)
        assert_equal(found, expected)
        assert report.peak_nbytes <= limit == report.limit_nbytes
        if limit == least:
            assert report.calls > plain.calls
    assert report.again_nbytes == 0 < plain.again_nbytes


def test_results_that_do_not_fit_are_refused_before_reading(listed: Any, saved: tuple[Path, Path]) -> None:
    checkpoint = lm.open_checkpoint(saved[0])
    with pytest.raises(lm.DoesNotFitError, match="returns .* Nothing was read") as raised:
        listed.run(lambda model: model, checkpoint=checkpoint, max_device_memory=listed.nbytes - 1)
    assert (raised.value.needed_nbytes, bytes_read(checkpoint)) == (listed.nbytes, 0)
    found, report = ran(listed, lambda model: model, checkpoint=checkpoint)
    assert_equal(found, listed.materialize())
    assert report.results_nbytes == report.loaded_nbytes == listed.nbytes


def test_a_variable_that_all_layers_use_stays() -> None:
    def init(key: jax.Array) -> dict[str, Any]:
        keys = jax.random.split(key, 9)
        return {
            "shared": jax.random.normal(keys[8], (64, 64)),
            "own": [jax.random.normal(k, (64, 64)) for k in keys[:8]],
        }

    def function(model: Any, x: jax.Array) -> jax.Array:
        for own in model["own"]:
            x = jnp.tanh(x @ own) @ model["shared"]
        return x

    abstract = lm.build_abstract(init, jax.random.key(0))
    found, report = ran(abstract, function, jnp.ones((2, 64)))
    assert_equal(found, jax.jit(function)(abstract.materialize(), jnp.ones((2, 64))))
    assert report.again_nbytes == 0 and report.peak_nbytes < 5 * 64 * 64 * 4


def test_the_report(listed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, report = ran(listed, forward, tokens(), max_device_memory="1MiB")
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    text = str(report)
    assert "init: ran 9 calls of 3 programs" in text and "limit: 1.00 MiB" in text and "initialized:" in text
    assert sum(row.calls for row in report.rows) == report.calls and report.variables == len(listed)
    assert 0 < report.plan_seconds < report.seconds
    listed.run(forward, tokens(), report=True)
    assert "init: ran 9 calls" in capsys.readouterr().out


# On several devices


RULES = {"embedding": P("model"), ".*(qkv|up)": P(None, "model"), ".*(out|down)": P("model"), ".*": P()}


@pytest.mark.parametrize(
    "function", [forward, pytest.param(norms_of(forward), marks=pytest.mark.large)], ids=["forward", "norms"]
)
def test_sharded(mesh42: Any, saved: tuple[Path, Path], function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    abstract = lm.build_abstract(decoder(LAYERS), jax.random.key(0)).shard(mesh42, RULES)
    checkpoint, texts = lm.open_checkpoint(saved[0]), list[str]()
    compile_it = jax.stages.Lowered.compile

    def noted(lowered: Any, *args: Any, **options: Any) -> Any:
        compiled = compile_it(lowered, *args, **options)
        texts.append(compiled.as_text())
        return compiled

    monkeypatch.setattr(jax.stages.Lowered, "compile", noted)
    found, report = ran(abstract, function, tokens(), checkpoint=checkpoint)
    monkeypatch.undo()
    model = abstract.materialize(checkpoint)
    whole = jax.jit(function).lower(model, tokens()).compile()
    assert_equal(jax.device_get(found), jax.device_get(jax.jit(function)(model, tokens())))
    if function is forward:  # the embedding is sharded by rows, so it is read whole, twice
        once = sum(variable.shard_nbytes for variable in abstract.values())
        assert report.loaded_nbytes == once + abstract["embedding"].shard_nbytes
    assert len(texts) == len(report.rows)
    calls = sum(row.calls * _collectives(text) for row, text in zip(report.rows, texts, strict=True))
    assert 0 < calls <= _collectives(whole.as_text())


def _collectives(text: str) -> int:
    """Collectives of arrays. Those of scalars alone, such as norms, are combined as far as they are in one program."""
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf" = (.+?) (?:{kinds})(?:-start)?\(", text)
    return sum(bool(re.search(r"\[\d", shapes)) for shapes in found)


def test_sharded_scans_and_gradients(mesh42: Any, saved: tuple[Path, Path]) -> None:
    rules = {"layers/(qkv|up)": P(None, None, "model"), "layers/(out|down)": P(None, "model"), ".*": P()}
    abstract = lm.build_abstract(decoder(LAYERS, stacked=True), jax.random.key(0)).shard(mesh42, rules)
    checkpoint = lm.open_checkpoint(saved[1])
    batch = jax.device_put(jnp.stack([tokens()] * 4), jax.NamedSharding(mesh42, P("batch")))

    def function(model: Any, batch: jax.Array) -> Any:
        return jax.vmap(norms_of(scanned), (None, 0))(model, batch)

    found, report = ran(abstract, function, batch, checkpoint=checkpoint)
    assert_equal(jax.device_get(found), jax.device_get(jax.jit(function)(abstract.materialize(checkpoint), batch)))
    assert report.whole == ()
    along = abstract.shard(mesh42, {"layers/(up|down)": P("batch"), ".*": P()})
    found, report = ran(along, scanned, tokens(), checkpoint=checkpoint)
    assert_equal(jax.device_get(found), jax.device_get(jax.jit(scanned)(along.materialize(checkpoint), tokens())))
    assert report.whole[0].paths == ("layers/down", "layers/up")


@pytest.mark.large
def test_shard_map_and_explicit_axes(mesh8: Any) -> None:
    def init(key: jax.Array) -> list[jax.Array]:
        return [jax.random.normal(each, (16, 16)) * 0.1 for each in jax.random.split(key, 4)]

    def function(model: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in model:
            inner = lambda x, w: jax.lax.psum(x @ w, "model")  # noqa: E731
            x = jax.shard_map(inner, mesh=mesh8, in_specs=(P(None, "model"), P("model")), out_specs=P())(x, w)
            x = jax.lax.with_sharding_constraint(jnp.tanh(x), jax.NamedSharding(mesh8, P()))
        return x

    abstract = lm.build_abstract(init, jax.random.key(0)).shard(mesh8, {".*": P("model")})
    norm = lambda model, x: [jnp.sum(g * g) for g in jax.grad(lambda m: function(m, x).sum())(model)]  # noqa: E731
    for each in (function, norm):
        found, _ = ran(abstract, each, np.ones((2, 16), "float32"))
        expected = jax.jit(each)(abstract.materialize(), jnp.ones((2, 16)))
        assert_equal(jax.device_get(found), jax.device_get(expected))
    explicit = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Explicit,))
    placed = lm.build_abstract(init, jax.random.key(0)).shard(explicit, {".*": P(None, "model")})
    product = lambda model, x: [jnp.sum(x @ w, axis=0) for w in model]  # noqa: E731
    with jax.set_mesh(explicit):
        found, _ = ran(placed, product, jnp.ones((2, 16)))
        assert_equal(jax.device_get(found), jax.device_get(product(placed.materialize(), jnp.ones((2, 16)))))
