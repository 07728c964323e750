"""`lazymodel inspect`: what a path holds, and all that is wrong with it; no tensor's bytes are read."""

from __future__ import annotations

import dataclasses
import json
import os
import reprlib
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

from lazymodel._errors import LazyModelError, LazyModelWarning
from lazymodel._remote.path import Location
from lazymodel._show.table import Column, Report, Table, plain, shape_text
from lazymodel._show.text import first_lines, format_bytes, plural, printable
from lazymodel.checkpoints._checkpoint import Checkpoint
from lazymodel.checkpoints._open import content_files, find_contents
from lazymodel.checkpoints._safetensors import Contents, short, some
from lazymodel.extras.inspection.verify import mismatches, no_hash, stated_hashes

_MAX_PROBLEMS = 40  # problems that the text shows; `to_dict` has all
_MAX_VALUES = 100  # of a list in the metadata; the first ones identify the vocabulary of a tokenizer


class TensorSummary(NamedTuple):
    """One tensor: its name, dtype, shape, bytes, and the file that has it (relative to the checkpoint's folder).

    For quantized GGUF tensors, the name of their type, such as `Q4_K`, and their bytes in the file. Of safetensors and
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
    """A problem in a sentence, and its file; None if it is not of a single file."""

    file: str | None
    message: str


@dataclasses.dataclass(frozen=True, repr=False)
class CheckpointSummary(Report):
    """The result of `inspect_checkpoint`. `str()` is a report for a person, `to_dict()` the same for a program."""

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

    def with_problem(self, message: str) -> CheckpointSummary:
        """The same with one more problem, which is not of a single file."""
        return dataclasses.replace(self, problems=(*self.problems, Problem(None, message)))

    def to_dict(self) -> dict[str, Any]:
        """The summary in types that JSON has; counts are of bytes."""
        own = {"num_tensors": len(self.tensors), "nbytes": self.nbytes, "dtypes": self.dtypes}
        return plain(dataclasses.replace(self, metadata={})) | own | {"metadata": self.metadata}  # as deep as files say

    def page_tables(self) -> list[Table]:
        """The tables of its page."""
        problems = [problem.message for problem in self.problems]
        count = f"{plural(len(problems), 'problem')} found" if problems else "no problems found"
        metadata = [(key, str(value)) for key, value in self.metadata.items()]
        columns = (Column("key"), Column("value"))
        tables = [self.table(), Table(count, columns, [], problems), self._tensor_table()]
        return [*tables, *([Table("metadata", columns, metadata)] if metadata else [])]

    def _line(self) -> str:
        size = f"{format_bytes(self.nbytes)} in {plural(len(self.files), 'file')}"
        return f"{self.format}, {plural(len(self.tensors), 'tensor')}, {size}"

    def table(self) -> Table:
        """The files, and a summary below them."""
        by_file = Counter(problem.file for problem in self.problems)

        def cells(file: FileSummary) -> tuple[Any, ...]:
            state = f"{', '.join(file.verified)} as stated" if file.verified else "ok"
            state = plural(by_file[file.path], "problem") if by_file[file.path] else state
            return short(file.path), f"{file.tensors:,}", file.nbytes, state

        lines: list[str] = []
        if self.tensors:
            lines.append(f"dtypes: {', '.join(f'{name} {format_bytes(size)}' for name, size in self.dtypes.items())}")
        metadata = [f"metadata: {short(key)} = {short(str(value))}" for key, value in self.metadata.items()]
        lines += first_lines(metadata, indent="metadata: ")
        columns = (Column.names("file"), Column("tensors"), Column.nbytes("bytes"), Column.notes("state"))
        return Table(f"{self.path}: {self._line()}", columns, [*map(cells, self.files)], lines)

    def _tensor_table(self) -> Table:
        columns = (
            Column.names("tensor"), Column("shape"), Column("dtype"), Column.nbytes("bytes"), Column.notes("file"),
            Column.in_pages("offset"),
        )  # fmt: skip

        def cells(t: TensorSummary) -> tuple[Any, ...]:
            offset = "" if t.offset is None else f"{t.offset:,}"
            return short(t.name), shape_text(t.shape), t.dtype, t.nbytes, short(t.file), offset

        return Table("", columns, [*map(cells, self.tensors)])

    def __repr__(self) -> str:
        return f"CheckpointSummary({self.path!r}: {self._line()}, {plural(len(self.problems), 'problem')})"

    def __str__(self) -> str:
        """The report for a person, as wide as the terminal; no colours."""
        parts = [self.table().text(), *([self._tensor_table().text()] if self.tensors else [])]
        # Not in a table: a message with a path in it is copied, searched and quoted in one line.
        messages = [f"  - {printable(problem.message)}" for problem in self.problems]
        problems = first_lines(messages, most=_MAX_PROBLEMS, indent="  ")
        count = f"{plural(len(self.problems), 'problem')} found:" if problems else "no problems found"
        return "\n".join([*parts, "", count, *problems])


def inspect_checkpoint(where: Location, *, verify: bool = False) -> CheckpointSummary:
    """Lists what is in a checkpoint and what is wrong with it; reads headers only.

    Args:
        where: The place of the checkpoint, at which something is.
        verify: Whether to hash the files too, and to compare that with what a Hugging Face cache or download, or a
            manifest such as `SHA256SUMS`, states. A file whose hash nobody states is a problem.

    Raises:
        CheckpointError: Nothing in a folder is a checkpoint. Everything else that is wrong is a
            problem in the summary.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LazyModelWarning)
        contents = find_contents(where)
        found = _Inspection(contents)
        for checkpoint, names in contents.parts:
            with checkpoint:
                found.add(checkpoint, names)
    for warning in caught:
        if issubclass(warning.category, LazyModelWarning):
            found.problem(str(warning.message))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    if verify:
        found.verify()
    names = {file: found.relative(file) for file in found.files}
    counts = Counter(tensor.file for tensor in found.tensors.values())
    files = tuple(FileSummary(names[f], found.size(f), counts[names[f]], found.files[f]) for f in names)
    tensors, problems = tuple(found.tensors.values()), tuple(found.problems)
    return CheckpointSummary(str(found.where), contents.format, found.metadata, files, tensors, problems)


