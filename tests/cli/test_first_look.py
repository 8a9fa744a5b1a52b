"""What the first file of a source and the names of architectures tell is said before a run begins, by run and doctor alike."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from s3fs import S3FileSystem
from s3fs.core import S3File

import rekindle
from rekindle.cli.main import invoke, report_errors
from rekindle.data import glance
from rekindle.errors import DataError, Problem, StepError
from tests.support.s3 import s3_server

ROWS = [
    {"id": f"r{i}", "body": f"text {i}", "team": "ab"[i % 2], "product": "x"} for i in range(20)
]
CONFIG = """\
name: tickets
task: text_classification
data:
  source: SOURCE
  columns: {text: body, label: team}
  slices: [product]
model:
  source: {model_type: distilbert, dim: 16, n_layers: 1, n_heads: 2, hidden_dim: 16}
"""


def written(folder: Path, name: str) -> Path:
    path = folder / name
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    elif name.endswith(".jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    else:
        separator = {"t.tsv": "\t", "semicolons.csv": ";"}.get(name, ",")
        lines = [separator.join(ROWS[0]), *(separator.join(row.values()) for row in ROWS)]
        path.write_text("﻿" * (name == "mark.csv") + "\n".join(lines) + "\n")
    return path


@pytest.fixture
def say(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def said(source: str, *settings: str, verb: str = "run") -> tuple[int, str]:
        (tmp_path / "c.yaml").write_text(CONFIG.replace("SOURCE", source))
        words = [word for setting in settings for word in ("--set", setting)]
        code = invoke([verb, "c.yaml", *words])
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    return said


@pytest.fixture
def lake(monkeypatch):
    """A bucket behind a real S3 protocol."""
    server, reached = s3_server()
    for name, value in reached.items():
        monkeypatch.setenv(name, value)
    S3FileSystem.clear_instance_cache()  # other tests of this process had stores of their own
    yield S3FileSystem()
    S3FileSystem.clear_instance_cache()
    server.kill()
    server.wait()


FILES = ["t.csv", "mark.csv", "semicolons.csv", "t.tsv", "t.jsonl", "t.parquet"]


@pytest.mark.parametrize("verb", ["run", "doctor"])
@pytest.mark.parametrize("name", FILES)
def test_columns_that_a_file_does_not_have_are_named_before_a_run_begins(say, tmp_path, name, verb):
    written(tmp_path, name)
    settings = ["data.columns={text: bdy, label: team}", "data.slices=[channel]"]
    code, text = say(name, *settings, verb=verb)
    assert code == 2
    assert "there is no column `bdy`" in text
    assert "did you mean `body`?" in text
    assert "there is no column `channel`" in text
    assert name in text
    assert not (tmp_path / ".rekindle" / "runs").exists()


@pytest.mark.slow
def test_what_lies_in_a_store_is_looked_at_too(say, tmp_path, lake, monkeypatch):
    for name in ("t.csv", "t.jsonl", "t.parquet"):
        lake.put(str(written(tmp_path, name)), f"s3://lake/{name}")
        uri = f"s3://lake/{name}"
        assert say(uri, verb="doctor")[0] == 0
        for verb in ("run", "doctor"):
            code, text = say(uri, "data.columns={text: bdy, label: team}", verb=verb)
            assert (code, "there is no column `bdy`" in text) == (2, True), text
        code, text = say(uri, "data.columns={text: bdy, label: team}", verb="plan")
        assert "there is no column" not in text, "planning asks no store"
    for i in range(40):
        (tmp_path / f"{i:02}.csv").write_text("body,team,product\n" + f"{'x' * 999},a,p\n" * 1000)
    lake.put([str(tmp_path / f"{i:02}.csv") for i in range(40)], "s3://lake/many/")
    asked, fetch = [], S3File._fetch_range
    monkeypatch.setattr(
        S3File,
        "_fetch_range",
        lambda file, start, end: asked.append((file.path, end - start)) or fetch(file, start, end),
    )
    assert say("s3://lake/many/*.csv", verb="doctor")[0] == 0
    assert len({path for path, _ in asked}) == 4
    assert max(size for _, size in asked) < 3 * glance._HEAD_BYTES, "of a megabyte each"
    code, text = say("s3://lake/none.csv")
    assert (code, "names no file" in text) == (2, True), text
    assert not (tmp_path / ".rekindle" / "runs").exists()


@pytest.mark.parametrize("name", FILES)
def test_a_source_with_all_its_columns_is_ready(say, tmp_path, name):
    written(tmp_path, name)
    assert say(name, verb="doctor")[0] == 0
    assert say("t*." + name.rpartition(".")[2] if name[0] == "t" else name, verb="doctor")[0] == 0


@pytest.mark.parametrize(
    ("source", "odd"), [("d/*.csv", "d/_old.csv"), ("d/{window:%Y-%m}.csv", "d/2023-01.csv")]
)
def test_only_what_the_run_reads_is_judged(say, tmp_path, source, odd):
    """No hidden file, and of partitions the window says which."""
    for folder in (tmp_path / "d", tmp_path / "_d"):
        folder.mkdir()
        written(folder, "t.csv")
    (tmp_path / "d/t.csv").rename(
        tmp_path / "d/2026-01.csv" if "{" in source else tmp_path / "d/t.csv"
    )
    (tmp_path / odd).write_text("other\n1\n")
    window = ["data.window={size: 1 months}"] if "{" in source else []
    code, text = say(source, *window, verb="doctor")
    assert (code, "there is no column" in text) == (0, False), text
    assert say("_d/t.csv", "data.slices=[x]", verb="doctor")[0] == 2, "a file by its own name"


def test_a_header_of_another_code_page_is_told_as_such(say, tmp_path):
    (tmp_path / "t.csv").write_bytes("body,größe,team,product\na,1,x,p\n".encode("cp1252"))
    code, text = say("t.csv")
    assert code == 2
    assert "the names of the columns are not UTF-8" in text
    assert "there is no column" not in text


@pytest.mark.parametrize("source", FILES)
def test_a_weight_of_a_class_that_the_data_lack_is_told_with_the_classes(say, tmp_path, source):
    written(tmp_path, source)
    code, text = say(source, "train.class_weights={a: 2, c: 3}", verb="doctor")
    assert code == 2
    assert "there is no class `c`" in text
    assert "train.class_weights.c" in text
    assert "one of a, b" in text
    assert "no class `a`" not in text
    assert "no class" not in say(source, "train.class_weights={a: 2, b: 3}", verb="doctor")[1]


@pytest.mark.parametrize("verb", ["run", "doctor"])
def test_labels_that_are_all_the_same_are_told_before_a_run_begins(say, tmp_path, verb):
    rows = [{"body": f"text {i}", "team": "a", "product": "x", "price": 5} for i in range(20)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, text = say("t.jsonl", verb=verb)
    assert code == 2
    assert "every row has the label `a`" in text
    prices = ("task=text_regression", "data.columns={text: body, target: price}")
    code, text = say("t.jsonl", *prices, verb=verb)
    assert code == 2
    assert "all training examples have the same number" in text
    assert say("t.jsonl", "data.labels=[a, b]", verb="doctor")[0] == 0, "the run will tell"


def test_classes_of_data_that_is_long_damaged_or_elsewhere_are_left_to_the_run(
    say, tmp_path, monkeypatch
):
    written(tmp_path, "t.jsonl")
    with (tmp_path / "t.jsonl").open("a") as file:
        file.write("{broken\n")
    for source in ("t.jsonl", "s3://bucket/t.jsonl"):
        assert "no class" not in say(source, "train.class_weights={c: 3}", verb="doctor")[1]
    written(tmp_path, "t.csv")
    monkeypatch.setattr(glance, "_MOST_BYTES", 10)
    assert "no class" not in say("t.csv", "train.class_weights={c: 3}", verb="doctor")[1]


def test_a_letter_that_the_first_look_cuts_is_no_fault(say, tmp_path):
    head = b"body,team,produkt\n"
    body = b"a" * (glance._HEAD_BYTES - len(head) - 1) + "ß,x,y\n".encode()
    (tmp_path / "t.csv").write_bytes(head + body)
    assert "there is no column `product`" in say("t.csv")[1], "it was looked at"


def test_a_module_without_its_pipeline_is_told_so(say, tmp_path, capsys):
    (tmp_path / "p.py").write_text("x = 1\n")
    assert invoke(["run", "p.py"]) == 2
    assert "name its pipeline: p.py:FUNCTION" in capsys.readouterr().err


def test_a_key_that_comes_later_in_a_file_is_no_fault(say, tmp_path):
    rows = [{"body": "a", "team": "x"}, {"body": "b", "team": "y", "product": "z"}]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert say("t.jsonl", verb="doctor")[0] == 0


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\xff\xfe{", "not UTF-8 but UTF-16"),
        (b"{broken", "1 row that cannot be parsed"),
        (b"[1, 2]\n", "no object"),
        (b"[" * 100_000, "1 row that cannot be parsed"),
    ],
)
def test_what_cannot_be_parsed_is_told_at_a_glance(say, tmp_path, content, told):
    (tmp_path / "t.jsonl").write_bytes(content)
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(content))
    (tmp_path / "t.parquet").write_bytes(content)
    for name in ("t.jsonl", "t.jsonl.gz"):
        code, text = say(name, verb="doctor")
        assert (code, told in text) == (2, True), text
    assert "no Parquet file" in say("t.parquet", verb="doctor")[1]


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_that_a_source_is_empty_is_left_to_the_run(say, tmp_path, content):
    (tmp_path / "t.jsonl").write_bytes(content)
    assert say("t.jsonl", verb="doctor")[0] == 0


@pytest.fixture
def five(tmp_path):
    """Five files with a fault each, far from large: the last is behind a megabyte of good rows."""
    (tmp_path / "d").mkdir()
    head = "body,team,product\n"
    good = "".join(f"text {i},{'ab'[i % 2]},x\n" for i in range(50))
    for name, content in {
        "1.csv": (head + good + "straße,a,x\n").encode("cp1252"),
        "2.csv": (head + good + ",a,x\n").encode(),
        "3.csv": (head + good + "text,c,x\n").encode(),
        "4.csv": (head.replace("body", "boddy") + good).encode(),
        "5.csv": (head + good).replace(",", ";").replace("product", "pro,duct").encode(),
        "6.csv": (head + good * 100_000).encode(),
    }.items():
        (tmp_path / "d" / name).write_bytes(content)


FIVE = [
    "1 row with bytes that are not UTF-8",
    "d/1.csv:52",
    "1 row with an empty text",
    "2.csv:52",
    "1 row with a label that data.labels does not name",
    "3.csv:52",
    "there is no column `body`",
    "did you mean `boddy`?",
    "its columns are divided by ';', and were read with ','",
    "5.csv",
]


def test_five_faults_in_five_files_are_one_list(say, five, tmp_path):
    for verb in ("doctor", "run"):
        began = time.process_time()
        code, text = say("d/*.csv", "data.labels=[a, b]", verb=verb)
        seconds = time.process_time() - began
        assert code == 2
        assert [part for part in FIVE if part.removeprefix("d/") not in text] == []
        print(f"{verb}: {seconds:.2f} s of processor time")
        assert seconds < 5
    assert not (tmp_path / ".rekindle").exists()
    code, text = say("d/*.csv", "data.labels=[a, b]", "data.columns.text=text", verb="plan")
    assert code == 0
    assert "there is no column `text`" in text


@pytest.mark.parametrize("verb", ["doctor", "plan"])  # run says it, too
def test_a_split_by_time_is_advised_where_a_time_is_named_and_no_split(say, tmp_path, caplog, verb):
    written(tmp_path, "t.csv")
    for settings in (["data.columns.time=id", "data.split.by=hash"], []):
        assert say("t.csv", *settings, verb=verb)[0] == 0
        assert "set data.split.by to time" not in caplog.text
    assert say("t.csv", "data.columns.time=id", verb=verb)[0] == 0
    assert caplog.text.count("set data.split.by to time, or to hash") == 1


def test_rows_that_may_be_dropped_are_not_told(say, tmp_path):
    written(tmp_path, "t.csv")
    with (tmp_path / "t.csv").open("a") as file:
        file.write("r20,,a,x\n")
    assert say("t.csv", verb="doctor")[0] == 2
    dropped = ["data.on_bad_rows=drop", "data.max_bad_rows=3"]
    assert say("t.csv", *dropped, verb="doctor")[0] == 0
    assert say("t.csv", *dropped, "data.labels=[c, d]", verb="doctor")[0] == 2, "none is left"


def test_a_row_that_the_first_look_cuts_is_no_fault(say, tmp_path):
    lines = [f'"{i} a ""quoted"" text\nof\nfour\nlines",{"ab"[i % 2]},x\n' for i in range(10_000)]
    (tmp_path / "t.csv").write_text("body,team,product\n" + "".join(lines))
    rows = [
        json.dumps({"body": f'5" {i}', "team": "ab"[i % 2], "product": "x"}) for i in range(9_999)
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(rows))
    for name in ("t.csv", "t.jsonl"):
        assert (tmp_path / name).stat().st_size > glance._HEAD_BYTES
        assert say(name, verb="doctor")[0] == 0


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ("distillbert", "did you mean `distilbert`?"),
        ("lama", "did you mean `llama`?"),
        ("nothing-like-it", "see transformers' list of models"),
    ],
)
@pytest.mark.parametrize("verb", ["run", "doctor"])
def test_an_architecture_that_does_not_exist_is_named_before_a_run_begins(
    say, tmp_path, given, fix, verb
):
    written(tmp_path, "t.csv")
    code, text = say("t.csv", f"model.source.model_type={given}", verb=verb)
    assert code == 2
    assert f"transformers has no architecture `{given}`" in text
    assert fix in text
    assert not (tmp_path / ".rekindle" / "runs").exists()


PIPELINE = """
from kfp import dsl

