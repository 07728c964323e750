"""What a command line says of something in Python: `module:name`, and dtypes by their short names."""

from __future__ import annotations

import importlib
import os
import re
import sys
from typing import Any

from lazymodel._errors import LazyModelError
from lazymodel._show.text import closest

_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32", "f32": "float32"}


def dtype_name(text: str) -> str:
    """The name that NumPy has for a dtype, also of one that is said in short, as `bf16`; anything else as it is."""
    return _SHORT_DTYPES.get(text.lower(), text)


def is_imported(text: str) -> bool:
    """Whether a text is such a name, and no file's."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", text) is not None and not os.path.exists(text)


def imported(text: str) -> Any:
    """What a module has by a name; modules are looked for in the current folder, too, as `python -m` has it."""
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
