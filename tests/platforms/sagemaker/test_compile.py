"""The definition for SageMaker, and the 30 ways in which one is refused before anything is written."""

import copy
import json
from typing import Any

import pytest
import yaml
from kfp import dsl

from rekindle.errors import RequestError, UnsupportedError
from rekindle.ir.compile import compile_function
from rekindle.ir.flatten import Given
from rekindle.platforms import bundle
from tests.platforms.local.runs import module
from tests.support.sagemaker_compile import ECR, IMAGE, compiled, definition
from tests.support.two_steps import changed, component, make, pipeline, spread


def test_a_definition_of_two_steps_and_a_condition() -> None:
    made = compiled(
        pipeline,
        {"n": 3},
        subnets=("subnet-1",),
        security_groups=("sg-1",),
        tags={"team": "a"},
        kms_key="arn:aws:kms:eu-central-1:123456789012:key/k",
    )
    found = definition(made)
    assert found["Parameters"] == [
        {"Name": "n", "Type": "Integer", "DefaultValue": 3},
        {"Name": "text", "Type": "String", "DefaultValue": "a"},
    ]
    first, condition = found["Steps"]
    job = first["Arguments"]
    assert (first["Name"], first["Type"]) == ("make", "Processing")
    assert first["CacheConfig"] == {"Enabled": True, "ExpireAfter": "P30D"}
    assert first["RetryPolicies"][0]["IntervalSeconds"] == 7
    assert job["AppSpecification"]["ImageUri"] == IMAGE
    assert job["Environment"]["REKINDLE_P0"] == {
        "Std:Join": {"On": "", "Values": [{"Get": "Parameters.n"}]}
    }
    assert job["NetworkConfig"]["VpcConfig"] == {
        "Subnets": ["subnet-1"],
        "SecurityGroupIds": ["sg-1"],
    }
    assert job["Tags"] == [{"Key": "team", "Value": "a"}]
    assert job["ProcessingOutputConfig"]["KmsKeyId"].endswith("key/k")
    assert job["ProcessingResources"]["ClusterConfig"]["InstanceType"] == "ml.m5.xlarge"
    assert [o["OutputName"] for o in job["ProcessingOutputConfig"]["Outputs"]] == [
        "rekindle-result",
        "data",
    ]
    assert condition["Arguments"]["Conditions"] == [
        {
            "Type": "Equals",
            "LeftValue": {
                "Std:JsonGet": {
                    "PropertyFile": {"Get": "Steps.make.PropertyFiles.result"},
                    "Path": "parameters.Output",
                }
            },
            "RightValue": True,
        }
    ]
    (second,) = condition["Arguments"]["IfSteps"]
    places = {
        i["InputName"]: i["S3Input"]["S3Uri"] for i in second["Arguments"]["ProcessingInputs"]
    }
    outputs = "Steps.make.ProcessingOutputConfig.Outputs"
    assert places["artifact-0"] == {"Get": f"{outputs}['data'].S3Output.S3Uri"}
    assert places["result-0"] == {"Get": f"{outputs}['rekindle-result'].S3Output.S3Uri"}
    bundle = places["bundle"].removeprefix("s3://lake/rekindle/")
    assert {
        f"{bundle}/{n}" for n in ("entry.py", "rekindle/launch/shim.py", "task.json")
    } <= made.files.keys()


def test_no_time_or_execution_is_in_what_the_service_caches_by() -> None:
    found = definition(compiled(pipeline, {"n": 3}))
    job = found["Steps"][0]["Arguments"]
    keyed = json.dumps([job[k] for k in ("AppSpecification", "Environment", "ProcessingInputs")])
    assert "Execution" not in keyed
    assert compiled(pipeline, {"n": 3}) == compiled(pipeline, {"n": 3})


def test_a_long_value_is_fixed_in_the_bundle_and_no_parameter() -> None:
    made = compiled(pipeline, {"n": 3, "text": "x" * 300})
    assert [p["Name"] for p in definition(made)["Parameters"]] == ["n"]
    assert any(b"x" * 300 in content for name, content in made.files.items() if "task" in name)


