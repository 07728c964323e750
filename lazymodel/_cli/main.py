"""The command line: `lazymodel COMMAND …`, also as `python -m lazymodel`.

Responsible for arguments, exit statuses and output streams; functions elsewhere implement the commands.

Exit statuses: 0 success; 1 the command found a problem, and printed it; 2 wrong usage, nothing to work on, or an
exception in the user's code, such as a function that builds a model; 130 interrupted.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import traceback
import types
from collections.abc import Sequence

from lazymodel._cli.convert import add_convert_parser
from lazymodel._cli.diff import add_diff_parser
from lazymodel._cli.doctor import add_doctor_parser
from lazymodel._cli.inspect import add_inspect_parser
from lazymodel._cli.output import add_command
from lazymodel._cli.plan import add_plan_parser
from lazymodel._errors import DoesNotFitError, LazyModelError
from lazymodel._version import VERSION


def _completion(arguments: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError as error:
        raise LazyModelError("completion needs shtab: pip install shtab") from error
    print(shtab.complete(make_parser(), arguments.shell))
    return 0


_OURS = ("lazymodel", "lazymodel_flax", "lazymodel_keras")
_EXAMPLES = """\
examples:
  lazymodel inspect model.safetensors                list the content of a checkpoint, and its problems
  lazymodel plan config.json --topology v5e-8        does a model fit, before any hardware is rented?
  lazymodel convert folder model.weights.h5          convert a checkpoint to another one, of any format
  lazymodel diff before.safetensors after/           compare two checkpoints
  lazymodel doctor                                   show what is installed, and packages missing for features

`lazymodel COMMAND --help` shows more about each.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command with these arguments, by default those of the process, and returns its exit status."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if "run" not in arguments:
        parser.print_help()
        return 0
    try:
        return arguments.run(arguments)
    except DoesNotFitError as error:  # raised by a compiler that gave no numbers for a plan
        print(f"lazymodel: {error}", file=sys.stderr)
        return 1
    except LazyModelError as error:
        print(f"lazymodel: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130  # the exit status of shells for SIGINT
    except (Exception, SystemExit) as error:  # a user's function that exits with 0 has not built anything either
        _print_own_traceback(error)
        return 2


def _print_own_traceback(error: BaseException) -> None:
    """Prints the traceback of an exception in a user's code, without our frames that lead there."""
    chained: BaseException | None = error
    while chained is not None:
        entries: list[types.TracebackType] = []
        entry = chained.__traceback__
        while entry is not None:
            entries.append(entry)
            entry = entry.tb_next
        theirs = itertools.dropwhile(lambda entry: _package(entry) in (*_OURS, "jax", "importlib"), entries)
        kept = [entry for entry in theirs if _package(entry) not in _OURS]
        if kept or isinstance(chained, SyntaxError):  # otherwise it is a bug of ours
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
    description = "Prints a script for a shell to complete commands and options. Needs the package shtab."
    example = 'example, in ~/.bashrc: eval "$(lazymodel completion bash)"'
    help = "print a script for shell completion of these commands"
    option = add_command(commands, "completion", _completion, help, description, example)
    option("shell", ("bash", "zsh", "tcsh"), "the shell")
    return parser
