"""The command line: `lazymodel COMMAND …`, also as `python -m lazymodel`.

Responsible for arguments, exit statuses and where output goes; what a command does is a function elsewhere.

Exit statuses: 0 all is well; 1 the command found something wrong, and printed it; 2 wrong usage, or nothing is there
to work on; 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lazymodel._cli.completion import add_completion_parser
from lazymodel._cli.doctor import add_doctor_parser
from lazymodel._cli.inspect import add_inspect_parser
from lazymodel._cli.plan import add_plan_parser
from lazymodel._errors import DoesNotFitError, LazyModelError
from lazymodel._version import VERSION

_EXAMPLES = """\
examples:
  lazymodel inspect model.safetensors                what is in a checkpoint, and what is wrong with it
  lazymodel plan config.json --topology v5e-8        whether a model fits, before anything is rented
  lazymodel doctor                                   what is installed here, and what is missing for what

`lazymodel COMMAND --help` says more of each.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command, of the process's arguments if none are given, and returns its exit status."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if "run" not in arguments:
        parser.print_help()
        return 0
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


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="lazymodel",
        description="Look at checkpoints and models before loading.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lazymodel {VERSION}")
    commands = parser.add_subparsers(metavar="COMMAND")
    add_inspect_parser(commands)
    add_plan_parser(commands)
    add_doctor_parser(commands)
    add_completion_parser(commands, parser)
    return parser
