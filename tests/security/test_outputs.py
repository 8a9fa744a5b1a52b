"""What a step in a container says of its outputs: it runs without our rights, and we read with them."""

import json
import os
from pathlib import Path

import pytest

from rekindle.launch.shim import MOST_OUTPUT_BYTES, TaskError, collect_outputs


@pytest.fixture
def task(tmp_path):
    """A step's task, whose container sees two folders; beside them lies what it must not."""
    for name in ("outputs", "given", "secret"):
        (tmp_path / name).mkdir()
    (tmp_path / "secret" / "key").write_text("secret")
    (tmp_path / "given" / "data").write_text("data")
    made = {"name": "made", "uri": str(tmp_path / "outputs" / "made"), "metadata": {}}
    return {
        "executor_input": {
            "inputs": {"artifacts": {}},
            "outputs": {
                "outputFile": str(tmp_path / "outputs" / "executor_output.json"),
                "parameters": {},
                "artifacts": {"made": {"artifacts": [made]}},
            },
        },
        "outputs": {
            "parameters": {},
            "artifacts": {"made": {"schema_title": "x", "schema_version": "0"}},
        },
        "within": [str(tmp_path / "outputs"), str(tmp_path / "given")],
    }


def said(task, **artifact):
    """What is collected where the container reports this."""
    report = {"artifacts": {"made": {"artifacts": [artifact]}}}
    Path(task["executor_input"]["outputs"]["outputFile"]).write_text(json.dumps(report))
    return collect_outputs(task)[1]["made"]


@pytest.mark.parametrize("field", ["uri", "custom_path"])
@pytest.mark.parametrize(
    "place",
    ["/root", "/", "/etc/passwd", "file:///root", "{here}/secret", "{here}/outputs/../secret"],
)
def test_a_place_that_it_cannot_see_is_refused(task, tmp_path, field, place):
    if (field, place[:4]) == ("custom_path", "file"):
        pytest.skip("a path, and no URI")
    with pytest.raises(TaskError, match="which the step cannot see"):
        said(task, **{field: place.format(here=tmp_path)})
    assert not (tmp_path / "outputs" / "made").exists()


def test_a_name_that_is_no_place_of_this_machine_stays_as_it_is(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said(task, uri="projects/1/endpoints/2")["uri"] == "projects/1/endpoints/2"
    with pytest.raises(TaskError, match="which the step cannot see"):
        said(task, uri="secret")
    with pytest.raises(TaskError, match="which the step cannot see"):
        said(task, uri="outputs/../secret")


def test_nor_by_a_link(task, tmp_path):
    (tmp_path / "outputs" / "made").symlink_to(tmp_path / "secret")
    with pytest.raises(TaskError, match="which the step cannot see"):
        said(task)


def test_a_link_in_a_folder_is_copied_as_a_link(task, tmp_path):
    (tmp_path / "outputs" / "work").mkdir()
    (tmp_path / "outputs" / "work" / "link").symlink_to(tmp_path / "secret" / "key")
    said(task, custom_path=str(tmp_path / "outputs" / "work"))
    assert (tmp_path / "outputs" / "made" / "link").is_symlink()


@pytest.mark.parametrize("uri", ["{here}/outputs/made", "{here}/given", "s3://bucket/x"])
def test_what_it_made_or_was_given_or_sent_away_is_taken(task, tmp_path, uri):
    place = uri.format(here=tmp_path)
    assert said(task, uri=place)["uri"] == place


def test_a_step_here_may_say_what_it_likes(task):
    del task["within"]
    assert said(task, uri="/etc")["uri"] == "/etc"


@pytest.mark.parametrize(
    "place", ["{here}/secret/new/lib", "{here}/outputs/link", "{here}/outputs/link/x"]
)
def test_nothing_is_copied_to_a_place_that_it_cannot_see(task, tmp_path, place):
    (tmp_path / "outputs" / "work").mkdir()
    (tmp_path / "outputs" / "work" / "evil.py").write_text("owned")
    (tmp_path / "outputs" / "link").symlink_to(tmp_path / "secret" / "not there yet")
    with pytest.raises(TaskError, match="which the step cannot see"):
        said(task, uri=place.format(here=tmp_path), custom_path=str(tmp_path / "outputs" / "work"))
    assert [path.name for path in (tmp_path / "secret").rglob("*")] == ["key"]


def with_a_parameter(task, tmp_path, kind="STRING"):
    file = tmp_path / "outputs" / ".parameter-said"
    task["executor_input"]["outputs"]["parameters"]["said"] = {"outputFile": str(file)}
    task["outputs"] = {"parameters": {"said": kind}, "artifacts": {}}
    return file


def test_a_parameter_that_is_a_link_is_not_followed(task, tmp_path):
    with_a_parameter(task, tmp_path).symlink_to(tmp_path / "secret" / "key")
    with pytest.raises(TaskError, match="which the step cannot see"):
        collect_outputs(task)


def test_nor_one_in_a_folder_that_is_a_link(task, tmp_path):
    (tmp_path / "outputs" / "in").symlink_to(tmp_path / "secret")
    with_a_parameter(task, tmp_path)
    task["executor_input"]["outputs"]["parameters"]["said"]["outputFile"] = str(
        tmp_path / "outputs/in/key"
    )
    with pytest.raises(TaskError, match="which the step cannot see"):
        collect_outputs(task)


def test_nor_is_a_link_within_its_own_folders(task, tmp_path):
    (tmp_path / "outputs" / "real").write_text("x")
    with_a_parameter(task, tmp_path).symlink_to(tmp_path / "outputs" / "real")
    with pytest.raises(TaskError, match="cannot be read"):
        collect_outputs(task)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", [".parameter-said", "executor_output.json"])
def test_a_pipe_is_not_waited_for(task, tmp_path, name):
    with_a_parameter(task, tmp_path)
    os.mkfifo(tmp_path / "outputs" / name)
    with pytest.raises(TaskError, match="not a regular file"):
        collect_outputs(task)


def test_what_is_larger_than_any_parameter_is_refused(task, tmp_path):
    with with_a_parameter(task, tmp_path).open("wb") as file:
        file.truncate(MOST_OUTPUT_BYTES + 1)
    with pytest.raises(TaskError, match="has more than"):
        collect_outputs(task)


@pytest.mark.parametrize(
    "report",
    [
        "[]",
        "3",
        '{"parameterValues": []}',
        '{"artifacts": {"made": []}}',
        '{"artifacts": {"made": {"artifacts": [3]}}}',
        '{"artifacts": {"made": {"artifacts": [{"metadata": 3}]}}}',
        '{"artifacts": {"made": {"artifacts": [{"uri": 3}]}}}',
        "[" * 100_000,
        '{"artifacts": {"made": {"artifacts": [{"uri": "\\u0000"}]}}}',
    ],
)
@pytest.mark.parametrize("contained", [True, False])
def test_a_report_of_another_form_is_an_error_of_the_step(task, report, contained):
    if not contained:
        del task["within"]
    Path(task["executor_input"]["outputs"]["outputFile"]).write_text(report)
    with pytest.raises(TaskError):
        collect_outputs(task)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400", "[" * 100_000])
@pytest.mark.parametrize("kind", ["NUMBER_INTEGER", "STRUCT"])
def test_numbers_that_are_none_are_an_error_of_the_step(task, tmp_path, value, kind):
    with_a_parameter(task, tmp_path, kind).write_text(value)
    with pytest.raises(TaskError, match="is no"):
        collect_outputs(task)
