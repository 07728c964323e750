"""Content hashes: each place that may state one is read and believed only for its own file; a mismatch is refused; and
what was hashed is what is read. On disks and in stores.
"""

import functools
import hashlib
import json
import os
import shutil
import sys

import numpy as np
import pytest
from safetensors.numpy import save

import lazymodel as lm
from tests.command import inspected
from tests.core.checkpoints._formats import read_nbytes
from tests.servers.scripted import part, scripted

NAMES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
CONTENT = {
    NAMES[0]: save({"a": np.array([1, 2, 3], np.float32)}),
    NAMES[1]: save({"b": np.array([4, 5], np.float32)}),
    INDEX: json.dumps({"weight_map": {"a": NAMES[0], "b": NAMES[1]}}).encode(),
}


def digest(name, algorithm="sha256"):
    if algorithm == "git-sha1":
        return hashlib.sha1(b"blob %d\0" % len(CONTENT[name]) + CONTENT[name]).hexdigest()
    return hashlib.new(algorithm, CONTENT[name]).hexdigest()


@pytest.fixture
def folder(tmp_path):
    """A folder with an index and two shards, and nothing that states a hash."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in CONTENT.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def snapshot(tmp_path):
    """The same in a Hugging Face cache: links to blobs that are named by their content."""
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for name, content in CONTENT.items():
        blob = digest(name, "git-sha1" if name == INDEX else "sha256")
        (repository / "blobs" / blob).write_bytes(content)
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    return snapshot


def damage(path):
    """Changes the last byte, which is a tensor's: no header check can notice."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def assert_opens(path, verify=True):
    with lm.open_checkpoint(path, verify=verify) as checkpoint:
        np.testing.assert_array_equal(checkpoint["a"], np.array([1, 2, 3], np.float32))
        np.testing.assert_array_equal(checkpoint["b"], np.array([4, 5], np.float32))


def refused(path, match, verify=True):
    with pytest.raises(lm.CheckpointError, match=match) as error:
        lm.open_checkpoint(path, verify=verify)
    return str(error.value)


def write_manifest(folder, name="SHA256SUMS", algorithm="sha256", line="{digest}  {name}"):
    lines = [line.format(digest=digest(file, algorithm), name=file) for file in CONTENT]
    (folder / name).write_text("\n".join(lines) + "\n")


def write_each(folder, line):
    """A manifest for each file, beside it."""
    for name in CONTENT:
        (folder / f"{name}.sha256").write_text(line.format(digest=digest(name), name=name))


def write_download(folder, below=".", texts=None):
    """What `hf download` leaves in the folder of the download, which may be above the one that is opened."""
    metadata = folder / below / ".cache" / "huggingface" / "download"
    for name in CONTENT:
        etag = digest(name, "git-sha1" if name == INDEX and below == "." else "sha256")
        path = metadata / f"{os.path.relpath(folder / name, folder / below)}.metadata"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts if texts is not None else f"{'c' * 40}\n{etag}\n1712656091.123\n")


