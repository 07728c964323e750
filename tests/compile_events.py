"""What JAX traces, lowers and compiles while something runs."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import jax


@contextlib.contextmanager
def compile_events() -> Generator[list[str]]:
    """A list that gets `"trace f"`, `"lower jit(f)"` and `"compile jit(f)"` as these happen, in whatever thread."""
    names = {
        "/jax/core/compile/jaxpr_trace_duration": "trace",
        "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
        "/jax/core/compile/backend_compile_duration": "compile",
    }
    events: list[str] = []

    def listen(event: str, _: float, **details: Any) -> None:
        if event in names:
            events.append(f"{names[event]} {details.get('fun_name', '')}".strip())

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
