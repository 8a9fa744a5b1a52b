"""Folders that others can reach: what lies in them is ours, or refused."""

import os
import stat

import pytest
import yaml
from click.testing import CliRunner

from rekindle.cli.main import cli
from rekindle.errors import RequestError
from rekindle.platforms.local.store import make_home
from rekindle.train.job import working_of

URI = "s3://bucket/checkpoints/0123abcd"


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """A folder for temporary files, as all users of a machine share it, and ours in it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"rekindle-{os.getuid()}"


def test_the_folder_among_temporary_files_is_for_this_user_alone(shared):
    before = os.umask(0)
    try:
        assert working_of(URI) == shared / "0123abcd"
    finally:
        os.umask(before)
    assert stat.S_IMODE(shared.stat().st_mode) == 0o700
    assert working_of(URI) == shared / "0123abcd"


def made_by_somebody_else(folder):
    if os.getuid():
        pytest.skip("only root can give a folder away")
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)


def test_one_that_an_earlier_version_made_is_closed(shared):
    shared.mkdir()
    shared.chmod(0o755)
    working_of(URI)
    assert stat.S_IMODE(shared.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "prepare",
    [
        made_by_somebody_else,
        lambda folder: (folder.mkdir(), folder.chmod(0o777)),
        lambda folder: (folder.mkdir(), folder.chmod(0o720)),
        lambda folder: ((folder.parent / "x").mkdir(0o700), folder.symlink_to(folder.parent / "x")),
        lambda folder: folder.write_text(""),
    ],
)
def test_a_folder_that_is_not_ours_alone_is_refused(shared, prepare):
    prepare(shared)
    with pytest.raises(RequestError, match="other users can write"):
        working_of(URI)


def test_a_home_is_for_its_user_alone_unless_somebody_made_it_otherwise(tmp_path):
    make_home(tmp_path / "a" / "home")
    assert stat.S_IMODE((tmp_path / "a" / "home").stat().st_mode) == 0o700
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o775)
    make_home(tmp_path / "shared")
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o775


IMPORTS = """
from kfp import dsl

@dsl.component
def look(data: dsl.Input[dsl.Dataset]) -> str:
    return data.uri

@dsl.pipeline(name="p")
def p(uri: str):
    look(data=dsl.importer(artifact_uri=uri, artifact_class=dsl.Dataset).output)
"""


@pytest.mark.slow
def test_a_run_makes_its_home_for_this_user_alone_and_imports_no_folder_around_it(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.py").write_text(IMPORTS)
    (tmp_path / "link").symlink_to(tmp_path.parent)
    before = os.umask(0)
    try:
        for uri in (f"file://{tmp_path}", "/", str(tmp_path / "link")):
            (tmp_path / "p.yaml").write_text(
                yaml.safe_dump({"name": "m", "pipeline": "p.py:p", "arguments": {"uri": uri}})
            )
            done = CliRunner().invoke(cli, ["run", "p.yaml", "--home", "home"])
            assert done.exit_code == 1, done.output
            assert f"cannot be imported: rekindle's home {tmp_path / 'home'} lies in it" in str(
                done.exception
            )
            assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o700
    finally:
        os.umask(before)
