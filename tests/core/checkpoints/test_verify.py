"""Content hashes: each place that may state one is read and believed only for its own file; a mismatch is refused."""

import hashlib
import json
import os
import shutil

import numpy as np
import pytest

from lazymodel._errors import CheckpointError, LazyModelError
from lazymodel.checkpoints import _verify, open_checkpoint
from lazymodel.checkpoints._verify import verify_files

NAMES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


def safetensors_bytes(tensors):
    header, data = {}, b""
    for name, values in tensors.items():
        array = np.asarray(values, np.float32)
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": [len(data), len(data) + array.nbytes]}
        data += array.tobytes()
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


CONTENT = {
    NAMES[0]: safetensors_bytes({"a": [1, 2, 3]}),
    NAMES[1]: safetensors_bytes({"b": [4, 5]}),
    INDEX: json.dumps({"weight_map": {"a": NAMES[0], "b": NAMES[1]}}).encode(),
}


def digest(name, algorithm="sha256"):
    return hashlib.new(algorithm, CONTENT[name]).hexdigest()


def git_id(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


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
        blob = git_id(content) if name == INDEX else digest(name)
        (repository / "blobs" / blob).write_bytes(content)
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    return snapshot


def damage(path):
    """Changes the last byte, which is a tensor's: no header check can notice."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def assert_opens(path, verify=True):
    with open_checkpoint(path, verify=verify) as checkpoint:
        np.testing.assert_array_equal(checkpoint["a"], np.array([1, 2, 3], np.float32))
        np.testing.assert_array_equal(checkpoint["b"], np.array([4, 5], np.float32))


def write_manifest(folder, name="SHA256SUMS", algorithm="sha256", line="{digest}  {name}"):
    lines = [line.format(digest=digest(file, algorithm), name=file) for file in CONTENT]
    (folder / name).write_text("\n".join(lines) + "\n")


# --- the hub ---------------------------------------------------------------------------------------------------------


def test_the_cache_of_the_hub(snapshot):
    assert_opens(snapshot)
    assert_opens(snapshot / INDEX)
    damage((snapshot / NAMES[1]).resolve())
    open_checkpoint(snapshot).close()  # nothing but the hash can tell
    with pytest.raises(CheckpointError) as info:
        open_checkpoint(snapshot, verify=True)
    message = str(info.value)
    assert str(snapshot / NAMES[1]) in message
    assert f"expected sha256 {digest(NAMES[1])}" in message
    assert "Hugging Face blob" in message
    assert f"found {hashlib.sha256((snapshot / NAMES[1]).read_bytes()).hexdigest()}" in message
    assert "Download or copy it again" in message
    assert NAMES[0] not in message


def test_the_index_is_verified_too(snapshot):
    (snapshot / INDEX).resolve().write_bytes(CONTENT[INDEX] + b"\n")
    with pytest.raises(CheckpointError, match=rf"{INDEX}: expected git-sha1 {git_id(CONTENT[INDEX])} .* states"):
        open_checkpoint(snapshot, verify=True)


def test_every_damaged_file_is_named(snapshot):
    for name in NAMES:
        damage((snapshot / name).resolve())
    with pytest.raises(CheckpointError, match=rf"{NAMES[0]}: expected sha256(.|\n)*{NAMES[1]}: expected sha256"):
        open_checkpoint(snapshot, verify=True)


def test_a_file_in_a_subfolder_of_a_snapshot(snapshot):
    (snapshot / "unet").mkdir()
    (snapshot / "unet" / "model.safetensors").symlink_to(f"../../../blobs/{digest(NAMES[0])}")
    with open_checkpoint(snapshot / "unet", verify=True) as checkpoint:
        assert list(checkpoint) == ["a"]


@pytest.mark.parametrize("place", ["blobs", "elsewhere"])
def test_only_blobs_of_a_cache_are_named_by_their_content(tmp_path, place):
    """A folder that happens to be called `blobs`, and a name that happens to have 64 hexadecimal digits."""
    (tmp_path / place).mkdir()
    (tmp_path / place / ("0" * 64)).write_bytes(CONTENT[NAMES[0]])
    (tmp_path / "model.safetensors").symlink_to(f"{place}/{'0' * 64}")
    with pytest.raises(CheckpointError, match="no hash is known for .*model.safetensors"):
        open_checkpoint(tmp_path, verify=True)


def test_ids_are_those_of_git(tmp_path):
    """Against ids that git itself prints for these contents."""
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "hello").write_bytes(b"hello world\n")
    ids = {"empty": "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391", "hello": "3b18e512dba79e4c8300dd08aeb37f8e728b8dad"}
    files = [tmp_path / name for name in ids]
    assert len(verify_files(files, {name: f"git-sha1:{id}" for name, id in ids.items()}, tmp_path)) == 2
    with pytest.raises(CheckpointError, match="hello: expected git-sha1 e69de29b.*found 3b18e512"):
        verify_files(files, dict.fromkeys(ids, f"git-sha1:{ids['empty']}"), tmp_path)


def test_downloads_to_a_folder(folder):
    metadata = folder / ".cache" / "huggingface" / "download"
    metadata.mkdir(parents=True)
    for name in CONTENT:
        etag = git_id(CONTENT[name]) if name == INDEX else digest(name)
        (metadata / f"{name}.metadata").write_text(f"{'c' * 40}\n{etag}\n1712656091.123\n")
    assert_opens(folder)
    damage(folder / NAMES[0])
    with pytest.raises(CheckpointError, match=rf"as .*{NAMES[0]}\.metadata states"):
        open_checkpoint(folder, verify=True)


def test_a_download_s_subfolder(tmp_path, folder):
    """The metadata is in the folder of the download, not in the one that is opened."""
    metadata = tmp_path / ".cache" / "huggingface" / "download" / "model"
    metadata.mkdir(parents=True)
    for name in CONTENT:
        (metadata / f"{name}.metadata").write_text(f"{'c' * 40}\n{digest(name)}\n0\n")
    assert_opens(folder)


@pytest.mark.parametrize("text", ["", "\n", "c\nnot a hash\n0\n", 'c\nW/"0123"\n', f"c\n{'g' * 64}\n0\n"])
def test_metadata_that_states_no_hash(folder, text):
    metadata = folder / ".cache" / "huggingface" / "download"
    metadata.mkdir(parents=True)
    for name in CONTENT:
        (metadata / f"{name}.metadata").write_text(text)
    with pytest.raises(CheckpointError, match="no hash is known"):
        open_checkpoint(folder, verify=True)


# --- manifests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["SHA256SUMS", "sha256sums.txt", "sha256sum.txt", "checksums.txt", "CHECKSUMS", "checksum.txt", "all.sha256"],
)
def test_names_of_manifests(folder, name):
    write_manifest(folder, name)
    assert_opens(folder)
    damage(folder / NAMES[0])
    with pytest.raises(CheckpointError, match=rf"{NAMES[0]}: expected sha256 .* as .*{name} states"):
        open_checkpoint(folder, verify=True)


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        ("MD5SUMS", "md5"),
        ("sha1sum.txt", "sha1"),
        ("SHA512SUMS", "sha512"),
        ("all.md5", "md5"),
        ("checksums.txt", "md5"),
    ],
)
def test_other_algorithms(folder, name, algorithm):
    write_manifest(folder, name, algorithm)
    assert_opens(folder)
    damage(folder / NAMES[0])
    with pytest.raises(CheckpointError, match=f"expected {algorithm} {digest(NAMES[0], algorithm)}"):
        open_checkpoint(folder, verify=True)


@pytest.mark.parametrize(
    "line",
    [
        "{digest}  {name}",
        "{digest} *{name}",
        "{digest}\t{name}",
        "{digest}  ./{name}",
        "{digest}  {name}\r",
        "\\{digest}  {name}",
        "SHA256 ({name}) = {digest}",
        "SHA2-256({name})= {digest}",
        "# of the release\n\n-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA256\n{digest}  {name}",
        "not a hash  {name}\n{digest}  {name}",
    ],
)
def test_lines_of_manifests(folder, line):
    write_manifest(folder, line=line)
    assert_opens(folder)
    damage(folder / NAMES[0])
    with pytest.raises(CheckpointError, match=f"{NAMES[0]}: expected sha256 {digest(NAMES[0])}"):
        open_checkpoint(folder, verify=True)


def test_upper_case_digits(folder):
    lines = [f"{digest(name).upper()}  {name}" for name in CONTENT]
    (folder / "SHA256SUMS").write_text("\n".join(lines))
    assert_opens(folder)


def test_escaped_names(tmp_path):
    """A name with a newline or backslash is escaped, and its line starts with a backslash."""
    path = tmp_path / "new\nline\\n.safetensors"
    path.write_bytes(CONTENT[NAMES[0]])
    (tmp_path / "SHA256SUMS").write_text(f"\\{digest(NAMES[0])}  new\\nline\\\\n.safetensors\n")
    assert list(open_checkpoint(path, verify=True)) == ["a"]


@pytest.mark.parametrize("line", ["{digest}\n", "{digest}  {name}\n", "{digest}  build/out/{name}\n"])
def test_a_manifest_of_one_file(folder, line):
    for name in CONTENT:
        (folder / f"{name}.sha256").write_text(line.format(digest=digest(name), name=name))
    assert_opens(folder)
    damage(folder / NAMES[1])
    with pytest.raises(CheckpointError, match=rf"as .*{NAMES[1]}\.sha256 states"):
        open_checkpoint(folder, verify=True)


def test_everyone_who_states_a_hash_must_be_right(snapshot):
    write_manifest(snapshot, "MD5SUMS", "md5")
    assert_opens(snapshot)
    (snapshot / "SHA256SUMS").write_text(f"{'0' * 64}  {NAMES[0]}\n")
    with pytest.raises(CheckpointError, match=rf"{NAMES[0]}: expected sha256 {'0' * 64} as .*SHA256SUMS states"):
        open_checkpoint(snapshot, verify=True)


def test_a_manifest_in_the_root_covers_subfolders(tmp_path, folder):
    (tmp_path / "SHA256SUMS").write_text("".join(f"{digest(name)}  model/{name}\n" for name in CONTENT))
    verify_files([folder / name for name in CONTENT], True, tmp_path)
    with pytest.raises(CheckpointError, match="no hash is known"):  # what is above the checkpoint's folder is not asked
        open_checkpoint(folder, verify=True)


def test_a_manifest_by_path(tmp_path, folder):
    """Its names are relative to its own folder or, where it is kept elsewhere, to the checkpoint's."""
    write_manifest(folder, "hashes")
    assert_opens(folder, verify=folder / "hashes")
    (tmp_path / "hashes").write_text("".join(f"{digest(name)}  model/{name}\n" for name in CONTENT))
    assert_opens(folder, verify=str(tmp_path / "hashes"))
    (tmp_path / "away").mkdir()
    shutil.move(folder / "hashes", tmp_path / "away" / "hashes")
    assert_opens(folder, verify=tmp_path / "away" / "hashes")
    damage(folder / NAMES[0])
    with pytest.raises(CheckpointError, match="as .*away/hashes states"):
        open_checkpoint(folder, verify=tmp_path / "away" / "hashes")


def test_a_given_manifest_is_the_only_source(snapshot, tmp_path):
    (tmp_path / "hashes").write_text(f"{digest(NAMES[0])}  {NAMES[0]}\n")
    with pytest.raises(CheckpointError, match=f"no hash is known for .*{INDEX}.*{NAMES[1]}.* in .*hashes, found none"):
        open_checkpoint(snapshot, verify=tmp_path / "hashes")


def test_a_manifest_that_is_not_there(folder, tmp_path):
    with pytest.raises(CheckpointError, match="expected a manifest of file hashes at .*absent, found no such file"):
        open_checkpoint(folder, verify=tmp_path / "absent")


# --- hostile manifests -----------------------------------------------------------------------------------------------


def test_names_that_lead_elsewhere_are_not_opened(tmp_path, folder):
    """Not even looked at: a pipe would hang, and a file that is not the checkpoint's is nobody's business."""
    os.mkfifo(tmp_path / "pipe")
    write_manifest(folder)
    with open(folder / "SHA256SUMS", "a") as file:
        for name in ("../pipe", str(tmp_path / "pipe"), "/dev/zero", "../../../../etc/passwd", "", ".", "a\0b"):
            file.write(f"{'0' * 64}  {name}\n")
    assert_opens(folder)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\0" * 1000,
        b"\xff\xfe" + "0 0".encode("utf-16-le"),
        b"(" * 5000 + b")" * 5000 + b" = ",
        b"SHA256 (" + b") = 0" * 5000,
        b"0" * 10_000,
        b" " * 10_000,
        f"{'0' * 63}  {NAMES[0]}\n{'0' * 65}  {NAMES[0]}\nSHA3 ({NAMES[0]}) = {'0' * 64}\n".encode(),
        f"{digest(NAMES[0], 'md5')}  {NAMES[0]}\n".encode(),  # not what SHA256SUMS may state
        f"{digest(NAMES[0])}  {NAMES[0]}\0\n".encode(),
        f"{digest(NAMES[0])}  sub/{NAMES[0]}\n{digest(NAMES[0])}  {NAMES[0]}.bak\n".encode(),
    ],
)
def test_garbage_states_no_hash(folder, text):
    (folder / "SHA256SUMS").write_bytes(text)
    with pytest.raises(
        CheckpointError, match=f"no hash is known for .*{NAMES[0]}.*verify={{file name: 'sha256:<hex>'}}"
    ):
        open_checkpoint(folder, verify=True)


