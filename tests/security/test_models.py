"""A model folder is data: whoever may write it, as one may who can write the bucket of a registry, gets no code run and no
model promoted that was not judged."""

import json
import os
import shutil

import pytest

from rekindle.errors import DataError, RegistryError
from rekindle.registry.models import Registry, champion_state, fetch_model
from rekindle.registry.promotion import promote
from rekindle.spec.model import RegisterSpec
from rekindle.train.modelfolder import ANY_CODE, DESCRIPTION, digest_of, open_model
from tests.quick import first
from tests.registry.versions import model_in, registered, registry_in

TASK = '''
import pathlib
from rekindle.tasks.image_classification import ImageClassification

pathlib.Path(__file__).with_name("ran").touch()


class Mine(ImageClassification):
    """A task of a user's."""
'''


@pytest.fixture
def judged(tmp_path):
    """A registry with a champion, a registered candidate, and the candidate's evidence."""
    where = registry_in(tmp_path / "home")
    promote(where, *registered(where, model_in(tmp_path / "a", b"old")))
    state = champion_state(where)
    beaten = {"champion_version": state.version, "champion_digest": state.digest}
    return where, *registered(where, model_in(tmp_path / "b", b"new"), **beaten)


def folder_of(where, version):
    with where.open("look") as client:
        digest = client.get_model_version(where.name, version).tags["rekindle.model_digest"]
    return fetch_model(where, version, digest)


def replaced(folder):
    """A weight of another value, in a file of the same size and time."""
    path = folder / "model.safetensors"
    times = path.stat()
    path.write_bytes(bytes(len(path.read_bytes())))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def planted(folder):
    """Code that a changed description names; the weights are as they were."""
    (folder / "task.py").write_text(TASK)
    said = json.loads((folder / DESCRIPTION).read_text())
    (folder / DESCRIPTION).write_text(json.dumps({**said, "task": "task.py:Mine"}))


def added(folder):
    """A file that nothing names, such as a module that an import would find."""
    (folder / "numpy.py").write_text("raise SystemExit('imported')")


def linked(folder):
    """The same bytes, which lie elsewhere."""
    path = folder / "model.safetensors"
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")


CHANGED = r"not those that were registered|a link"
ATTACKS = [replaced, planted, added, linked]


@pytest.mark.parametrize("attack", first(2, ATTACKS))
def test_files_that_change_after_a_model_was_judged_are_not_promoted(judged, attack):
    where, registration, evidence = judged
    folder = folder_of(where, registration.version)
    attack(folder)
    with pytest.raises((RegistryError, DataError), match=CHANGED):
        promote(where, registration, evidence)
    assert champion_state(where).version == "1"
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("attack", first(2, ATTACKS))
def test_a_champion_whose_files_change_is_not_compared_with(judged, attack):
    where = judged[0]
    state = champion_state(where)
    attack(folder_of(where, state.version))
    with pytest.raises((RegistryError, DataError), match=CHANGED):
        fetch_model(where, state.version, state.digest)


@pytest.mark.parametrize("attack", [replaced, planted, added])
def test_a_model_that_is_not_the_one_that_was_judged_is_not_registered(tmp_path, attack):
    where, model = registry_in(tmp_path / "home"), model_in(tmp_path / "model", b"new")
    shutil.copytree(model, tmp_path / "judged")
    attack(model)
    with pytest.raises(RegistryError, match="are not those that were judged"):
        registered(where, model, judged=tmp_path / "judged")
    assert champion_state(where) is None


def own(folder, text=TASK, name="Mine"):
    """A model folder of a user's task."""
    model = model_in(folder, b"w")
    said = json.loads((model / DESCRIPTION).read_text())
    (model / DESCRIPTION).write_text(json.dumps({**said, "task": f"task.py:{name}"}))
    (model / "task.py").write_text(text)
    return model


def test_code_of_a_model_folder_runs_only_if_it_is_this_configs(tmp_path):
    config = tmp_path / "mine.py"
    config.write_text(TASK)
    same, other = own(tmp_path / "same"), own(tmp_path / "other", TASK + "\nprint('other')\n")
    assert open_model(same, f"{config}:Mine").own_task
    assert not (same / "ran").exists(), "this config's file runs, and not the copy"
    for folder, code in (
        (same, ""),
        (same, "image_classification"),
        (same, f"{config}:Another"),
        (other, f"{config}:Mine"),
    ):
        with pytest.raises(DataError, match="brings code that is not the task of this config"):
            open_model(folder, code)
        assert not (folder / "ran").exists()
    open_model(other, ANY_CODE)
    assert (other / "ran").exists(), "register.trust_code"


def test_a_champion_with_other_code_than_the_configs_is_refused_before_anything_is_trained(
    tmp_path,
):
    config, where = tmp_path / "mine.py", registry_in(tmp_path / "home")
    config.write_text(TASK)
    promote(where, *registered(where, own(tmp_path / "model"), code=f"{config}:Mine"))
    assert champion_state(where, f"{config}:Mine").version == "1"
    assert champion_state(where, ANY_CODE).version == "1"
    config.write_text(TASK + "# edited\n")
    for code in (f"{config}:Mine", f"{config}:Another", "image_classification"):
        with pytest.raises(RegistryError, match="brings code that is not the task of this config"):
            champion_state(where, code)


def test_a_champion_of_a_shipped_task_brings_no_code(judged):
    where = judged[0]
    assert champion_state(where, "image_classification").version == "1"
    with where.open("look") as client:
        tags = client.get_model_version(where.name, "1").tags
    assert tags["rekindle.task_code"] == ""


@pytest.mark.parametrize(
    "name", ["/etc/evil.py:Mine", "../evil.py:Mine", "evil.py:Mine", "os:system", "Mine", ""]
)
def test_a_description_names_no_other_code(tmp_path, name):
    folder = own(tmp_path / "model")
    said = json.loads((folder / DESCRIPTION).read_text())
    (folder / DESCRIPTION).write_text(json.dumps({**said, "task": name}))
    (folder / "evil.py").write_text(TASK)
    for code in ("", ANY_CODE):
        with pytest.raises(DataError, match="holds no such code"):
            open_model(folder, code)
    assert not (folder / "ran").exists()


def test_a_digest_counts_names_and_bytes(tmp_path):
    folder = model_in(tmp_path / "model", b"new")
    before = digest_of(folder)
    (folder / "a").write_text("b")
    (folder / "c").write_text("")
    first = digest_of(folder)
    (folder / "a").write_text("")
    (folder / "c").write_text("b")
    assert len({before, first, digest_of(folder)}) == 3


def test_trust_is_said_in_the_config():
    told = [
        Registry(RegisterSpec(trust_code=told), "m", "/x").code("a.py:B") for told in (False, True)
    ]
    assert told == ["a.py:B", ANY_CODE]
