"""Folders that others can reach: what lies in them is ours, or refused."""

import os
import stat

import pytest

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