def test_a_manifest_beyond_all_measure(folder, monkeypatch):
    write_manifest(folder)
    monkeypatch.setattr(_verify, "MAX_MANIFEST", 100)
    with pytest.raises(CheckpointError, match=r"SHA256SUMS: expected a manifest of at most 100 B, found \d+ B"):
        open_checkpoint(folder, verify=True)


def test_what_is_no_file_is_no_manifest(folder):
    os.mkfifo(folder / "SHA256SUMS")
    (folder / "MD5SUMS").mkdir()
    (folder / "checksums.txt").symlink_to("/dev/zero")
    (folder / f"{NAMES[0]}.sha256").symlink_to("absent")
    with pytest.raises(CheckpointError, match="no hash is known"):
        open_checkpoint(folder, verify=True)


# --- a mapping -------------------------------------------------------------------------------------------------------


def test_a_mapping(folder):
    hashes = {
        NAMES[0]: f"sha256:{digest(NAMES[0])}",
        f"./{NAMES[1]}": digest(NAMES[1], "sha512"),
        str(folder / INDEX): f"git-sha1:{git_id(CONTENT[INDEX])}",
        "README.md": "md5:" + "0" * 32,  # of another file: not asked for
    }
    assert_opens(folder, verify=hashes)
    with pytest.raises(CheckpointError, match=f"{NAMES[0]}: expected md5 {'1' * 32} as verify states, found"):
        open_checkpoint(folder, verify={**hashes, NAMES[0]: "1" * 32})


