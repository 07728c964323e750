"""`lazymodel inspect`: what is in a checkpoint, and what is wrong with it.

Responsible for what the command takes and prints; what is found is `checkpoints._inspect`'s matter.
"""

from __future__ import annotations

import argparse
from typing import Any

from lazymodel._cli.output import check_page, show
from lazymodel._cli.storage import add_storage_options, storage_options
from lazymodel.checkpoints._inspect import inspect_checkpoint


def add_inspect_parser(commands: Any) -> None:
    """Adds the command to `lazymodel`."""
    parser = commands.add_parser(
        "inspect",
        help="what is in a checkpoint, and what is wrong with it",
        description="Lists a checkpoint's files, tensors and metadata and everything that is wrong with it. Reads "
        "headers only. Exit status: 0 all is well, 1 problems were found, 2 there is no checkpoint.",
        epilog="example: lazymodel inspect model.safetensors --verify",
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a file, a folder or a URL, as for lazymodel.open_checkpoint"
    )
    add_storage_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="hash the files, too, and compare with the hashes that a Hugging Face cache or download, or a manifest "
        "such as SHA256SUMS, states; reads every file once",
    )
    parser.add_argument("--html", metavar="FILE", help="write a page, too")
    parser.set_defaults(run=_inspect)


def _inspect(arguments: argparse.Namespace) -> int:
    check_page(arguments.html)
    summary = inspect_checkpoint(arguments.checkpoint, storage_options(arguments), verify=arguments.verify)
    show(arguments, "inspect", summary)
    return 1 if summary.problems else 0
