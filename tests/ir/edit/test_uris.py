"""Where an artifact lies, as a parameter: KFP itself runs the rewritten pipeline and gets the right
strings."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from google.protobuf import json_format
from kfp import dsl
from kfp.pipeline_spec import pipeline_spec_pb2

from rekindle.errors import UnsupportedError
from rekindle.ir.compile import compile_function
from rekindle.ir.edit.uris import PREFIX, read_place, with_places
from rekindle.ir.read.pipeline import read

# What stands in for a launcher here: it shows the strings that it was given.
SHOW = """
# KFP's SubprocessRunner takes only what looks like kfp.dsl.executor_main
import json, pathlib, sys
task = json.loads(sys.argv[1])
given = pathlib.Path(sys.argv[2], "given")
given.mkdir(exist_ok=True)
(given / str(len(list(given.iterdir())))).write_text(json.dumps(task["inputs"]))
for name, one in task["outputs"].get("parameters", {}).items():
    file = pathlib.Path(one["outputFile"])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"told {name}")
"""


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def make(text: str, data: dsl.Output[dsl.Dataset], more: dsl.Output[dsl.Dataset]) -> str:
    from pathlib import Path

    Path(data.path).write_text(text)
    data.metadata["rows"] = 3
    data.metadata["odd"] = 'say "hi"\n'
    more.uri = "s3://elsewhere/more"
    return text


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def fail(data: dsl.Output[dsl.Dataset]):
    raise SystemExit(7)


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def spread(a: dsl.Input[dsl.Dataset], b: dsl.Input[dsl.Dataset], model: dsl.Output[dsl.Model]):
    pass


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def spread_again(a: dsl.Input[dsl.Artifact]):
    pass


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def listed(a: dsl.Input[list[dsl.Dataset]]):
    pass


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def keep(a: dsl.Input[dsl.Dataset]) -> str:
    from pathlib import Path

    return Path(a.path).read_text()


@dsl.pipeline(name="maker")
def maker(text: str) -> dsl.Dataset:
    return make(text=text).outputs["data"]


@dsl.pipeline(name="reader")
def reader(a: dsl.Dataset, b: dsl.Dataset):
    with dsl.If(keep(a=a).output == "hello"):
        spread(a=a, b=b)


@dsl.pipeline(name="routes")
def routes(text: str = "hello", uri: str = "s3://given/at-run-time"):
    made = make(text=text)
    nested = maker(text=text)
    there = dsl.importer(artifact_uri=uri, artifact_class=dsl.Dataset)
    known = dsl.importer(
        artifact_uri="s3://known/data", artifact_class=dsl.Dataset, metadata={"rows": "9"}
    )
    reader(a=made.outputs["data"], b=nested.output)
    model = spread(a=there.output, b=known.output).set_display_name("second").outputs["model"]
    spread(a=made.outputs["more"], b=made.outputs["data"])
    spread_again(a=model)


def compiled(pipeline) -> dict:
    return yaml.safe_load(compile_function(pipeline))


def lowered(pipeline, folder: Path) -> dict:
    """The pipeline with strings for whatever is called spread."""
    spec = compiled(pipeline)
    labels = {label for label in spec["deploymentSpec"]["executors"] if "spread" in label}
    spec = with_places(spec, labels)
    for label in labels:
        spec["deploymentSpec"]["executors"][label]["container"] = {
            "image": "python:3.11",
            "command": ["python3", "-c", SHOW, "{{$}}", str(folder)],
        }
    return spec


def run(spec: dict, folder: Path) -> subprocess.CompletedProcess:
    """By KFP itself, in a process of its own."""
    file = folder / "pipeline.yaml"
    file.write_text(yaml.safe_dump(spec))
    code = (
        "import sys\n"
        "from kfp import components, local\n"
        "local.init(local.SubprocessRunner(use_venv=False), pipeline_root=sys.argv[2])\n"
        "components.load_component_from_file(sys.argv[1])()\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code, str(file), str(folder / "root")],
        cwd=folder,
        env=os.environ,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_kfp_runs_what_was_rewritten_and_gives_the_places(tmp_path: Path) -> None:
    spec = lowered(routes, tmp_path)
    json_format.ParseDict(spec, pipeline_spec_pb2.PipelineSpec())
    done = run(spec, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    given = [json.loads(file.read_text()) for file in (tmp_path / "given").iterdir()]
    assert not any("artifacts" in one for one in given)
    places = [
        {n.removeprefix(PREFIX): read_place(v) for n, v in one["parameterValues"].items()}
        for one in given
    ]
    told = {"rows": 3, "odd": 'say "hi"\n'}
    root = str(tmp_path / "root")
    found = [{n: (_under(uri, root), m) for n, (uri, m) in p.items()} for p in places]
    expected = [
        {"a": ("make/data", told), "b": ("make/data", told)},
        {"a": ("s3://given/at-run-time", {}), "b": ("s3://known/data", {"rows": "9"})},
        {"a": ("s3://elsewhere/more", {}), "b": ("make/data", told)},
        {"a": ("told rekindle-place-model", {})},
    ]
    assert _in_order(found) == _in_order(expected)


def _in_order(places: list[dict]) -> list[str]:
    return sorted(json.dumps(place, sort_keys=True) for place in places)


def _under(uri: str, root: str) -> str:
    """`make/data` for what the component `make` wrote, in whichever of its folders."""
    if not uri.startswith(root):
        return uri
    *_, component, artifact = uri.split("/")
    return f"{component.rsplit('-', 1)[0]}/{artifact}"


@pytest.mark.slow
def test_the_places_of_two_makers_are_not_mixed_up(tmp_path: Path) -> None:
    done = run(lowered(routes, tmp_path), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for file in (tmp_path / "given").iterdir():
        values = json.loads(file.read_text())["parameterValues"]
        for text in values.values():
            uri, _ = read_place(text)
            if uri.startswith("/"):
                assert Path(uri).read_text() == "hello"


def test_a_maker_that_fails_fails_as_before_and_tells_nothing(tmp_path: Path) -> None:
    spec = with_places(compiled(failing), {"exec-spread-again"})
    words = spec["deploymentSpec"]["executors"]["exec-fail"]["container"]["command"]
    wrapper = [*words[:3], "{}", "data", "s3://b/c", "told.json"]
    done = subprocess.run([*wrapper, "sh", "-c", "exit 7"], cwd=tmp_path, check=False)
    assert done.returncode == 7
    assert list(tmp_path.iterdir()) == []
    done = subprocess.run(
        [*wrapper, "sh", "-c", 'echo "$1" > "$0"', "it.txt", "a  b"], cwd=tmp_path, check=False
    )
    assert done.returncode == 0
    assert (tmp_path / "it.txt").read_text() == "a  b\n"
    assert read_place((tmp_path / "told.json").read_text()) == ("s3://b/c", {})


@dsl.pipeline(name="failing")
def failing():
    spread_again(a=fail().outputs["data"])


@dsl.pipeline(name="chosen")
def chosen(text: str = "a"):
    with dsl.If(text == "a"):
        one = make(text=text)
    with dsl.Else():
        two = make(text=text)
    spread_again(a=dsl.OneOf(one.outputs["data"], two.outputs["data"]))


@dsl.pipeline(name="collected")
def collected():
    with dsl.ParallelFor(["a", "b"]) as item:
        one = make(text=item)
    listed(a=dsl.Collected(one.outputs["data"]))


@dsl.pipeline(name="templated")
def templated(rows: str = "1"):
    there = dsl.importer(
        artifact_uri="s3://b/c", artifact_class=dsl.Dataset, metadata={"rows": rows}
    )
    spread_again(a=there.output)


@dsl.pipeline(name="modelcar")
def modelcar():
    there = dsl.importer(artifact_uri="oci://registry/model:1", artifact_class=dsl.Dataset)
    spread_again(a=there.output)


@pytest.mark.parametrize(
    ("pipeline", "label", "what", "where"),
    [
        (
            chosen,
            "exec-spread-again",
            "one of several artifacts (OneOf)",
            "root.dag.tasks.spread-again.inputs.artifacts.a",
        ),
        (
            collected,
            "exec-listed",
            "a list of artifacts",
            "components.comp-listed.inputDefinitions.artifacts.a",
        ),
        (
            templated,
            "exec-spread-again",
            "placeholders in what it imports",
            "root.dag.tasks.spread-again.inputs.artifacts.a",
        ),
        (
            modelcar,
            "exec-spread-again",
            "an image (oci://)",
            "root.dag.tasks.spread-again.inputs.artifacts.a",
        ),
    ],
    ids=["one of", "collected", "placeholders", "image"],
)
def test_what_has_no_single_place_is_refused(pipeline, label, what, where) -> None:
    with pytest.raises(UnsupportedError) as caught:
        with_places(compiled(pipeline), {label})
    (problem,) = caught.value.problems
    assert what in problem.what
    assert problem.where == where
    assert problem.fix


@pytest.mark.parametrize("pipeline", [routes, reader])
def test_what_is_rewritten_is_still_a_pipeline_that_is_understood(pipeline, tmp_path) -> None:
    spec = lowered(pipeline, tmp_path)
    read(yaml.safe_dump(spec))
    assert spec == lowered(pipeline, tmp_path)
