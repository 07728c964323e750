"""The verb `stream`: a model's variables one after the other, none of them kept, for models larger than the machine.

What becomes of each variable is decided as for `materialize`. Where init programs can be cut into bands, variables take
the way of tensors in files (`_mapping/values`), under the same host budget; other programs run one at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import jax

from lazymodel._abstract.host_arrays import host_array
from lazymodel._abstract.placement import device_shardings, stays_on_host
from lazymodel._abstract.spec import ModelSpec
from lazymodel._devices.agreement import agreement
from lazymodel._devices.hardware import require_live
from lazymodel._mapping.given import flat_checkpoint
from lazymodel._mapping.match import Choice, choose_and_warn
from lazymodel._mapping.values import initial_values, is_banded, read_as, refuse_derived
from lazymodel._materialize.finish import finished
from lazymodel._materialize.stream import StreamItem
from lazymodel._materialize.stream import stream as read
from lazymodel._materialize.tell import tell
from lazymodel._programs.keys import as_keys
from lazymodel._programs.programs import run_recipes
from lazymodel._show.text import parse_budget
from lazymodel._tensors.casting import SAFE
from lazymodel._tensors.lazy import lazy
from lazymodel._tensors.shards import on_host

_BUDGET = 256 << 20  # bytes of the host's memory, within which variables are read ahead


def stream(
    model: ModelSpec,
    checkpoint: Any = None,
    *,
    initialize: str | None = None,
    strict: bool = True,
    cast: str = SAFE,
    max_host_memory: int | str | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yields (path, array) one variable at a time, initialized or loaded, and keeps none: the model may be larger than
    the machine.

    Each array is what `materialize` makes of the variable, bit for bit and sharded alike. On CPU devices at most two
    variables are there at once, the one that was yielded and the next, with what is read ahead within the budget; but
    initializing what has no bands (factorizations, sums, rows that do not fill vector registers) takes about four times
    its bytes.

    The order is the same in every process and run: what is initialized first, then what is loaded, as it lies in its
    files. Where several processes share the devices, all of them call this and take as many arrays; each reads its own
    shards.

    Args:
        checkpoint: As for `materialize`.
        initialize: As for `materialize`.
        strict: As for `materialize`.
        cast: As for `materialize`.
        max_host_memory: As for `materialize`, in bytes, or `"1GiB"`; None is 256 MiB.

    Raises:
        LazyModelError: At once: the model is sharded over devices that are only planned for, or a variable is computed
            from the values of others, as some optimizer state is.
        CheckpointError: At once, what `materialize` finds wrong before it reads; while iterating, what cannot be read.

    Example:
        >>> for path, array in sharded.stream():
        ...     print(path, array.shape, array.sharding.spec)
        down/kernel (256, 64) P('model',)
        up/kernel (64, 256) P(None, 'model')
    """
    require_live(model.variables)
    shardings = device_shardings(model.variables)
    budget = _BUDGET if max_host_memory is None else parse_budget(max_host_memory)
    with agreement([variable.sharding for variable in model.values()], done="streamed") as stage:
        checkpoint = flat_checkpoint(checkpoint)
        choice = choose_and_warn(model, checkpoint, initialize=initialize, strict=strict, cast=cast)
        refuse_derived(model, choice)
        tell(stage, choice)
        return _arrays(model, choice, shardings, budget)


def _arrays(
    model: ModelSpec, choice: Choice, shardings: Mapping[str, jax.sharding.Sharding], budget: int
) -> Generator[tuple[str, Any]]:
    tensors = {path: read_as(model[path], source, choice) for path, source in choice.sources.items()}
    for recipe in choice.recipes:
        here = all(on_host(device) for path in recipe.paths for device in shardings[path].device_set)
        if here and is_banded(recipe):
            tensors = initial_values(model, recipe) | tensors
            continue
        for path, array in run_recipes([recipe], shardings, model.programs):
            done = jax.block_until_ready(finished(array, model[path]))
            del array
            yield path, done
            del done
    order = {path: index for index, path in enumerate(model)}
    items = [
        StreamItem(path, lazy(tensors[path], path), *model[path].stored, shardings[path])
        for path in sorted(tensors, key=order.__getitem__)
        if not stays_on_host(model[path])
    ]
    with contextlib.closing(read(items, max_host_memory=budget)) as arriving:
        for path, array in arriving:
            done = finished(as_keys(array, model[path].dtype), model[path])
            del array  # the caller's alone, so that it is gone when the next one has come
            yield path, done
            del done
    for path, tensor in tensors.items():
        if stays_on_host(model[path]):
            yield path, host_array(model[path], tensor)
