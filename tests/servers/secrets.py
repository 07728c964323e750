"""Secrets planted in tests of remote checkpoints, and everything that an error says, in which none may be."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

SECRET = "SECRET-c0ffee"


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error with all its causes and contexts, those included that a traceback does not show."""
    todo, seen = [error], set[int]()
    while todo:
        found = todo.pop()
        if id(found) not in seen:
            seen.add(id(found))
            yield found
            todo += [other for other in (found.__cause__, found.__context__) if other is not None]


def everything_of(error: BaseException) -> str:
    texts = [f"{found!s} {found!r} {getattr(found, '__notes__', '')}" for found in chain(error)]
    return "\n".join([*texts, *traceback.format_exception(error)])
