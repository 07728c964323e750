"""Paths of variables: from a pytree's keys, made unique, in the form for rules, and patterns of paths with captures."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard, cast

import jax

from lazymodel._errors import LazyModelError

Captures: TypeAlias = "dict[str, str]"
PathOf: TypeAlias = "Callable[[Sequence[Any]], str]"  # names a leaf from its `jax.tree_util` key path

OPTIMIZER = "optimizer/"  # prefix of the paths of optimizer state


def path_text(path: Sequence[Any]) -> str:
    """A `jax.tree_util` key path as text: dict keys, indexes and attribute names joined by `/`."""
    parts: list[str] = []
    for key in path:
        names = (getattr(key, attribute) for attribute in ("key", "idx", "name") if hasattr(key, attribute))
        parts.append(str(next(names, key)))
    return "/".join(parts) or "value"


def is_trained_pair(tree: Any) -> TypeGuard[tuple[Any, Any]]:
    """Returns True for a pair of a model and an Optax state, such as `with_optimizer` materializes to."""
    return type(tree) is tuple and len(tree) == 2 and _is_state(tree[1]) and not _is_state(tree[0])


def _is_state(tree: Any) -> bool:
    """Returns True for a named tuple whose name ends in `State`, as all of Optax' do, and for a tuple with one."""
    if not isinstance(tree, tuple):
        return False
    if hasattr(cast(Any, tree), "_fields"):
        return type(cast(Any, tree)).__name__.endswith("State")
    return any(map(_is_state, cast("tuple[Any, ...]", tree)))


def trained_path(path: str) -> str:
    """The path in a pair of model and optimizer: `0/kernel` → `kernel`, `1/0/mu/kernel` → `optimizer/0/mu/kernel`."""
    part, _, rest = path.partition("/")
    return (OPTIMIZER if part == "1" else "") + (rest or "value")


def path_of(tree: Any) -> PathOf:
    """The function that names the leaves of a tree."""
    return (lambda keys: trained_path(path_text(keys))) if is_trained_pair(tree) else path_text


def unique_paths(paths: Sequence[str]) -> list[str]:
    """Makes repeated paths unique, in order: `a`, `a` → `a`, `a#2`."""
    unique = list(paths)
    while len(set(unique)) != len(unique):  # once is not enough if "a#2" is another variable's own name
        seen: dict[str, int] = {}
        for index, path in enumerate(unique):
            seen[path] = seen.get(path, 0) + 1
            unique[index] = path if seen[path] == 1 else f"{path}#{seen[path]}"
    return unique


def rule_path(path: str) -> str:
    """The path without the `#2` that distinguishes equal paths."""
    return re.sub(r"#\d+$", "", path)


def matched_paths(pattern: str, paths: Iterable[str], error: type[Exception], what: str) -> list[str]:
    """The paths that a regular expression matches completely; raises `error`, naming `what`, if it is not one."""
    try:
        compiled = re.compile(pattern)
    except (re.error, TypeError) as problem:
        raise error(f"{what}={pattern!r} is not a regular expression: {problem}") from problem
    return [path for path in paths if compiled.fullmatch(rule_path(path))]


def flatten_paths(tree: Any, *, only: tuple[type, ...] = (object,)) -> dict[str, Any]:
    """A pytree's leaves by path, named as `build_abstract` names variables: keys and indexes joined by `/`."""
    name = path_of(tree)
    leaves = [(keys, leaf) for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0] if isinstance(leaf, only)]
    paths = unique_paths([name(keys) for keys, _ in leaves])
    return {path: leaf for path, (_, leaf) in zip(paths, leaves, strict=True)}


class Template:
    """A name with captures: `{layer}` stands for text without `/` and `.`, `{rest...}` for any text.

    With `regex`, the text outside of captures is a regular expression, whose own braces contain numbers.
    """

    def __init__(self, text: str, *, regex: bool = False) -> None:
        if not isinstance(cast(Any, text), str):
            kind = "path regex" if regex else "name"
            raise LazyModelError(f"a pattern is a {kind}, with captures such as {{layer}}; got {text!r}")
        self.text = text
        capture = r"\{[A-Za-z_]\w*(?:\.\.\.)?\}" if regex else r"\{[^{}]*\}"
        self._parts: list[str] = re.split(f"({capture})", text)
        self.captures: tuple[str, ...] = tuple(dict.fromkeys(map(_name, self._parts[1::2])))
        if bad := [name for name in self.captures if not name.isidentifier()]:
            raise LazyModelError(f"{text!r}: a capture is a name in braces, such as {{layer}}; found {{{bad[0]}}}")
        pattern, seen = "", set[str]()
        for index, part in enumerate(self._parts):
            name = _name(part)
            if index % 2 == 0:
                pattern += part if regex else re.escape(part)
            else:
                pattern += f"(?P={name})" if name in seen else f"(?P<{name}>{'.+' if '...' in part else '[^/.]+'})"
                seen.add(name)
        try:
            self._regex = re.compile(pattern, 0 if regex else re.DOTALL)
        except re.error as error:
            raise LazyModelError(f"pattern {text!r} is not a regular expression: {error}") from error

    def match(self, name: str) -> Captures | None:
        """The text of each capture; None if the name does not match."""
        found = self._regex.fullmatch(name)
        return None if found is None else found.groupdict("")

    def fill(self, captures: Mapping[str, str]) -> str:
        """The name, with the known captures filled in."""
        return "".join(captures.get(_name(part), part) if index % 2 else part for index, part in enumerate(self._parts))


def _name(part: str) -> str:
    return part.strip("{}").removesuffix("...")
