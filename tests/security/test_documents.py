"""A small text must not fill the memory or take for ever."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from rekindle.data.source import open_source
from rekindle.errors import RequestError, UnsupportedError
from rekindle.ir import condition as conditions
from rekindle.ir.read.pipeline import read
from rekindle.ir.read.raw import MAX_LEVELS, MAX_VALUES, documents
from rekindle.rows.findings import Findings
from tests.data.corpora import text_spec


def bomb(levels=9, width=10):
    """Each list holds the one before, ten times: 10**9 values in a few hundred bytes."""
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)]
    return "\n".join(lines)


def nested(depth):
    """A pipeline of 1 + 10 + 100 + ... tasks, in components that name each other."""
    components = {}
    for level in range(depth):
        name = f"comp-c{level + 1}" if level + 1 < depth else "comp-leaf"
        tasks = {
            f"t{i}": {"componentRef": {"name": name}, "taskInfo": {"name": f"t{i}"}}
            for i in range(10)
        }
        components[f"comp-c{level}"] = {"dag": {"tasks": tasks}}
    components["comp-leaf"] = {"executorLabel": "exec-leaf"}
    return json.dumps(
        {
            "schemaVersion": "2.1.0",
            "sdkVersion": "kfp-2",
            "pipelineInfo": {"name": "deep"},
            "components": components,
            "deploymentSpec": {
                "executors": {"exec-leaf": {"container": {"image": "x", "command": ["a"]}}}
            },
            "root": {
                "dag": {
                    "tasks": {"t": {"componentRef": {"name": "comp-c0"}, "taskInfo": {"name": "t"}}}
                }
            },
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        bomb(),
        "[" * 60_000,
        "a: " + "[" * 60_000 + "]" * 60_000,
        "{" + '"a":{' * 200_000,
        '{"a":' + "[" * 200_000 + "]" * 200_000 + "}",
        '{"a":' + "[" * (MAX_LEVELS + 1) + "]" * (MAX_LEVELS + 1) + "}",
        "a: [" + "x," * (MAX_VALUES + 1) + "x]",
        '{"a":[' + "1," * MAX_VALUES + "1]}",
    ],
    ids=["aliases", "open", "yaml", "open json", "json", "levels", "values", "json values"],
)
def test_a_text_that_would_fill_the_memory_is_refused(text):
    with pytest.raises(yaml.YAMLError):
        documents(text)
    with pytest.raises(RequestError, match="neither YAML nor JSON"):
        read(text)


@pytest.mark.timeout(60)  # numbers to the base 60 took hours
@pytest.mark.parametrize(
    "text",
    [
        "x: 1" + ":1" * 400_000,
        "x: " + "9" * 5_000,
        '{"x": ' + "9" * 5_000 + "}",
        "x: !!float 1" + ":1" * 400_000,
        "x: 2024-99-99",
        "x: 2024-01-01 99:99:99",
        "x: !!int ''",
        "x: !!bool abc",
        "x: !!float abc",
        '{"x": "\\ud800"}',
        '{"\\ud800": 1}',
        "x: .inf",
        '{"x": NaN}',
        "x: " + "9" * 350,
    ],
    ids=[
        "base 60",
        "digits",
        "json",
        "tag",
        "date",
        "time",
        "int",
        "bool",
        "float",
        "half a character",
        "half a key",
        "infinite",
        "nan",
        "too large",
    ],
)
def test_a_value_that_is_none_or_takes_for_ever_is_refused(text):
    with pytest.raises(yaml.YAMLError):
        documents(text)
    with pytest.raises(RequestError, match="neither YAML nor JSON"):
        read(text)


REFERENCE = "inputs.parameter_values['a']"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "text",
    [
        "(" * 3_000 + f"{REFERENCE} == 1" + ")" * 3_000,
        "int(" * 3_000 + REFERENCE + ")" * 3_000 + " == 1",
        " || ".join([f"{REFERENCE} == 1"] * 50_000),
        " && ".join([f"{REFERENCE} == 1"] * 50_000),
        f"{REFERENCE} == " + "9" * 5_000,
    ],
    ids=["brackets", "casts", "or", "and", "digits"],
)
def test_a_condition_that_nobody_writes_is_refused(text):
    with pytest.raises(UnsupportedError, match="the condition has more than"):
        conditions.parse(text)


def test_the_largest_condition_is_evaluated():
    each = f"({REFERENCE} == 1 && !({REFERENCE} == 2))"
    expression = conditions.parse(" || ".join([each] * 57))
    conditions.check(expression, {"a": "NUMBER_INTEGER"})
    assert conditions.evaluate(expression, {"a": 1})
    assert not conditions.evaluate(expression, {"a": 2})
    assert str(expression).count("not") == 57


@pytest.mark.parametrize(
    "policy",
    [
        {"maxRetryCount": float("nan")},
        {"maxRetryCount": float("inf")},
        {"maxRetryCount": 10**399},
        {"backoffFactor": float("inf")},
        {"backoffDuration": "1e999s"},
        {"backoffDuration": "nans"},
    ],
    ids=str,
)
def test_a_setting_that_is_no_number_is_refused(policy):
    pipeline = json.loads(nested(1))
    pipeline["root"]["dag"]["tasks"]["t"]["retryPolicy"] = policy
    with pytest.raises(
        RequestError,
        match=r"a number is infinite|where a (float|finite number|duration such as 60s) belongs",
    ):
        read(json.dumps(pipeline))


def test_what_people_write_is_read():
    text = "a: &x {b: [1, 2]}\nc: *x\nd: *x\n---\ne: 1\n"
    assert documents(text) == [
        {"a": {"b": [1, 2]}, "c": {"b": [1, 2]}, "d": {"b": [1, 2]}},
        {"e": 1},
    ]


@pytest.mark.timeout(60)  # 10**9 tasks would take days
def test_pipelines_inside_of_pipelines_are_counted():
    with pytest.raises(RequestError, match="more than 10,000 tasks"):
        read(nested(9))


@pytest.mark.parametrize("as_dictionary", [True, False])
def test_rows_of_a_parquet_file_that_repeat_a_long_value_come_a_few_at_a_time(
    tmp_path, as_dictionary
):
    """4 GB of rows in less than a kilobyte; a batch of all of them ended the process, or took it."""
    value, rows = "a" * 1_000_000, 4_096
    column = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([value]))
    pq.write_table(
        pa.table({"text": column, "label": ["x"] * rows}),
        tmp_path / "x.parquet",
        compression="zstd",
        store_schema=as_dictionary,
        dictionary_pagesize_limit=1 << 30,
    )
    assert (tmp_path / "x.parquet").stat().st_size < 1_000
    source = open_source(text_spec(tmp_path / "x.parquet"), "text")
    batches = source.read({"text": "text", "label": "scalar"}, Findings())
    first, second = next(batches), next(batches)
    assert first.columns["text"][0].as_py() == value
    assert first.columns["text"].nbytes < 160 << 20
    assert second.lines[0] == len(first.lines) + 1


def test_rows_of_a_parquet_file_come_as_they_are_written(tmp_path):
    texts = [f"{i} " * (i % 97) for i in range(10_000)]
    table = pa.table({"text": texts, "label": pa.array(texts).dictionary_encode()})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=3_000)
    source = open_source(text_spec(tmp_path / "x.parquet"), "text")
    batches = list(source.read({"text": "text", "label": "scalar"}, Findings()))
    for name in ("text", "label"):
        assert [v for batch in batches for v in batch.columns[name].to_pylist()] == texts
    assert len(batches) == 3
