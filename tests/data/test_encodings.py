"""CSV and JSON lines in other encodings and with other delimiters give the same examples, at the same lines."""

from __future__ import annotations

import csv
import gzip
import io
import json

import pytest
from PIL import Image

from rekindle.data.encodings import encoding_of
from rekindle.errors import DataError, SpecError
from rekindle.spec.load import load_target
from tests.data.corpora import content, ingested, rows, text_spec

ROWS = [{**row, "text": f'{row["text"]} «ß»; "{i}" | x'} for i, row in enumerate(rows())]


def as_csv(delimiter=","):
    """CRLF, and texts of two lines with quotes in them."""
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, list(ROWS[0]), delimiter=delimiter)
    table.writeheader()
    table.writerows(ROWS)
    return text.getvalue()


JSONL = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
ENCODINGS = ["cp1252", "latin-1", "utf-16", "utf-16-le", "utf-32", "gb18030"]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("name", "text"), [("x.csv", as_csv()), ("x.jsonl", JSONL)])
def test_an_encoding_gives_the_examples_of_utf8(tmp_path, monkeypatch, name, text, encoding):
    monkeypatch.setattr("rekindle.data.encodings._PIECE_BYTES", 999)  # odd: cuts characters
    for folder, given in (("a", "utf-8"), ("b", encoding), ("c", encoding)):
        (tmp_path / folder).mkdir()
        zipped = folder == "c"
        path = tmp_path / folder / (name + ".gz" * zipped)
        encoded = text.encode(given)
        path.write_bytes(gzip.compress(encoded) if zipped else encoded)
        data = text_spec(path, encoding=given, columns={"key": "id"})
        ingested(data, tmp_path / folder / "out")
    contents = [content(tmp_path / folder / "out") for folder in "abc"]
    for found in contents:
        found.pop("summary.json")  # has the hash of the file
    assert contents[0] == contents[1] == contents[2]


@pytest.mark.parametrize("delimiter", [";", "|", "\t", "^", "]", "-", "\\"])
def test_a_delimiter_gives_the_examples_of_a_comma(tmp_path, delimiter):
    for folder, given in (("a", ","), ("b", delimiter)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.csv").write_text(as_csv(given), newline="")
        data = text_spec(tmp_path / folder / "x.csv", delimiter=given)
        ingested(data, tmp_path / folder / "out")
    ours, theirs = content(tmp_path / "a" / "out"), content(tmp_path / "b" / "out")
    assert {**ours, "summary.json": ""} == {**theirs, "summary.json": ""}


def test_a_byte_that_an_encoding_lacks_is_told_with_its_line(tmp_path):
    lines = as_csv(";").encode("cp1252") + b"x;\x81;good;c;2026-01\r\n,;;;;\r\n"
    (tmp_path / "x.csv").write_bytes(lines)
    data = text_spec(tmp_path / "x.csv", encoding="cp1252", delimiter=";")
    with pytest.raises(DataError) as caught:
        ingested(data, tmp_path / "out")
    row = as_csv().count("\n") + 1
    assert f"x.csv:{row} (text: b'\\x81')" in str(caught.value)
    assert f"x.csv:{row + 1}" in str(caught.value), "a fault after it"


@pytest.mark.parametrize(
    ("content", "encoding", "message"),
    {
        "half a character": (as_csv().encode("utf-16-le")[:-1], "utf-16-le", "it is not utf-16-le"),
        "UTF-16 as such": (
            as_csv().encode("utf-16"),
            "utf-8",
            "set data.encoding: utf-16, or conv",
        ),
        "without its mark": (as_csv().encode("utf-16-be"), "utf-8", "set data.encoding: utf-16-be"),
        "a code page": ("text,label,größe\na,b,c\n".encode("cp1252"), "utf-8", "such as to cp1252"),
        "another code page": (b"text,label,\x81\na,b,c\n", "utf-8", "such as to latin-1"),
        "a pipe": (as_csv("|").encode(), "utf-8", 'set data.delimiter: "|"'),
        "a tab behind commas": (
            as_csv("\t").replace("month", "a,b").encode(),
            "utf-8",
            r'set data.delimiter: "\\t"',
        ),
    }.values(),
)
def test_what_fits_is_named_where_it_can_be_known(tmp_path, content, encoding, message):
    (tmp_path / "x.csv").write_bytes(content)
    with pytest.raises(DataError, match=message.replace("|", r"\|")) as caught:
        ingested(text_spec(tmp_path / "x.csv", encoding=encoding), tmp_path / "out")
    assert len(caught.value.problems) == 1


def test_encodings_are_guessed_from_marks_and_zeros():
    written = {name: "text,ß".encode(name) for name in (*ENCODINGS[:4], "utf-16-be", "utf-32")}
    assert {name: encoding_of(head) for name, head in written.items()} == {
        **{name: name for name in written},
        "latin-1": "cp1252",
    }


@pytest.mark.parametrize(
    "setting",
    [
        "data.delimiter=''",
        "data.delimiter=a",
        "data.delimiter=';;'",
        "data.delimiter='\"'",
        "data.encoding=rot13",
        "data.encoding=unicode_escape",
        "data.format=jsonl data.delimiter=;",
        "data.format=parquet data.encoding=cp1252",
    ],
)
def test_what_is_no_delimiter_or_encoding_is_refused(tmp_path, setting):
    path = tmp_path / "c.yaml"
    path.write_text(
        "name: x\ntask: text_classification\ndata: {source: x.csv}\n"
        "model: {source: {model_type: distilbert}}\n"
    )
    assert load_target(path, ["data.delimiter=;", "data.encoding=cp1252"]).data.delimiter == ";"
    with pytest.raises(SpecError, match=r"data\.(delimiter|encoding)"):
        load_target(path, setting.split(" "))


def test_files_of_no_format_beside_images_are_ignored_and_named(tmp_path, caplog):
    for i in range(60):
        path = tmp_path / "d" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), i).save(path)
    (tmp_path / "d/notes.txt").write_text("collected in March")
    (tmp_path / "d/a/sources.docx").write_bytes(b"x")
    summary = ingested(text_spec(tmp_path / "d"), tmp_path / "out", modality="image")
    assert sum(summary.rows.values()) == 60
    assert "2 files beside the images are ignored, such as a/sources.docx" in caplog.text
    (tmp_path / "d/labels.csv").write_text("image,label\n")
    with pytest.raises(DataError, match="a mixture of csv, images, unknown"):
        ingested(text_spec(tmp_path / "d"), tmp_path / "out", modality="image")
