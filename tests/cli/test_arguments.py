"""What a pipeline's parameters are given: what the config asks for by `receives` and `arguments`, never what their names
suggest."""

import json
from pathlib import Path

import pytest
from kfp import dsl

from rekindle.app.pipeline import arguments_of, read_pipeline
from rekindle.errors import RequestError, SpecError
from rekindle.ir.compile import compile_function
from rekindle.ir.read.pipeline import read
from rekindle.ir.values import bind
from rekindle.spec.load import load_target

NAMES = {
    "name",
    "task",
    "artifact_root",
    "publish",
    "must_pass",
    "code_commit",
    "data",
    "model",
    "train",
    "evaluate",
    "register",
}


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def show(text: str):
    print(text)


@dsl.pipeline(name="defaults")
def defaults(
    name: str = "KFP",
    task: str = "t",
    artifact_root: str = "r",
    code_commit: str = "c",
    data: str = "d",
    model: str = "m",
    train: str = "n",
    evaluate: str = "e",
    register: str = "g",
    publish: str = "p",
    must_pass: str = "o",
):
    show(text=name)


@dsl.pipeline(name="needs")
def needs(train: str, rounds: int, note: str = ""):
    show(text=train)


@pytest.fixture(scope="module")
def graphs():
    return {made.name: read(compile_function(made)) for made in (defaults, needs)}


def spec_of(folder: Path, text: str = ""):
    path = folder / "c.yaml"
    path.write_text(f"name: tickets\npipeline: p.yaml\n{text}")
    return load_target(path)


def test_parameters_keep_their_defaults_whatever_they_are_called(graphs, tmp_path):
    for spec in (spec_of(tmp_path), load_target("p.py:defaults")):
        values = bind(graphs["defaults"], arguments_of(spec, graphs["defaults"], "/root"))
        assert values == {p: d.default for p, d in graphs["defaults"].inputs.parameters.items()}
        assert values.keys() == NAMES


def test_a_parameter_that_is_asked_for_receives_its_section_as_json(graphs, tmp_path):
    spec = spec_of(
        tmp_path, "receives: [train, name]\ntrain: {epochs: 7}\narguments: {data: mine}\n"
    )
    values = bind(graphs["defaults"], arguments_of(spec, graphs["defaults"], "/root"))
    assert json.loads(values["train"])["epochs"] == 7
    assert (values["name"], values["data"], values["model"]) == ("tickets", "mine", "m")


def test_all_is_each_parameter_of_the_pipeline_that_the_config_can_fill(graphs, tmp_path):
    spec = spec_of(tmp_path, "receives: all\narguments: {rounds: 2}\n")
    values = arguments_of(spec, graphs["needs"], "/root")
    assert values.keys() == {"train", "rounds"}
    own = arguments_of(
        spec_of(tmp_path, "receives: all\narguments: {name: x}"), graphs["defaults"], "/root"
    )
    assert own.keys() == NAMES
    assert (own["name"], own["artifact_root"]) == ("x", "/root")


def test_the_shipped_pipeline_receives_everything(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("name: x\ntask: text_classification\ndata: {source: 'sklearn:digits'}\n")
    spec = load_target(path)
    assert arguments_of(spec, read_pipeline(spec).graph, "/root").keys() == NAMES


def test_every_parameter_without_a_value_is_named_with_what_to_write(graphs, tmp_path):
    with pytest.raises(RequestError) as caught:
        arguments_of(spec_of(tmp_path), graphs["needs"], "/root")
    assert sorted((p.what, p.fix) for p in caught.value.problems) == [
        ("the pipeline needs a value for `rounds`", "write arguments: {rounds: VALUE}"),
        (
            "the pipeline needs a value for `train`",
            "write receives: [train] for what the config says, or arguments: {train: VALUE}",
        ),
    ]


@pytest.mark.parametrize(
    "section", ["train: {epochs: 7}", "register: {approval: manual}", "task: causal_lm"]
)
def test_a_section_with_the_name_of_a_parameter_that_nothing_joins_is_refused(
    graphs, tmp_path, section
):
    with pytest.raises(RequestError) as caught:
        arguments_of(spec_of(tmp_path, section), graphs["defaults"], "/root")
    (problem,) = caught.value.problems
    name = section.partition(":")[0]
    assert problem.where == name
    assert f"receives: [{name}]" in problem.fix


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("receives: [train]\narguments: {train: x}\n", "arguments.train"),
        ("receives: [trian]\n", "receives"),
    ],
)
def test_what_receives_cannot_mean_is_refused_when_the_config_is_read(tmp_path, text, where):
    with pytest.raises(SpecError) as caught:
        spec_of(tmp_path, text)
    assert caught.value.problems[0].what.startswith(where)


def test_a_name_that_the_pipeline_does_not_have_is_refused(graphs, tmp_path):
    spec = spec_of(tmp_path, "receives: [train, model]\narguments: {rounds: 1}\n")
    with pytest.raises(RequestError, match="no parameter `model`"):
        bind(graphs["needs"], arguments_of(spec, graphs["needs"], "/root"))


def test_publishing_that_the_pipeline_knows_nothing_of_is_refused(graphs, tmp_path):
    place = "{region: eu-central-1, role_arn: 'arn:aws:iam::123456789012:role/me', artifact_root: 's3://b/r', image: x}"
    text = f"register: {{publish: [sagemaker]}}\nplatforms: {{sagemaker: {place}}}\ndata: {{source: x.csv}}\n"
    with pytest.raises(RequestError, match="does not receive it") as caught:
        arguments_of(spec_of(tmp_path, text), graphs["defaults"], "/root")
    assert caught.value.problems[0].where == "register.publish"
    received = arguments_of(
        spec_of(tmp_path, f"receives: all\n{text}"), graphs["defaults"], "/root"
    )
    assert "role/me" in received["publish"]


def test_golden_rows_that_the_pipeline_knows_nothing_of_are_refused(graphs, tmp_path):
    """Else they would decide nothing."""
    text = "data: {source: x.csv}\nevaluate: {must_pass: {format: csv, content: 'a'}}\n"
    with pytest.raises(RequestError, match="does not receive it") as caught:
        arguments_of(spec_of(tmp_path, text), graphs["defaults"], "/root")
    assert caught.value.problems[0].where == "evaluate.must_pass"
