"""The command line: `lazymodel COMMAND …`, also as `python -m lazymodel`.

Responsible for arguments, exit statuses and where output goes; what a command does is a function elsewhere.

Exit statuses: 0 all is well; 1 the command found something wrong, and printed it; 2 wrong usage, or nothing is there
to work on; 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from lazymodel._cli_plan import add_parser as add_plan_parser
from lazymodel._errors import DoesNotFitError, LazyModelError
from lazymodel._table import print_text


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status.

    Args:
        argv: The arguments; None takes the process's.

    Raises:
        SystemExit: With status 2, for arguments that are wrong; with 0, for `--help`.
    """
    parser = argparse.ArgumentParser(prog="lazymodel", description="Look at checkpoints and models before loading.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    inspect = commands.add_parser(
        "inspect",
        help="what is in a checkpoint, and what is wrong with it",
        description="Lists a checkpoint's files, tensors and metadata and everything that is wrong with it. Reads "
        "headers only. Exit status: 0 all is well, 1 problems were found, 2 there is no checkpoint.",
    )
    inspect.add_argument("checkpoint", metavar="CHECKPOINT", help="a file or folder, as for lazymodel.open_checkpoint")
    inspect.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    inspect.add_argument(
        "--verify",
        action="store_true",
        help="hash the files, too, and compare with the hashes that a Hugging Face cache or download, or a manifest "
        "such as SHA256SUMS, states; reads every file once",
    )
    inspect.set_defaults(run=_inspect)
    add_plan_parser(commands)

    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except DoesNotFitError as error:  # found by a compiler that gave no numbers for a plan
        print(f"lazymodel: {error}", file=sys.stderr)
        return 1
    except LazyModelError as error:
        print(f"lazymodel: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130  # as shells report a process that was ended by SIGINT


def _inspect(arguments: argparse.Namespace) -> int:
    from lazymodel.checkpoints._inspect import inspect_checkpoint

    summary = inspect_checkpoint(arguments.checkpoint, verify=arguments.verify)
    print_text(json.dumps(summary.to_dict(), indent=2) if arguments.json else str(summary))
    return 1 if summary.problems else 0
