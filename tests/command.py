"""The command `lazymodel` of the installed distribution, run in the test's own process."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

(_command,) = importlib.metadata.entry_points(group="console_scripts", name="lazymodel")
main: Callable[[Sequence[str]], int] = _command.load()


class Ran(NamedTuple):
    """The exit status of a command, and what it printed."""

    status: int
    out: str
    err: str


def lazymodel(*arguments: object) -> int:
    """Runs it and returns its exit status; what it prints goes where the test's own output goes."""
    return main([*map(str, arguments)])


def command(*arguments: object) -> Ran:
    """Runs it and keeps what it prints."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = lazymodel(*arguments)
        except SystemExit as exit:
            status = int(exit.code or 0)
    return Ran(status, out.getvalue(), err.getvalue())


def inspected(path: object, options: Mapping[str, Any] | None = None, *, verify: bool = False) -> dict[str, Any]:
    """What `lazymodel inspect --json` prints about a checkpoint."""
    ran = command("inspect", path, "--json", *["--verify"] * verify, *_storage(options or {}))
    assert not ran.err
    found = json.loads(ran.out)
    assert ran.status == bool(found["problems"])
    return found


def _storage(options: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from _storage(value, f"{before}{key}.")
        else:
            yield from ("--storage-option", f"{before}{key}={value}")


def problems(path: object) -> list[str]:
    """The messages of what is wrong with a checkpoint."""
    return [problem["message"] for problem in inspected(path)["problems"]]
