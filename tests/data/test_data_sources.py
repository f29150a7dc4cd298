"""Documents come in a fixed order, exactly as written, and what cannot be read is named."""

from __future__ import annotations

import gzip
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mode
from mode.config.settings import DataConfig, FilesConfig, HubConfig
from mode.data import DataError
from mode.data.sources import LONG_TEXT, PACKAGES, HubDataset, PythonFiles, cut_long_text, find_packages, open_source

TEXTS = ["first", "second\r\nline\twith \u00e9 \U0001f600", "12", "NA", '"quoted", with comma']


def read(*paths: str | Path, text_column: str = "text") -> list[str]:
    files = FilesConfig(paths=tuple(str(path) for path in paths), text_column=text_column)
    return list(open_source(DataConfig(source="files", files=files)).documents())


def error(*paths: str | Path, text_column: str = "text") -> str:
    with pytest.raises(DataError) as raised:
        read(*paths, text_column=text_column)
    message = str(raised.value)
    assert "\n" not in message
    return message


def write_table(path: Path, texts: list[Any]) -> Path:
    import pandas

    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps([{"id": 1, "text": text} for text in texts]), encoding="utf-8")
    elif path.suffix == ".csv":
        pandas.DataFrame({"id": 1, "text": texts}).to_csv(path, index=False)
    else:
        pandas.DataFrame({"id": 1, "text": texts}).to_parquet(path)
    return path


def test_a_text_file_is_one_document_with_its_own_line_endings(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(TEXTS[1].encode())
    assert read(tmp_path / "a.txt") == [TEXTS[1]]


@pytest.mark.parametrize("extension", ["jsonl", "json", "csv", "parquet"])
def test_a_table_gives_one_document_per_row_exactly_as_written(tmp_path: Path, extension: str) -> None:
    assert read(write_table(tmp_path / f"a.{extension}", TEXTS)) == TEXTS


@pytest.mark.parametrize("extension", ["jsonl", "json", "csv", "parquet"])
def test_rows_without_text_are_passed_by(tmp_path: Path, extension: str) -> None:
    assert read(write_table(tmp_path / f"a.{extension}", ["one", None, "", "two"])) == ["one", "two"]


def test_a_table_larger_than_one_chunk_is_read_whole_and_in_order(tmp_path: Path) -> None:
    texts = [f"document {number} " + "x" * 200 for number in range(60_000)]
    assert read(write_table(tmp_path / "a.jsonl", texts)) == texts


def test_local_tables_need_no_network_and_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection was attempted")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    path = write_table(tmp_path / "a.jsonl", TEXTS)
    assert read(path) == TEXTS
    assert list(tmp_path.iterdir()) == [path]


def test_globs_are_sorted_and_a_file_named_twice_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.txt", "deep/c.txt", "note[1].txt"):
        (tmp_path / name).write_text(name)
    assert read(tmp_path / "b.txt", tmp_path / "**/*.txt") == ["b.txt", "a.txt", "deep/c.txt", "note[1].txt"]
    assert read(tmp_path / "note[1].txt") == ["note[1].txt"]


def test_a_table_whose_name_holds_glob_characters_is_read(tmp_path: Path) -> None:
    assert read(write_table(tmp_path / "a[1]*.jsonl", ["one"])) == ["one"]


def test_a_glob_without_matches_is_named(tmp_path: Path) -> None:
    assert f'{tmp_path}/*.txt: no file matches this entry of "files.paths"' in error(tmp_path / "*.txt")


def test_a_folder_stands_for_the_text_files_below_it(tmp_path: Path) -> None:
    names = ["b/deep/c.txt", "a.txt", "b/a.md", "z.TXT", "notes.txt.gz"]
    passed_by = ["picture.png", ".hidden.txt", ".git/d.txt", "archive.gz", "LICENSE"]
    for name in names + passed_by:
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(name.encode()) if name.endswith(".gz") else name.encode())
    (tmp_path / "texts" / "empty.txt").touch()
    assert read(tmp_path / "texts") == sorted(names)
    assert read(tmp_path / "texts" / "z.TXT", f"{tmp_path}/texts/") == ["z.TXT", *sorted(set(names) - {"z.TXT"})]
    (tmp_path / "bare").mkdir()
    assert 'bare: this folder of "files.paths" holds no file of .txt, .md, .jsonl, ' in error(tmp_path / "bare")


