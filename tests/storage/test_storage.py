"""Files in folders and object stores: each backend does the same, commits once, and fails with the sentence of its
caller."""

import errno
import io
import os
import shutil
import subprocess
import sys
import threading
import uuid

import fsspec
import pytest

from rekindle.errors import RekindleError, StorageError
from rekindle.storage import ExistsError, Folder, ObjectStore, about, object_store, storage_of
from tests.support.refusing_store import Refusing, refusing_root
from tests.support.s3 import s3_server

ROUNDS = 20
# of one process: it puts its own name under each path once all processes are there
RACER = """
import sys
from rekindle.storage import ExistsError, storage_of
root, name, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
storage = storage_of(root)
storage.read("warm")
print("ready", flush=True)
sys.stdin.readline()
for number in range(rounds):
    try:
        storage.put_new(f"{number}.json", name.encode())
        print("won", number, flush=True)
    except ExistsError:
        print("lost", number, flush=True)
"""


@pytest.fixture(scope="module")
def bucket():
    server, environment = s3_server()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        fsspec.filesystem("s3").clear_instance_cache()
        yield "s3://lake"
        fsspec.filesystem("s3").clear_instance_cache()
    server.kill()
    server.wait()


@pytest.fixture(params=["folder", "file", "memory", "s3"])
def root(request, tmp_path):
    name = uuid.uuid4().hex
    match request.param:
        case "folder":
            return str(tmp_path / "root")
        case "file":
            return f"file://{tmp_path}/root"
        case "memory":
            return f"memory://{name}"
        case _:
            return f"{request.getfixturevalue('bucket')}/{name}"


def test_what_is_written_is_listed_read_and_removed(root):
    storage = storage_of(root)
    assert storage.folders() == []
    assert storage.files() == {}
    assert storage.read("a/one") is None
    assert storage.size("a/one") is None
    assert storage.write("a/one", lambda file: file.write(b"0123456789")) == 10
    storage.put("a/b/two", b"two")
    storage.put("a/b/two", b"again")
    storage.put_new("top", b"top")
    assert sorted(storage.folders()) == ["a"]
    assert storage.files() == {"a/one": 10, "a/b/two": 5, "top": 3}
    assert storage.files("a") == {"one": 10, "b/two": 5}
    assert storage.size("a/one") == 10
    assert storage.read("a/b/two") == b"again"
    assert storage.read("a/one", 2, 5) == b"234"
    assert storage.read("a/one", 7) == b"789"
    for ahead in (True, False):
        with storage.reader("a/one", ahead=ahead) as file:
            file.seek(4)
            assert file.read(3) == b"456"
            assert file.read() == b"789"
    with pytest.raises(FileNotFoundError), storage.reader("nothing"):
        pass
    storage.remove("a", first="b/two")
    storage.remove("a")
    assert storage.files() == {"top": 3}
    storage.remove("top")
    storage.remove("top")
    storage.put("top", b"again")
    storage.remove_file("top")
    assert storage.files() == {}


