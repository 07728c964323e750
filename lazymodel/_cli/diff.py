"""`lazymodel diff`: what is different between two checkpoints.

Responsible for what the command takes and prints; what is found is `_diff`'s matter.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from lazymodel._cli.output import show
from lazymodel._cli.storage import add_storage_options, storage_options
from lazymodel._diff import diff
from lazymodel._remote.url import is_url
from lazymodel.checkpoints import open_checkpoint


def add_diff_parser(commands: Any) -> None:
    """Adds the command to `lazymodel`."""
    parser = commands.add_parser(
        "diff",
        help="what is different between two checkpoints",
        description="Compares names, shapes, dtypes and values, reading both slab by slab. Exit status, as of diff: 0 "
        "they are the same, 1 they differ, 2 one cannot be read.",
        epilog="example: lazymodel diff before.safetensors after/ --tolerance 0.01",
    )
    for name in ("a", "b"):
        parser.add_argument(name, metavar=name.upper(), help="a file, a folder or a URL, as for open_checkpoint")
    add_storage_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="RELATIVE",
        help="take elements for equal that differ by no more than this times the larger of the two, such as 0.01, and "
        "dtypes for a matter of storage; without, dtypes and bytes must be the same",
    )
    parser.set_defaults(run=_diff)


def _diff(arguments: argparse.Namespace) -> int:
    options, paths = storage_options(arguments), (arguments.a, arguments.b)
    needless = not any(map(is_url, paths))  # which opening says
    with contextlib.ExitStack() as stack:
        a, b = (open_checkpoint(path, options if needless or is_url(path) else None) for path in paths)
        stack.enter_context(a)
        stack.enter_context(b)
        found = diff(a, b, tolerance=arguments.tolerance)
    show(arguments, "diff", found)
    return 1 if found else 0
