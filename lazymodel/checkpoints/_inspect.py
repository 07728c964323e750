"""What is in a checkpoint, and everything that is wrong with it: what `lazymodel inspect` prints.

`open_checkpoint` stops at the first thing that is wrong, because nothing should be loaded from such a checkpoint. A
person who wants to mend it needs the whole list: here every shard is opened on its own, and what the index says is
compared with what they hold. Reading the files is the formats' own; no tensor's bytes are read.
"""

from __future__ import annotations

import dataclasses
import json
import os
import reprlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from lazymodel._errors import CheckpointError, LazyModelError, LazyModelWarning
from lazymodel._remote.path import Location, RemotePath
from lazymodel._show.page import Bars, Grid, Nbytes, Section, Text, Treemap, modules, save_page
from lazymodel._show.table import Row, folded_table, shape_text
from lazymodel._show.text import first_lines, format_bytes, plural, printable
from lazymodel.checkpoints._checkpoint import Checkpoint
from lazymodel.checkpoints._numpy import npy_names
from lazymodel.checkpoints._open import (
    SAFETENSORS,
    Format,
    content_files,
    format_of,
    located,
    no_checkpoint,
    open_located,
    weight_files,
)
from lazymodel.checkpoints._orbax_folder import find_item
from lazymodel.checkpoints._shards import Part, open_indexed, open_loose, short, some
from lazymodel.checkpoints._steps import newest_step
from lazymodel.checkpoints._untrusted import read_json_file, weight_map
from lazymodel.checkpoints._verify import known_hashes, mismatches, no_hash
from lazymodel.checkpoints._verify_remote import known_object_hashes, object_mismatches

_MAX_PROBLEMS = 40  # problems that the text shows; `to_dict` has all
_MAX_VALUES = 100  # of a list in the metadata; the vocabulary of a tokenizer is told by its first ones