def test_a_single_path_needs_no_list(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    config = DataConfig.from_dict({"source": "files", "files": {"paths": str(tmp_path)}})
    assert list(open_source(config).documents()) == ["one"]
    assert DataConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("extension", ["txt", "md", "jsonl", "json", "csv"])
def test_a_compressed_file_is_read_like_the_file_in_it(tmp_path: Path, extension: str) -> None:
    plain = tmp_path / f"a.{extension}"
    if extension in ("txt", "md"):
        plain.write_bytes(TEXTS[1].encode())
    else:
        write_table(plain, TEXTS)
    compressed = tmp_path / f"b.{extension}.gz"
    compressed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read(compressed) == read(plain)
    whole = compressed.read_bytes()
    compressed.write_bytes(whole[:-9])
    assert error(compressed).startswith(f"{compressed}: cannot be read: ")
    compressed.write_bytes(b"no gzip file")
    assert error(compressed) == f"{compressed}: cannot be read: Not a gzipped file (b'no')"
    content = b'{"text": "good"}\n{"text": "\xff"}\n'
    compressed.write_bytes(gzip.compress(content))
    assert f"{compressed}: the byte at offset {content.index(0xFF)} is not UTF-8 text" in error(compressed)


@pytest.mark.parametrize("extension", ["txt", "jsonl", "json", "csv", "parquet"])
def test_an_empty_file_is_named(tmp_path: Path, extension: str) -> None:
    path = tmp_path / f"a.{extension}"
    path.touch()
    assert error(path) == f"{path}: the file is empty"


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", "\n"), ("a.json", "[]"), ("a.csv", "id,text\n")])
def test_a_table_without_rows_is_named(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert error(tmp_path / name) == f'{tmp_path / name}: no row holds text in column "text"'


@pytest.mark.parametrize("extension", ["jsonl", "json", "csv", "parquet"])
def test_a_missing_column_is_named_beside_the_columns_there_are(tmp_path: Path, extension: str) -> None:
    path = write_table(tmp_path / f"a.{extension}", TEXTS)
    assert error(path, text_column="body") == f'{path}: there is no column "body"; the columns are: id, text'


@pytest.mark.parametrize("extension", ["jsonl", "json", "parquet"])
def test_a_column_that_holds_no_text_is_named_with_its_row(tmp_path: Path, extension: str) -> None:
    path = write_table(tmp_path / f"a.{extension}", [1, 2])
    assert error(path) == f"{path}, row 0: the text column holds a int; it must hold text"


@pytest.mark.parametrize("extension", ["txt", "jsonl", "json", "csv"])
def test_undecodable_bytes_are_named_with_their_offset(tmp_path: Path, extension: str) -> None:
    content = {
        "txt": b"good \xc3\xa9 then \xff bad",
        "jsonl": b'{"text": "good"}\n{"text": "\xff"}\n',
        "json": b'[{"text": "good"}, {"text": "\xff"}]',
        "csv": b"id,text\n1,good\n2,\xff\n",
    }[extension]
    path = tmp_path / f"a.{extension}"
    path.write_bytes(content)
    assert f"{path}: the byte at offset {content.index(0xFF)} is not UTF-8 text" in error(path)


def test_the_offset_of_an_undecodable_byte_is_right_deep_in_a_large_table(tmp_path: Path) -> None:
    # characters of three bytes, so that one lies across the border of two chunks
    content = b'{"text": "' + "\u20ac".encode() * 700_000 + b'"}\n{"text": "\xe2\x82"}\n'
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    assert f"the byte at offset {content.rindex(0xE2)} is not UTF-8 text" in error(path)


@pytest.mark.parametrize(("name", "shown"), [("a.pdf", ".pdf"), ("a.pdf.gz", ".gz"), ("a.parquet.gz", ".gz")])
def test_an_unknown_extension_is_named_beside_the_known_ones(tmp_path: Path, name: str, shown: str) -> None:
    (tmp_path / name).write_text("x")
    expected = (
        f'{name}: unknown extension "{shown}"; it must be one of .txt, .md, .jsonl, .json, .csv, .parquet, the first'
    )
    assert expected in error(tmp_path / name)


def test_a_broken_line_of_jsonl_is_named_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b\n')
    assert f"{tmp_path}/a.jsonl: line 2 is not valid JSON" in error(tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", ["a.json", "a.parquet"])
def test_a_table_of_another_format_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("[this is neither")
    assert f"{tmp_path / name}: cannot be read as {name[2:]}: " in error(tmp_path / name)


@pytest.mark.parametrize("content", ["text\none, two\nthree\n", "text\none, two, three\n", "id,text\n1,one, two\n"])
def test_unquoted_commas_in_csv_are_an_error_and_not_lost_text(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.csv").write_text(content)
    message = error(tmp_path / "a.csv")
    assert f"{tmp_path / 'a.csv'}: a row has more fields than the header has names" in message


def test_the_standard_library_gives_the_same_python_files_every_time() -> None:
    source = open_source(DataConfig())
    documents = list(source.documents())
    assert documents == list(source.documents())
    assert source.identity() == open_source(DataConfig()).identity()
    assert len(documents) > 100 and all(documents)
    assert any("class OrderedDict" in document for document in documents)


def test_an_edit_changes_the_identity_of_files(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    config = DataConfig(source="files", files=FilesConfig(paths=(str(path),)))
    before = open_source(config).identity()
    assert open_source(config).identity() == before
    path.write_text("one more")
    assert open_source(config).identity() != before


def test_a_hub_dataset_is_read_by_name_config_split_and_column(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub.constants

    asked = []

    def load(*names: str, split: str) -> datasets.Dataset:
        asked.append((*names, split))
        return datasets.Dataset.from_dict({"id": [1, 2, 3], "body": ["one", None, "two"]})

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # so that the hub is not looked for
    monkeypatch.setattr(datasets, "load_dataset", load)
    source = HubDataset(HubConfig(name="some/data", config="small", split="test", text_column="body"))
    assert list(source.documents()) == ["one", "two"]
    assert asked == [("some/data", "small", "test")]
    with pytest.raises(
        DataError, match='hub dataset "some/data": there is no column "text"; the columns are: id, body'
    ):
        list(HubDataset(HubConfig(name="some/data")).documents())

    def lose_contact(*_: object, **__: object) -> None:
        raise EOFError("the connection broke\nhalf-way")  # HTTP clients have errors of their own

    monkeypatch.setattr(datasets, "load_dataset", lose_contact)
    with pytest.raises(DataError, match='hub dataset "some/data": cannot be loaded: the connection broke$'):
        list(source.documents())


def test_a_hub_out_of_reach_is_a_clear_error_without_retries(tmp_path: Path) -> None:
    # in a process of its own: the libraries read these variables when they are imported
    code = (
        "from mode.config.settings import HubConfig\n"
        "from mode.data.errors import DataError\n"
        "from mode.data.sources import HubDataset\n"
        "from mode.data.tokenizer import pretrained_tokenizer\n"
        "for act in (lambda: list(HubDataset(HubConfig(name='no/such')).documents()),\n"
        "            lambda: pretrained_tokenizer('no/such')):\n"
        "    try: act()\n"
        "    except DataError as error: print(error)\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen: connections are refused
        environment |= {
            "HF_ENDPOINT": f"http://127.0.0.1:{unused.getsockname()[1]}",
            "HF_HOME": str(tmp_path),
            "NO_PROXY": "127.0.0.1",
            "PYTHONPATH": str(Path(mode.__file__).parents[1]),
        }
        result = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
    dataset, tokenizer = result.stdout.splitlines()
    assert dataset.startswith('hub dataset "no/such": cannot be reached (')
    assert dataset.endswith('"python_stdlib" and "files" work without')
    assert 'tokenizer "no/such": there is no such file or folder, and the Hugging Face hub cannot provide' in tokenizer
    assert "Retrying" not in result.stderr


@pytest.mark.parametrize("separator", ["\n\n", "\n", " ", "x"], ids=["paragraphs", "lines", "words", "nothing"])
def test_a_long_text_is_cut_between_paragraphs_lines_or_words_and_nothing_is_lost(separator):
    text = separator.join(f"{'word' * 40}{number}" for number in range(1000))
    pieces = list(cut_long_text(text))
    assert "".join(pieces) == text and len(pieces) > 4
    assert all(0 < len(piece) <= LONG_TEXT for piece in pieces)
    if separator != "x":
        assert all(piece.endswith(separator) for piece in pieces[:-1])


def test_a_short_text_stays_one_document():
    assert list(cut_long_text("a\n\nb")) == ["a\n\nb"]


def test_packages_are_read_folder_by_folder_without_their_tests_and_without_importing_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "zeta_text": ["__init__.py", "tests/test_a.py"],
        "alpha_text": ["b/c.py", "a.py", "data.txt", "__init__.py"],
    }
    for number, (package, names) in enumerate(files.items()):
        for name in names:
            path = tmp_path / str(number) / package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"raise ImportError('{package}/{name}')\n")
        monkeypatch.syspath_prepend(tmp_path / str(number))
    found = PythonFiles("python_packages", tuple(find_packages(["alpha_text", "no_such_package", "zeta_text"])))
    assert list(found.documents()) == [
        f"raise ImportError('{name}')\n"
        for name in ("alpha_text/__init__.py", "alpha_text/a.py", "alpha_text/b/c.py", "zeta_text/__init__.py")
    ]


def test_the_packages_of_the_larger_corpus_come_with_mode() -> None:
    source = open_source(DataConfig(source="python_packages"))
    assert isinstance(source, PythonFiles) and [root.name for root in source.roots] == list(PACKAGES)
    small = open_source(DataConfig())
    assert isinstance(small, PythonFiles)
    sizes = [sum(path.stat().st_size for path in each.paths()) for each in (small, source)]
    assert sizes[1] > 5 * sizes[0]
