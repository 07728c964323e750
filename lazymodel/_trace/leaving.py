"""The way out of a trace: what turns out not to be a function for JAX goes on as if it had never been traced."""

from __future__ import annotations

import contextlib
from typing import Any

from jax._src import core  # which trace is running, and what it has seen, nothing public says

from lazymodel._trace.inlined import keep_inlined


class WayOut:
    """The way out of the trace that runs where this is made; used as a context manager, it leads back in the end."""

    def __init__(self) -> None:
        self._trace: Any = core.trace_ctx.trace
        self._seen = len(self._trace.frame.tracing_eqns)
        self._stack = contextlib.ExitStack()
        self.left = False  # whether it was taken

    def __enter__(self) -> WayOut:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._trace = None  # who keeps this keeps nothing that was traced

    def take(self) -> bool:
        """Leaves the trace, if it is the one that runs; False if something was traced, and so has no value outside."""
        if self.left or core.trace_ctx.trace is not self._trace:
            return True
        if len(self._trace.frame.tracing_eqns) > self._seen:
            return False
        self._stack.enter_context(keep_inlined(False))
        self._stack.enter_context(core.eval_context())
        self.left = True
        return True
