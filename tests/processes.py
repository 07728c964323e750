"""Runs workers to their end, each in a process of its own, forked from one that has imported JAX and lazymodel.

Importing takes longer than most workers' work. The process that they are forked from is started once, with the
environment of `child_environment`, and has no devices; a worker ends as if it had been started as a script.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax


def free_address() -> str:
    """An address of this machine on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def run_workers(
    script: Path, arguments: Sequence[Sequence[object]], folder: Path, *, patience: float, **environment: str
) -> list[int | None]:
    """Runs a script in a process for each sequence of arguments; none outlives this call.

    What they print goes to `log-0.txt` and so on in the folder.

    Returns:
        The exit codes, minus the signal of one that was killed; None for one that had not ended after `patience`
        seconds, all of them together.
    """
    logs = [str(folder / f"log-{number}.txt") for number in range(len(arguments))]
    task = {
        "script": str(script),
        "workers": [(log, list(map(str, given))) for log, given in zip(logs, arguments, strict=True)],
        "patience": patience,
        "environment": environment,
    }
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    try:
        print(json.dumps(task), file=server.stdin, flush=True)
        return json.loads(server.stdout.readline())
    except BaseException:  # it would answer to the next one
        server.kill()
        _server.cache_clear()
        raise


def printed(folder: Path, processes: int) -> str:
    """What so many workers have printed."""
    logs = ((folder / f"log-{number}.txt").read_text(errors="replace") for number in range(processes))
    return "\n".join(f"--- process {number}\n{log}" for number, log in enumerate(logs))


def join(
    process: int,
    processes: int,
    address: str,
    devices: int,
    *,
    heartbeat: int = 10,
    silence: float | None = None,
    between_checks: float | None = None,
) -> None:
    """Makes a worker one of several processes of so many devices each; warnings are errors from here on.

    `silence` are the seconds after which a process that was at work counts as dead; `between_checks` those between two
    looks at whether another one has failed.
    """
    for name, seconds in (("SILENCE", silence), ("_BETWEEN_CHECKS", between_checks)):
        if seconds is not None:
            setattr(_collective(), name, seconds)
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address,
        processes,
        process,
        initialization_timeout=30,
        heartbeat_timeout_seconds=heartbeat,
        shutdown_timeout_seconds=10,
    )
    warnings.simplefilter("error")


def published() -> dict[str, str]:
    """What processes have published for one another at the stages of their work."""
    return _collective().run_store().folder("lazymodel/stages/")


@contextlib.contextmanager
def checking_always() -> Iterator[None]:
    """Within the block, this process looks at every opportunity whether another one has failed."""
    before, _collective()._BETWEEN_CHECKS = _collective()._BETWEEN_CHECKS, 0.0
    yield
    _collective()._BETWEEN_CHECKS = before


def _collective() -> Any:
    return importlib.import_module("lazymodel._devices.collective")


@functools.cache
def _server() -> subprocess.Popen[str]:
    from tests.conftest import ROOT, child_environment  # which the server itself does without

    server = subprocess.Popen(
        [sys.executable, "-P", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=child_environment() | {"JAX_PLATFORMS": "cpu"},
    )
    atexit.register(server.communicate)  # ends it, with nothing more to do
    return server


def _fork(task: dict[str, Any], log: str) -> int:
    if child := os.fork():
        return child
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(os.devnull) as nothing, open(log, "w") as file:
        for stream, number in ((nothing, 0), (file, 1), (file, 2)):
            os.dup2(stream.fileno(), number)
    os.environ |= task["environment"]
    return 0


def _serve() -> tuple[str, list[str]]:
    """Forks workers as it is asked to; returns only in a worker, with its script and arguments."""
    running: list[int] = []
    late: list[int] = []

    def end_all(*_: object) -> None:
        late.extend(running)
        for child in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, end_all)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which ends this process
    while line := sys.stdin.readline():
        task = json.loads(line)
        children: list[int] = []
        for log, arguments in task["workers"]:
            child = _fork(task, log)
            if not child:
                return task["script"], arguments
            children.append(child)
        running[:], late[:] = children, []
        signal.setitimer(signal.ITIMER_REAL, task["patience"])
        codes: list[int | None] = []
        for child in children:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            running.remove(child)
            codes.append(None if child in late else code)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(codes), flush=True)
    sys.exit()


if __name__ == "__main__":
    for name in (
        "jax.numpy",
        "safetensors.numpy",
        "lazymodel.checkpoints",
        "lazymodel._devices.collective",
    ):  # most of what the workers import
        importlib.import_module(name)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fork")  # JAX has no threads before it has devices
        script, arguments = _serve()
    _collective()._PID = os.getpid()  # a worker takes leave of the others at its end, unlike what programs fork
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(__file__).parents[1]))
    runpy.run_path(script, run_name="__main__")