def test_files_and_folders_are_copied_to_and_from_a_storage(root, tmp_path):
    storage = storage_of(root)
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "a [b].txt").write_text("1")
    (source / "top.bin").write_bytes(bytes(range(256)))
    storage.upload(source, "copy")
    storage.upload(source / "top.bin", "single")
    storage.upload(tmp_path / "nothing", "nothing")
    assert storage.files() == {"copy/deep/a [b].txt": 1, "copy/top.bin": 256, "single": 256}
    assert storage.download("copy", tmp_path / "back")
    assert (tmp_path / "back" / "deep" / "a [b].txt").read_text() == "1"
    assert storage.download("single", tmp_path / "single")
    assert (tmp_path / "single").read_bytes() == bytes(range(256))
    assert not storage.download("nothing", tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_an_object_whose_name_leads_out_of_the_folder_is_not_copied(tmp_path):
    storage = storage_of(f"memory://{uuid.uuid4().hex}")
    storage.put("model/weights", b"1")
    storage.put("model/../../outside", b"2")
    with pytest.raises(StorageError, match=r"the name \.\./\.\./outside leads out of the folder"):
        storage.download("model", tmp_path / "a" / "b")
    assert list(tmp_path.rglob("*")) == []


def test_the_root_may_be_a_file(root, tmp_path):
    storage = storage_of(f"{root}/said")
    assert storage.read("") is None
    storage.put("", b"text", mode=0o600)
    assert storage.read("") == b"text"
    assert storage.download("", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"text"
    storage.remove("")
    assert storage.read("") is None
    storage.remove_file("")
    storage.upload(tmp_path / "copy", "")
    assert storage.files() == {"": 4}


def test_a_put_of_what_is_there_is_refused(root):
    storage = storage_of(root)
    storage.put_new("event", b"mine")
    with pytest.raises(ExistsError, match="was written by another process") as refused:
        storage.put_new("event", b"other")
    assert refused.value.problems[0].code == "E-STORAGE"
    assert storage.read("event") == b"mine"


def race(root):
    """How often each of two processes won, and what is there in the end."""
    words = [sys.executable, "-c", RACER, root]
    racers = [
        subprocess.Popen(
            [*words, name, str(ROUNDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in "ab"
    ]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        racer.stdin.write("\n")
        racer.stdin.flush()
    said = [racer.communicate(timeout=120)[0].splitlines() for racer in racers]
    return dict(zip("ab", said, strict=True))


def assert_one_winner(said, storage):
    for number in range(ROUNDS):
        winners = [name for name, lines in said.items() if f"won {number}" in lines]
        losers = [name for name, lines in said.items() if f"lost {number}" in lines]
        assert len(winners) == 1, said
        assert len(losers) == len(said) - 1, said
        assert storage.read(f"{number}.json") == winners[0].encode()


@pytest.mark.parametrize("place", ["folder", "s3"])
def test_of_two_processes_that_put_at_once_one_wins(place, tmp_path, request):
    root = str(tmp_path / "root")
    if place == "s3":
        root = f"{request.getfixturevalue('bucket')}/race-{uuid.uuid4().hex}"
    assert_one_winner(race(root), storage_of(root))
    assert all(not name.startswith(".") for name in storage_of(root).files()), "drafts are gone"


def test_of_two_threads_that_put_at_once_into_memory_one_wins():
    """Another process has a memory of its own."""
    storage = storage_of(f"memory://{uuid.uuid4().hex}")
    said = {"a": [], "b": []}
    barrier = threading.Barrier(2)

    def put(name):
        for number in range(ROUNDS):
            barrier.wait()
            try:
                storage.put_new(f"{number}.json", name.encode())
                said[name].append(f"won {number}")
            except ExistsError:
                said[name].append(f"lost {number}")

    threads = [threading.Thread(target=put, args=(name,)) for name in said]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert_one_winner(said, storage)


def test_a_file_system_without_hard_links_commits_by_a_rename(tmp_path, monkeypatch):
    def link(source, target):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    storage = Folder(tmp_path)
    storage.put_new("event", b"mine")
    with pytest.raises(ExistsError):
        storage.put_new("event", b"other")
    assert storage.files() == {"event": 4}


def test_a_secret_is_never_readable_by_others(tmp_path):
    storage_of(tmp_path).put("secret", b"x", mode=0o600)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


# ---- what fails ---------------------------------------------------------------------------------


@pytest.fixture
def refusing():
    return refusing_root()


def test_a_store_that_refuses_a_write_gives_the_sentence_of_the_caller(refusing):
    storage = storage_of(refusing, about("the log of the deployment"))
    for write in (
        lambda: storage.put_new("1.json", b"{}"),
        lambda: storage.put("1.json", b"{}"),
        lambda: storage.write("1.json", lambda file: file.write(b"{}")),
    ):
        with pytest.raises(StorageError) as refused:
            write()
        (problem,) = refused.value.problems
        assert problem.what == (
            "the log of the deployment cannot be written: PermissionError: Access Denied"
        )
        assert problem.where == f"{refusing}/1.json"
        assert problem.fix == f"grant write on {refusing} to the process that runs this"
        assert problem.code == "E-STORAGE"


def test_a_request_is_tried_again_before_the_store_is_given_up(refusing, monkeypatch):
    monkeypatch.setattr(object_store, "PAUSES_SECONDS", (0.0, 0.0))
    answers = [ConnectionError("reset"), ConnectionError("reset"), b"there"]

    def answer(self, path, **kwargs):
        value = answers.pop(0)
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr(Refusing, "cat_file", answer)
    storage = storage_of(refusing)
    assert storage.read("file") == b"there"
    answers += [ConnectionError("reset")] * 3
    with pytest.raises(StorageError, match="the files cannot be read: ConnectionError: reset"):
        storage.read("file")


def test_a_bucket_that_is_missing_is_named(bucket):
    with pytest.raises(StorageError) as missing:
        storage_of("s3://nowhere/predictions", about("the predictions")).put_new("a", b"")
    (problem,) = missing.value.problems
    assert problem.what.startswith("the predictions cannot be written: ")
    assert problem.fix == "create s3://nowhere/predictions, or name another place"


def test_an_unknown_protocol_is_named():
    with pytest.raises(StorageError, match="cannot open nothing://x") as unknown:
        storage_of("nothing://x")
    assert "install the driver" in unknown.value.problems[0].fix


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_gives_the_sentence_of_the_caller_and_leaves_no_draft(small_disk):
    storage = storage_of(small_disk, about("the predictions"))
    storage.put_new("part-0", b"small")
    large = bytes(2 << 20)
    for write in (
        lambda: storage.put_new("part-1", large),
        lambda: storage.put("part-0", large),
        lambda: storage.check_room(len(large)),
    ):
        with pytest.raises(StorageError) as full:
            write()
        (problem,) = full.value.problems
        assert problem.what == "the predictions cannot be written: No space left on device"
        assert problem.fix.startswith("make room there")
        assert "checkpoint" not in str(full.value)
    assert storage.files() == {"part-0": 5}
    assert storage.read("part-0") == b"small"


def test_a_folder_that_is_removed_is_empty_and_is_made_again(tmp_path):
    storage = storage_of(tmp_path / "root", about("the predictions"))
    storage.put_new("a/part", b"1")
    shutil.rmtree(tmp_path / "root")
    assert storage.read("a/part") is None
    assert storage.files() == {}
    assert storage.folders() == []
    storage.remove("a")
    storage.put_new("a/part", b"2")
    assert storage.read("a/part") == b"2"


def test_a_folder_that_goes_while_a_file_is_committed_gives_the_sentence_of_the_caller(
    tmp_path, monkeypatch
):
    link = os.link

    def removed_before(source, target):
        shutil.rmtree(tmp_path / "root")
        link(source, target)

    monkeypatch.setattr(os, "link", removed_before)
    storage = storage_of(tmp_path / "root", about("the predictions"))
    with pytest.raises(StorageError, match="the predictions cannot be written: No such file"):
        storage.put_new("part", b"1")


def test_a_file_in_place_of_the_folder_gives_the_sentence_of_the_caller(tmp_path):
    (tmp_path / "root").write_text("a file")
    storage = storage_of(tmp_path / "root", about("the log of predictions"))
    with pytest.raises(StorageError, match="the log of predictions cannot be written") as refused:
        storage.put_new("1.parquet", b"")
    assert not isinstance(refused.value, ExistsError)
    with pytest.raises(StorageError, match="the log of predictions cannot be read"):
        storage.read("1.parquet")


def test_an_error_of_a_caller_reaches_it_as_it_is(tmp_path):
    def produce(file: io.BufferedIOBase) -> None:
        raise RekindleError("mine")

    for storage in (Folder(tmp_path), ObjectStore(f"memory://{uuid.uuid4().hex}")):
        with pytest.raises(RekindleError, match="mine"):
            storage.write("a", produce)
        assert storage.size("a") in (None, 0)


def test_a_killed_put_leaves_no_half_of_a_file(tmp_path):
    """Its draft has another name, which no reader asks for."""
    script = """
import os, signal, sys
from rekindle.storage import storage_of
os.link = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
storage_of(sys.argv[1]).put_new("event", b"whole")
"""
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path)])
    assert killed.returncode == -9
    storage = storage_of(tmp_path)
    assert storage.read("event") is None
    (draft,) = storage.files()
    assert draft.startswith(".event.")
    storage.put_new("event", b"later")
    assert storage.read("event") == b"later"
