"""What commands import says nothing of itself, and everything that matters."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lazymodel._show.quiet import quiet_tensorflow

NOISE = (
    b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
    b"I0000 00:00:1795320015.407997    7476 port.cc:153] oneDNN custom operations are on. You may see\n"
    b"I0000 00:00:1795320015.409912    7476 cudart_stub.cc:31] Could not find cuda drivers on your machine\n"
)
ERROR = b"E0000 00:00:1795320015.409912    7476 cuda_dnn.cc:31] it is broken\nTraceback\n"


def test_only_noise_is_left_out(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)

    def fails() -> None:
        with quiet_tensorflow():
            os.write(2, NOISE + ERROR)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    os.write(2, b"after")
    assert capfd.readouterr().err == ERROR.decode() + "after"


def test_who_asks_for_the_log_gets_it(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    with quiet_tensorflow():
        os.write(2, NOISE)
    assert capfd.readouterr().err == NOISE.decode()
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "0"


@pytest.mark.parametrize("command", [["inspect", "nowhere"], ["plan", "no_preset_of_this_name"]])
def test_a_command_says_what_it_has_to_say(command: list[str]) -> None:
    pytest.importorskip("keras_hub")
    names = ("TF_CPP_MIN_LOG_LEVEL", "JAX_PLATFORMS", "XLA_FLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-m", "lazymodel", *command], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 2
    assert done.stderr.startswith("lazymodel: error: "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
