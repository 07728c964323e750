"""Shared by commands: declaring options and printing results.

With --json, the result is one JSON document with the name of its schema, see docs/command_line.md.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lazymodel._errors import LazyModelError
from lazymodel._show.text import closest

_SHORT_DTYPES = {
    "bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16", "fp32": "float32", "f32": "float32",
    "float": "float32", "fp64": "float64", "f64": "float64", "double": "float64", "fp8_e4m3": "float8_e4m3fn",
    "f8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "f8_e5m2": "float8_e5m2",
}  # fmt: skip


def dtype_name(text: str) -> str:
    """NumPy's name of a dtype, also for a short name such as `bf16`; anything else unchanged."""
    return _SHORT_DTYPES.get(text.lower(), text)


def is_imported(text: str) -> bool:
    """Returns True if a text is a name for `imported`, and not a file."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", text) is not None and not os.path.exists(text)


def imported(text: str) -> Any:
    """Imports `module:name`; also finds modules in the current folder, like `python -m`."""
    module_name, _, name = text.partition(":")
    if not re.fullmatch(r"\w+(\.\w+)*:\w+", text):
        raise LazyModelError(f"expected MODULE:NAME, such as mappings:gemma, found {text!r}")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise LazyModelError(f"there is no module {error.name!r} (looking for {text})") from error
    finally:
        sys.path.remove(os.getcwd())
    if not hasattr(module, name):
        raise LazyModelError(f"module {module_name} has no function {name!r}{closest(name, vars(module))}")
    return getattr(module, name)


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], help: str, description: str, example: str
) -> Callable[..., None]:
    """Adds a command to `lazymodel`; returns a function that adds an option (flags, value, help, **more) to it.

    `value` is a placeholder, the choices, or None for a flag.
    """
    formatter = argparse.RawDescriptionHelpFormatter if "\n" in description else argparse.HelpFormatter
    parser = commands.add_parser(name, help=help, description=description, epilog=example, formatter_class=formatter)
    flags_by_name: dict[str, str] = {}
    parser.set_defaults(run=run, flags=flags_by_name)

    def option(flags: str, value: str | Sequence[str] | None, help: str, **more: Any) -> None:
        kind = "action" if value is None else "metavar" if isinstance(value, str) else "choices"
        added = parser.add_argument(*flags.split(), help=help, **{kind: value or "store_true", **more})
        flags_by_name[added.dest] = added.option_strings[0] if added.option_strings else ""

    return option


def in_options(text: str, flags: Mapping[str, str], *, names: bool = True) -> str:
    """Replaces parameters of Python in a message by the command's options: `batch=…` → `--batch`, `a=1` → `--a 1`.

    `names` are replaced without a value, too, if nothing else is likely to be called that.
    """
    call = r"\b(?:plan|shard|WhatIf|convert)\(((?:\w+=…,?\s*)+)\)"
    text = re.sub(call, lambda match: re.sub(r",\s*", " and ", match[1]), text)
    # A file of rules has no PartitionSpec, and no other parameters of `shard`.
    text = re.sub(r",? or pass on_unmatched='auto'[^.]*", "", text).replace("PartitionSpec()", "[]")
    for name, flag in sorted(flags.items(), key=lambda item: -len(item[0])):
        if flag:
            text = re.sub(rf"(?<![\w/.?&-]){name}=…", flag, text)
            text = re.sub(rf"(?<![\w/.?&-]){name}=(?:'([^'\s]*)'|(?=[\w.]))", rf"{flag} \1", text)
            if names and ("_" in name or " was given without " in text):
                text = re.sub(rf"(?<![\w/.?&'-]){name}(?![\w/=])", flag, text)
    return text.replace("--optimizer-on-host pinned_host", "--optimizer-on-host")


# Arguments of an option that several commands have.
JSON = ("--json", None, "print one JSON document instead of tables")
STORAGE_OPTION = (
    "--storage-option",
    "KEY=VALUE",
    "for a URL: one of the storage_options of lazymodel.open_checkpoint, such as region=eu-west-1 or "
    "client_options.allow_http=true; may be given several times. Keep credentials in the environment instead, "
    "where obstore finds them and nobody else sees them",
)


def storage_options(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """The given options as a mapping; a dot in a key leads into an inner one. None if there are none.

    Raises:
        LazyModelError: It is not a key and a value, or two of them conflict. Values, which may be secrets, are not
            shown.
    """
    options: dict[str, Any] = {}
    for text in arguments.storage_option or ():
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


VERSION = 1  # of every schema: grows if a key is removed or changes its meaning, not if one is added


def print_json(command: str, document: dict[str, Any]) -> None:
    """Prints a document, its schema first."""
    print_text(json.dumps({"schema": f"lazymodel.{command}/{VERSION}", **document}, indent=2))


def show(arguments: argparse.Namespace, command: str, found: Any, code: str = "") -> None:
    """Prints the result of a command, as text or with --json, and writes its page with --html.

    `code` is what the text of the result ends with, printed as it is.
    """
    if getattr(arguments, "html", None):
        found.save(arguments.html)
    if arguments.json:
        print_json(command, found.to_dict())
    else:
        print_text(in_options(str(found).removesuffix(code), arguments.flags, names=False) + code)


def check_page(path: str | None) -> None:
    """Raises LazyModelError early if a page cannot be written to a path."""
    if path is not None and not Path(path).parent.is_dir():
        raise LazyModelError(f"cannot write {path}: {os.strerror(errno.ENOENT)}")


def print_text(text: str) -> None:
    """Prints text: replaces characters missing in the terminal's encoding, and ignores a reader that has left."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "replace").decode(encoding), flush=True)
    except BrokenPipeError:
        # The interpreter flushes once more when it ends, and would raise.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
