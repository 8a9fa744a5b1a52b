"""What a storage that refuses a write means for who deploys, predicts and serves: none of them hears of checkpoints."""

import json

import pytest

from rekindle.errors import RequestError, StorageError
from rekindle.serve.batch import predict
from rekindle.serve.rollout import RolloutLog
from rekindle.serve.staging import stage
from rekindle.spec.model import ColumnsSpec, DataSpec
from tests.serve import models
from tests.support.refusing_store import refusing_root


def refused(call):
    """The problem that the call raises of a storage."""
    with pytest.raises(StorageError) as error:
        call()
    assert "checkpoint" not in str(error.value)
    (problem,) = error.value.problems
    assert problem.code == "E-STORAGE"
    return problem


def test_the_log_of_a_deployment():
    root = refusing_root()
    log = RolloutLog(root, print)
    problem = refused(lambda: log.put(None, "create", "1", ""))
    assert problem.what == (
        "the log of the deployment cannot be written: PermissionError: Access Denied"
    )
    assert problem.where == f"{root}/000001.json"
    assert problem.fix == f"grant write on {root} to the process that runs this"


def test_the_log_of_a_deployment_whose_folder_is_a_file(tmp_path):
    (tmp_path / "log").write_text("a file")
    problem = refused(lambda: RolloutLog(tmp_path / "log", print).put(None, "create", "1", ""))
    assert problem.what.startswith("the log of the deployment cannot be written: ")


def test_a_deployment_that_another_command_moved(tmp_path):
    log = RolloutLog(tmp_path / "log", lambda event: None)
    log.put(None, "create", "1", "")
    with pytest.raises(RequestError, match="another command moved this deployment on") as error:
        log.put(None, "create", "2", "")
    assert error.value.problems[0].where == str(tmp_path / "log")


def test_predictions_into_a_store(tmp_path):
    root = f"{refusing_root()}/out.jsonl"
    source = tmp_path / "few.jsonl"
    rows = [{"id": f"t{i}", "body": text} for i, text in enumerate(models.TEXTS)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    served = models.made(tmp_path / "model", "text")
    data = DataSpec(source=str(source), columns=ColumnsSpec(text="body", key="id"))
    problem = refused(lambda: predict(served, data, str(source), root, lambda *numbers: None))
    assert problem.what == "the predictions cannot be written: PermissionError: Access Denied"
    assert problem.where.startswith(root)


def test_the_copy_of_a_model(tmp_path):
    served = models.made(tmp_path / "model", "text")
    problem = refused(lambda: stage(served, refusing_root()))
    assert problem.what.startswith("the copy of the model for the deployment cannot be written: ")
