"""Where documents come from: Python source files that are installed anyway, local files, or a hub dataset.

A source is a stream of texts in a fixed order, read anew each time it is asked for, so that nothing
larger than a document is held in memory. What cannot be read is a `DataError` that names the file.

This file knows nothing of tokens, splits or caches.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import importlib.util
import io
import json
import logging
import os
import sys
import sysconfig
import tempfile
import tokenize
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from mode.config.settings import DataConfig, FilesConfig, HubConfig
from mode.data.errors import DataError
from mode.data.hub import go_offline_if_unreachable

TEXT = (".txt", ".md")
READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}  # `datasets`' names for them
EXTENSIONS = (*TEXT, *READERS)
LONG_TEXT = 1 << 15  # characters: a longer text file is cut into documents

# Folders of Python source files that are left out: installed packages are not part of the standard library, tests
# are missing from many installations, and `encodings` and `pydoc_data` hold generated tables.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}

# What is installed wherever `mode` is, as it or what it needs depends on them: nine times the standard library's text.
PACKAGES = ("deepspeed", "networkx", "numpy", "pandas", "sympy", "torch")


class Source(Protocol):
    """A stream of documents."""

    @property
    def name(self) -> str:
        """What to call this source in a message."""

    def identity(self) -> list[Any]:
        """JSON values that change when the documents may have changed."""

    def documents(self) -> Iterator[str]:
        """Every document that is not empty, in an order that is always the same."""


def open_source(config: DataConfig) -> Source:
    """The source that the configuration names. Files are looked up now, and read later."""
    if config.source == "files":
        assert config.files is not None
        return LocalFiles(find_files(config.files), config.files.text_column)
    if config.source == "hub":
        assert config.hub is not None
        return HubDataset(config.hub)
    roots = [Path(sysconfig.get_paths()["stdlib"])] if config.source == "python_stdlib" else find_packages(PACKAGES)
    return PythonFiles(config.source, tuple(roots))


def find_packages(names: Sequence[str]) -> list[Path]:
    """The folders of the packages that are installed. None is imported."""
    specs = [importlib.util.find_spec(name) for name in names]
    return [Path(folder) for spec in specs if spec is not None for folder in spec.submodule_search_locations or []]


@dataclass(frozen=True)
class PythonFiles:
    """Python source files below some folders: real text on every machine."""

    source: str
    roots: tuple[Path, ...]

    @property
    def name(self) -> str:
        return f"{self.source} ({', '.join(root.name for root in self.roots)})"

    def paths(self) -> list[Path]:
        """Folder by folder, so that where packages are installed does not change the order."""
        return [path for root in self.roots for path in self._below(root)]

    def _below(self, root: Path) -> list[Path]:
        found = []
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if name not in LEFT_OUT]  # os.walk then passes them by
            # _sysconfigdata holds the paths and compiler flags of the machine Python was built on
            wanted = [name for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")]
            found += [Path(folder, name) for name in wanted]
        return sorted(found)

    def identity(self) -> list[Any]:
        return [self.source, sys.version, *file_identities(self.paths())]

    def documents(self) -> Iterator[str]:
        for path in self.paths():
            try:
                with tokenize.open(path) as file:  # honours a source file's own encoding line
                    text = file.read()
            except (OSError, SyntaxError, UnicodeDecodeError):
                continue  # not the user's file, so not the user's error
            if text:
                yield text


@dataclass(frozen=True)
class LocalFiles:
    """Text files, one document each unless long, and tables of documents, one document per row."""

    paths: tuple[Path, ...]
    text_column: str

    @property
    def name(self) -> str:
        more = f" and {len(self.paths) - 1} more files" if len(self.paths) > 1 else ""
        return f"{self.paths[0]}{more}"

    def identity(self) -> list[Any]:
        return ["files", self.text_column, *file_identities(self.paths)]

    def documents(self) -> Iterator[str]:
        for path in self.paths:
            if extension(path) in TEXT:
                yield from cut_long_text(_read_text(path))
            else:
                yield from _read_table(path, self.text_column)


def cut_long_text(text: str) -> Iterator[str]:
    """A text as documents of at most `LONG_TEXT` characters, cut between paragraphs, else lines, else words.

    A corpus is often one large text file; as one document it could not be split for validation.
    """
    start = 0
    while len(text) - start > LONG_TEXT:
        end = start + LONG_TEXT
        for separator in ("\n\n", "\n", " "):
            found = text.rfind(separator, start + LONG_TEXT // 2, end)
            if found >= 0:
                end = found + len(separator)
                break
        yield text[start:end]
        start = end
    yield text[start:]


@dataclass(frozen=True)
class HubDataset:
    """A dataset of the Hugging Face hub, downloaded once into Hugging Face's own cache.

    Its identity is its name, not its revision: asking the hub for the revision would need the network
    at every start, and could answer differently to two ranks.
    """

    config: HubConfig

    @property
    def name(self) -> str:
        return f'hub dataset "{self.config.name}"'

    def identity(self) -> list[Any]:
        return ["hub", self.config.to_dict()]

    def documents(self) -> Iterator[str]:
        import datasets

        go_offline_if_unreachable()
        try:
            table = datasets.load_dataset(self.config.name, self.config.config, split=self.config.split)
        except (ConnectionError, datasets.exceptions.DatasetNotFoundError) as error:
            raise DataError(
                f"{self.name}: cannot be reached ({_first_line(error)}); it needs network, or a copy in Hugging "
                'Face\'s cache; "python_stdlib" and "files" work without'
            ) from error
        except Exception as error:  # of datasets, pyarrow, the file system, the HTTP client: each its own
            raise DataError(f"{self.name}: cannot be loaded: {_first_line(error)}") from error
        _check_column(self.name, self.config.text_column, table.column_names)
        for row, record in enumerate(table.select_columns([self.config.text_column])):
            text = _check_text(record[self.config.text_column], f"{self.name}, row {row}")
            if text:
                yield text


def find_files(config: FilesConfig) -> tuple[Path, ...]:
    """The files that paths, folders and globs name: in the order given, sorted within a folder or glob, each once."""
    found: dict[Path, None] = {}  # a set that keeps its order
    for pattern in config.paths:
        expanded = Path(pattern).expanduser()
        if expanded.is_dir():
            paths = files_below(expanded)
            if not paths:
                kinds = ", ".join(EXTENSIONS)
                raise DataError(f'{pattern}: this folder of "files.paths" holds no file of {kinds}')
        else:
            # a file whose own name holds a glob character is meant literally
            names = [str(expanded)] if expanded.exists() else sorted(glob.glob(str(expanded), recursive=True))
            paths = [Path(name) for name in names if Path(name).is_file()]
            if not paths:
                raise DataError(f'{pattern}: no file matches this entry of "files.paths"')
        found.update(dict.fromkeys(path.absolute() for path in paths))
    for path in found:
        if extension(path) not in EXTENSIONS:
            raise DataError(
                f'{path}: unknown extension "{extension(path)}"; it must be one of {", ".join(EXTENSIONS)}, the first '
                "five also with .gz after it"
            )
        if path.stat().st_size == 0:
            raise DataError(f"{path}: the file is empty")
    return tuple(found)


def files_below(folder: Path) -> list[Path]:
    """The files that can be read as text, sorted. Others are passed by, and so are empty and hidden ones."""
    found = []
    for parent, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]  # os.walk then passes them by
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(path for path in found if extension(path) in EXTENSIONS and path.stat().st_size)


def extension(path: Path) -> str:
    """The lower-case extension that tells what a file holds: ".jsonl" of a.jsonl and of a.jsonl.gz."""
    inner = Path(path.stem).suffix.lower()
    return inner if is_compressed(path) and inner in EXTENSIONS and inner != ".parquet" else path.suffix.lower()


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def open_bytes(path: Path) -> BinaryIO:
    """A file's content, decompressed."""
    return cast(BinaryIO, gzip.open(path)) if is_compressed(path) else path.open("rb")