def test_a_single_file(folder):
    path = folder / NAMES[0]
    assert list(open_checkpoint(path, verify={NAMES[0]: digest(NAMES[0])})) == ["a"]
    with pytest.raises(CheckpointError, match=f"expected sha256 {digest(NAMES[1])} as verify states"):
        open_checkpoint(path, verify={NAMES[0]: digest(NAMES[1])})


@pytest.mark.parametrize("left_out", CONTENT)
def test_a_mapping_covers_every_file(folder, left_out):
    hashes = {name: digest(name) for name in CONTENT if name != left_out}
    with pytest.raises(CheckpointError, match=f"no hash is known for [^,]*{left_out}: expected one for every file"):
        open_checkpoint(folder, verify=hashes)


@pytest.mark.parametrize("text", ["", "sha256:", "sha256:12", "crc32:00000000", "z" * 64, f"md5:{'0' * 64}", None, 7])
def test_what_is_no_hash_in_a_mapping(folder, text):
    with pytest.raises(CheckpointError, match=f"expected a hash for '{INDEX}' such as 'sha256:<64 hex digits>'"):
        open_checkpoint(folder, verify={INDEX: text})


@pytest.mark.parametrize("verify", [None, 7, ["SHA256SUMS"]])
def test_what_verify_may_be(folder, verify):
    with pytest.raises(LazyModelError, match="verify is True, False, the path of a manifest, or a mapping"):
        open_checkpoint(folder, verify=verify)


