"""Keeps TensorFlow's log off the standard error of a command, before the command's own output.

KerasHub imports TensorFlow for its tokenizers, and TensorFlow logs, from C++, its build options and that there is no
CUDA. Responsible for imports and starts of our commands only; logs of a user's own program are up to the user.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Generator

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"  # 0 also shows lines of the level INFO; JAX sets 1 if the user set nothing

# TensorFlow 2.21 logs these at any level: lines of the level INFO, and one that these come too early.
_NOISE = re.compile(
    rb"I\d{4} [\d:.]+ +\d+ [\w./-]+\.cc:\d+\] .*|WARNING: All log messages before absl::InitializeLog.*"
)


@contextlib.contextmanager
def quiet_tensorflow() -> Generator[None, None, None]:
    """Within the block, TensorFlow's import log is not shown; all other output is shown at the end."""
    if os.environ.setdefault(_LEVEL, "1") == "0":
        yield
        return
    with tempfile.TemporaryFile() as caught:
        sys.stderr.flush()
        shown = os.dup(2)
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(shown, 2)
            caught.seek(0)
            rest = b"".join(line for line in caught if not _NOISE.fullmatch(line.rstrip(b"\r\n")))
            with contextlib.suppress(OSError):  # the reader has gone
                os.write(shown, rest)
            os.close(shown)