def file_identities(paths: tuple[Path, ...] | list[Path]) -> list[Any]:
    """Path, size and time of change: enough to notice an edit without reading a large corpus."""
    return [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in paths]


def _read_text(path: Path) -> str:
    try:
        with open_bytes(path) as file:
            return file.read().decode("utf-8")  # not read_text, which would translate line endings
    except (OSError, EOFError, zlib.error) as error:  # the latter of gzip
        raise _unread(path, error) from None
    except UnicodeDecodeError as error:
        raise _undecodable(path, error.start) from None


def _read_table(path: Path, text_column: str) -> Iterator[str]:
    import datasets

    # What `datasets` logs when a file cannot be read also comes back as an exception, with the file's name.
    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    reader = READERS[extension(path)]
    # Left to itself the reader takes "12" for a number, and "NA" or "null" for a missing value.
    options = {"converters": {text_column: str}, "keep_default_na": False} if reader == "csv" else {}
    found = False
    with tempfile.TemporaryDirectory() as scratch:  # streaming keeps nothing there but lock files
        try:
            table = datasets.load_dataset(
                reader, data_files=[glob.escape(str(path))], split="train", streaming=True, cache_dir=scratch, **options
            )
            for row, record in enumerate(table):
                if row == 0:
                    if any(column.startswith("__index_level_") for column in record):
                        # pandas takes surplus fields at the start of a row for row names, and would lose text
                        raise DataError(
                            f"{path}: a row has more fields than the header has names; "
                            "put text that holds commas into double quotes"
                        )
                    _check_column(str(path), text_column, list(record))
                text = _check_text(record.get(text_column), f"{path}, row {row}")
                if text:
                    found = True
                    yield text
        except DataError:
            raise
        except Exception as error:  # pyarrow, pandas and datasets each raise their own
            raise _unreadable(path, reader, error) from error
    if not found:
        raise DataError(f'{path}: no row holds text in column "{text_column}"')


