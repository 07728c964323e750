"""`lazymodel diff`: compares two checkpoints.

Responsible for the command's arguments and output; `research/_diff` compares.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from lazymodel._cli.output import JSON, STORAGE_OPTION, add_command, show, storage_options
from lazymodel._remote.url import is_url
from lazymodel.checkpoints import open_checkpoint
from lazymodel.research._diff import diff


def add_diff_parser(commands: Any) -> None:
    """Adds the command to `lazymodel`."""
    description = (
        "Compares names, shapes, dtypes and values, reading both chunk by chunk. Exit status, as of diff: 0 they are "
        "the same, 1 they differ, 2 one cannot be read."
    )
    example = "example: lazymodel diff before.safetensors after/ --tolerance 0.01"
    option = add_command(commands, "diff", _diff, "compare two checkpoints", description, example)
    option("a", "A", "a file, a folder or a URL, as for open_checkpoint")
    option("b", "B", "likewise")
    option(*STORAGE_OPTION, action="append")
    option(*JSON)
    option(
        "--tolerance",
        "RELATIVE",
        "treat elements as equal that differ by no more than this times the larger of the two, such as 0.01, and "
        "ignore dtypes; by default, dtypes and bytes must be the same",
        type=float,
    )


def _diff(arguments: argparse.Namespace) -> int:
    options, paths = storage_options(arguments), (arguments.a, arguments.b)
    needless = not any(map(is_url, paths))  # then opening raises for options
    with contextlib.ExitStack() as stack:
        a, b = (open_checkpoint(path, options if needless or is_url(path) else None) for path in paths)
        stack.enter_context(a)
        stack.enter_context(b)
        found = diff(a, b, tolerance=arguments.tolerance)
    show(arguments, "diff", found)
    return 1 if found else 0
