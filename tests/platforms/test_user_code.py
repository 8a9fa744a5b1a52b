"""One's own code on platforms: a definition is compiled only for an image that has it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from rekindle.app.compile import compiled
from rekindle.app.pipeline import CompiledPipeline, pipeline_of
from rekindle.errors import RequestError
from rekindle.ir.compile import compile_pipeline
from rekindle.ir.read.pipeline import read
from rekindle.platforms.user_code import code_of, hashes, placed
from rekindle.spec import lock
from rekindle.spec.load import load_target
from rekindle.spec.lock import Pin
from rekindle.spec.model import Spec

DIGEST = "sha256:" + "1" * 64
ECR = "123456789012.dkr.ecr.eu-central-1.amazonaws.com/own"
CONFIG = f"""
name: own
task: ../tasks/linear.py:Linear
data: {{source: "sklearn:digits"}}
register: {{tracking_uri: "https://mlflow.example.com"}}
platforms:
  azureml: {{artifact_root: "abfs://lake@acc.dfs.core.windows.net/rekindle", image: "lake.azurecr.io/own:1"}}
  kubeflow: {{artifact_root: /mnt/rekindle, image: "registry.example.com/own:1"}}
  sagemaker: {{region: eu-central-1, role_arn: "arn:aws:iam::123456789012:role/me", artifact_root: "s3://b/r", image: "{ECR}:1"}}
  vertex: {{project: p, region: europe-west4, artifact_root: "gs://b/r", image: "europe-docker.pkg.dev/p/r/own:1"}}
"""
PIPELINE = """
from kfp import dsl

@dsl.component(base_image="{image}", install_kfp_package=False)
def count(text: str) -> int:
    from lib.words import split
    return len(split(text))

@dsl.pipeline(name="own")
def own(text: str = "a b"):
    count(text=text)