def _check_column(where: str, column: str, columns: list[str]) -> None:
    if column not in columns:
        raise DataError(f'{where}: there is no column "{column}"; the columns are: {", ".join(columns)}')


def _check_text(value: Any, where: str) -> str:
    """The document in one field of a table; empty where the field is null."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{where}: the text column holds a {type(value).__name__}; it must hold text")
    return value


def _unread(path: Path, error: Exception) -> DataError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else _first_line(error)
    return DataError(f"{path}: cannot be read: {reason}")


def _undecodable(path: Path, offset: int) -> DataError:
    return DataError(f"{path}: the byte at offset {offset} is not UTF-8 text; convert the file to UTF-8")


def _unreadable(path: Path, reader: str, error: Exception) -> DataError:
    """The clearest message there is for a table that a library could not read."""
    if isinstance(error, OSError | EOFError | zlib.error):
        return _unread(path, error)
    if reader != "parquet":
        offset = _first_bad_byte(path)
        if offset is not None:
            return _undecodable(path, offset)
    if extension(path) == ".jsonl":
        with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                try:
                    json.loads(line or "null")
                except json.JSONDecodeError as problem:
                    return DataError(f"{path}: line {number} is not valid JSON: {problem.msg}")
    return DataError(f"{path}: cannot be read as {reader}: {_first_line(error)}")


def _first_bad_byte(path: Path) -> int | None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0  # of the first byte that the decoder has not turned into text yet
    with open_bytes(path) as file:
        while True:
            chunk = file.read(1 << 20)
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                return offset + error.start
            if not chunk:
                return None
            offset = file.tell() - len(decoder.getstate()[0])


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