# --- reading ---------------------------------------------------------------------------------------------------------


def test_without_a_hash_nothing_is_read(folder, monkeypatch):
    """A checkpoint takes minutes to hash; that one file of it has no hash is known before."""
    (folder / "SHA256SUMS").write_text(f"{digest(NAMES[0])}  {NAMES[0]}\n")
    monkeypatch.setattr(_verify, "mismatches", lambda hashes: pytest.fail("hashed"))
    with pytest.raises(CheckpointError, match="no hash is known"):
        open_checkpoint(folder, verify=True)


def test_each_file_is_read_once(folder, monkeypatch):
    """However many hashes are stated for it."""
    write_manifest(folder)
    write_manifest(folder, "MD5SUMS", "md5")
    write_manifest(folder, "checksums.txt")
    files = []
    real = _verify._digests
    monkeypatch.setattr(_verify, "_digests", lambda file, *rest: files.append(file) or real(file, *rest))
    assert_opens(folder)
    assert sorted(files) == sorted(str(folder / name) for name in CONTENT)


@pytest.mark.parametrize("name", CONTENT)
def test_a_file_that_changes_between_hash_and_load(folder, monkeypatch, name):
    """Whether shard or index: what is returned must be what was hashed."""
    write_manifest(folder)
    real = _verify.verify_files

    def then_replaced(paths, verify, root):
        sources = real(paths, verify, root)
        new = folder / "new"
        new.write_bytes(CONTENT[name])  # the same bytes: only the file is another one
        os.replace(new, folder / name)
        return sources

    monkeypatch.setattr("lazymodel.checkpoints._open.verify_files", then_replaced)
    with pytest.raises(CheckpointError, match=f"{name} changed while it was being read"):
        open_checkpoint(folder, verify=True)


