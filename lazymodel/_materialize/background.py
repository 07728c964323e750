"""What happens in other threads while weights are read: nothing, or what an extra does, which compiles functions."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence

from lazymodel._devices.hardware import CompiledMemory


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A program that was compiled while weights were read.

    Attributes:
        description: What it computes.
        seconds: Wall-clock seconds that compiling took, while other work was running.
        cache: `"hit"` if JAX' persistent compilation cache had it, `"miss"` if not, `""` without such a
            cache.
        memory: The compiler's numbers for its memory on each device; None if there are none.
    """

    description: str
    seconds: float
    cache: str
    memory: CompiledMemory | None


class Background:
    """Programs that are compiled while weights are read; here there are none."""

    wait_seconds = 0.0  # that `finished` waited

    @property
    def names(self) -> Sequence[str]:
        """Descriptions of the programs."""
        return ()

    @property
    def details(self) -> Iterable[str]:
        """The arguments of each program as text: the same in all processes that do the same."""
        return ()

    def in_background(self) -> contextlib.AbstractContextManager[None]:
        """Compiles while the body runs; after a failure, compilations that have not started are cancelled."""
        return contextlib.nullcontext()

    @property
    def unfinished(self) -> Sequence[str]:
        """Descriptions of the programs that are not compiled yet."""
        return ()

    def check(self) -> None:
        """Raises the errors of programs that have failed so far."""

    def hold(self, share: float, unless: Callable[[], bool]) -> None:
        """If a share of the bytes is read already and programs may not fit, waits until it is known that they do.

        Args:
            share: Share of all bytes, from 0 to 1.
            unless: Returns True if waiting does not make sense any more; called several times a second. Its exceptions
                are raised.
        """

    def finished(self, check: Callable[[], object]) -> tuple[CompiledProgram, ...]:
        """All compiled programs, in their order.

        Args:
            check: Called several times a second; its exceptions are raised.
        """
        return ()
