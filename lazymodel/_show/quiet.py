"""Nothing of TensorFlow's on the standard error of a command, before what the command has to say.

KerasHub imports TensorFlow for its tokenizers, and TensorFlow logs, from C++, what it was built for and that there is
no CUDA. Responsible for what commands of ours import and start; what a user's own program logs is the user's.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Generator

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"  # 0 asks for lines of the level INFO, too; JAX sets 1 where the user set nothing

# TensorFlow 2.21 logs these whatever the level: lines of the level INFO, and one that says that they come too early.
_NOISE = re.compile(
    rb"I\d{4} [\d:.]+ +\d+ [\w./-]+\.cc:\d+\] .*|WARNING: All log messages before absl::InitializeLog.*"
)


@contextlib.contextmanager
def quiet_tensorflow() -> Generator[None, None, None]:
    """Within the block, what TensorFlow logs of itself when it is imported is not shown; all else is, at the end."""
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
            with contextlib.suppress(OSError):  # nobody reads it
                os.write(shown, rest)
            os.close(shown)
