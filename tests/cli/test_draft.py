"""`rekindle init --data` guesses what columns are, and what it writes is a config that holds."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from rekindle.app.draft import draft_config
from rekindle.cli.main import invoke
from rekindle.data.glance import first_rows
from rekindle.errors import RequestError
from rekindle.spec.load import load_target

TURNS = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day to you"}]
TEXTS = [f"the {n} parcel came late and the box was open" for n in ["first", "second", "third"]]


def rows(**columns):
    return [{name: make(i) for name, make in columns.items()} for i in range(60)]


def text(i):
    return f"{TEXTS[i % 3]} number {i}"


FILES = {
    "a text and a class": (
        rows(no=lambda i: i, message=text, team=lambda i: ["billing", "delivery"][i % 2]),
        "text_classification",
        {"text": "message", "label": "team"},
    ),
    "words alone": (rows(note=text), "causal_lm", {"text": "note"}),
    "a chat": (rows(turns=lambda i: TURNS), "causal_lm", {"messages": "turns"}),
    "chats of ShareGPT": (
        rows(
            conversations=lambda i: [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]
        ),
        "causal_lm",
        {"messages": "conversations"},
    ),
    "Alpaca": (
        rows(instruction=text, input=lambda i: "" if i % 2 else text(i), output=text),
        "causal_lm",
        {"prompt": "instruction", "input": "input", "completion": "output"},
    ),
    "numbers for classes": (
        rows(review=text, stars=lambda i: i % 5),
        "text_classification",
        {"text": "review", "label": "stars"},
    ),
    "numbers to predict": (
        rows(id=lambda i: i, work=text, shop=lambda i: "ab"[i % 2], minutes=lambda i: i * 7 % 30),
        "text_regression",
        {"text": "work", "target": "minutes"},
    ),
    "dates and a kind": (
        rows(
            day=lambda i: f"2026-01-{i % 28 + 1:02}",
            body=text,
            kind=lambda i: "xyz"[i % 3],
            label=lambda i: "ab"[i % 2],
        ),
        "text_classification",
        {"time": "day", "text": "body", "label": "label"},
    ),
}


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize(("made", "task", "roles"), FILES.values(), ids=FILES)
def test_columns_are_known_by_name_and_values(tmp_path, made, task, roles, form):
    path = tmp_path / f"my data.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in made))
    else:
        pyarrow.parquet.write_table(pa.Table.from_pylist(made), path)
    words, guessed = draft_config(path, str(path))
    assert guessed == task
    (tmp_path / "made.yaml").write_text(words)
    spec = load_target(tmp_path / "made.yaml")
    assert (spec.name, spec.task) == ("my-data", task)
    assert spec.data.columns.model_dump(exclude_unset=True) == roles
    if "time" in roles:
        assert (spec.data.split.by, spec.data.slices) == ("time", ("kind",))
    if "target" in roles:
        assert (spec.data.slices, spec.evaluate.floor) == (("shop",), {"r2": 0})
    if "label" in roles:
        assert 0 < spec.evaluate.floor["accuracy"] < 1


def test_a_csv_of_another_program_is_read(tmp_path):
    lines = ["nr;Text;Art", *(f"{i};{text(i)} für Sie;{'ab'[i % 2]}" for i in range(60)), "60;;a"]
    (tmp_path / "fälle.csv").write_text("\r\n".join(lines), encoding="cp1252")
    words, task = draft_config(tmp_path / "fälle.csv", str(tmp_path / "fälle.csv"))
    (tmp_path / "made.yaml").write_text(words, encoding="utf-8")
    data = load_target(tmp_path / "made.yaml").data
    assert task == "text_classification"
    assert (data.encoding, data.on_bad_rows) == ("cp1252", "drop")
    assert (data.columns.text, data.columns.label) == ("Text", "Art")


ODD = {
    "a name with a line end": [
        {"a\nb": i, "text": text(i), "label": "ab"[i % 2]} for i in range(60)
    ],
    "a control character": [{"te\x7fxt": text(i), "label": "ab"[i % 2]} for i in range(60)],
    "words of YAML": [{"yes": text(i), "null": ["no", "1.0"][i % 2]} for i in range(60)],
    "names of ours": [
        {"text": text(i), "label": "ab"[i % 2], "split": "xy"[i % 2]} for i in range(60)
    ],
    "ids like months": [
        {"text": text(i), "label": "ab"[i % 2], "id": f"1013-{i:02}"} for i in range(60)
    ],
    "another line separator": [
        {"text": text(i) + "\u2028on", "label": "ab"[i % 2]} for i in range(60)
    ],
    "lists and strings": [
        {"text": text(i), "label": "ab"[i % 2], "x": ["y"] if i % 2 else "y"} for i in range(60)
    ],
    "one class of nearly all": [{"text": text(i), "label": "ab"[i % 60 == 0]} for i in range(900)],
    "many empty labels": [
        {"text": text(i), "label": ["a", "b", "b", "a", ""][i % 5]} for i in range(60)
    ],
}


@pytest.mark.parametrize("made", ODD.values(), ids=ODD)
def test_odd_files_become_configs_that_hold(tmp_path, made):
    (tmp_path / "x.jsonl").write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made)
    )
    words, _ = draft_config(tmp_path / "x.jsonl", str(tmp_path / "x.jsonl"))
    (tmp_path / "made.yaml").write_text(words, encoding="utf-8")
    spec = load_target(tmp_path / "made.yaml")
    assert spec.task == "text_classification"
    assert spec.data.columns.time is None
    assert not set(spec.data.slices) & {"split", "id"}
    assert first_rows(spec.data, "text") == []
    assert spec.evaluate.floor["accuracy"] <= 0.99
    empty = sum(row.get("label") == "" for row in made)
    assert spec.data.max_bad_rows >= empty / len(made)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (
            "more fields than names",
            "text;label\n" + "".join(f"{text(i)};{'ab'[i % 2]};x\n" for i in range(60)),
        ),
        (
            "a long field",
            "text,label\n"
            + "".join(f"{'word ' * 40_000},{'ab'[i % 2]}\n{text(i)},a\n" for i in range(30)),
        ),
        ("both marks", "te,xt;label\n" + "".join(f"{text(i)};{'ab'[i % 2]}\n" for i in range(60))),
    ],
)
def test_odd_csv_files_are_read(tmp_path, name, content):
    (tmp_path / "x.csv").write_text(content)
    words, task = draft_config(tmp_path / "x.csv", str(tmp_path / "x.csv"))
    (tmp_path / "made.yaml").write_text(words)
    assert load_target(tmp_path / "made.yaml").data.columns.label == "label"
    assert task == "text_classification"


@pytest.mark.parametrize(
    ("name", "first", "mark"),
    [
        ("x.csv.gz", "body", ";"),
        ("x.csv", "body", ";"),
        ("x.csv", "bo,dy", ";"),
        ("x.csv", "body", "|"),
    ],
)
def test_a_delimiter_is_said_only_where_auto_would_not_find_it(tmp_path, name, first, mark):
    """Else the config would refuse a file with commas, such as one to predict."""
    lines = [f"{first}{mark}team", *(f"{text(i)}{mark}{'ab'[i % 2]}" for i in range(60))]
    content = "\n".join(lines).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    words, _ = draft_config(tmp_path / name, str(tmp_path / name))
    (tmp_path / "made.yaml").write_text(words)
    data = load_target(tmp_path / "made.yaml").data
    assert (data.columns.text, data.columns.label) == (first, "team")
    assert data.delimiter == (mark if "," in first or mark == "|" else "auto")


def test_a_folder_of_images_is_one_class_a_folder(tmp_path):
    for name in ("cats", "dogs"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (40, 30)).save(tmp_path / "pets" / name / f"{number}.png")
    words, task = draft_config(tmp_path / "pets", str(tmp_path / "pets"))
    (tmp_path / "made.yaml").write_text(words)
    assert task == load_target(tmp_path / "made.yaml").task == "image_classification"


# without the time, so that each process calls the case alike
CUT = gzip.compress(b"text,label\n" * 999, mtime=0)[:-9]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x.xlsx", "PK", "neither CSV, JSON lines nor Parquet"),
        ("x.csv", "a,b\n1,2\n3,4\n", "no column of x.csv holds texts: it has a, b"),
        ("x.csv", "", "holds no rows"),
        ("cut.csv.gz", CUT, "cut.csv.gz cannot be read"),
        ("x.csv.gz", b"text,label\na,b\n", "x.csv.gz cannot be read"),
        ("x.csv.xz", b"text,label\na,b\n", "x.csv.xz cannot be read"),
        ("x.jsonl", '{"text": "a"}\n[1]\n', "is not a JSON object"),
        ("x.parquet", "PAR1", "x.parquet cannot be read"),
    ],
)
def test_what_cannot_be_guessed_is_refused(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(RequestError, match=says):
        draft_config(tmp_path / name, name)


def test_it_writes_one_config_and_never_over_another(tmp_path, monkeypatch, capsys):
    (tmp_path / "cases.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in FILES["a text and a class"][0])
    )
    monkeypatch.chdir(tmp_path)
    assert invoke(["init", "--data", "cases.jsonl"]) == 0
    said = capsys.readouterr().out
    assert 'text: "message"  # 1' in said
    assert "rekindle run cases.yaml" in said
    assert load_target("cases.yaml").data.source == str(tmp_path / "cases.jsonl")
    assert invoke(["init", "--data", "cases.jsonl"]) == 2
    assert "already here: cases.yaml" in capsys.readouterr().err


@pytest.mark.slow
def test_three_commands_lead_from_a_file_to_a_champion(tmp_path):
    words = {"billing": "invoice paid twice refund", "delivery": "parcel late box broken"}
    made = rows(label=lambda i: ["billing", "delivery"][i % 2])
    for i, row in enumerate(made * 8):
        own = words[row["label"]].split()
        with (tmp_path / "cases.csv").open("a") as file:
            if not i:
                file.write("case,team\n")
            file.write(
                f"{own[i % 4]} {own[(i // 4) % 4]} of order {i} {own[(i // 16) % 4]},{row['label']}\n"
            )
    said = ""
    for verb in (["init", "--data", "cases.csv"], ["doctor", "cases.yaml"], ["run", "cases.yaml"]):
        done = subprocess.run(
            [sys.executable, "-m", "rekindle.cli.main", *verb],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said = done.stdout + done.stderr
    assert "(champion)" in said
