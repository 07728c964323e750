"""Repositories of the hub, by what servers of tests answer; nothing asks the real one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

import lazymodel as lm
from tests.servers.object_server import ObjectServer
from tests.servers.scripted import Asked, Reply, part, scripted
from tests.servers.secrets import SECRET, everything_of

pytest.importorskip("obstore", reason="needs obstore: pip install 'lazymodel[remote]'")

WEIGHTS = {"w": np.arange(12, dtype=np.float32).reshape(3, 4)}
ONCE: dict[str, Any] = {"retry_config": {"max_retries": 0}}


@pytest.fixture
def hub(object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> ObjectServer:
    """A repository `hub/model` for those with the token, which is in the environment."""
    monkeypatch.setenv("HF_ENDPOINT", object_server.hub)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    folder = object_server.root / "hub" / "model"
    for name in ("model.safetensors", "sub/x y.safetensors"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(save(WEIGHTS))
    object_server.repository("hub/model", token=SECRET)
    return object_server


@pytest.mark.parametrize("where", ["", "/model.safetensors", "/sub", "/sub/x y.safetensors", "@main", "@main/sub/"])
def test_files_and_folders(hub: ObjectServer, where: str) -> None:
    with lm.open_checkpoint(f"hf://hub/model{where}") as checkpoint:
        np.testing.assert_array_equal(np.asarray(checkpoint["w"]), WEIGHTS["w"])
        assert SECRET not in f"{checkpoint!r} {checkpoint['w']!r} {vars(checkpoint)}"
    counted = hub.counters()
    assert counted["cdn_authorization"] == 0 and counted["authorization"] > 0


def test_a_token_that_is_missing_or_wrong(hub: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", f"another-{SECRET}")
    with pytest.raises(lm.CheckpointError, match="knows no such repository") as found:
        lm.open_checkpoint("hf://hub/model")
    assert SECRET not in everything_of(found.value)
    hub.repository("hub/model", token=SECRET, gated=True)
    with pytest.raises(lm.CheckpointError, match="refuses access"):
        lm.open_checkpoint("hf://hub/model")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # where nobody has logged in
    if importlib.util.find_spec("huggingface_hub") is not None:
        monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(lm.CheckpointError, match="hf auth login"):
        lm.open_checkpoint("hf://hub/model")
    with pytest.raises(lm.CheckpointError, match="hf auth login"):
        lm.open_checkpoint("hf://hub/absent")


def test_a_token_that_expires_while_weights_are_read(hub: ObjectServer) -> None:
    checkpoint = lm.open_checkpoint("hf://hub/model/model.safetensors", ONCE)
    hub.repository("hub/model", token="another")
    with pytest.raises(
        lm.CheckpointError, match=r"hf://hub/model/model\.safetensors: (there is nothing|the store)"
    ) as e:
        np.asarray(checkpoint["w"])
    assert SECRET not in everything_of(e.value)


@pytest.mark.parametrize("revision", ["refs%2Fpr%2F1", "v1.0"])
def test_revisions_are_asked_for_as_the_hub_wants_them(revision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def reply(request: Asked) -> Reply:
        asked.append(request.path)
        if request.path.startswith("/api"):
            return 200, {}, json.dumps({"sha": "f" * 40, "siblings": [{"rfilename": "a/w.safetensors"}]}).encode()
        return part(save(WEIGHTS), request, ETag='"1"')

    with scripted(reply) as origin:
        monkeypatch.setenv("HF_ENDPOINT", origin)
        with lm.open_checkpoint(f"hf://o/n@{revision}/a") as checkpoint:
            np.testing.assert_array_equal(np.asarray(checkpoint["w"]), WEIGHTS["w"])
    assert asked[0] == f"/api/models/o/n/revision/{revision}"
    assert set(asked[1:]) == {f"/o/n/resolve/{'f' * 40}/a/w.safetensors"}


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"sha": "../..", "siblings": []}',
        b'{"sha": "\xff"}',
        b'{"sha": "a\\nb", "siblings": []}',
        b'{"sha": 3, "siblings": []}',
        b'{"sha": "a", "siblings": 3}',
        b'{"sha": "a", "siblings": [3]}',
        b'{"sha": "a", "siblings": [{"rfilename": 3}]}',
        b'{"sha": "a", "siblings": [{}]}',
    ],
)
def test_answers_that_are_none(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(lambda _: (200, {}, answer)) as origin:
        monkeypatch.setenv("HF_ENDPOINT", origin)
        monkeypatch.setenv("HF_TOKEN", SECRET)
        with pytest.raises(lm.CheckpointError, match="hub's answer is not what it documents") as found:
            lm.open_checkpoint("hf://o/n")
    assert SECRET not in everything_of(found.value)


def test_names_of_files_that_lead_elsewhere_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        "../../x.safetensors",
        "/etc/x.safetensors",
        "a\0.safetensors",
        "\x1b[2J.safetensors",
        "./x.safetensors",
        "",
    ]
    body = json.dumps({"sha": "f" * 40, "siblings": [{"rfilename": name} for name in names]}).encode()
    asked: list[str] = []

    def reply(request: Asked) -> Reply:
        asked.append(request.path)
        return 200, {}, body

    with scripted(reply) as origin:
        monkeypatch.setenv("HF_ENDPOINT", origin)
        with pytest.raises(lm.CheckpointError, match=r"(found no|no) checkpoint") as found:
            lm.open_checkpoint("hf://o/n")
        assert str(found.value).isprintable()
    assert len(asked) == 1


def test_plain_http_to_another_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://me:{SECRET}@hub.example.com")
    with pytest.raises(lm.CheckpointError, match="expected https") as found:
        lm.open_checkpoint("hf://o/n")
    assert SECRET not in everything_of(found.value)