@dsl.component(base_image="python:3.11", install_kfp_package=False)
def count(path: str) -> int:
    with open(path) as file:
        return len(file.readlines())

@dsl.pipeline(name="counting")
def counting(path: str) -> int:
    return count(path=path).output
"""


@pytest.mark.slow
def test_a_pipeline_alone_runs_here_as_it_compiles(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "counting.py").write_text(PIPELINE)
    words = [
        "run",
        "counting.py:counting",
        "--set",
        f"arguments.path={tmp_path / 'counting.py'}",
        "--json",
    ]
    assert invoke(words) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["status"] == "succeeded"
    record = rekindle.run(
        "counting.py:counting", [f"arguments.path={tmp_path / 'counting.py'}"], quiet=True
    ).record
    assert record.step("count").parameters["Output"] == len(PIPELINE.splitlines())
    assert record.step("count").cached


GOLDEN = [
    (
        "body,team\ntext 1,c\n",
        "1 row with a label that data.labels does not name",
        "must_pass.csv:2 (c)",
    ),
    ("bdy,team\ntext 1,b\n", "there is no column `body`", "must_pass.csv"),
    ("body,team\n", "the file holds no rows", "evaluate.must_pass"),
    ("", "the file is empty", "must_pass.csv"),
    ("body,team\ntext 1,b\n,a\n", "1 row with an empty text or none", "must_pass.csv:3"),
]


@pytest.mark.parametrize("verb", ["run", "doctor"])
@pytest.mark.parametrize(("content", "what", "where"), GOLDEN)
def test_golden_rows_are_looked_at_before_a_run_begins(say, tmp_path, content, what, where, verb):
    """The classes are those of the source, which is small."""
    written(tmp_path, "t.csv")
    (tmp_path / "golden.csv").write_text(content)
    code, text = say("t.csv", "evaluate.must_pass=golden.csv", verb=verb)
    assert code == 2
    assert what in text
    assert where in text
    assert "fix: " in text
    assert not (tmp_path / ".rekindle" / "runs").exists()


def test_golden_rows_need_neither_key_nor_slices_and_may_be_those_of_the_data(say, tmp_path):
    written(tmp_path, "t.csv")
    (tmp_path / "golden.jsonl").write_text('{"body": "text 1", "team": "b", "why": "ticket 7"}\n')
    settings = [
        "evaluate.must_pass=golden.jsonl",
        "data.columns={text: body, label: team, key: id}",
    ]
    code, text = say("t.csv", *settings, verb="doctor")
    assert code == 0, text


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.parquet"])
def test_a_file_of_data_is_not_taken_for_a_config(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, name)
    assert invoke(["run", name]) == 2
    assert f"{name} is a data file, not a config" in capsys.readouterr().err


def test_problems_that_a_step_printed_stand_below_the_step(capsys):
    inner = str(
        DataError(
            [Problem("1 row without a label", "t.csv:4", "label it"), Problem("no text", "t.csv:5")]
        )
    )
    report_errors(StepError(f"step `ingest` failed: {inner}", where="log.txt"), as_json=False)
    assert capsys.readouterr().err.splitlines() == [
        "error: step `ingest` failed: 1 row without a label",
        "      where: t.csv:4",
        "      fix:   label it",
        "    no text",
        "      where: t.csv:5",
        "  where: log.txt",
    ]
