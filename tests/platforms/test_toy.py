"""A platform of another package: a toy is installed as a package of its own, and the verbs plan, compile, submit, follow and
schedule on it as on ours, with no line of rekindle changed. What is wrong with a package is said by name, and it is left out."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rekindle.spec.model import recorded_spec

TOY = Path(__file__).parent / "toy"
ROOT = Path(__file__).parents[2]
PIPELINE = """\
from kfp import dsl

@dsl.component(base_image="python:3.11", install_kfp_package=False)
def shout(text: str) -> str:
    return text.upper()

@dsl.pipeline(name="loud")
def loud():
    shout(text="a")
"""
CONFIG = """\
name: loud
pipeline: loud.py:loud
schedule: {cron: "0 3 * * 1"}
platforms: {toy: {folder: FOLDER}}
"""
# what each command printed, in one process: a start costs more than all of them
COMMANDS = """\
import json, sys
from tests.support.cli import rekindle
for line in sys.stdin:
    done = rekindle(*json.loads(line), check=False)
    print(json.dumps([done.returncode, done.stdout, done.stderr]))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder that holds the toy as pip installs it."""
    folder = tmp_path_factory.mktemp("site")
    install = [
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--target",
    ]
    subprocess.run([sys.executable, "-m", *install, folder, str(TOY)], check=True, timeout=120)
    return folder


def answers(site: Path, folder: Path, *commands: list[str]) -> list[tuple[int, str, str]]:
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS],
        input="".join(json.dumps(command) + "\n" for command in commands),
        capture_output=True,
        text=True,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": f"{site}:{ROOT}"},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.fixture
def job(tmp_path):
    (tmp_path / "loud.py").write_text(PIPELINE)
    (tmp_path / "toy").mkdir()
    (tmp_path / "loud.yaml").write_text(CONFIG.replace("FOLDER", str(tmp_path / "toy")))
    return tmp_path


def test_every_verb_works_on_a_platform_of_another_package(site, job):
    words = ["loud.yaml", "--platform", "toy"]
    compiled, doctor, submitted, again, logs, *schedules, alarms, deploy, other = answers(
        site,
        job,
        ["compile", *words, "-o", "out"],
        ["doctor", *words, "--json"],
        ["submit", *words, "--yes", "--wait", "--json"],
        ["status", "latest", "--json"],
        ["logs", "latest"],
        ["schedule", "set", *words, "--yes", "--json"],
        ["schedule", "list", *words, "--json"],
        ["schedule", "delete", *words, "--json"],
        ["alarms", "write", *words, "--json"],
        ["deploy", "loud.yaml", "--platform", "toy", "--json"],
        ["compile", "loud.yaml", "--platform", "nowhere", "-o", "out"],
    )
    assert compiled[0] == 0, compiled
    assert json.loads((job / "out/loud.toy.json").read_text())["steps"] == {"shout": "python:3.11"}
    checks = json.loads(doctor[1])["checks"]
    assert ("folder", "ok") in [(check["name"], check["state"]) for check in checks]
    assert submitted[0] == 0, submitted
    assert len([file for file in (job / "toy").iterdir() if file.suffix == ""]) == 1
    assert json.loads(submitted[1])["status"] == "succeeded"
    steps = json.loads(again[1])["steps"]
    assert [(step["name"], step["status"]) for step in steps] == [("shout", "succeeded")]
    assert "shout was here" in logs[1]
    assert [done[0] for done in schedules] == [0, 0, 0], schedules
    assert json.loads(schedules[1][1])["schedules"][0]["cron"] == "0 3 * * 1"
    assert json.loads(schedules[2][1])["deleted"] is True
    # what it cannot do is refused by name, with what to do instead
    (problem,) = json.loads(alarms[1])["errors"]
    assert (alarms[0], problem["what"]) == (2, "rekindle writes no alarms for toy")
    assert "azureml, kubeflow, sagemaker, vertex" in problem["fix"]
    assert deploy[0] == 2
    assert other[0] == 2
    assert "`nowhere` is not one of azureml, kubeflow, sagemaker, toy, vertex" in other[2]


def test_records_are_read_when_a_platform_is_installed_no_more(site, job, tmp_path_factory):
    """A record has a section of each platform that was installed, whatever the run was on."""
    words = ["loud.yaml", "--platform", "toy", "--yes", "--json"]
    (submitted,) = answers(site, job, ["submit", *words])
    assert submitted[0] == 0, submitted
    nothing = tmp_path_factory.mktemp("nothing")
    runs, status = answers(nothing, job, ["runs", "--json"], ["cancel", "latest", "--json"])
    assert runs[0] == 0, runs
    assert len(json.loads(runs[1])["runs"]) == 1
    (problem,) = json.loads(status[1])["errors"]
    assert (status[0], problem["what"]) == (2, "there is no platform `toy`")
    spec = {"name": "a", "platforms": {"toy": {"folder": "/srv"}, "local": {"ranks": 3}}}
    assert recorded_spec(spec).platforms.local.ranks == 3


def test_what_the_section_does_not_say_is_refused_before_anything_is_written(site, job):
    (job / "loud.yaml").write_text("name: loud\npipeline: loud.py:loud\n")
    bare, wrong = answers(
        site,
        job,
        ["submit", "loud.yaml", "--platform", "toy", "--yes", "--json"],
        ["compile", "loud.yaml", "--platform", "toy", "--set", "platforms.toy.fodler=a", "--json"],
    )
    (problem,) = json.loads(bare[1])["errors"]
    assert (bare[0], problem["where"]) == (2, "platforms.toy.folder")
    assert problem["fix"] == "set platforms.toy.folder: /srv/toy"
    assert not (job / ".rekindle").exists()
    (problem,) = json.loads(wrong[1])["errors"]
    assert "folder" in problem["fix"]


# a class with all methods, and some sections
WHOLE = """
        from rekindle.platforms.api import Platform
        from rekindle.spec.section import PlatformSection
        class Bare(PlatformSection):
            artifact_root: str = ""
        class Good(Bare):
            image: str | None = None
        class Needy(Good):
            folder: str
        class It(Platform):
            seam, name, section = 1, "bad", {section}
            for method in Platform.__abstractmethods__:
                locals()[method] = None
