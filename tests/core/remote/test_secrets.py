"""No token, key or signature is in anything that is shown, whatever fails, wherever the weights lie."""

from __future__ import annotations

import base64
import logging
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import lazymodel as lm
from lazymodel._remote.path import remote_path
from tests.servers.object_server import ObjectServer
from tests.servers.s3 import S3Server
from tests.servers.secrets import SECRET, everything_of

obstore = pytest.importorskip("obstore", reason="needs obstore: pip install 'lazymodel[remote]'")

SOON: dict[str, Any] = {"max_retries": 1, "backoff": {"init_backoff": 0.001, "max_backoff": 0.001}}
CLIENT = {"allow_http": True, "read_timeout": "150ms"}
KEY = base64.b64encode(SECRET.encode()).decode()


@pytest.fixture(scope="module")
def stored(_object_server: ObjectServer) -> ObjectServer:
    folder = _object_server.root / "secrets" / "model"
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"w": np.arange(60_000, dtype=np.float32)}, folder / "w.safetensors")
    return _object_server


def places(server: ObjectServer) -> dict[str, tuple[str, dict[str, Any]]]:
    """Dialect and kind of credentials → URL and options, with the secret in each."""
    host = server.origin().partition("://")[2]
    path = "secrets/model/w.safetensors"
    azure = {name: value for name, value in server.azure().items() if name != "bearer_token"}
    plain: dict[str, Any] = {"client_options": CLIENT, "retry_config": SOON}
    return {
        "signed": (f"{server.url(path)}?X-Amz-Signature={SECRET}&sig={SECRET}", plain),
        "password": (f"http://me:{SECRET}@{host}/http/{path}", plain),
        "header": (server.url(path), plain | {"client_options": CLIENT | {"default_headers": {"X-Api-Key": SECRET}}}),
        "hub": ("hf://secrets/model/w.safetensors", plain),
        "gcs": (f"gs://{path}", server.gcs() | {"bearer_token": SECRET} | plain),
        "azure token": (f"az://{path}", azure | {"bearer_token": SECRET} | plain),
        "azure key": (f"az://{path}", azure | {"account_key": KEY} | plain),
        "azure SAS": (f"az://{path}", azure | {"sas_key": f"sv=2023&sig={SECRET}"} | plain),
    }


@pytest.mark.parametrize(
    "where", ["signed", "password", "header", "hub", "gcs", "azure token", "azure key", "azure SAS"]
)
def test_nothing_shows_a_secret(
    stored: ObjectServer, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("HF_ENDPOINT", stored.hub)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    stored.reset()
    url, options = places(stored)[where]
    place = remote_path(url, options)
    shown = [repr(place), repr(place.store), str(place), repr(place.store.url), repr(place.parent)]
    with lm.open_checkpoint(url, options) as checkpoint:
        assert np.asarray(checkpoint["w"])[-1] == 59_999
        shown += [repr(checkpoint), repr(checkpoint["w"]), checkpoint.path, *checkpoint.files]
        for kind in ("401", "403", "404", "416", "500", "503", "reset", "truncate", "stall"):
            stored.faults([kind], every=1)
            with pytest.raises(lm.CheckpointError) as found:
                np.asarray(checkpoint["w"])
            shown.append(everything_of(found.value))
            with pytest.raises(lm.CheckpointError) as found:
                lm.open_checkpoint(url, options)
            shown.append(everything_of(found.value))
        stored.faults()
        stored.replace("secrets/model/w.safetensors", after=0)
        with pytest.raises(lm.CheckpointError, match="changed") as found:
            np.asarray(checkpoint["w"])
        shown.append(everything_of(found.value))
    with pytest.raises(lm.CheckpointError) as found:
        lm.open_checkpoint(url.replace("w.safetensors", "absent.safetensors"), options)
    shown += [everything_of(found.value), caplog.text, *capfd.readouterr()]
    for text in shown:
        for secret in (SECRET, KEY, "SECRET-SIGNATURE", base64.b64encode(f"me:{SECRET}".encode()).decode()):
            assert secret not in text, text


def test_passwords_are_sent_as_such(stored: ObjectServer) -> None:
    stored.reset()
    url, options = places(stored)["password"]
    with lm.open_checkpoint(url, options) as checkpoint:
        np.asarray(checkpoint["w"])
    counted = stored.counters()
    assert counted["authorization"] == counted["requests"] > 0


def test_orbax_shows_no_secret_either(
    stored: ObjectServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    orbax = pytest.importorskip("orbax.checkpoint")
    with orbax.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(stored.root / "secrets" / "orbax", {"w": np.arange(60_000, dtype=np.float32)})
    monkeypatch.setenv("HF_ENDPOINT", stored.hub)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    stored.reset()
    for url in (f"{stored.url('secrets/orbax')}?sig={SECRET}", "hf://secrets/orbax"):
        stored.faults()
        checkpoint = lm.open_checkpoint(url)
        checkpoint["w"]
        stored.faults(["403"], every=1)
        with pytest.raises(lm.CheckpointError) as found:
            np.asarray(checkpoint["w"])
        assert SECRET not in everything_of(found.value)
        assert "a fault that was asked for" not in everything_of(found.value)
        with pytest.raises(lm.CheckpointError) as found:
            lm.open_checkpoint(url)
        assert SECRET not in everything_of(found.value)
    assert SECRET not in "".join(capfd.readouterr())


def test_keys_of_s3(s3: S3Server) -> None:
    options = s3.options() | {"secret_access_key": SECRET, "retry_config": SOON}
    for key in ("absent", "absent/w.safetensors"):
        with pytest.raises(lm.CheckpointError, match="no checkpoint") as found:
            lm.open_checkpoint(f"s3://{s3.bucket}/{key}", options)
        assert SECRET not in everything_of(found.value)
    with pytest.raises(lm.CheckpointError) as found:
        lm.open_checkpoint("s3://no-such-bucket/w.safetensors", options)
    assert SECRET not in everything_of(found.value)