"""
PLATFORMS = ("azureml", "kubeflow", "sagemaker", "vertex")
FILES = {
    "configs/own.yaml": CONFIG,
    "tasks/linear.py": "import shapes\n",
    "tasks/shapes.py": "from lib import words\n",
    "lib/words.py": "def split(text):\n    return text.split()\n",
    "prompts/a.txt": "a",
    "train.py": "import lib.words\n",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


_COMPILED: dict[str, CompiledPipeline] = {}  # by the text of the file: KFP takes a second each


def pipeline_at(spec: Spec) -> CompiledPipeline:
    target = pipeline_of(spec)
    text = Path(target.rpartition(":")[0]).read_text()
    if text not in _COMPILED:
        ir = compile_pipeline(target)
        _COMPILED[text] = CompiledPipeline(ir, read(ir))
    return _COMPILED[text]


def spec_of(project: Path, *overrides: str) -> Spec:
    return load_target(project / "configs" / "own.yaml", overrides)


def pin(project: Path, *overrides: str) -> None:
    """Say of every image that it has the code that is here."""
    spec = spec_of(project, *overrides)
    code = code_of(spec, pipeline_at(spec).graph).digest
    plain = load_target(project / "configs" / "own.yaml", overrides, pinned=False).platforms
    images = [getattr(plain, platform).image for platform in PLATFORMS]
    pins = {image: Pin(digest=DIGEST, code=code) for image in images}
    lock.write(project / "configs", pins)


def compile_for(platform: str, spec: Spec) -> str:
    definition = compiled(platform, spec, pipeline_at(spec))
    return "".join(content.decode() for content in definition.files.values())


def refusals(platform: str, spec: Spec) -> str:
    with pytest.raises(RequestError) as caught:
        compile_for(platform, spec)
    return str(caught.value)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_task_of_ones_own_is_refused_until_the_image_has_it_and_then_found_there(
    platform: str, project: Path
) -> None:
    said = refusals(platform, spec_of(project))
    assert "has your files that `task` needs" in said
    assert f"where: platforms.{platform}.image" in said
    assert "fix:   rekindle images build" in said
    pin(project)
    text = compile_for(platform, spec_of(project))
    assert "/opt/rekindle/code/tasks/linear.py:Linear" in text
    assert f"own@{DIGEST}" in text
    assert str(project) not in text
    (project / "lib" / "words.py").write_text("split = str.split\n")
    assert "was built from other files than those here" in refusals(platform, spec_of(project))


def test_the_files_are_those_named_those_imported_and_those_included(project: Path) -> None:
    spec = spec_of(
        project,
        f"image.include=[{project}/prompts]",
        f"train.entrypoint={project}/train.py --lr 1",
    )
    code = code_of(spec, pipeline_at(spec).graph)
    assert sorted(code.files) == [
        "lib/words.py",
        "prompts/a.txt",
        "tasks/linear.py",
        "tasks/shapes.py",
        "train.py",
    ]
    assert code.folders == (".", "configs", "tasks")
    assert code.wanted_by == ("task", "train.entrypoint", "image.include")


def test_the_hash_is_of_the_content_and_not_of_the_place(project: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / "copy"
    shutil.copytree(project, other, ignore=shutil.ignore_patterns("elsewhere"))
    here, there = spec_of(project), spec_of(other)
    graph = pipeline_at(here).graph
    assert code_of(here, graph).digest == code_of(there, graph).digest
    (other / "tasks" / "shapes.py").write_text("from lib import words  # changed\n")
    assert code_of(here, graph).digest != code_of(there, graph).digest


@pytest.mark.slow
def test_the_cache_here_knows_the_files_behind_a_task_and_a_component(project: Path) -> None:
    (project / "pipelines").mkdir()
    (project / "pipelines" / "own.py").write_text(PIPELINE.replace("{image}", "python:3.11"))
    spec = spec_of(project, f"pipeline={project}/pipelines/own.py:own", "data=null")
    graph = pipeline_at(spec).graph
    before = hashes(spec, graph)
    assert list(before) == [spec.task, "count"]
    (project / "tasks" / "shapes.py").write_text("from lib import words  # changed\n")
    assert hashes(spec, graph)["count"] == before["count"]
    assert hashes(spec, graph)[spec.task] != before[spec.task]


def test_two_modules_that_change_places_are_other_code(project: Path) -> None:
    spec = spec_of(project)
    graph = pipeline_at(spec).graph
    shapes, words = project / "tasks" / "shapes.py", project / "lib" / "words.py"
    (project / "tasks" / "linear.py").write_text("import shapes\nfrom lib import words\n")
    found = []
    for one, other in (("A = 1\n", "A = 2\n"), ("A = 2\n", "A = 1\n")):
        shapes.write_text(one)
        words.write_text(other)
        found.append(hashes(spec, graph)[spec.task])
    assert found[0] != found[1]


def test_ones_own_script_is_called_where_the_image_has_it(project: Path) -> None:
    spec = spec_of(project, f"train.entrypoint={project}/train.py --data {{data}} --name 'a b'")
    inside = placed(spec, code_of(spec, pipeline_at(spec).graph))
    assert inside.train.entrypoint == "/opt/rekindle/code/train.py --data '{data}' --name 'a b'"
    assert inside.task == "/opt/rekindle/code/tasks/linear.py:Linear"


def test_a_path_that_is_not_here_is_the_images_own_affair(project: Path) -> None:
    spec = spec_of(project, "task=/opt/mine/task.py:Mine", f"platforms.vertex.image=r/x@{DIGEST}")
    assert "/opt/mine/task.py:Mine" in compile_for("vertex", spec)


@pytest.mark.parametrize(
    ("platform", "image", "said"),
    [
        (
            "kubeflow",
            "python:3.11",
            "`count` imports words.py, which its image python:3.11 does not have",
        ),
        (
            "vertex",
            "python:3.11",
            "`count` imports words.py, which its image python:3.11 does not have",
        ),
        (
            "azureml",
            "python:3.11",
            "`count` imports words.py, which its image python:3.11 does not have",
        ),
        ("sagemaker", "python:3.11", "has your files that `count` needs"),
        ("kubeflow", "rekindle/cpu", "has your files that `count` needs"),
        ("vertex", "rekindle/cpu", "has your files that `count` needs"),
        ("azureml", "rekindle/cpu", "has your files that `count` needs"),
        ("sagemaker", "rekindle/cpu", "has your files that `count` needs"),
    ],
)
def test_a_component_that_imports_a_module_of_ones_own_needs_an_image_that_has_it(
    platform: str, image: str, said: str, project: Path
) -> None:
    (project / "pipelines").mkdir()
    (project / "pipelines" / "own.py").write_text(PIPELINE.replace("{image}", image))
    words = ("task=''", f"pipeline={project}/pipelines/own.py:own", "data=null")
    assert said in refusals(platform, spec_of(project, *words))
    pin(project, *words)
    if "does not have" in said:
        assert said in refusals(platform, spec_of(project, *words))
    else:
        assert f"own@{DIGEST}" in compile_for(platform, spec_of(project, *words))


@pytest.mark.slow
def test_an_image_of_ones_own_may_have_the_module_and_is_said_to_need_it(
    project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (project / "pipelines").mkdir()
    (project / "pipelines" / "own.py").write_text(PIPELINE.replace("{image}", "r.example/mine:1"))
    words = ("task=''", f"pipeline={project}/pipelines/own.py:own", "data=null")
    pin(project, *words)
    assert "r.example/mine:1" in compile_for("kubeflow", spec_of(project, *words))
    assert [record.getMessage() for record in caplog.records] == [
        "`count` imports words.py, which its image r.example/mine:1 has to have"
    ]


def test_a_config_without_code_of_its_own_needs_no_pin(project: Path) -> None:
    spec = spec_of(project, "task=image_classification")
    assert "registry.example.com/own:1" in compile_for("kubeflow", spec)


def test_an_image_by_tag_is_warned_of_once_and_one_by_digest_is_not(
    project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = "task=image_classification"
    compile_for("kubeflow", spec_of(project, words))
    assert [record.getMessage() for record in caplog.records] == [
        "registry.example.com/own:1 is a mutable tag; pin it by digest: `rekindle images push`"
    ]
    caplog.clear()
    pin(project, words)
    compile_for("kubeflow", spec_of(project, words))
    assert caplog.records == []


def test_what_is_included_has_to_be_there(project: Path) -> None:
    spec = spec_of(project, f"image.include=[{os.sep}nowhere{os.sep}x]")
    with pytest.raises(RequestError, match="no such file or folder: /nowhere/x"):
        code_of(spec, pipeline_at(spec).graph)
