"""huggingface_hub against the object server.

Dialects, faults and hostile modes are proven by the tests of remote checkpoints, which count what came of each.
"""

from __future__ import annotations

import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers._dialects import SIGNATURE
from tests.servers.object_server import ObjectServer

MIB = 1 << 20
DATA = bytes(range(256)) * (MIB // 128)  # 2 MiB


@pytest.fixture
def repository(object_server: ObjectServer) -> Iterator[ObjectServer]:
    folder = object_server.root / "owner" / "name"
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(DATA)
    (folder / "config.json").write_bytes(b"{}")
    (folder / "1_Pooling" / "config.json").write_bytes(b"{ }")
    yield object_server
    shutil.rmtree(object_server.root / "owner")


def test_the_cdn_notices_a_token_and_wants_its_signature(repository: ObjectServer) -> None:
    opener = urllib.request.build_opener(_NoRedirect)
    with pytest.raises(urllib.error.HTTPError) as redirect:
        opener.open(repository.url("owner/name/resolve/main/model.safetensors", "hf"))
    location = redirect.value.headers["Location"]
    assert redirect.value.headers["X-Linked-Size"] == str(len(DATA))
    assert location.startswith("http://localhost:") and SIGNATURE in location
    request = urllib.request.Request(location, headers={"Authorization": "Bearer hf_good"})
    with urllib.request.urlopen(request) as answer:
        assert answer.read() == DATA
    assert repository.counters()["cdn_authorization"] == 1
    with pytest.raises(urllib.error.HTTPError, match="403") as forbidden:
        urllib.request.urlopen(location.partition("?")[0])
    for error in (redirect.value, forbidden.value):
        error.close()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def test_huggingface_hub_itself(repository: ObjectServer, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    repository.configure(page_size=1)
    repository.repository("owner/name", token="hf_good", gated=True, revisions={"v1": "f" * 40})
    api = hub.HfApi(endpoint=repository.hub, token="hf_good")
    files = {entry.path: entry for entry in api.list_repo_tree("owner/name", recursive=True)}
    assert list(files) == ["1_Pooling/config.json", "config.json", "model.safetensors"]
    assert files["model.safetensors"].size == files["model.safetensors"].lfs.size == len(DATA)
    flat = [entry.path for entry in api.list_repo_tree("owner/name")]
    assert flat == ["1_Pooling", "config.json", "model.safetensors"]
    assert api.model_info("owner/name", revision="v1").sha == "f" * 40
    stranger = hub.HfApi(endpoint=repository.hub, token="hf_stranger")
    with pytest.raises(hub.errors.GatedRepoError):
        stranger.model_info("owner/name")
    with pytest.raises(hub.errors.RepositoryNotFoundError):
        api.model_info("owner/nothing")
    with pytest.raises(hub.errors.RevisionNotFoundError):
        api.model_info("owner/name", revision="v2")
    with pytest.raises(hub.errors.EntryNotFoundError):
        api.hf_hub_download("owner/name", "nothing.json", cache_dir=tmp_path)
    assert Path(api.hf_hub_download("owner/name", "model.safetensors", cache_dir=tmp_path)).read_bytes() == DATA
    assert repository.counters()["cdn_authorization"] == 0
