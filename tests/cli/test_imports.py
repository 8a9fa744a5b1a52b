"""What each verb loads, in a child process: the control plane needs neither torch nor kfp nor mlflow."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli_compile import PLATFORMS, TRACKED

HEAVY = ("torch", "transformers", "datasets", "mlflow", "kfp", "sklearn", "pandas", "boto3", "botocore",
         "sagemaker", "google.cloud.aiplatform", "azure.ai", "kubernetes")  # fmt: skip
ROOT = Path(__file__).parents[2]
CODE = """
import json, sys
from rekindle.cli.main import invoke
code = invoke(sys.argv[1:])
print(json.dumps([code, sorted(m for m in {heavy} if m in sys.modules)]))
"""
PIPELINE = """
from kfp import dsl

@dsl.component(base_image="python:3.11", install_kfp_package=False)
def hello() -> str:
    return "hello"

@dsl.pipeline(name="hello")
def pipeline():
    hello()
"""


def loaded(folder, *words):
    code = CODE.replace("{heavy}", repr(HEAVY))
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=folder, capture_output=True, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("verbs")
    (made / "p.py").write_text(PIPELINE)
    (made / "c.yaml").write_text("name: hello\npipeline: p.py:pipeline\n")
    assert loaded(made, "run", "c.yaml") == [0, []]
    return made


@pytest.mark.parametrize(
    "words",
    [["--help"], ["run", "--help"], ["runs"], ["status"], ["logs", "--step", "hello"], ["report"], ["init", "new"],
     ["run", "c.yaml"], ["compile", "c.yaml", "--platform", "kubeflow"], ["submit", "--help"], ["images", "--help"], ["schedule", "--help"], ["doctor", "--platform", "vertex"],
     ["gc"], ["prices"], ["prices", "refresh", "--help"], ["serve", "--help"], ["predict", "--help"]],
    ids=lambda words: " ".join(words),
)  # fmt: skip
def test_the_verb_loads_nothing_heavy(folder, words):
    assert loaded(folder, *words) == [0, []]


def test_compiling_the_shipped_pipeline_for_every_platform_loads_no_sdk(tmp_path):
    words = [word for more, _ in PLATFORMS.values() for word in more]
    words = ["compile", "configs/digits.yaml", "--platform", ",".join(PLATFORMS), *words, *TRACKED]
    assert loaded(ROOT, *words, "-o", str(tmp_path / "out")) == [0, []]
    assert (tmp_path / "out" / "continuous-training.parity.md").exists()


@pytest.mark.parametrize(
    "module",
    [
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
    ],
)
def test_importing_the_module_loads_nothing_heavy(module):
    code = (
        f"import sys, json, {module}; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


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
