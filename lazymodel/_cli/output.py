"""What commands print for programs: one JSON document that names its schema, see docs/command_line.md."""

from __future__ import annotations

import argparse
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


def show(arguments: argparse.Namespace, command: str, found: Any) -> None:
    """Prints what a command found, as text or with --json, and writes its page where the command has --html."""
    if getattr(arguments, "html", None):
        found.save(arguments.html)
    if arguments.json:
        print_json(command, found.to_dict())
    else:
        print_text(str(found))


def check_page(path: str | None) -> None:
    """That a page cannot be written there is said before any work is done for it."""
    if path is None:
        return
    plotly_source()
    if not Path(path).parent.is_dir():
        raise LazyModelError(f"cannot write {path}: {os.strerror(errno.ENOENT)}")