def test_loops_and_nested_pipelines_are_steps_of_their_own() -> None:
    same = module("same")
    names = [s["Name"] for s in definition(compiled(same.loop_over_nested_pipelines))["Steps"]]
    assert names[:2] == [
        "for-loop-2-0-pairs-of-for-loop-2-0-pair",
        "for-loop-2-0-pairs-of-for-loop-2-1-pair",
    ]
    assert all(len(name) <= 64 for name in names)


def test_the_steps_of_a_branch_are_in_one_condition() -> None:
    @dsl.pipeline(name="branch")
    def branch(n: int = 1) -> None:
        with dsl.If(n == 1):
            make(n=n, text="first")
            make(n=n, text="second")

    (condition,) = definition(compiled(branch))["Steps"]
    assert [step["Name"] for step in condition["Arguments"]["IfSteps"]] == [
        "condition-1-make",
        "condition-1-make-2",
    ]


def many_inputs() -> Any:
    @component
    def eleven(data: dsl.Input[list[dsl.Dataset]]):
        print(data)

    @dsl.pipeline(name="wide")
    def wide() -> None:
        with dsl.ParallelFor(list(range(10))) as i:
            made = make(n=i, text="")
        eleven(data=dsl.Collected(made.outputs["data"]))

    return wide


def many_parameters() -> str:
    """One more than an execution takes."""

    @component
    def joined(a: str) -> str:
        return a

    @dsl.pipeline(name="wide")
    def wide(a: str = "x") -> None:
        joined(a=a)

    (document,) = yaml.safe_load_all(compile_function(wide))
    inputs = document["root"]["inputDefinitions"]["parameters"]
    tasks, task = document["root"]["dag"]["tasks"], document["root"]["dag"]["tasks"]["joined"]
    for i in range(200):
        inputs[f"p{i}"] = inputs["a"]
        if i % 5 == 0:
            tasks[f"joined-{i}"] = copy.deepcopy(task)
            tasks[f"joined-{i}"]["inputs"]["parameters"]["a"] = {
                "runtimeValue": {
                    "constant": "".join(
                        f"{{{{$.inputs.parameters['p{n}']}}}}" for n in range(i, i + 5)
                    )
                }
            }
            for n in range(i, i + 5):
                tasks[f"joined-{i}"]["inputs"]["parameters"][f"p{n}"] = {
                    "componentInputParameter": f"p{n}"
                }
    return str(yaml.safe_dump(document))


def contained(image: str) -> Any:
    """A step with a command of its own."""

    @dsl.container_component
    def shell():
        return dsl.ContainerSpec(image=image, command=["sh", "-c", "echo"])

    @dsl.pipeline(name="contained")
    def other() -> None:
        shell()

    return other


def many_conditions(count: int) -> Any:
    """One step that `count` conditions look at, each with one step in it."""

    @dsl.pipeline(name="many")
    def other() -> None:
        flag = make(n=1, text="").outputs["Output"]
        for _ in range(count):
            with dsl.If(flag == True):  # noqa: E712
                make(n=1, text="")

    return other


