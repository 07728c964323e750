"""obstore against moto's S3."""

from __future__ import annotations

import pytest

from tests.servers.s3 import S3Server

obstore = pytest.importorskip("obstore", reason="needs obstore: pip install 'lazymodel[remote]'")
from obstore.store import S3Store  # noqa: E402

MIB = 1 << 20


def test_objects(s3: S3Server) -> None:
    store = S3Store(s3.bucket, **s3.options())
    obstore.put(store, "folder/a.bin", b"0123456789")
    found = obstore.get(store, "folder/a.bin", options={"range": (3, 7)})
    assert bytes(found.bytes()) == b"3456"
    assert obstore.head(store, "folder/a.bin")["e_tag"] == found.meta["e_tag"]
    with pytest.raises(obstore.exceptions.PreconditionError):
        obstore.get(store, "folder/a.bin", options={"if_match": '"another"'})
    assert list(obstore.list_with_delimiter(store)["common_prefixes"]) == ["folder"]
    s3.reset()
    assert obstore.list(store).collect() == []


def test_uploads_in_parts(s3: S3Server) -> None:
    store, seen = S3Store(s3.bucket, **s3.options()), list[list[str]]()

    def pieces():
        yield bytes(6 * MIB)
        yield bytes(6 * MIB)
        seen.append(s3.open_uploads())
        raise RuntimeError("broken off")

    with pytest.raises(RuntimeError, match="broken off"):
        obstore.put(store, "a.bin", pieces(), use_multipart=True, chunk_size=5 * MIB)
    assert seen == [["a.bin"]]
    assert s3.open_uploads() == []
    assert obstore.list(store).collect() == []
