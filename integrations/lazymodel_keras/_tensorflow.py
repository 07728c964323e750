"""KerasHub without TensorFlow, whose import takes seconds."""

from __future__ import annotations

import sys
from typing import Any, cast

from lazymodel import LazyModelError
from lazymodel_keras._upstream import TENSORFLOW

_PACKAGES = ("tensorflow", "tensorflow_text")


def leave_out_tensorflow() -> None:
    """Keeps TensorFlow, although installed, from being imported: call it before anything imports `keras_hub`.

    KerasHub imports TensorFlow for `tf.data` and for older tokenizers. With KerasHub 0.32, loading, tokenizing,
    `generate`, and `predict` and `fit` of backbones work without it, with the same results. `predict` and `fit` of
    tasks need `pip install grain` then, and a `tf.data.Dataset` needs TensorFlow: KerasHub raises an error that names
    the package. A later `import tensorflow` raises ModuleNotFoundError.

    Raises:
        LazyModelError: TensorFlow was imported before.

    Example:
        >>> import subprocess, sys
        >>> code = "import sys, lazymodel_keras as lk; lk.leave_out_tensorflow(); import keras_hub; "
        >>> code += "print(sys.modules['tensorflow'])"
        >>> subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        'None\\n'
    """
    if any(sys.modules.get(name) for name in _PACKAGES):
        raise LazyModelError(
            "TensorFlow was imported before leave_out_tensorflow() was called. Call it first, above `import keras_hub` "
            "and other modules that import TensorFlow"
        )
    # None: the import system's word for a module that cannot be imported.
    cast("dict[str, Any]", sys.modules).update(dict.fromkeys(_PACKAGES))
    TENSORFLOW.executing_eagerly = lambda: True
