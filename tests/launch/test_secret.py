"""Nodes to which their platform gives no secret agree on one below the artifact root, and it goes with the step."""

import stat
import threading
import time

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from rekindle.errors import PreemptedError
from rekindle.launch.rendezvous import Rendezvous
from rekindle.launch.staging import shared_secret
from rekindle.train.job import folder_of, root_of


def place(node, job="pipelines-1-train-a", patience=20.0):
    return Rendezvous(3, node, 1, "10.0.0.4", 29400, patience, job=job)


def test_node_zero_makes_it_and_the_others_wait_for_it(tmp_path):
    found, over = {}, threading.Event()

    def run(node):
        with shared_secret(place(node), str(tmp_path)) as shared:
            found[node] = shared.secret
            over.wait(20)

    nodes = [threading.Thread(target=run, args=(node,)) for node in (2, 1, 0)]
    for node in nodes:
        node.start()
    deadline = time.monotonic() + 20
    while len(found) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    (file,) = (tmp_path / "meetings").iterdir()
    assert set(found.values()) == {file.read_text()}
    assert len(found[0]) == 64
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "pipelines" not in file.name
    over.set()
    for node in nodes:
        node.join()
    assert list((tmp_path / "meetings").iterdir()) == []


def test_another_job_has_another_and_a_node_that_comes_back_finds_its_own(tmp_path):
    with shared_secret(place(0), str(tmp_path)) as first:
        with shared_secret(place(0, job="other"), str(tmp_path)) as other:
            assert first.secret != other.secret
        with shared_secret(place(1), str(tmp_path)) as again:
            assert again.secret == first.secret


def test_one_that_the_platform_gave_is_taken_and_a_single_node_needs_none(tmp_path):
    given = Rendezvous(3, 1, 1, "10.0.0.4", 29400, secret="5" * 64)
    for known in (given, Rendezvous(), place(0, job="")):  # torchrun refuses the last
        with shared_secret(known, str(tmp_path)) as shared:
            assert shared == known
    assert list(tmp_path.iterdir()) == []


class Unlisted(MemoryFileSystem):
    """A store as S3 is without the right to list: what is not there is forbidden."""

    protocol = "unlisted"

    def cat_file(self, path, **kwargs):
        if not self.exists(path):
            raise PermissionError("Access Denied")
        return super().cat_file(path, **kwargs)

    def find(self, path, **kwargs):
        raise PermissionError("Access Denied")


def test_in_a_store_whose_objects_may_not_be_listed():
    fsspec.register_implementation("unlisted", Unlisted, clobber=True)
    root = "unlisted://bucket/secrets"
    with pytest.raises(PreemptedError), shared_secret(place(1, patience=0.0), root):
        pass
    with shared_secret(place(0), root) as first, shared_secret(place(1), root) as second:
        assert first.secret == second.secret
    with pytest.raises(PreemptedError), shared_secret(place(1, patience=0.0), root):
        pass


def test_without_node_zero_the_others_give_up_and_may_be_started_again(tmp_path):
    with (
        pytest.raises(PreemptedError, match=r"node 1 waited 0\.1 s for node 0"),
        shared_secret(place(1, patience=0.1), str(tmp_path)),
    ):
        pass


@pytest.mark.parametrize("root", ["s3://b/r", "/home/r", "gs://b"])
def test_the_root_is_that_of_the_checkpoints(root):
    assert root_of(folder_of(root, "checkpoints", "key")) == root