class _Inspection:
    """The tables of a checkpoint's contents."""

    def __init__(self, contents: Contents) -> None:
        self.where = contents.where
        self.root = self.where if self.where.is_dir() else self.where.parent
        self.metadata: dict[str, Any] = {}
        # path → algorithms of hashes that it was found to have
        self.files: dict[str, tuple[str, ...]] = {str(file): () for file in contents.files}
        self.tensors: dict[str, TensorSummary] = {}
        self.problems: list[Problem] = []
        self.add_metadata(contents.metadata)
        for message, file, _ in contents.problems:
            self.problem(message, file)

    def add(self, checkpoint: Checkpoint, names: Iterable[str]) -> None:
        """Notes the tensors of a file, and that some were found before."""
        path = checkpoint.path
        self.files.update(dict.fromkeys(content_files(checkpoint), ()))
        try:
            self.add_metadata(checkpoint.metadata)
        except LazyModelError as error:
            self.problem(str(error), path)
        again: dict[str, list[str]] = {}
        texts: dict[Any, str] = {}  # a million tensors may be in one file, and have one dtype
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
        """A path relative to the checkpoint's folder where it is inside."""
        inside = os.path.relpath(str(path), str(self.root))
        return str(path) if inside.split(os.sep)[0] == os.pardir else inside

    def size(self, file: str) -> int:
        """Bytes of a file; 0 where it is not there."""
        where = self.root.named(file)
        return where.stat().st_size if where.is_file() else 0

    def verify(self) -> None:
        """Compares the files with the hashes that are stated for them."""
        try:
            hashes = stated_hashes([file for file in self.files if self.size(file)], True, self.root)
            wrong = mismatches({file: known for file, known in hashes.items() if known}, self.root)
        except LazyModelError as error:
            self.problem(str(error))
            return
        for file, message in wrong.items():
            self.problem(message, file)
        if missing := [file for file, stated in hashes.items() if not stated]:
            self.problem(no_hash(missing, True))
        for file, stated in hashes.items():
            self.files[file] = () if file in wrong else tuple(hash.algorithm for hash in stated)


def _plain(value: Any) -> Any:
    """A value as JSON can say it; what it cannot (NaN, a nesting without end) and long lists as text."""
    if isinstance(value, list) and len(values := cast("list[Any]", value)) > _MAX_VALUES:
        return f"{len(values)} values: {reprlib.repr(values)}"
    try:
        return json.loads(json.dumps(value, default=str, allow_nan=False))
    except (ValueError, TypeError, RecursionError):
        return reprlib.repr(value)
