"""`--storage-option KEY=VALUE`: what the store of a URL is opened with, said on a command line."""

from __future__ import annotations

import argparse
from typing import Any

from lazymodel._errors import LazyModelError


def add_storage_options(parser: argparse.ArgumentParser) -> None:
    """Adds the option to a command."""
    parser.add_argument(
        "--storage-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="for a URL: one of the storage_options of lazymodel.open_checkpoint, such as region=eu-west-1 or "
        "client_options.allow_http=true; may be given several times. Credentials are better kept in the environment, "
        "where obstore finds them and nobody else sees them",
    )


def storage_options(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """What was given, as a mapping; a dot in a key leads into an inner one. None where nothing was.

    Raises:
        LazyModelError: It is no key and value, or two of them do not go together. Values, which may be secrets, are
            not shown.
    """
    options: dict[str, Any] = {}
    for text in arguments.storage_option:
        key, equals, value = text.partition("=")
        *outer, last = key.split(".")
        if not equals or not all((*outer, last)):
            raise LazyModelError("cannot read a --storage-option; write name and value, such as region=eu-west-1")
        inner = options
        for name in outer:
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                raise LazyModelError(f"--storage-option {key!r} and one for {name!r} itself were given; leave one out")
        if last in inner:
            raise LazyModelError(f"--storage-option {key!r} was given twice; leave one out")
        inner[last] = {"true": True, "false": False}.get(value.lower(), value)
    return options or None
