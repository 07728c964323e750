"""GPT-OSS' experts, decoded while they are read: KerasHub's converter would hold them in float32.

Responsible for handing that converter a lazy tensor where it decodes. The numbers are its own function's, looked up
(`lazymodel._mxfp4`).
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from lazymodel import LazyModelWarning, LazyTensor
from lazymodel._mxfp4 import CODES, Decode, Mxfp4Leaf, decoded_pairs
from lazymodel_keras import _upstream


def _lazy_decode(decode: Decode) -> Decode:
    """The converter's function, which for lazy tensors returns a lazy tensor; what it would refuse, it still does."""
    table = functools.cache(lambda: decoded_pairs(decode))

    @functools.wraps(decode)
    def decode_lazily(blocks: Any, scales: Any) -> Any:
        lazy = isinstance(blocks, LazyTensor) and isinstance(scales, LazyTensor)
        if (
            lazy
            and blocks.dtype == scales.dtype == np.uint8
            and blocks.shape == (*scales.shape, CODES)
            and scales.ndim == 3
            and (found := table()) is not None
        ):
            return LazyTensor(Mxfp4Leaf(blocks, scales, found))
        return decode(blocks, scales)

    return decode_lazily


def patch(undo: contextlib.ExitStack, active: Callable[[], Any]) -> None:
    """Has KerasHub's converter of GPT-OSS decode lazily until `undo` closes, where `active()` is a recording."""
    from lazymodel_keras._patches import replace

    converter = _upstream.gpt_oss_converter()
    if converter is None:
        return
    original = converter.convert_weights
    lazily = _upstream.with_gpt_oss_decoder(original, _lazy_decode)

    @functools.wraps(original)
    def convert_weights(*args: Any, **kwargs: Any) -> Any:
        if active() is None:
            return original(*args, **kwargs)
        if lazily is None:
            warnings.warn(
                "this KerasHub decodes GPT-OSS' experts in a way that lazymodel does not know: the host holds all of "
                "them decoded, until the model is materialized",
                LazyModelWarning,
                stacklevel=2,
            )
            return original(*args, **kwargs)
        return lazily(*args, **kwargs)

    replace(undo, converter, "convert_weights", convert_weights)
