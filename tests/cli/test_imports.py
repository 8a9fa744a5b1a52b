"""What each verb loads, in a child process: the control plane needs neither torch nor kfp nor mlflow."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli_compile import PLATFORMS, TRACKED

HEAVY = (
    "torch",
    "transformers",
    "datasets",
    "mlflow",
    "kfp",
    "sklearn",
    "pandas",
    "boto3",
    "botocore",
    "sagemaker",
    "google.cloud.aiplatform",
    "azure.ai",
    "kubernetes",
)
ROOT = Path(__file__).parents[2]
# one process does it all, and says of each what it was the first to load
CODE = """
import importlib, json, sys
from rekindle.cli.main import invoke
found, there = [], set()
for words in json.loads(sys.argv[1]):
    code = invoke(words) if isinstance(words, list) else importlib.import_module(words) and 0
    now = {m for m in {heavy} if m in sys.modules}
    found.append([code, sorted(now - there)])
    there = now
print()
print(json.dumps(found))
"""
VERBS = [
    ["run", "c.yaml"],
    ["--help"],
    ["run", "--help"],
    ["runs"],
    ["status"],
    ["logs", "--step", "hello"],
    ["report"],
    ["init", "new"],
    ["compile", "c.yaml", "--platform", "kubeflow"],
    ["submit", "--help"],
    ["images", "--help"],
    ["schedule", "--help"],
    ["doctor", "--platform", "vertex"],
    ["gc"],
    ["serve", "--help"],
    ["predict", "--help"],
]
MODULES = [
    "rekindle",
    "rekindle.cli.main",
    "rekindle.spec",
    "rekindle.ir.read.pipeline",
    "rekindle.platforms.kubeflow.launcher",
    "rekindle.platforms.kubeflow.node",
    "rekindle.platforms.local.execute",
    "rekindle.platforms.vertex.compile",
    "rekindle.platforms.vertex.launcher",
    "rekindle.report.card",
]
PIPELINE = """
from kfp import dsl

@dsl.component(base_image="python:3.11", install_kfp_package=False)
def hello() -> str:
    return "hello"

@dsl.pipeline(name="hello")
def pipeline():
    hello()
"""


def loaded(folder, *asked):
    """By verb or module: the exit code, and what it loads of the heavy ones."""
    code = CODE.replace("{heavy}", repr(HEAVY))
    words = [sys.executable, "-c", code, json.dumps(asked)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_no_verb_loads_anything_heavy(tmp_path):
    (tmp_path / "p.py").write_text(PIPELINE)
    (tmp_path / "c.yaml").write_text("name: hello\npipeline: p.py:pipeline\n")
    found = loaded(tmp_path, *VERBS)
    assert {" ".join(v): one for v, one in zip(VERBS, found, strict=True) if one != [0, []]} == {}


def test_compiling_the_shipped_pipeline_for_every_platform_loads_no_sdk(tmp_path):
    words = [word for more, _ in PLATFORMS.values() for word in more]
    words = ["compile", "configs/digits.yaml", "--platform", ",".join(PLATFORMS), *words, *TRACKED]
    assert loaded(ROOT, [*words, "-o", str(tmp_path / "out")]) == [[0, []]]
    assert (tmp_path / "out" / "continuous-training.parity.md").exists()


def test_no_module_loads_anything_heavy(tmp_path):
    found = loaded(tmp_path, *MODULES)
    assert {name: one for name, one in zip(MODULES, found, strict=True) if one != [0, []]} == {}


def test_the_public_surface_is_what_it_says():
    import rekindle

    assert rekindle.__all__ == [
        "Comparison",
        "Forecast",
        "RekindleError",
        "Run",
        "Spec",
        "Task",
        "__version__",
        "champion",
        "compare",
        "deploy",
        "distribute",
        "load",
        "planned",
        "rollback",
        "run",
        "runs",
        "submit",
    ]
    assert all(getattr(rekindle, name) is not None for name in rekindle.__all__)
    with pytest.raises(AttributeError):
        _ = rekindle.nothing