"""
# name of the entry point, what the module of its class holds, the beginning of why it is left out
LEFT_OUT = {
    "it does not import": ("bad", "import no_such_package\n", "No module named 'no_such_package'"),
    "it raises": ("bad", "raise OSError('no licence')\n", "no licence"),
    "its name is ours": ("vertex", "", "there is a platform of that name"),
    "it is called as this machine is": ("local", "", "there is a platform of that name"),
    "it was made for another seam": (
        "bad",
        "class It:\n    seam = 2\n",
        "it was written for version 2 of the seam, and this is 1",
    ),
    "it has another name": (
        "bad",
        "class It:\n    seam, name = 1, 'other'\n",
        "its class calls itself `other`",
    ),
    "it ends the process": ("bad", "raise SystemExit('no licence')\n", "no licence"),
    "its name is no name of a section": (
        "bad-name",
        "class It:\n    seam, name, section = 1, 'bad-name', None\n",
        "`bad-name` cannot be the name of a section",
    ),
    "its name is that of a method": (
        "copy",
        "class It:\n    seam, name, section = 1, 'copy', None\n",
        "`copy` cannot be the name of a section",
    ),
    "it is no platform": (
        "bad",
        "class It:\n    seam, name, section = 1, 'bad', None\n",
        "It is not a rekindle.platforms.api.Platform",
    ),
    "it lacks methods": (
        "bad",
        """
        from rekindle.platforms.api import Platform
        class It(Platform):
            seam, name, section = 1, "bad", None
        """,
        "It has no artifacts, cache_keys, cancel, checks, compile, describe, permissions, preview, "
        "read, read_log, resume, submit",
    ),
    "its section is none": ("bad", WHOLE.format(section="None"), "None is not a PlatformSection"),
    "its section has no image": (
        "bad",
        WHOLE.format(section="Bare"),
        "Bare has no image",
    ),
    "its section needs a value": (
        "bad",
        WHOLE.format(section="Needy"),
        "1 validation error for Needy",
    ),
    "it has no column of the feature table": (
        "bad",
        WHOLE.format(section="Good"),
        "[Errno 2] No such file or directory",
    ),
    "its column has no verdict": (
        "bad",
        WHOLE.format(section="Good")
        + """
            @classmethod
            def features(cls):
                return {"python_components": "works"}
        """,
        "its feature `python_components` has none of the verdicts native, emulated, noticed, ignored, refused",
    ),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_a_package_that_cannot_be_used_is_named_and_left_out(case, tmp_path, monkeypatch):
    from rekindle.spec.installed import BUILT_IN, installed_platforms

    name, source, reason = LEFT_OUT[case]
    module = f"bad_{abs(hash(case))}"
    (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
    about = tmp_path / "bad_platform-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: bad-platform\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[rekindle.platforms]\n{name} = {module}:It\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = installed_platforms.__wrapped__()
    assert set(found.classes) == set(BUILT_IN)
    (left_out,) = found.left_out
    expected = f"the platform `{name}` of bad-platform is left out: {reason}"
    assert str(left_out).startswith(expected)


def test_its_name_is_refused_with_the_reason(tmp_path, job):
    about = tmp_path / "bad_platform-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: bad-platform\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[rekindle.platforms]\nbad = no_such_module:It\n")
    (done, helped) = answers(
        tmp_path,
        job,
        ["compile", "loud.py:loud", "--platform", "bad", "-o", "out"],
        ["--help"],
    )
    assert done[0] == 2
    assert "the platform `bad` of bad-platform is left out: No module named" in done[2]
    assert helped[0] == 0
