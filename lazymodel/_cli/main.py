"""The command line: `lazymodel COMMAND …`, also as `python -m lazymodel`.

Responsible for arguments, exit statuses and where output goes; what a command does is a function elsewhere.

Exit statuses: 0 all is well; 1 the command found something wrong, and printed it; 2 wrong usage, nothing is there to
work on, or an exception in what was given, such as a function that builds a model; 130 interrupted.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import traceback
import types
from collections.abc import Sequence

from lazymodel._cli.completion import add_completion_parser
from lazymodel._cli.convert import add_convert_parser
from lazymodel._cli.diff import add_diff_parser
from lazymodel._cli.doctor import add_doctor_parser
from lazymodel._cli.inspect import add_inspect_parser
from lazymodel._cli.plan import add_plan_parser
from lazymodel._errors import DoesNotFitError, LazyModelError
from lazymodel._version import VERSION

_OURS = ("lazymodel", "lazymodel_flax", "lazymodel_keras")
_EXAMPLES = """\
examples:
  lazymodel inspect model.safetensors                what is in a checkpoint, and what is wrong with it
  lazymodel plan config.json --topology v5e-8        whether a model fits, before anything is rented
  lazymodel convert folder model.weights.h5          a checkpoint as another one, of any format
  lazymodel diff before.safetensors after/           what is different between two checkpoints
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
    except (Exception, SystemExit) as error:  # a function of the user's that exits with 0 has built nothing, either
        _print_own_traceback(error)
        return 2


def _print_own_traceback(error: BaseException) -> None:
    """Prints the traceback of an exception in a user's code, without the frames of ours that lead there."""
    chained: BaseException | None = error
    while chained is not None:
        entries: list[types.TracebackType] = []
        entry = chained.__traceback__
        while entry is not None:
            entries.append(entry)
            entry = entry.tb_next
        theirs = itertools.dropwhile(lambda entry: _package(entry) in (*_OURS, "jax", "importlib"), entries)
        kept = [entry for entry in theirs if _package(entry) not in _OURS]
        if kept or isinstance(chained, SyntaxError):  # otherwise it is a mistake of ours
            chained.__traceback__ = None
            for entry in reversed(kept):
                own = types.TracebackType(chained.__traceback__, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
                chained.__traceback__ = own
        chained = chained.__cause__ or chained.__context__
    traceback.print_exception(error)


def _package(entry: types.TracebackType) -> str:
    return entry.tb_frame.f_globals.get("__name__", "").partition(".")[0]


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="lazymodel",
        description="Look at checkpoints and models before loading, and convert them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lazymodel {VERSION}")
    commands = parser.add_subparsers(metavar="COMMAND")
    add_inspect_parser(commands)
    add_plan_parser(commands)
    add_convert_parser(commands)
    add_diff_parser(commands)
    add_doctor_parser(commands)
    add_completion_parser(commands, parser)
    return parser
