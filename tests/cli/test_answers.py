"""What verbs say with `--json` is what configs/schemas/ describes."""

from __future__ import annotations

import json

import jsonschema
import pytest

from rekindle.cli.main import invoke
from tests.platforms.azureml.conftest import service as service
from tests.support.cli_compile import PLATFORMS, ROOT, TRACKED
from tests.support.cli_submit import WEEKLY, WORKSPACE
from tests.support.cli_submit import home as home

DIGITS = str(ROOT / "configs" / "digits.yaml")
SETTINGS = [word for setting in (*WORKSPACE, WEEKLY) for word in ("--set", setting)]
THERE = [DIGITS, "--platform", "azureml", *PLATFORMS["azureml"][0], *TRACKED, *SETTINGS]

SAID = [
    ("compiled", 0, ["compile", *THERE, "-o", "out"]),
    ("difference", 0, ["diff", *THERE, "--against", "out"]),
    ("readiness", 2, ["doctor", *THERE, "--set", "platforms.azureml.workspace=none"]),
    ("turn", 3, ["watch", DIGITS, "--once", "--set", "triggers={act: suggest}"]),
    ("submitted", 0, ["submit", *THERE, "--yes"]),
    ("runs", 0, ["runs"]),
    ("run", 0, ["status"]),
    ("schedules", 0, ["schedule", "set", *THERE, "--yes"]),
    ("schedules", 0, ["schedule", "list", *THERE]),
    ("schedule-deleted", 0, ["schedule", "delete", *THERE]),
    ("laid-out", 0, ["init", "new"]),
    ("card", 0, ["report"]),
    ("collected", 0, ["gc"]),
    ("errors", 2, ["logs", "--step", "nobody"]),
    ("errors", 2, ["submit", *THERE]),  # nobody is there to be asked
    ("errors", 2, ["status", "--nonsense"]),
]


@pytest.mark.slow
def test_every_answer_follows_its_schema(service, capsys):
    for name, code, words in SAID:
        assert invoke([*words, "--json"]) == code, words[0]
        said = json.loads(capsys.readouterr().out)
        schema = json.loads((ROOT / "configs" / "schemas" / f"{name}.json").read_text())
        jsonschema.validate(said, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(said | {"nobody": 1}, schema)
