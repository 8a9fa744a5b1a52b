"""The store of pieces, in a folder and in an object store: the same entries, and the same refusals."""

import uuid

import pyarrow as pa
import pytest

from rekindle.data.store import PieceStore
from rekindle.errors import DataError, StorageError
from tests.support.refusing_store import refusing_root

TABLE = pa.table({"id": [1, 2, 3], "text": ["a", "b", "c"]})


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path):
    if request.param == "folder":
        return PieceStore(str(tmp_path / "store"))
    return PieceStore(f"memory://{uuid.uuid4().hex}")


def committed(store, key):
    with store.writing(key) as folder:
        with pa.ipc.new_file(folder / "rows.arrow", TABLE.schema) as writer:
            writer.write_table(TABLE)
        (folder / "bytes").write_bytes(b"0123456789")
        return store.commit(key, folder, {"rows": 3})


def test_an_entry_is_found_and_read_in_parts(store, tmp_path):
    assert store.find("key") is None
    entry = committed(store, "key")
    assert store.find("key") == entry
    assert committed(store, "key") == entry, "another worker made the same"
    assert store.column("key", "rows.arrow", "text").to_pylist() == ["a", "b", "c"]
    assert store.part("key", "bytes", 2, 5) == b"234"
    assert store.part("key", "bytes", 5, 5) == b""
    store.take("key", "bytes", entry["files"]["bytes"], tmp_path / "taken")
    assert (tmp_path / "taken").read_bytes() == b"0123456789"
    with store.reading("key", "bytes") as path:
        assert path.read_bytes() == b"0123456789"


def test_a_file_that_is_missing_is_named(store, tmp_path):
    committed(store, "key")
    for read in (
        lambda: store.take("key", "gone", "0", tmp_path / "taken"),
        lambda: store.part("key", "gone", 0, 5),
    ):
        with pytest.raises(DataError, match="the piece gone is missing") as missing:
            read()
        assert missing.value.problems[0].where == f"{store.root}/key"
    assert not (tmp_path / "taken").exists()


def test_answers_are_seen_by_the_other_nodes(store):
    assert store.answered("work") == set()
    store.answer("work", 1, {"rows": 2})
    store.answer("work", 0, None)
    assert store.answered("work") == {0, 1}
    assert store.answers("work", 2) == [None, {"rows": 2}]


def test_a_store_that_refuses_a_piece():
    store = PieceStore(refusing_root())
    with pytest.raises(StorageError) as refused:
        committed(store, "key")
    (problem,) = refused.value.problems
    assert problem.what == "the pieces of data cannot be written: PermissionError: Access Denied"
    assert problem.where == f"{store.root}/key"
