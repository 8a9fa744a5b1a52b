"""`compile`: the shipped pipeline for every platform, byte-stable, against golden files."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kfp import dsl, kubernetes

from rekindle import distribute
from rekindle.app.compile import compiled
from rekindle.app.pipeline import CompiledPipeline, precompiled
from rekindle.errors import RequestError
from rekindle.ir.compile import compile_function
from rekindle.ir.read.pipeline import read
from rekindle.spec.load import load_target
from tests.quick import first
from tests.support import cli
from tests.support.cli_compile import PLATFORMS, ROOT, TRACKED, sagemaker

GOLDEN = Path(__file__).with_name("golden")


def rekindle(*words, check=True, cwd=ROOT):
    return cli.rekindle(*words, cwd=cwd, check=check, env={"GIT_DIR": "/nowhere"})


def hashed(*words, seed, cwd=ROOT):
    """In a process of its own, whose sets have another order."""
    subprocess.run(
        [sys.executable, "-m", "rekindle.cli.main", *map(str, words)],
        cwd=cwd,
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONHASHSEED": seed, "GIT_DIR": "/nowhere"},
    )


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_golden_file_is_what_compile_writes_every_time(platform, tmp_path, request):
    words, name = PLATFORMS[platform]
    asked = ("compile", "configs/digits.yaml", "--platform", platform, *words, *TRACKED)
    rekindle(*asked, "-o", tmp_path / "here")
    hashed(*asked, "-o", tmp_path / "hashed", seed="1")
    texts = []
    for folder in (tmp_path / "here", tmp_path / "hashed"):
        texts.append((folder / name).read_text())
        names = {path.name for path in folder.iterdir()}
        assert names == {name, *(["bundles"] if platform in ("azureml", "sagemaker") else [])}
    assert texts[0] == texts[1], "the same input gives the same bytes"
    golden = GOLDEN / f"digits.{platform}{Path(name).suffix}"
    if request.config.getoption("--regenerate"):
        golden.write_text(texts[0])
    assert texts[0] == golden.read_text(), "run `make generate` and read the difference"


def test_the_shipped_pipeline_is_compiled_anew_once_what_it_is_made_of_changed(tmp_path):
    for folder in ("pipelines", "components"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    source = tmp_path / "pipelines/continuous_training.py"
    assert read(precompiled(source)).inputs.parameters
    with (tmp_path / "components/ingest.py").open("a") as file:
        file.write("# changed\n")
    assert not precompiled(source)


@pytest.mark.slow
def test_twenty_compilations_anywhere_give_the_same_bytes(tmp_path):
    words = [word for more, _ in PLATFORMS.values() for word in more]
    asked = ("compile", ROOT / "configs/digits.yaml", "--platform", ",".join(PLATFORMS))
    seen = set()
    for i in range(20):
        folder = tmp_path / f"{'deep/' * (i % 3)}{i}"
        folder.mkdir(parents=True)
        hashed(*asked, *words, *TRACKED, "-o", "out", seed=str(i * 7919), cwd=folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        digest = hashlib.sha256()
        for path in files:
            digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
        seen.add((len(files), digest.hexdigest()))
    assert len(seen) == 1


def test_the_steps_that_train_and_score_get_the_machines_that_the_config_asks_for(tmp_path):
    asked = sagemaker(
        resources__nodes=4,
        resources__gpus_per_node=8,
        resources__accelerator="H100",
        resources__spot="true",
        resources__max_run_hours=48,
        resources__budget_usd=100,
        register__publish="[sagemaker]",
    )
    rekindle("compile", "configs/digits.yaml", *asked, "-o", tmp_path)
    (path,) = tmp_path.glob("*.sagemaker.json")
    definition = json.loads(path.read_text())
    *steps, gate = definition["Steps"]
    jobs = {step["Name"]: step["Arguments"] for step in steps if step["Type"] == "Training"}
    assert list(jobs) == ["finetune", "score"]
    for job in jobs.values():
        assert job["ResourceConfig"] == {
            "InstanceCount": 4,
            "InstanceType": "ml.p5.48xlarge",
            "VolumeSizeInGB": 30,
        }
        assert job["EnableManagedSpotTraining"]
        assert job["StoppingCondition"]["MaxRuntimeInSeconds"] == 48 * 3_600
    (promoted,) = gate["Arguments"]["IfSteps"]
    known = json.dumps([definition["Parameters"], promoted])
    assert "publish" in known
    assert "arn:aws:iam::123456789012:role/me" in known, "the step knows where"


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (sagemaker(resources__nodes=0), "greater than or equal to 1"),
        (sagemaker(resources__accelerator="H100"), "no GPUs to be of that kind"),
        (
            sagemaker(resources__gpus_per_node=3, resources__accelerator="H999"),
            "no machine has the 3 GPUs H999",
        ),
        (sagemaker(resources__machine="ml.p99.xlarge"), "none that the service knows"),
        (
            sagemaker(resources__machine="auto"),
            "does not know what the task `image_classification` computes",
        ),
        (sagemaker(resources__max_run_hours=1000), "less than or equal to 672"),
        (
            sagemaker(platforms__sagemaker__secrets="{HF_TOKEN: hf_abcdef}"),
            "platforms.sagemaker.secrets.HF_TOKEN",
        ),
        (sagemaker(platforms__sagemaker__role_arn="me"), "platforms.sagemaker.role_arn"),
        (sagemaker(platforms__sagemaker__image="train:latest"), "is not in ECR"),
        (sagemaker(register__tracking_uri="''"), "the embedded registry is on this machine"),
        (sagemaker(platforms__sagemaker__colour="red"), "colour"),
        (sagemaker(deploy__after_promotion="true", deploy__precision="int8"), "has no test split"),
    ],
)
def test_a_wrong_request_writes_nothing_and_says_what_to_do(asked, says, tmp_path):
    done = rekindle("compile", "configs/digits.yaml", *asked, "-o", tmp_path / "no", check=False)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "hf_abcdef" not in done.stderr
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("platform", first(2, PLATFORMS))
def test_the_config_of_its_page_in_the_docs_compiles(platform, tmp_path):
    page = (ROOT / "docs" / f"{platform}.md").read_text()
    (tmp_path / "c.yaml").write_text(page.partition("```yaml\n")[2].partition("```")[0])
    rekindle("compile", tmp_path / "c.yaml", "--platform", platform, "-o", tmp_path / "out")
    assert list((tmp_path / "out").glob("continuous-training.*"))


@pytest.mark.parametrize("platform", first(2, PLATFORMS))
def test_where_the_config_says_so_the_pipeline_ends_with_a_deployment(platform, tmp_path):
    words, name = PLATFORMS[platform]
    rekindle(
        "compile",
        "configs/digits.yaml",
        "--platform",
        platform,
        *words,
        *TRACKED,
        "-o",
        tmp_path,
        "--set",
        "deploy.after_promotion=true",
        "--set",
        "deploy.canary=[20]",
    )
    assert (tmp_path / name.replace("training", "deployment")).is_file()
    files = [path for path in tmp_path.rglob("*") if path.suffix in (".json", ".yaml")]
    text = "".join(path.read_text() for path in files).replace("\\", "").replace(" ", "")
    found = re.search(r'"deploy":{[^{}]*"canary":\[20\][^{}]*},"platforms":{"(\w+)":', text)
    assert found, "the step is not told how to deploy"
    assert found[1] == platform


def test_a_step_of_azure_that_acts_as_the_user_does_not_deploy(tmp_path):
    words, _ = PLATFORMS["azureml"]
    asked = ["--platform", "azureml", *words, *TRACKED, "--set", "platforms.azureml.identity=user"]
    asked += ["--set", "deploy.after_promotion=true"]
    done = rekindle("compile", "configs/digits.yaml", *asked, "-o", tmp_path / "out", check=False)
    assert done.returncode == 2
    assert "platforms.azureml.identity" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_pipeline_that_deploys_publishes_on_no_other_platform(tmp_path):
    asked = sagemaker(deploy__after_promotion="true", register__publish="[sagemaker, vertex]")
    words = [*asked, *PLATFORMS["vertex"][0], "-o", tmp_path / "out"]
    done = rekindle("compile", "configs/digits.yaml", *words, check=False)
    assert done.returncode == 2
    assert "would not be followed on vertex" in done.stderr
    assert "leave out vertex" in done.stderr
    assert not (tmp_path / "out").exists()


def test_several_platforms_come_with_a_table_of_how_each_carries_it(tmp_path):
    (kubeflow, first), (vertex, second) = PLATFORMS["kubeflow"], PLATFORMS["vertex"]
    done = rekindle(
        "compile",
        "configs/digits.yaml",
        "--platform",
        "kubeflow,vertex",
        *kubeflow,
        *vertex,
        *TRACKED,
        "-o",
        tmp_path,
        "--json",
    )
    parity = "continuous-training.parity.md"
    names = {first, second, parity}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert {Path(path).name for path in json.loads(done.stdout)["files"]} == names
    table = (tmp_path / parity).read_text()
    assert "| step | azureml | kubeflow | sagemaker | vertex |" in table
    assert "| condition-1 | emulated: If, Elif and Else | native | native | native |" in table

    def files():
        return {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()}

    before, words = files(), [*PLATFORMS["azureml"][0], *vertex, *TRACKED]
    again = (
        "compile",
        "configs/digits.yaml",
        "--platform",
        "vertex,azureml",
        *words,
        "-o",
        tmp_path,
    )
    assert "replaced" not in rekindle(*again).stdout
    assert {name: text for name, text in files().items() if name in before} == before
    said = rekindle(*again, "--set", "train.epochs=7").stdout
    assert f"{tmp_path / second} (replaced other content)\n" in said
    assert f"{tmp_path / parity}\n" in said


@pytest.mark.slow
def test_a_pipeline_by_itself_is_compiled_and_its_limits_are_named(tmp_path):
    source = tmp_path / "mine.py"
    source.write_text(
        "from kfp import dsl, kubernetes\n"
        "@dsl.component(base_image='python:3.11', install_kfp_package=False)\n"
        "def say(text: str):\n    print(text)\n"
        "@dsl.pipeline(name='mine')\n"
        "def mine(text: str = 'a'):\n"
        "    kubernetes.mount_pvc(say(text=text), pvc_name='data', mount_path='/data')\n"
    )
    rekindle("compile", f"{source}:mine", "--platform", "kubeflow", "-o", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.yaml"]
    in_place = ("compile", "mine.yaml", "--platform", "kubeflow", "-o", ".")
    refused = rekindle(*in_place, cwd=tmp_path / "out", check=False)
    assert (refused.returncode, "would replace mine.yaml" in refused.stderr) == (2, True)
    again = rekindle(
        "compile",
        tmp_path / "out" / "mine.yaml",
        "--platform",
        "kubeflow",
        "-o",
        tmp_path / "again",
    )
    assert again.returncode == 0
    words, _ = PLATFORMS["vertex"]
    done = rekindle(
        "compile",
        f"{source}:mine",
        "--platform",
        "kubeflow,vertex",
        *words,
        "-o",
        tmp_path / "no",
        check=False,
    )
    assert done.returncode == 2
    assert "persistent volume claims, which vertex refuses" in done.stderr
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(("platform", "warned"), [("azureml", ["shell"]), ("kubeflow", [])])
def test_what_the_image_of_a_command_needs_is_said_when_it_is_compiled(
    platform, warned, tmp_path, caplog
):
    @dsl.container_component
    def shell():
        return dsl.ContainerSpec(image="ghcr.io/a/b:1", command=["true"])

    @dsl.pipeline(name="shelled")
    def shelled():
        shell()

    text = compile_function(shelled)
    (tmp_path / "p.yaml").write_text(text)
    compiled(platform, load_target(tmp_path / "p.yaml"), CompiledPipeline(text, read(text)))
    said = [record.getMessage().split(" on ")[0] for record in caplog.records]
    assert said == warned
    assert all("needs python3" in record.getMessage() for record in caplog.records)


def sections(platform, *names):
    return {f"platforms.{platform}.{name}" for name in names}


LACKS = {  # of a pipeline alone with a step on two nodes
    "azureml": sections("azureml"),
    "kubeflow": sections("kubeflow", "image"),
    "sagemaker": sections("sagemaker", "region", "role_arn", "artifact_root", "image"),
    "vertex": sections("vertex", "project", "region", "artifact_root", "image", "service_account"),
}


@pytest.mark.parametrize("platform", LACKS)
def test_what_a_platform_refuses_and_what_its_section_lacks_are_said_at_once(platform, tmp_path):
    @dsl.component(base_image="python:3.11", install_kfp_package=False)
    def say(data: dsl.Input[dsl.Dataset]):
        print(data.path)

    @dsl.pipeline(name="refused")
    def refused():
        data = dsl.importer(artifact_uri="abfs://lake/rows", artifact_class=dsl.Dataset)
        distribute(say(data=data.output), nodes=2)

    text = compile_function(refused)
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(RequestError) as caught:
        compiled(platform, load_target(tmp_path / "p.yaml"), CompiledPipeline(text, read(text)))
    problems = caught.value.problems
    assert {p.where for p in problems if p.where.startswith("platforms.")} == LACKS[platform]
    assert any(f"which {platform} refuses" in p.what for p in problems)


def test_what_the_section_of_sagemaker_lacks_hides_no_machine_that_there_is_not(tmp_path):
    asked = (
        "configs/digits.yaml",
        "--platform",
        "sagemaker",
        "--set",
        "resources.machine=ml.p99.xlarge",
    )
    done = rekindle("compile", *asked, "-o", tmp_path / "no", "--json", check=False)
    where = {error["where"] for error in json.loads(done.stdout)["errors"]}
    machines = {f"{step}.ResourceConfig.InstanceType" for step in ("finetune", "score")}
    assert where == {*LACKS["sagemaker"], *machines, "register.tracking_uri"}


def test_a_machine_that_cannot_be_chosen_hides_nothing_else(tmp_path):
    asked = ("configs/digits.yaml", "--platform", "kubeflow", "--set", "resources.machine=auto")
    done = rekindle("compile", *asked, "-o", tmp_path / "no", "--json", check=False)
    where = {error["where"] for error in json.loads(done.stdout)["errors"]}
    assert where == {
        "resources.machine",
        "register.tracking_uri",
        "platforms.kubeflow.artifact_root",
    }


def test_data_of_this_machine_is_warned_of(tmp_path):
    (tmp_path / "t.csv").write_text("text,label\na,b\n")
    words, _ = PLATFORMS["vertex"]
    asked = (
        "compile",
        "configs/digits.yaml",
        "--platform",
        "vertex",
        *words,
        *TRACKED,
        "-o",
        tmp_path,
    )
    for source, warned in ((tmp_path / "t.csv", True), ("/gcs/bucket/t.csv", False)):
        said = rekindle(*asked, "--set", f"data.source={source}").stderr
        assert (f"data.source: {source} is on this machine" in said) is warned


def test_a_platform_that_there_is_not_is_named(tmp_path):
    done = rekindle(
        "compile",
        "configs/digits.yaml",
        "--platform",
        "kubeflow,mars",
        "-o",
        tmp_path / "no",
        check=False,
    )
    assert done.returncode == 2
    assert "`mars` is not one of azureml, kubeflow, sagemaker, vertex" in done.stderr


def test_kfp_loads_it():
    from kfp import components

    loaded = components.load_component_from_text((GOLDEN / "digits.kubeflow.yaml").read_text())
    assert set(loaded.component_spec.inputs) >= {"name", "task", "data", "artifact_root"}


def test_what_several_steps_ask_for_is_said_once_with_all_their_places(tmp_path):
    @dsl.component(base_image="python:3.11", install_kfp_package=False)
    def say(n: int):
        print(n)

    @dsl.pipeline(name="several")
    def several():
        for n in range(3):
            kubernetes.add_node_selector(say(n=n), "pool", "gpus")

    text = compile_function(several)
    (tmp_path / "p.yaml").write_text(text)
    asked = ("compile", tmp_path / "p.yaml", "--platform", "sagemaker")
    section = (
        "platforms.sagemaker={region: eu-central-1, role_arn: 'arn:aws:iam::123456789012:role/me', "
    )
    section += (
        "artifact_root: 's3://b/r', image: '123456789012.dkr.ecr.eu-central-1.amazonaws.com/i:1'}"
    )
    done = rekindle(*asked, "--set", section, check=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    (line,) = [line for line in lines if "node selectors" in line]
    assert line.startswith("error: `say`, `say-2`, `say-3` use node selectors, which sagemaker")
    assert done.stderr.count(".nodeSelector") == 3
    errors = json.loads(rekindle(*asked, "--set", section, "--json", check=False).stdout)["errors"]
    assert len([error for error in errors if "node selectors" in error["what"]]) == 3
