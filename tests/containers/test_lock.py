"""What images install is known by its hash (L4): the locks, what of them a base leaves to install, and builds that refuse."""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTAINERS = ROOT / "containers"
LOCKS = (
    "requirements.lock",
    "kfp.lock",
    "deepspeed.lock",
    "build.lock",
    "tensorflow.lock",
    "megatron.lock",
)
HASH = r"--hash=sha256:[0-9a-f]{64}"


def entries(text):
    """Each package's line, with the lines of its hashes."""
    joined = text.replace("\\\n", " ")
    return {re.split(r"[=@ ;]", line)[0]: line for line in joined.splitlines() if line}


def run(*words, **variables):
    return subprocess.run(
        words, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **variables}
    )


@pytest.mark.parametrize("lock", LOCKS)
def test_every_package_of_a_lock_has_one_version_and_a_hash(lock):
    found = entries((CONTAINERS / lock).read_text())
    assert found
    for name, line in found.items():
        assert re.fullmatch(rf"{re.escape(name)}==[^ ;]+( ; [^\\]*?)?(\s+{HASH})+\s*", line), line


def test_the_locks_hold_all_that_steps_import_in_the_versions_that_are_tested():
    found = entries((CONTAINERS / "requirements.lock").read_text())
    wanted = {
        re.split(r"[ ><=]", line)[0].lower().replace("_", "-")
        for line in (CONTAINERS / "requirements.txt").read_text().splitlines()
        if not line.startswith("#")
    }
    assert wanted <= found.keys(), "make lock"
    pins = dict(
        line.lower().replace("_", "-").split("==")
        for line in (ROOT / "constraints.txt").read_text().split()
    )
    more = [
        entries((CONTAINERS / f"{name}.lock").read_text())
        for name in ("kfp", "deepspeed", "tensorflow", "megatron")
    ]
    for name, line in itertools.chain.from_iterable(one.items() for one in (found, *more)):
        if name in pins:
            assert line.split()[0] == f"{name}=={pins[name]}", "make lock"


def locked(tmp_path, held, **variables):
    (tmp_path / "held").write_text(held)
    done = run(
        "sh",
        str(CONTAINERS / "install.sh"),
        "locked",
        str(tmp_path / "held"),
        str(CONTAINERS / "requirements.lock"),
        **variables,
    )
    assert done.returncode == 0, done.stderr
    return entries(done.stdout)


def test_what_a_base_holds_stays_and_with_its_torch_its_cuda(tmp_path):
    whole = entries((CONTAINERS / "requirements.lock").read_text())
    assert locked(tmp_path, "") == whole
    rest = locked(tmp_path, "torch @ file:///x\nNumpy==1.26\n")
    left = whole.keys() - rest.keys()
    assert {"torch", "numpy", "triton", "nvidia-nccl-cu13"} <= left
    assert all(name == "numpy" or re.match("torch|triton|cuda-|nvidia-", name) for name in left)


def test_another_torch_takes_the_place_of_the_locks_with_a_hash_of_its_own(tmp_path):
    own = f"torch==2.13.0+cpu --hash=sha256:{'a' * 64}"
    found = locked(tmp_path, "", TORCH=own)
    assert found["torch"] == own
    assert not [name for name in found if name.startswith("nvidia-")]


@pytest.mark.parametrize("image", ["cpu", "train"])
def test_a_base_is_named_by_its_digest_and_a_release_takes_no_other(image):
    (base,) = re.findall(
        "^ARG BASE_IMAGE=(.*)$", (CONTAINERS / image / "Dockerfile").read_text(), re.M
    )
    assert re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", base)
    variable = f"{image.upper()}_BASE"
    done = run(
        "bash", str(CONTAINERS / "build.sh"), image, RELEASE="1", **{variable: "python:3.11-slim"}
    )
    assert done.returncode == 2
    assert f"{variable}=NAME@sha256:..." in done.stderr


def test_the_efa_installer_is_not_even_fetched_without_its_hash():
    done = run(
        "bash",
        str(CONTAINERS / "train" / "network.sh"),
        "efa",
        "1.51.0",
        EFA_SHA256="",
        PATH="/nowhere:/bin",
    )
    assert done.returncode == 1
    assert "set EFA_SHA256" in done.stderr
    assert "apt-get" not in done.stderr


@pytest.mark.slow
def test_the_sbom_names_every_package_with_its_hashes(tmp_path):
    pytest.importorskip("cyclonedx_py", reason="cyclonedx-bom is a developer's dependency")
    made = tmp_path / "all.lock"
    made.write_text("".join((CONTAINERS / lock).read_text() for lock in LOCKS[:2]))
    out = tmp_path / "sbom.json"
    done = run(sys.executable, "-m", "cyclonedx_py", "requirements", str(made), "-o", str(out))
    assert done.returncode == 0, done.stderr
    sbom = json.loads(out.read_text())
    assert sbom["bomFormat"] == "CycloneDX"
    assert {one["name"] for one in sbom["components"]} == entries(made.read_text()).keys()
    for one in sbom["components"]:
        assert re.match("pkg:pypi/", one["purl"])
        assert any(place.get("hashes") for place in one["externalReferences"])
