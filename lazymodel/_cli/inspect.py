"""`lazymodel inspect`: lists the content of a checkpoint, and its problems.

Responsible for the command's arguments and output; `checkpoints._inspect` inspects.
"""

from __future__ import annotations

import argparse
from typing import Any

from lazymodel._cli.output import JSON, STORAGE_OPTION, add_command, check_page, show, storage_options
from lazymodel.checkpoints._inspect import inspect_checkpoint


def add_inspect_parser(commands: Any) -> None:
    """Adds the command to `lazymodel`."""
    help = "list the content of a checkpoint, and its problems"
    description = (
        "Lists a checkpoint's files, tensors and metadata and all of its problems. Reads headers only. "
        "Exit status: 0 no problems, 1 problems were found, 2 there is no checkpoint."
    )
    example = "example: lazymodel inspect model.safetensors --verify"
    option = add_command(commands, "inspect", _inspect, help, description, example)
    option("checkpoint", "CHECKPOINT", "a file, a folder or a URL, as for lazymodel.open_checkpoint")
    option(*STORAGE_OPTION, action="append")
    option(*JSON)
    option(
        "--verify",
        None,
        "also hash the files, and compare with the hashes of a Hugging Face cache or download, or of a manifest such "
        "as SHA256SUMS; reads every file once",
    )
    option("--html", "FILE", "also write a page")


def _inspect(arguments: argparse.Namespace) -> int:
    check_page(arguments.html)
    summary = inspect_checkpoint(arguments.checkpoint, storage_options(arguments), verify=arguments.verify)
    show(arguments, "inspect", summary)
    return 1 if summary.problems else 0
