"""`storage_options`: what can be said of them without asking a store, and which of them one does not take."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any, cast

from lazymodel._errors import CheckpointError
from lazymodel._remote.requests import Retries
from lazymodel._remote.url import Url
from lazymodel._show.text import listed

_PREFIXES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
# Source: `ClientConfigKey` of the object_store crate; those whose value is text, or that obstore reads from text.
_CLIENT_OPTIONS = (
    *("allow_http", "allow_invalid_certificates", "connect_timeout", "proxy_ca_certificate", "proxy_excludes"),
    *("proxy_url", "timeout", "user_agent"),
)


def checked_options(url: Url, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """`storage_options` as far as they can be checked without obstore, which checks the rest."""
    given: Any = {} if options is None else options
    if not isinstance(given, Mapping):
        raise CheckpointError(
            f"{url.text}: expected storage_options to be a mapping of names to values, found {type(given).__name__}"
        )
    checked = {str(name): value for name, value in cast("Mapping[Any, Any]", given).items()}
    for name in ("client_options", "retry_config"):
        if not isinstance(checked.get(name) or {}, Mapping):
            raise CheckpointError(
                f"{url.text}: expected storage_options[{name!r}] to be a mapping, found {type(checked[name]).__name__}"
            )
    unknown = [repr(name) for name in checked if name not in ("client_options", "retry_config")]
    if unknown and url.kind in ("http", "https", "hf"):
        mend = "Credentials of the hub are those of `hf auth login` or HF_TOKEN. " if url.kind == "hf" else ""
        raise CheckpointError(
            f"{url.text}: expected storage_options 'client_options' and 'retry_config', found {listed(unknown)}. {mend}"
            "Headers are client_options['default_headers']"
        )
    with contextlib.suppress(TypeError, ValueError, AttributeError):
        Retries(checked.get("retry_config"))
        return checked
    raise CheckpointError(
        f"{url.text}: expected storage_options['retry_config'] as obstore takes it, with numbers and durations, found "
        "something else"
    )


def client_from_environment(url: Url) -> dict[str, str]:
    """What environment variables such as `AWS_ALLOW_HTTP` say of connections to a cloud.

    obstore takes them from there only where it is given no `client_options` at all.
    """
    prefix = _PREFIXES.get(url.kind)
    if prefix is None:
        return {}
    found = {name: os.environ.get(f"{prefix}{name.upper()}") for name in _CLIENT_OPTIONS}
    return {name: value for name, value in found.items() if value}


def refused_options(
    opened: Callable[..., Any], client_options: Mapping[str, Any], options: Mapping[str, Any]
) -> list[str]:
    """Names of those with which nothing can be opened, each tried by itself; `opened` takes both."""

    def fails(client_options: Mapping[str, Any], **options: Any) -> bool:
        try:
            opened(client_options, **options)
        except Exception:  # obstore's own, or Python's for a name or a value that it does not take
            return True
        return False

    if fails({}):  # for whatever else is wrong
        return []
    wrong = [f"client_options[{name!r}]" for name, value in client_options.items() if fails({name: value})]
    return wrong + [repr(name) for name, value in options.items() if fails({}, **{name: value})]