class TensorSummary(NamedTuple):
    """One tensor: its name, dtype, shape, bytes, and the file that has it (relative to the checkpoint's folder).

    Of quantized GGUF tensors the name of their type, such as `Q4_K`, and their bytes in the file. Of safetensors and
    GGUF also the tensor's first byte in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str
    offset: int | None = None


class FileSummary(NamedTuple):
    """One file: its path (relative to the checkpoint's folder), its bytes on disk, how many of the tensors it has,
    and the algorithms of the hashes that its content was found to have."""

    path: str
    nbytes: int
    tensors: int
    verified: tuple[str, ...]


class Problem(NamedTuple):
    """What is wrong, in a sentence, and in which file; None where it is no single file's."""

    file: str | None
    message: str


@dataclasses.dataclass(frozen=True, repr=False)
class CheckpointSummary:
    """What `inspect_checkpoint` found. `str()` is a report for a person, `to_dict()` the same for a program."""

    path: str
    format: str  # what the files are: `safetensors`, `hdf5` and so on, or `unknown`
    metadata: dict[str, Any]  # what the files say about themselves: strings, numbers, or lists and mappings of them
    files: tuple[FileSummary, ...]  # index first
    tensors: tuple[TensorSummary, ...]  # those that could be found, in the order of the files
    problems: tuple[Problem, ...]  # in the order in which they were found

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def dtypes(self) -> dict[str, int]:
        """Dtype → bytes of the tensors that have it, largest first."""
        totals: Counter[str] = Counter()
        for tensor in self.tensors:
            totals[tensor.dtype] += tensor.nbytes
        return dict(totals.most_common())

    def to_dict(self) -> dict[str, Any]:
        """The summary in types that JSON has; counts are of bytes."""
        return {
            "path": self.path,
            "format": self.format,
            "num_tensors": len(self.tensors),
            "nbytes": self.nbytes,
            "dtypes": self.dtypes,
            "metadata": self.metadata,
            "files": [{**file._asdict(), "verified": list(file.verified)} for file in self.files],
            "tensors": [{**tensor._asdict(), "shape": list(tensor.shape)} for tensor in self.tensors],
            "problems": [problem._asdict() for problem in self.problems],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the summary as a page: one HTML file that needs no network; needs plotly.

        Raises:
            LazyModelError: plotly is not installed, or the file cannot be written.
        """
        problems = [problem.message for problem in self.problems]
        count = f"{plural(len(problems), 'problem')} found" if problems else "no problems found"
        sections: list[Section] = [Text([self._line(), count, *problems])]
        if self.tensors:
            sections.append(Bars("Bytes by dtype", {"all tensors": self.dtypes}))
            sizes = {tensor.name.replace(".", "/"): tensor.nbytes for tensor in self.tensors}
            sections.append(Treemap("Names by bytes", modules(sizes)))
        columns = ("tensor", "dtype", "shape", "bytes", "file", "offset")
        rows = [
            (
                one.name,
                one.dtype,
                shape_text(one.shape),
                Nbytes(one.nbytes),
                one.file,
                "" if one.offset is None else f"{one.offset:,}",
            )
            for one in self.tensors
        ]
        sections.append(Grid("Tensors", columns, rows))
        files = [(one.path, f"{one.tensors:,}", Nbytes(one.nbytes), ", ".join(one.verified)) for one in self.files]
        sections.append(Grid("Files", ("file", "tensors", "bytes", "verified"), files))
        if self.metadata:
            metadata = [(key, str(value)) for key, value in self.metadata.items()]
            sections.append(Grid("Metadata", ("key", "value"), metadata))
        save_page(path, f"{self.path}: checkpoint", sections)

    def _line(self) -> str:
        size = f"{format_bytes(self.nbytes)} in {plural(len(self.files), 'file')}"
        return f"{self.format}, {plural(len(self.tensors), 'tensor')}, {size}"

    def __repr__(self) -> str:
        return f"CheckpointSummary({self.path!r}: {self._line()}, {plural(len(self.problems), 'problem')})"

    def __str__(self) -> str:
        """The report for a person, as wide as the terminal; no colours."""
        by_file = Counter(problem.file for problem in self.problems)

        def file_row(file: FileSummary) -> Row:
            state = f"{', '.join(file.verified)} as stated" if file.verified else "ok"
            if by_file[file.path]:
                state = plural(by_file[file.path], "problem")
            return Row(short(file.path), (f"{file.tensors:,}",), file.nbytes, state)

        def tensor_row(one: TensorSummary) -> Row:
            return Row(short(one.name), (shape_text(one.shape), one.dtype), one.nbytes, short(one.file))

        lines: list[str] = []
        if self.tensors:
            lines.append(f"dtypes: {', '.join(f'{name} {format_bytes(size)}' for name, size in self.dtypes.items())}")
        metadata = [f"metadata: {short(key)} = {short(str(value))}" for key, value in self.metadata.items()]
        lines += first_lines(metadata, indent="metadata: ")
        title, headings = f"{self.path}: {self._line()}", ("tensors", "bytes", "state")
        parts = [folded_table(title, headings, map(file_row, self.files), lines, noun="file").text()]
        if self.tensors:
            headings = ("shape", "dtype", "bytes", "file")
            parts.append(folded_table("", headings, map(tensor_row, self.tensors), noun="tensor").text())
        # Not in a table: a message with a path in it is copied, searched and quoted in one line.
        messages = [f"  - {printable(problem.message)}" for problem in self.problems]
        problems = first_lines(messages, most=_MAX_PROBLEMS, indent="  ")
        count = f"{plural(len(self.problems), 'problem')} found:" if problems else "no problems found"
        return "\n".join([*parts, "", count, *problems])


def inspect_checkpoint(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None, *, verify: bool = False
) -> CheckpointSummary:
    """Lists what is in a checkpoint and what is wrong with it; reads headers only.

    Args:
        path: As for `open_checkpoint`, and `storage_options` too.
        verify: Whether to hash the files too, and to compare that with what a Hugging Face cache or download, or a
            manifest such as `SHA256SUMS`, states. A file whose hash nobody states is a problem.

    Raises:
        CheckpointError: Nothing is there, or nothing in a folder is a checkpoint. Everything else that is wrong is a
            problem in the summary.
    """
    found = _Inspection(located(path, storage_options))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LazyModelWarning)
        found.look()
    for warning in caught:
        if issubclass(warning.category, LazyModelWarning):
            found.problem(str(warning.message))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    if verify:
        found.verify()
    return found.summary()


class _Inspection:
    """What was found so far."""

    def __init__(self, where: Location) -> None:
        self.where = where
        self.root = where if where.is_dir() else where.parent
        self.format = "unknown"
        self.metadata: dict[str, Any] = {}
        self.files: dict[str, tuple[str, ...]] = {}  # path → algorithms of hashes that it was found to have
        self.tensors: dict[str, TensorSummary] = {}
        self.problems: list[Problem] = []

    # What there is.

    def look(self) -> None:
        try:
            files = weight_files(self.where) if self.where.is_dir() else [self.where]
        except CheckpointError as error:
            self.format = "safetensors"
            self.problem(str(error))
            return
        if files and files[0].suffix == ".safetensors" and self.where.is_dir():
            self.look_at_loose(files)
        elif files:
            self.look_at_file(files[0])
        else:
            try:
                item = find_item(self.where)
            except CheckpointError:
                item = self.where  # something of Orbax' that cannot be opened; opening it says why
            if item is None and (step := newest_step(self.where)) is not None:
                self.where = self.root = step
                self.look()
                return
            if item is None and not npy_names(self.where):
                raise no_checkpoint(self.where)
            self.format = "orbax" if item is not None else "numpy"
            self.look_at_whole(self.where)

    def look_at_file(self, file: Location) -> None:
        """A file that is an index or the whole checkpoint."""
        if kind := format_of(file):
            self.format = kind.name
        if kind and kind.shard:
            self.look_at_index(file, kind.shard)
        else:
            self.look_at_whole(file)

    def look_at_whole(self, path: Location) -> None:
        """A checkpoint of one file, or in a format that can only be opened as a whole."""
        if path.is_file():
            self.files[str(path)] = ()
        try:
            checkpoint = open_located(path, as_stored=True)
        except LazyModelError as error:
            self.problem(str(error), path if path.is_file() else None)
            return
        self.format = checkpoint.format
        self.files.update(dict.fromkeys(content_files(checkpoint), ()))
        self.add([(checkpoint, checkpoint)])

    def look_at_index(self, index: Location, kind: Format) -> None:
        """An index and the shards that it names, or, where it cannot be read, those that lie beside it."""
        self.files[str(index)] = ()
        try:
            content = read_json_file(index)
            weights = weight_map(content, index)
        except CheckpointError as error:
            self.problem(str(error), index)
            self.look_at_loose(sorted(index.parent.glob(f"*{kind.suffixes[0]}")), kind)
            return
        self.add_metadata(content.get("metadata"))
        self.add(open_indexed(index, weights, self.noting(kind), self.problem, grouped=kind.grouped))

    def look_at_loose(self, paths: Sequence[Location], kind: Format = SAFETENSORS) -> None:
        self.format = kind.name
        self.add(open_loose(self.root, paths, self.noting(kind), self.problem))

    def noting(self, kind: Format) -> Callable[[Any], Checkpoint]:
        """Opens a file of a format, which is noted, whether it can be opened or not."""

        def open(path: Location) -> Checkpoint:
            if path.is_file():
                self.files[str(path)] = ()
            return kind.open(path)

        return open

    # What is noted of it.

    def add(self, parts: Iterable[Part]) -> None:
        for checkpoint, names in parts:
            with checkpoint:
                self.add_part(checkpoint, names)

    def add_part(self, checkpoint: Checkpoint, names: Iterable[str]) -> None:
        """Notes tensors, and that some were found before."""
        path = checkpoint.path
        try:
            self.add_metadata(checkpoint.metadata)
        except LazyModelError as error:
            self.problem(str(error), path)
        again: dict[str, list[str]] = {}
        texts: dict[Any, str] = {}  # a million tensors may lie in one file, and have one dtype
        for name in names:
            try:
                dtype, shape, nbytes, file, stored, offset = checkpoint.describe(name)
            except LazyModelError as error:
                self.problem(str(error), path)
                continue
            if name in self.tensors:
                again.setdefault(self.tensors[name].file, []).append(name)
                continue
            if file not in texts:
                texts[file] = self.relative(file or path)
            if dtype not in texts:
                texts[dtype] = dtype.name
            kind, nbytes = stored or (texts[dtype], nbytes)
            self.tensors[name] = TensorSummary(name, kind, shape, nbytes, texts[file], offset)
        for other, twice in again.items():
            self.problem(f"{path} and {other} both have {some(twice)}; keep one of them, or add an index", path)

    def add_metadata(self, metadata: Any) -> None:
        if isinstance(metadata, Mapping):
            self.metadata.update({str(key): _plain(value) for key, value in metadata.items()})

    def problem(self, message: str, file: str | Location | None = None) -> None:
        self.problems.append(Problem(None if file is None else self.relative(file), message))

    def relative(self, path: str | Location) -> str:
        """A path relative to the checkpoint's folder where it lies inside."""
        if isinstance(self.root, RemotePath):
            return str(path).removeprefix(f"{self.root}/")
        inside = os.path.relpath(str(path), self.root)
        return str(path) if inside.split(os.sep)[0] == os.pardir else inside

    def size(self, file: str) -> int:
        """Bytes of a file; 0 where it is not there."""
        where = self.root / self.relative(file) if isinstance(self.root, RemotePath) else Path(file)
        return where.stat().st_size if where.is_file() else 0

    def verify(self) -> None:
        """Compares the files with the hashes that are stated for them."""
        try:
            if isinstance(self.root, RemotePath):
                there = [file for file in self.files if (self.root / self.relative(file)).is_file()]
                hashes = known_object_hashes(there, True, self.root)
                wrong = object_mismatches(hashes, self.root)
            else:
                hashes = known_hashes([file for file in self.files if os.path.isfile(file)], True, self.root)
                wrong = mismatches(hashes)
        except LazyModelError as error:
            self.problem(str(error))
            return
        for file, message in wrong.items():
            self.problem(message, file)
        if lacking := [file for file, stated in hashes.items() if not stated]:
            self.problem(no_hash(lacking, True))
        for file, stated in hashes.items():
            self.files[file] = () if file in wrong else tuple(hash.algorithm for hash in stated)

    def summary(self) -> CheckpointSummary:
        found = Counter(tensor.file for tensor in self.tensors.values())
        files: list[FileSummary] = []
        for file, verified in self.files.items():
            files.append(FileSummary(self.relative(file), self.size(file), found[self.relative(file)], verified))
        tensors, problems = tuple(self.tensors.values()), tuple(self.problems)
        return CheckpointSummary(str(self.where), self.format, self.metadata, tuple(files), tensors, problems)


def _plain(value: Any) -> Any:
    """A value as JSON can say it; what it cannot (NaN, a nesting without end) and long lists as text."""
    if isinstance(value, list) and len(values := cast("list[Any]", value)) > _MAX_VALUES:
        return f"{len(values)} values: {reprlib.repr(values)}"
    try:
        return json.loads(json.dumps(value, default=str, allow_nan=False))
    except (ValueError, TypeError, RecursionError):
        return reprlib.repr(value)
