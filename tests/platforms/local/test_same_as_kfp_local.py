"""The same pipelines under kfp.local and here: equal outputs, equal types."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rekindle.ir.read.pipeline import read
from tests.platforms.local.runs import PIPELINES, module, plain, run
from tests.quick import only
from tests.support.results import outputs

CASES = module("same").CASES
KNOWN_BUGS = module("same").KNOWN_BUGS
# neighbours in the table are variations of one idea
QUICK = list(CASES)[::2]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """The answers of kfp.local to the cases that this session asks for."""
    root = tmp_path_factory.mktemp("oracle")
    here = [item for item in request.session.items if item.path == request.path]
    wanted = [item.callspec.params["case"] for item in here if hasattr(item, "callspec")]
    command = [sys.executable, str(PIPELINES / "run_oracle.py"), str(root), *wanted]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


def run_here(answer: Any, home: Path, tmp_path: Path) -> dict[str, Any]:
    arguments = {k: str(tmp_path) if v == "FOLDER" else v for k, v in answer["arguments"].items()}
    graph = read(answer["ir"])
    record = run(graph, home, arguments)
    assert record.status == "succeeded"
    return {name: plain(value) for name, value in outputs(graph, record).items()}


@pytest.mark.slow
@pytest.mark.parametrize("case", only(QUICK, CASES))
def test_outputs_and_types_equal_those_of_kfp_local(
    case: str, oracle: Any, home: Path, tmp_path: Path
) -> None:
    answer = oracle[case]
    assert answer["error"] is None
    assert run_here(answer, home, tmp_path) == answer["outputs"]


@pytest.mark.slow
@pytest.mark.parametrize("case", KNOWN_BUGS)
def test_what_kfp_local_gets_wrong_is_right_here(
    case: str, oracle: Any, home: Path, tmp_path: Path
) -> None:
    _, _, says, right = KNOWN_BUGS[case]
    answer = oracle[case]
    assert run_here(answer, home, tmp_path) == right
    if says is None:
        assert answer["outputs"] != right, "kfp.local got it right: move this case to CASES"
    else:
        assert says in answer["error"]


@pytest.mark.slow
def test_there_are_enough_of_them() -> None:
    assert len({id(pipeline) for pipeline, _ in CASES.values()}) >= 15
