"""What a step in a container says of its outputs: it runs without our rights, and we read with them."""

import json
from pathlib import Path

import pytest

from rekindle.launch.shim import TaskError, collect_outputs


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
                "parameters": {}, "artifacts": {"made": {"artifacts": [made]}},
            },
        },
        "outputs": {"parameters": {}, "artifacts": {"made": {"schema_title": "x", "schema_version": "0"}}},
        "within": [str(tmp_path / "outputs"), str(tmp_path / "given")],
    }  # fmt: skip


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
