"""Formats that are known and not read, by the names of their files: what to make of them instead."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

# Patterns of names, what such a file is, and how it becomes one that is read. The first that fits is meant.
_FOREIGN = (
    (
        ("*.pt", "*.pth", "*.bin", "*.ckpt"),
        "a pickle of PyTorch, which can run any code when it is read",
        "save it as safetensors: "
        '`safetensors.torch.save_file(torch.load(path, weights_only=True, map_location="cpu"), "model.safetensors")`',
    ),
    (
        ("*.index", "*.data-?????-of-?????", "saved_model.pb"),
        "a checkpoint of TensorFlow",
        'load it there and save it as Keras weights: `model.save_weights("model.weights.h5")`',
    ),
    (
        ("*.msgpack", "checkpoint", "checkpoint_*"),
        "Flax' msgpack",
        'save it as safetensors: `lm.save(flax.serialization.msgpack_restore(open(path, "rb").read()), '
        '"model.safetensors")`',
    ),
    (
        ("*.eqx",),
        "leaves of an Equinox model, which have no names",
        "load it there and save it as safetensors: `lm.save(eqx.tree_deserialise_leaves(path, model), "
        '"model.safetensors")`',
    ),
    (
        ("*.pkl", "*.pickle"),
        "a Python pickle, which can run any code when it is read",
        'if you trust it, load it and save its arrays as safetensors: `lm.save(tree, "model.safetensors")`',
    ),
)


def foreign(names: Iterable[str]) -> str:
    """What the first of these file names says that the file is, and the mend; empty if none says anything."""
    there = sorted(names)
    for patterns, what, mend in _FOREIGN:
        for name in there:
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                return f"{name} looks like {what}; {mend}. "
    return ""
