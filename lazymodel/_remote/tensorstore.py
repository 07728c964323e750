"""Specifications of locations for TensorStore, which reads arrays by itself, with its own drivers.

Its drivers for S3, Google Cloud Storage and HTTP take credentials from the environment, as obstore does. Options from
`storage_options` are passed to them if they have an equivalent.
Specifications: https://google.github.io/tensorstore/kvstore/index.html
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lazymodel._errors import CheckpointError
from lazymodel._remote.path import Location
from lazymodel._remote.url import quoted


def kvstore(folder: Location) -> dict[str, Any]:
    """The specification of a key-value store of the files in a folder.

    Raises:
        CheckpointError: TensorStore has no driver for it, or none that accepts the given credentials.
    """
    if isinstance(folder, Path):
        return {"driver": "file", "path": f"{folder.resolve()}/"}
    store = folder.store
    path = f"{folder.key}/" if folder.key else ""
    options = {**store.options, **store.options.get("config", {})}
    options = {str(name).lower().removeprefix("aws_"): value for name, value in options.items()}
    kind = store.url.kind
    if kind == "s3":
        if "access_key_id" in options or "credential_provider" in options:
            raise CheckpointError(
                f"{folder}: Orbax checkpoints are read by TensorStore, which takes no keys from storage_options; set "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile, in the environment"
            )
        spec: dict[str, Any] = {"driver": "s3", "bucket": store.url.root.partition("://")[2], "path": path}
        endpoint = options.get("endpoint") or options.get("endpoint_url")
        spec |= {"endpoint": endpoint} if endpoint else {}
        region = options.get("region") or options.get("default_region")
        spec |= {"aws_region": region} if region else {}
        return spec | ({"aws_credentials": {"type": "anonymous"}} if options.get("skip_signature") else {})
    if kind == "gs":
        return {"driver": "gcs", "bucket": store.url.root.partition("://")[2], "path": path}
    if kind in ("http", "https", "hf"):
        base, headers = store.http()
        root, mark, query = base.partition("?")
        names = [f"{name}: {value}" for name, value in headers.items()]
        url = f"{root.rstrip('/')}/{quoted(folder.key)}{mark}{query}"
        return {"driver": "http", "base_url": url, "path": "/", "headers": names}
    raise CheckpointError(
        f"{folder}: TensorStore, which reads Orbax checkpoints, has no driver for Azure; copy it to a disk first"
    )