WRONG: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "no region": (pipeline, {"n": 1}, {"region": ""}, "needs `region`"),
    "no role": (pipeline, {"n": 1}, {"role_arn": ""}, "needs `role_arn`"),
    "no store": (pipeline, {"n": 1}, {"artifact_root": ""}, "needs `artifact_root`"),
    "another store": (pipeline, {"n": 1}, {"artifact_root": "gs://b"}, "out of reach"),
    "no image": (pipeline, {"n": 1}, {"image": None}, "is not in ECR"),
    "an image of another registry": (
        pipeline,
        {"n": 1},
        {"image": "ghcr.io/a@sha256:0"},
        "not in ECR",
    ),
    "an image without a digest": (
        pipeline,
        {"n": 1},
        {"image": IMAGE.partition("@")[0]},
        "is a mutable tag",
    ),
    "an unknown machine": (
        pipeline,
        {"n": 1},
        {"machine": "ml.m5.huge"},
        "none that the service knows",
    ),
    "a subnet without a group": (pipeline, {"n": 1}, {"subnets": ("subnet-1",)}, "less than the 1"),
    "a wrong subnet": (
        pipeline,
        {"n": 1},
        {"subnets": ("x y",), "security_groups": ("sg-1",)},
        "the form",
    ),
    "a tag that is too long": (pipeline, {"n": 1}, {"tags": {"x" * 129: "a"}}, "129 characters"),
    "a missing argument": (pipeline, {}, {}, "needs `n`"),
    "an argument of another type": (pipeline, {"n": "x"}, {}, "not a whole number"),
    "an unknown argument": (pipeline, {"n": 1, "m": 2}, {}, "no parameter `m`"),
    "a command in an image of Docker Hub": (
        contained("alpine:3.20"),
        {},
        {},
        "alpine:3.20 is not in ECR",
    ),
    "a command in another registry": (
        contained("ghcr.io/a/b:1"),
        {},
        {},
        "ghcr.io/a/b:1 is not in ECR",
    ),
    "an image without Python": (contained(f"{ECR}/library/alpine:3"), {}, {}, "has no python3"),
    "conditions and what is in them": (many_conditions(25), {}, {}, "its 26 steps are 51 there"),
    "too many inputs": (many_inputs(), {}, {}, "11 inputs"),
    "more CPUs than there are": (changed(set_cpu_limit=["500"]), {}, {}, "no machine has"),
    "a name of a pipeline": (
        compile_function(changed()).replace("name: changed", "name: a_b"),
        {},
        {},
        "not a name of a pipeline",
    ),
    "an accelerator": (
        changed(set_accelerator_type=["TPU_V3"], set_accelerator_limit=[1]),
        {},
        {},
        "other than current GPUs of NVIDIA",
    ),
    "a Kubernetes accelerator": (
        changed(set_accelerator_type=["amd.com/gpu"], set_accelerator_limit=[1]),
        {},
        {},
        "other than current GPUs of NVIDIA",
    ),
    "an exit handler": (module("behaviour").watched, {"folder": "x"}, {}, "exit handlers"),
    "ignored failures": (
        module("behaviour").tolerant,
        {"folder": "x"},
        {},
        "ignore_upstream_failure",
    ),
    "a volume": (
        module("behaviour").wants_a_volume,
        {"folder": "x"},
        {},
        "persistent volume claims",
    ),
    "a secret": (module("behaviour").knows_a_secret, {"folder": "x"}, {}, "secrets in environment"),
    "a loop over an output": (module("same").loop_over_an_output, {}, {}, "ForEach"),
    "retries of several nodes": (
        spread(2, retry=True),
        {},
        {},
        "cannot be tried again without the others",
    ),
    "an unknown machine of several": (
        spread(2, machine="ml.p9.48xlarge"),
        {},
        {},
        "none that the service knows",
    ),
    "a training of months": (spread(2, max_run_hours=700), {}, {}, "672 at most"),
    "GPUs that nobody has": (spread(1, gpus_per_node=16), {}, {}, "no machine has the 16 GPUs"),
    "too many parameters": (many_parameters(), {}, {}, "201 parameters"),
    "an importer of a path": (module("same").imported, {"uri": "/x"}, {}, "importers"),
}


def test_images_in_ecr_and_fifty_steps_are_taken() -> None:
    (step,) = definition(compiled(contained(f"{ECR}/tools/alpine:3")))["Steps"]
    assert step["Arguments"]["AppSpecification"]["ImageUri"] == f"{ECR}/tools/alpine:3"
    steps = definition(compiled(many_conditions(24)))["Steps"]
    assert sum(1 + len(step["Arguments"].get("IfSteps", ())) for step in steps) == 49


def test_refusals_of_images_have_their_place_in_the_pipeline() -> None:
    with pytest.raises(UnsupportedError) as caught:
        compiled(contained("alpine"))
    assert [problem.where for problem in caught.value.problems] == ["root.dag.tasks.shell"] * 2


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_request_is_refused_with_its_place_and_a_way_out(case: str) -> None:
    made, arguments, place, says = WRONG[case]
    with pytest.raises(RequestError) as caught:
        compiled(made, arguments, **place)
    assert caught.value.exit_code == 2
    assert says in str(caught.value)
    for problem in caught.value.problems:
        assert problem.where, problem


def test_an_element_that_a_fixed_struct_lacks_is_named() -> None:
    asked, known = Given("settings", ("lr",)), {"settings": {"lr": 0.1}}
    assert bundle._encoded(asked, {}, known) == {"constant": 0.1}
    with pytest.raises(UnsupportedError, match=r"there is no `rate` in \{.lr.: 0.1\}"):
        bundle._encoded(Given("settings", ("rate",)), {}, known)
