"""`diff`: which steps of a compiled pipeline run again after a change."""

import json

import pytest

from rekindle.cli.main import invoke
from tests.support.cli_compile import PLATFORMS, ROOT, TRACKED

CONFIG = str(ROOT / "configs" / "digits.yaml")
ALWAYS = {"fingerprint", "register", "promote"}
PROMOTE = {"azureml": "condition_1_promote", "sagemaker": "condition-1-promote"}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The digits job for every platform, in one folder."""
    folder = tmp_path_factory.mktemp("compiled")
    words = [word for more, _ in PLATFORMS.values() for word in more]
    asked = ["compile", CONFIG, "--platform", ",".join(PLATFORMS), *words, *TRACKED]
    assert invoke([*asked, "-o", str(folder)]) == 0
    return folder


def steps(platform, folder, capsys, *more):
    """What each step is said to do."""
    words, _ = PLATFORMS[platform]
    capsys.readouterr()
    asked = ["diff", CONFIG, "--platform", platform, *words, *TRACKED, *more]
    assert invoke([*asked, "--against", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["steps"]
    name = PROMOTE.get(platform, "condition-1/promote")
    return {"promote" if s["step"] == name else s["step"]: s for s in found}


@pytest.mark.parametrize("platform", ["kubeflow", "vertex"])
def test_another_learning_rate_trains_and_judges_again(platform, compiled, capsys):
    found = steps(platform, compiled, capsys, "--set", "train.lr=0.01")
    again = {name for name, step in found.items() if step["again"] == "yes"}
    assert again == ALWAYS | {"finetune", "score", "evaluate"}
    assert "changed: input `train`" in found["finetune"]["why"]
    assert "changed: input `train`" in found["score"]["why"]
    assert "files of score" in found["evaluate"]["why"]
    perhaps = {name for name, step in found.items() if step["again"] == "perhaps"}
    assert perhaps == {"ingest", "shard"}
    assert found["ingest"]["why"] == "if fingerprint returns something else"


@pytest.mark.parametrize("platform", PLATFORMS)
def test_without_a_change_only_what_is_never_cached_runs_for_sure(platform, compiled, capsys):
    found = steps(platform, compiled, capsys)
    changed = {name for name, step in found.items() if step["why"].startswith("changed")}
    assert changed == set()
    assert {n for n, s in found.items() if s["why"] == "it is never taken from the cache"} == ALWAYS


@pytest.mark.parametrize("platform", PLATFORMS)
def test_what_changed_is_named(platform, compiled, capsys):
    found = steps(platform, compiled, capsys, "--set", "train.lr=0.01")
    changed = {name for name, step in found.items() if step["why"].startswith("changed")}
    assert changed == {"fingerprint", "finetune", "score"}
    assert all(
        "train" in found[name]["why"] or "constants" in found[name]["why"] for name in changed
    )


def test_it_is_told_in_a_table(compiled, capsys):
    words, _ = PLATFORMS["vertex"]
    asked = [
        "diff",
        CONFIG,
        "--platform",
        "vertex",
        *words,
        *TRACKED,
        "--set",
        "evaluate.gate.min_delta=0.1",
    ]
    assert invoke([*asked, "--against", str(compiled)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:3] == ["evaluate", "runs", "again"] for line in lines), lines
    assert any(line.split()[:4] == ["finetune", "may", "run", "again"] for line in lines), lines


def test_there_has_to_be_something_to_compare_with(tmp_path, capsys):
    words, _ = PLATFORMS["vertex"]
    asked = ["diff", CONFIG, "--platform", "vertex", *words, *TRACKED, "--against", str(tmp_path)]
    assert invoke(asked) == 2
    assert "rekindle compile" in capsys.readouterr().err