NAMED = ["SHA256SUMS", "sha256sums.txt", "sha256sum.txt", "checksums.txt", "CHECKSUMS", "checksum.txt", "all.sha256"]
ALGORITHMS = [("MD5SUMS", "md5"), ("sha1sum.txt", "sha1"), ("SHA512SUMS", "sha512"), ("all.md5", "md5")]
ALGORITHMS += [("checksums.txt", "md5")]
LINES = [
    "{digest} *{name}", "{digest}\t{name}", "{digest}  ./{name}", "{digest}  {name}\r", "\\{digest}  {name}",
    "SHA256 ({name}) = {digest}", "SHA2-256({name})= {digest}", "not a hash  {name}\n{digest}  {name}",
    "# of the release\n\n-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA256\n{digest}  {name}",
]  # fmt: skip
ONE_FILE = ["{digest}\n", "{digest}  {name}\n", "{digest}  build/out/{name}\n"]
# What states a hash → who writes it, the algorithm, and the file that says so.
STATING = {
    **{name: (functools.partial(write_manifest, name=name), "sha256", name) for name in NAMED},
    **{
        f"{algorithm} in {name}": (
            functools.partial(write_manifest, name=name, algorithm=algorithm), algorithm, name
        )
        for name, algorithm in ALGORITHMS
    },
    **{repr(line): (functools.partial(write_manifest, line=line), "sha256", "SHA256SUMS") for line in LINES},
    **{repr(line): (functools.partial(write_each, line=line), "sha256", f"{NAMES[0]}.sha256") for line in ONE_FILE},
    "a download": (write_download, "sha256", f"{NAMES[0]}.metadata"),
    "a download's subfolder": (
        functools.partial(write_download, below=".."), "sha256", f"model/{NAMES[0]}.metadata"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", STATING)
def test_whoever_states_a_hash_is_believed(folder, kind):
    write, algorithm, source = STATING[kind]
    write(folder)
    assert_opens(folder)
    damage(folder / NAMES[0])
    refused(folder, rf"{NAMES[0]}: expected {algorithm} {digest(NAMES[0], algorithm)} as .*{source} states")


GARBAGE = {
    "nothing": b"",
    "UTF-16": b"\xff\xfe" + "0 0".encode("utf-16-le"),
    "brackets": b"(" * 5000 + b")" * 5000 + b" = ",
    "half a line": b"SHA256 (" + b") = 0" * 5000,
    "digits": b"0" * 10_000,
    "spaces": b" " * 10_000,
    "too few and too many digits": (
        f"{'0' * 63}  {NAMES[0]}\n{'0' * 65}  {NAMES[0]}\nSHA3 ({NAMES[0]}) = {'0' * 64}\n".encode()
    ),
    "not what SHA256SUMS may state": f"{digest(NAMES[0], 'md5')}  {NAMES[0]}\n".encode(),
    "a name that goes on": f"{digest(NAMES[0])}  {NAMES[0]}\0\n".encode(),
    "other names": f"{digest(NAMES[0])}  sub/{NAMES[0]}\n{digest(NAMES[0])}  {NAMES[0]}.bak\n".encode(),
}


def no_files(folder):
    """What is named as a manifest and is no file."""
    os.mkfifo(folder / "SHA256SUMS")
    (folder / "MD5SUMS").mkdir()
    (folder / "checksums.txt").symlink_to("/dev/zero")
    (folder / f"{NAMES[0]}.sha256").symlink_to("absent")


SILENT = {
    **{name: lambda folder, text=text: (folder / "SHA256SUMS").write_bytes(text) for name, text in GARBAGE.items()},
    **{
        repr(text): functools.partial(write_download, texts=text)
        for text in ("", "\n", "c\nnot a hash\n0\n", 'c\nW/"0123"\n', f"c\n{'g' * 64}\n0\n")
    },
    "no files": no_files,
    "a manifest above the folder": lambda folder: (folder.parent / "SHA256SUMS").write_text(
        "".join(f"{digest(name)}  model/{name}\n" for name in CONTENT)
    ),
}


@pytest.mark.parametrize("kind", SILENT)
def test_what_states_no_hash(folder, kind):
    SILENT[kind](folder)
    refused(folder, f"no hash is known for .*{NAMES[0]}.*verify={{file name: 'sha256:<hex>'}}")


def test_a_manifest_beyond_all_measure(folder):
    write_manifest(folder)
    os.truncate(folder / "SHA256SUMS", 17 << 20)
    refused(folder, r"SHA256SUMS: expected a manifest of at most .*, found ")


def test_names_that_lead_elsewhere_are_not_opened(tmp_path, folder):
    """Not even looked at: a pipe would hang, and a file that is not the checkpoint's is nobody's business."""
    os.mkfifo(tmp_path / "pipe")
    write_manifest(folder)
    with open(folder / "SHA256SUMS", "a") as file:
        for name in ("../pipe", str(tmp_path / "pipe"), "/dev/zero", "../../../../etc/passwd", "", ".", "a\0b"):
            file.write(f"{'0' * 64}  {name}\n")
    assert_opens(folder)


def test_escaped_names(tmp_path):
    """A name with a newline or backslash is escaped, and its line starts with a backslash."""
    path = tmp_path / "new\nline\\n.safetensors"
    path.write_bytes(CONTENT[NAMES[0]])
    (tmp_path / "SHA256SUMS").write_text(f"\\{digest(NAMES[0])}  new\\nline\\\\n.safetensors\n")
    assert list(lm.open_checkpoint(path, verify=True)) == ["a"]


# --- the cache of the hub --------------------------------------------------------------------------------------------


def test_the_cache_of_the_hub(snapshot):
    assert_opens(snapshot)
    assert_opens(snapshot / INDEX)
    damage((snapshot / NAMES[1]).resolve())
    lm.open_checkpoint(snapshot).close()  # nothing but the hash can tell
    message = refused(snapshot, "Hugging Face blob.*Download or copy it again")
    assert f"{snapshot / NAMES[1]}: expected sha256 {digest(NAMES[1])}" in message
    assert f"found {hashlib.sha256((snapshot / NAMES[1]).read_bytes()).hexdigest()}" in message
    assert NAMES[0] not in message
    damage((snapshot / NAMES[0]).resolve())
    (snapshot / INDEX).resolve().write_bytes(CONTENT[INDEX] + b"\n")
    message = refused(snapshot, rf"{INDEX}: expected git-sha1 {digest(INDEX, 'git-sha1')} .* states")
    assert all(f"{name}: expected sha256" in message for name in NAMES)


def test_a_file_in_a_subfolder_of_a_snapshot(snapshot):
    (snapshot / "unet").mkdir()
    (snapshot / "unet" / "model.safetensors").symlink_to(f"../../../blobs/{digest(NAMES[0])}")
    with lm.open_checkpoint(snapshot / "unet", verify=True) as checkpoint:
        assert list(checkpoint) == ["a"]


@pytest.mark.parametrize("place", ["blobs", "elsewhere"])
def test_only_blobs_of_a_cache_are_named_by_their_content(tmp_path, place):
    """A folder that happens to be called `blobs`, and a name that happens to have 64 hexadecimal digits."""
    (tmp_path / place).mkdir()
    (tmp_path / place / ("0" * 64)).write_bytes(CONTENT[NAMES[0]])
    (tmp_path / "model.safetensors").symlink_to(f"{place}/{'0' * 64}")
    refused(tmp_path, "no hash is known for .*model.safetensors")


def test_everyone_who_states_a_hash_must_be_right(snapshot):
    write_manifest(snapshot, "MD5SUMS", "md5")
    assert_opens(snapshot)
    (snapshot / "SHA256SUMS").write_text(f"{'0' * 64}  {NAMES[0]}\n")
    refused(snapshot, rf"{NAMES[0]}: expected sha256 {'0' * 64} as .*SHA256SUMS states")


def test_ids_are_those_of_git(tmp_path):
    """Against the id that git itself prints for this content."""
    (tmp_path / "m.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    stated = "git-sha1:7b19cc601c0e9f2f80f83c1b0b2d9586d018ae2b"
    lm.open_checkpoint(tmp_path / "m.safetensors", verify={"m.safetensors": stated}).close()
    wrong = {"m.safetensors": f"git-sha1:{'e' * 40}"}
    refused(tmp_path / "m.safetensors", "expected git-sha1 eeee.*found 7b19cc60", wrong)


# --- a given manifest or mapping -------------------------------------------------------------------------------------


def test_a_manifest_by_path(tmp_path, folder, snapshot):
    """Its names are relative to its own folder or, where it is kept elsewhere, to the checkpoint's."""
    write_manifest(folder, "hashes")
    assert_opens(folder, folder / "hashes")
    (tmp_path / "hashes").write_text("".join(f"{digest(name)}  model/{name}\n" for name in CONTENT))
    assert_opens(folder, str(tmp_path / "hashes"))
    (tmp_path / "away").mkdir()
    away = shutil.move(folder / "hashes", tmp_path / "away" / "hashes")
    assert_opens(folder, away)
    damage(folder / NAMES[0])
    refused(folder, "as .*away/hashes states", away)
    away.write_text(f"{digest(NAMES[0])}  {NAMES[0]}\n")  # which is the only source then
    refused(snapshot, f"no hash is known for .*{INDEX}.*{NAMES[1]}.* in .*hashes, found none", away)
    for absent in (tmp_path / "absent", "x" * 300):
        refused(folder, f"expected a manifest of file hashes at {absent}, found no such file", absent)


def test_a_mapping(folder):
    hashes = {
        NAMES[0]: f"sha256:{digest(NAMES[0]).upper()}",
        f"./{NAMES[1]}": digest(NAMES[1], "sha512"),
        str(folder / INDEX): f"git-sha1:{digest(INDEX, 'git-sha1')}",
        "README.md": "md5:" + "0" * 32,  # of another file: not asked for
    }
    assert_opens(folder, hashes)
    assert_opens(folder, False)
    refused(folder, f"{NAMES[0]}: expected md5 {'1' * 32} as verify states", {**hashes, NAMES[0]: "1" * 32})
    path = folder / NAMES[0]
    assert list(lm.open_checkpoint(path, verify={NAMES[0]: digest(NAMES[0])})) == ["a"]
    refused(path, f"expected sha256 {digest(NAMES[1])} as verify states", {NAMES[0]: digest(NAMES[1])})
    for left_out in CONTENT:
        known = {name: digest(name) for name in CONTENT if name != left_out}
        refused(folder, f"no hash is known for [^,]*{left_out}: expected one for every file", known)


@pytest.mark.parametrize("text", ["", "sha256:", "sha256:12", "crc32:00000000", "z" * 64, f"md5:{'0' * 64}", None, 7])
def test_what_is_no_hash_in_a_mapping(folder, text):
    refused(folder, f"expected a hash for '{INDEX}' such as 'sha256:<64 hex digits>'", {INDEX: text})


@pytest.mark.parametrize("verify", [None, 7, ["SHA256SUMS"]])
def test_what_verify_may_be(folder, verify):
    with pytest.raises(lm.LazyModelError, match="verify is True, False, the path of a manifest, or a mapping"):
        lm.open_checkpoint(folder, verify=verify)


def test_inspecting(folder):
    write_manifest(folder)
    assert [file["verified"] for file in inspected(folder)["files"]] == [[], [], []]
    found = inspected(folder, verify=True)
    assert found["problems"] == []
    assert [file["verified"] for file in found["files"]] == [["sha256"]] * 3
    damage(folder / NAMES[0])
    (folder / "SHA256SUMS").write_text((folder / "SHA256SUMS").read_text().replace(NAMES[1], "other"))
    found = inspected(folder, verify=True)
    assert [file["path"] for file in found["files"] if file["verified"]] == [INDEX]
    wrong, unknown = found["problems"]
    assert wrong["file"] == NAMES[0] and "expected sha256" in wrong["message"]
    assert unknown["file"] is None and f"no hash is known for {folder / NAMES[1]}:" in unknown["message"]
    (folder / "MD5SUMS").write_bytes(b"x" * (17 << 20))
    assert "MD5SUMS: expected a manifest of at most" in inspected(folder, verify=True)["problems"][0]["message"]


# --- reading ---------------------------------------------------------------------------------------------------------


def test_without_a_hash_nothing_is_read(folder, monkeypatch):
    """A checkpoint takes minutes to hash; that one file of it has no hash is known before."""
    (folder / "SHA256SUMS").write_text(f"{digest(NAMES[0])}  {NAMES[0]}\n")
    monkeypatch.setattr(hashlib, "new", lambda *_, **__: pytest.fail("hashed"))
    refused(folder, "no hash is known")


@pytest.mark.skipif(sys.platform != "linux", reason="what was read is in /proc")
def test_each_file_is_read_once(tmp_path):
    """However many hashes are stated for it."""
    path = tmp_path / "m.safetensors"
    path.write_bytes(content := save({"w": np.zeros(1 << 20)}))
    for name, algorithm in (("SHA256SUMS", "sha256"), ("MD5SUMS", "md5"), ("checksums.txt", "sha256")):
        (tmp_path / name).write_text(f"{hashlib.new(algorithm, content).hexdigest()}  m.safetensors\n")
    before = read_nbytes()
    lm.open_checkpoint(path, verify=True).close()
    assert len(content) <= read_nbytes() - before < 1.2 * len(content)


@pytest.mark.parametrize("name", CONTENT)
def test_a_file_that_changes_between_hash_and_load(folder, monkeypatch, name):
    """Whether shard or index: what is returned must be what was hashed."""
    write_manifest(folder)
    real = json.loads

    def then_replaced(*arguments, **options):  # which reads the index, after everything was hashed
        new = folder / "new"
        new.write_bytes(CONTENT[name])  # the same bytes: only the file is another one
        os.replace(new, folder / name)
        return real(*arguments, **options)

    monkeypatch.setattr(json, "loads", then_replaced)
    refused(folder, f"{name} changed while it was being read")


def test_a_file_that_changes_while_it_is_hashed(folder, monkeypatch):
    write_manifest(folder)
    real = hashlib.new

    def then_grows(*arguments, **options):
        with open(folder / NAMES[0], "ab") as stream:
            stream.write(b"more")
        return real(*arguments, **options)

    monkeypatch.setattr(hashlib, "new", then_grows)
    refused(folder, f"{NAMES[0]} changed while it was being read")


# --- in stores -------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(_object_server, object_server):
    """An index and two shards of 8 MB; and where they are, as every store has it."""
    folder = object_server.root / "verify" / "sub"
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensor in zip(NAMES, "ab", strict=True):
        (folder / name).write_bytes(save({tensor: np.full((700, 3000), ord(tensor), np.float32)}))
    (folder / INDEX).write_bytes(CONTENT[INDEX])
    (folder / "SHA256SUMS").unlink(missing_ok=True)
    hashes = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in CONTENT}
    places = [(object_server.url("verify/sub/"), None), ("gs://verify/sub", object_server.gcs())]
    return folder, hashes, [*places, ("az://verify/sub", object_server.azure())]


def test_given_hashes_and_manifests_on_disk(served, tmp_path):
    _, stated, places = served
    manifest = tmp_path / "sums"
    manifest.write_text("".join(f"{digest}  {name}\n" for name, digest in stated.items()))
    ways = ({name: f"sha256:{digest}" for name, digest in stated.items()}, manifest, str(manifest))
    for (url, options), verify in zip(places, ways, strict=True):
        with lm.open_checkpoint(url, options, verify=verify) as checkpoint:
            assert np.asarray(checkpoint["b"]).min() == ord("b")
        with pytest.raises(lm.CheckpointError, match=f"{NAMES[1]}: expected sha256 000"):
            lm.open_checkpoint(url, options, verify={**stated, NAMES[1]: "0" * 64})
        with pytest.raises(lm.CheckpointError, match="no hash is known for .*index"):
            lm.open_checkpoint(url, options, verify={name: stated[name] for name in NAMES})


def test_manifests_beside_the_objects(served):
    folder, stated, places = served
    for url, options in places:
        with pytest.raises(lm.CheckpointError, match="no hash is known"):
            lm.open_checkpoint(url, options, verify=True)
    manifest = folder / "SHA256SUMS"
    manifest.write_text("".join(f"{digest}  {name}\n" for name, digest in stated.items()))
    for url, options in places:
        lm.open_checkpoint(url, options, verify=True).close()
    assert not inspected(*places[0], verify=True)["problems"]
    manifest.write_text(manifest.read_text().replace(stated[NAMES[0]], "1" * 64))
    for url, options in places:
        with pytest.raises(lm.CheckpointError, match=f"{NAMES[0]}: expected sha256 111"):
            lm.open_checkpoint(url, options, verify=True)
        (problem,) = inspected(url, options, verify=True)["problems"]
        assert problem["file"] == NAMES[0]


def test_what_is_replaced_after_it_was_hashed_is_not_read(served, object_server):
    checkpoint = lm.open_checkpoint("gs://verify/sub", object_server.gcs(), verify=served[1])
    object_server.replace(f"verify/sub/{NAMES[1]}", after=0)
    with pytest.raises(lm.CheckpointError, match="changed while it was being read"):
        np.asarray(checkpoint["b"])


def test_hashes_that_the_hub_states(monkeypatch):
    pytest.importorskip("obstore", reason="needs obstore: pip install 'lazymodel[remote]'")
    data = CONTENT[NAMES[0]]
    stated = {}

    def reply(asked):
        if asked.path.startswith("/api"):
            entry = {"rfilename": "a/w.safetensors"} | (stated if asked.query == "blobs=true" else {})
            return 200, {}, json.dumps({"sha": "f" * 40, "siblings": [entry]}).encode()
        return part(data, asked, ETag='"1"')

    with scripted(reply) as origin:
        monkeypatch.setenv("HF_ENDPOINT", origin)
        large = {"lfs": {"sha256": digest(NAMES[0])}, "blobId": "0" * 40}
        for found in (large, {"blobId": digest(NAMES[0], "git-sha1")}):
            stated = found
            for url in ("hf://o/n/a/w.safetensors", "hf://o/n/a"):
                lm.open_checkpoint(url, verify=True).close()
        for found, words in (
            ({"lfs": {"sha256": "2" * 64}}, "expected sha256 222.* as the hub states"),
            *((broken, "no hash is known|expected") for broken in ({}, {"lfs": 3}, {"blobId": None})),
        ):
            stated = found
            refused("hf://o/n/a", words)


def test_names_that_leave_no_room_for_a_suffix(folder):
    """The hub's metadata would be named as the file is and `.metadata`, which no file can be called."""
    path = folder / f"{'x' * 239}.safetensors"
    path.write_bytes(CONTENT[NAMES[0]])
    assert list(lm.open_checkpoint(path, verify={path.name: f"sha256:{digest(NAMES[0])}"})) == ["a"]
    refused(path, "no hash is known for")
