"""The methods `quantize` and `lora`: the framework changes the layers of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lazymodel._abstract.spec import AnyModel


def quantize(model: AnyModel, how: Any, filters: str | Sequence[str] | Callable[[Any], bool] | None = None) -> AnyModel:
    """The quantized model: a kernel is quantized while it is read, and never exists whole in floating point.

    For Keras models without other changes: before `lora`, `shard`, `with_optimizer`, `reinitialize`. The materialized
    model is equal bit for bit to the framework's own quantization of the loaded model.

    Args:
        how: `"int8"`, `"int4"`, `"float8"` or a `keras.quantizers.QuantizationConfig`. Schemes that calibrate with
            data (GPTQ, AWQ) need the loaded model. The user's own quantizer in a configuration is run at once, with
            one layer's weights read at a time. `"int4"` stores the kernels of `EinsumDense` as matrices, so rules
            for their float shapes do not fit; `lazymodel.auto()` does.
        filters: Selects layers, like the `filters` of `keras.Model.quantize`.

    Raises:
        LazyModelError: The model has no layers that can be quantized in this way, or has other changes already.

    Example:
        >>> abstract = lk.abstract_from_preset(keras_hub.models.GemmaBackbone, "preset")
        >>> abstract.quantize("int8").nbytes < abstract.nbytes / 2
        True
    """
    return model.framework.quantize(model, how, filters)


def lora(model: AnyModel, rank: int, targets: str | None = None) -> AnyModel:
    """The model with LoRA pairs, initialized on their devices and split like their kernels unless a rule matches them.

    For Keras models, like `model.backbone.enable_lora(rank)` after loading: only the pairs are trained.
    It comes after `quantize` and before `shard`, `with_optimizer` and `reinitialize`.

    Args:
        rank: The rank of the pairs.
        targets: Regex of whole paths (`re.fullmatch`): the layers whose kernel or embeddings it matches get a pair.
            None is the query and value projections, or the default of the backbone.

    Raises:
        LazyModelError: The rank is not a positive integer, no layer is a target, a target cannot have a pair, or the
            model has other changes already.

    Example:
        >>> tuned = lk.abstract_from_preset(keras_hub.models.GemmaBackbone, "preset").lora(4).shard(mesh, lm.auto())
        >>> [variable.shape for variable in tuned.values() if variable.trainable][:2]
        [(2, 16, 4), (4, 8)]
    """
    return model.framework.lora(model, rank, targets)
