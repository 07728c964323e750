"""The command line: `lazymodel COMMAND …`, also as `python -m lazymodel`.

Responsible for arguments, exit statuses and where output goes; what a command does is a function elsewhere.

Exit statuses: 0 all is well; 1 the command found something wrong, and printed it; 2 wrong usage, or nothing is there
to work on; 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lazymodel._cli.convert import add_convert_parser
from lazymodel._cli.inspect import add_inspect_parser
from lazymodel._cli.plan import add_plan_parser
from lazymodel._errors import DoesNotFitError, LazyModelError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command, of the process's arguments if none are given, and returns its exit status."""
    parser = argparse.ArgumentParser(prog="lazymodel", description="Look at checkpoints and models before loading.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    add_inspect_parser(commands)
    add_plan_parser(commands)
    add_convert_parser(commands)

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
