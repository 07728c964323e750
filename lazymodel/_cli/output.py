"""What commands print for programs: one JSON document that names its schema, see docs/command_line.md."""

from __future__ import annotations

import json
from typing import Any

from lazymodel._show.table import print_text

VERSION = 1  # of every schema: grows when a key goes or changes its meaning, not when one is added


def print_json(command: str, document: dict[str, Any]) -> None:
    """Prints a document, its schema first."""
    print_text(json.dumps({"schema": f"lazymodel.{command}/{VERSION}", **document}, indent=2))
