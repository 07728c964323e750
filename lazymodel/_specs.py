"""What people write for rules and specs: names of rules, and every form of spec, checked before any is used.

Responsible for reading and for saying what was meant instead. Whether a spec fits its variable is checked in
`_sharding`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, cast

from jax.experimental.layout import Format
from jax.sharding import PartitionSpec, Sharding

from lazymodel._auto import Auto, auto
from lazymodel._errors import ShardingError
from lazymodel._text import closest

_NAMED = {"auto": auto}


def named_rules(rules: Any, what: str = "rules") -> Any:
    """Rules that were given by name, or by the function that makes them; any other as they are.

    Raises:
        ShardingError: There are none of this name; `what` is the parameter that they were given as.
    """
    if rules is auto or rules is Auto:
        return auto()
    if not isinstance(rules, str):
        return rules
    if rules not in _NAMED:
        raise ShardingError(
            f"{what}={rules!r} is not known{closest(rules, _NAMED)}; rules by name are 'auto', which is lm.auto(). "
            f"A rule for paths is written {{{rules!r}: PartitionSpec(…)}}"
        )
    return _NAMED[rules]()


def check_is_spec(spec: Any, where: str) -> None:
    """Checks that it is any form of spec: PartitionSpec, sequence, None, a sharding, or Keras' TensorLayout.

    Raises:
        ShardingError: It is none, or has an entry that cannot be an axis; `where` names the rule that gave it.
    """
    if spec is None or isinstance(spec, PartitionSpec | Sharding | Format):
        return
    entries = getattr(spec, "axes", spec)
    if isinstance(entries, str):
        raise ShardingError(
            f"{where}: a spec is a PartitionSpec or a tuple of axis names; got {entries!r}. Write "
            f"PartitionSpec({entries!r}) to split the first dimension, PartitionSpec(None, {entries!r}) for the second"
        )
    if not isinstance(entries, Sequence):
        raise ShardingError(
            f"{where}: a spec is a PartitionSpec or a tuple of axis names; got {spec!r}. PartitionSpec() replicates"
        )
    for entry in cast("Sequence[Any]", entries):
        names = cast("Sequence[Any]", entry) if isinstance(entry, list | tuple) else (entry,)
        if not all(isinstance(name, Hashable) for name in names):
            raise ShardingError(f"{where}: an entry of a spec is an axis name, a tuple of them, or None; got {entry!r}")


def spec_entries(spec: Any) -> tuple[Any, ...]:
    """The entries of any form of spec that `check_is_spec` lets pass, but a sharding."""
    if spec is None:
        return ()
    entries = cast("Sequence[Any]", getattr(spec, "axes", spec))
    return tuple(tuple(cast("list[Any]", entry)) if isinstance(entry, list) else entry for entry in entries)