def test_a_file_that_changes_while_it_is_hashed(folder, monkeypatch):
    write_manifest(folder)

    def then_grows(file, *rest, real=_verify._digests):
        digests = real(file, *rest)
        with open(folder / NAMES[0], "ab") as stream:
            stream.write(b"more")
        return digests

    monkeypatch.setattr(_verify, "_digests", then_grows)
    with pytest.raises(CheckpointError, match=f"{NAMES[0]} changed while it was being read"):
        verify_files([folder / NAMES[0]], True, folder)


def test_a_file_that_cannot_be_read(folder):
    (folder / "sub").mkdir()
    hashes = {"sub": "0" * 64, NAMES[0]: digest(NAMES[0])}
    with pytest.raises(CheckpointError, match="cannot open .*sub: expected a regular file"):
        verify_files([folder / "sub", folder / NAMES[0]], hashes, folder)


def test_false_does_nothing(folder):
    assert verify_files([folder / "absent"], False, folder) == []
    assert_opens(folder, verify=False)


def test_other_formats(tmp_path):
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "model.weights.h5"
    with h5py.File(path, "w") as file:
        file["layers/dense/vars/0"] = np.arange(4, dtype=np.float32)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    with open_checkpoint(tmp_path, verify={path.name: sha256}) as checkpoint:
        np.testing.assert_array_equal(checkpoint["layers/dense/vars/0"], np.arange(4, dtype=np.float32))
    with pytest.raises(CheckpointError, match=f"{path.name}: expected sha256 {'0' * 64}"):
        open_checkpoint(tmp_path, verify={path.name: "0" * 64})


def test_names_that_leave_no_room_for_a_suffix(folder):
    """The hub's metadata would be named as the file is and `.metadata`, which no file can be called."""
    name = f"{'x' * 239}.safetensors"
    (folder / name).write_bytes(CONTENT[NAMES[0]])
    with open_checkpoint(folder / name, verify={name: f"sha256:{digest(NAMES[0])}"}) as checkpoint:
        assert list(checkpoint) == ["a"]
    with pytest.raises(CheckpointError, match="no hash is known for"):
        open_checkpoint(folder / name, verify=True)
    with pytest.raises(CheckpointError, match="expected a manifest of file hashes at x+"):
        open_checkpoint(folder, verify="x" * 300)
