"""`lazymodel completion SHELL`: a script that teaches a shell the commands and their options."""

from __future__ import annotations

import argparse
from typing import Any

from lazymodel._errors import LazyModelError


def add_completion_parser(commands: Any, all_commands: argparse.ArgumentParser) -> None:
    """Adds the command to `lazymodel`, whose parser is given."""
    parser = commands.add_parser(
        "completion",
        help="a script that teaches your shell these commands",
        description="Prints a script for a shell to complete commands and options. Needs the package shtab.",
        epilog='example, in ~/.bashrc: eval "$(lazymodel completion bash)"',
    )
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))

    def run(arguments: argparse.Namespace) -> int:
        try:
            import shtab
        except ImportError as error:
            raise LazyModelError("completion needs shtab: pip install shtab") from error
        print(shtab.complete(all_commands, arguments.shell))
        return 0

    parser.set_defaults(run=run)
