"""What commands print for programs: one JSON document that names its schema, see docs/command_line.md."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from lazymodel._errors import LazyModelError
from lazymodel._show.page import plotly_source
from lazymodel._show.table import print_text

VERSION = 1  # of every schema: grows when a key goes or changes its meaning, not when one is added


def print_json(command: str, document: dict[str, Any]) -> None:
    """Prints a document, its schema first."""
    print_text(json.dumps({"schema": f"lazymodel.{command}/{VERSION}", **document}, indent=2))


def check_page(path: str | None) -> None:
    """That a page cannot be written there is said before any work is done for it."""
    if path is None:
        return
    plotly_source()
    if not Path(path).parent.is_dir():
        raise LazyModelError(f"cannot write {path}: {os.strerror(errno.ENOENT)}")
