"""What a row of data names is read below the source's own root, or refused with its row.

Folders hold files that say `inside` and, beside the root, ones that say `secret`: no value of a row
may ever lead to the latter, nor to a server that is not the source's.
"""

from __future__ import annotations

import http.server
import os
import threading
from posixpath import normpath
from urllib.parse import unquote, urlsplit

import fsspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rekindle.data import reference
from rekindle.data.files import SourceFile
from rekindle.data.roles import wanted_columns
from rekindle.data.source import open_source
from rekindle.errors import DataError
from rekindle.rows.findings import Findings
from tests.data.corpora import ingested, text_spec, write_jsonl
from tests.support.data_images import png

TREE = {
    "root/table.jsonl": b"inside",
    "root/a.png": b"inside",
    "root/deep/b.png": b"inside",
    "root/100%25.png": b"inside",
    "root/.hidden/key": b"secret",
    "root/.env": b"secret",
    "key": b"secret",
    "rootkey": b"secret",
    "root-2/a.png": b"secret",
}


class Site(http.server.BaseHTTPRequestHandler):
    """Serves the tree below /lake, as a server does that decodes and joins paths, and keeps what
    was asked of it."""

    def do_GET(self):
        path = normpath(unquote(urlsplit(self.path).path))
        self.server.asked.append(path)
        content = TREE.get(path.removeprefix("/lake/"))
        self.send_response(200 if content else 404)
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content or b"")

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.url = f"http://127.0.0.1:{server.server_port}/lake"
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def lake(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lake")
    for name, content in TREE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "root/link.png").symlink_to(folder / "key")
    (folder / "root/links").symlink_to(folder)
    (folder / "root/loop.png").symlink_to(folder / "root/loop.png")
    (folder / "root/near.png").symlink_to("deep/b.png")
    os.mkfifo(folder / "root/pipe.png")
    memory = fsspec.filesystem("memory")
    for name, content in TREE.items():
        memory.pipe(f"/lake/{name}", content)
    yield folder
    memory.rm("/lake", recursive=True)


def table(uri):
    """The source file root/table.jsonl below a URI."""
    filesystem, path = fsspec.core.url_to_fs(f"{uri}/root/table.jsonl")
    return SourceFile(filesystem, path.rsplit("/", 1)[0], path, "table.jsonl", 0)


ALLOWED = ["a.png", "./a.png", "deep/b.png", "deep//b.png", "100%25.png", "near.png"]
REFUSED = [
    "../key",
    "deep/../../key",
    "deep/../a.png",
    "link.png",
    "links/key",
    "loop.png",
    "pipe.png",
    ".env",
    ".hidden/key",
    "deep/../.env",
    "%2e%2e/key",
    "%252e%252e/key",
    "..\\key",
    "a.png\0",
    "a.png\n",
    "",
    "/etc/passwd",
    "//etc/passwd",
    "file:///etc/passwd",
    "s3://other/key",
    "memory://other",
    "http://127.0.0.1:9/x",
    "reference://a.png::http://127.0.0.1:9/refs.json",
    "zip://a::file:///a.zip",
    "simplecache::http://127.0.0.1:9/x",
    "a.png::b",
    "deep",
    "data:text/plain,secret",
    "{{ os.environ }}",
]


@pytest.mark.parametrize("value", ALLOWED)
def test_a_file_below_the_root_is_read(lake, value):
    assert table(lake).fetch(value) == b"inside"
    assert table(lake).fetch(f"{lake}/root/{value}") == b"inside"
    assert table(lake).fetch(f"file://{lake}/root/{value}") == b"inside"


@pytest.mark.parametrize("value", REFUSED)
@pytest.mark.parametrize("scheme", ["", "memory:/", "http"])
def test_what_lies_elsewhere_is_refused(lake, site, scheme, value):
    uri = site.url if scheme == "http" else "memory://lake" if scheme else lake
    site.asked.clear()
    with pytest.raises((ValueError, OSError)):
        table(uri).fetch(value)
    assert all(path.startswith("/lake/root/") for path in site.asked)


PIECES = [
    "a.png",
    "deep",
    "b.png",
    "key",
    "root",
    "lake",
    "..",
    ".",
    "/",
    "//",
    "\\",
    "%2e",
    "%2f",
    "%5c",
    "%25",
    "::",
    "file:",
    "memory:",
    "http:",
    "://",
    "?",
    "#",
    "@",
    ":",
    "*",
    "{",
    "}",
    "~",
    "\0",
    "\n",
    " ",
    "link.png",
    "links",
    ".env",
    "100%25.png",
    "near.png",
    "ä",
    "‮",
    "root-2",
    "$HOME",
]
VALUES = st.lists(st.sampled_from([*PIECES, "<root>", "<parent>"]), max_size=9).map("".join)


@settings(
    max_examples=400,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@example(".\\a.png")
@example("deep\\..\\a.png")
@given(VALUES | st.text(max_size=20))
def test_no_value_leads_out_of_the_root(lake, site, value):
    for uri in (lake, "memory://lake", site.url):
        site.asked.clear()
        words = value.replace("<root>", f"{uri}/root").replace("<parent>", str(uri))
        try:
            content = table(uri).fetch(words)
        except (ValueError, OSError):
            content = b"inside"
        assert content in (b"inside", b"")
        assert all(path.startswith("/lake/root") for path in site.asked)
        assert not any("/." in path or path.startswith("/lake/root-2") for path in site.asked)


@pytest.mark.parametrize(
    "name", ["{url}/refs.json", "reference://a.png::{url}/refs.json", "../key", "/etc/passwd"]
)
def test_ingest_refuses_the_row_and_asks_nobody(tmp_path, site, name):
    site.asked.clear()
    good = [{"image": f"{i}.png", "label": i % 2} for i in range(60)]
    for i in range(60):
        (tmp_path / f"{i}.png").write_bytes(png([[i, 1], [2, 3]]))
    write_jsonl(tmp_path / "x.jsonl", [*good, {"image": name.format(url=site.url), "label": 1}])
    with pytest.raises(DataError) as caught:
        ingested(text_spec(tmp_path / "x.jsonl"), tmp_path / "out", modality="image")
    assert "x.jsonl:61" in str(caught.value)
    assert not site.asked


def test_one_file_has_a_largest_size(lake, monkeypatch):
    monkeypatch.setattr("rekindle.data.reference.MOST_BYTES", 5)
    with pytest.raises(ValueError, match="holds more than"):
        table(lake).fetch("a.png")


def test_a_folder_that_became_a_link_since_it_was_checked_is_not_followed(tmp_path):
    root = tmp_path / "root"
    for folder, content in ((root / "in", b"inside"), (tmp_path / "out", b"secret")):
        folder.mkdir(parents=True)
        (folder / "a.png").write_bytes(content)
    filesystem = fsspec.filesystem("file")
    path = reference.path_of(filesystem, str(root), str(root), "in/a.png")
    assert reference.read(filesystem, path) == b"inside"
    (root / "in").rename(root / "was")
    (root / "in").symlink_to(tmp_path / "out")
    with pytest.raises(OSError, match=r"Not a directory|symbolic"):
        reference.read(filesystem, path)


@pytest.mark.parametrize("uri", ["/", "memory://"])
def test_without_a_folder_of_its_own_a_source_names_no_files(uri):
    file = SourceFile(fsspec.core.url_to_fs(uri)[0], "", "x.jsonl", "x.jsonl", 1)
    for value in ("/etc/hostname", "other/key", "memory://other/key"):
        with pytest.raises(ValueError, match=r"has none|own scheme"):
            file.fetch(value)


def test_a_pipe_among_the_files_is_refused_and_not_waited_for(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a", "label": "x"}] * 60)
    os.mkfifo(tmp_path / "b.jsonl")
    with pytest.raises(DataError, match="this is not a file"):
        ingested(text_spec(tmp_path), tmp_path.with_name("out"))


def test_images_are_held_by_their_size(tmp_path, monkeypatch):
    for i in range(60):
        (tmp_path / "in" / f"c{i % 2}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / f"c{i % 2}" / f"{i}.png").write_bytes(png([[i, 1], [2, 3]]))
    data = text_spec(tmp_path / "in")
    source, columns = open_source(data, "image"), wanted_columns(data, "image")
    files = source.files.files
    assert [len(batch) for batch in source.read(columns, Findings())] == [60]
    monkeypatch.setattr("rekindle.data.source.MOST_BYTES", 7 * files[0].size)
    held, size_of = [*source.read(columns, Findings())], {file.name: file.size for file in files}
    assert sum(map(len, held)) == 60
    assert max(sum(map(size_of.get, batch.names)) for batch in held) <= 7 * files[0].size
    with (tmp_path / "in" / "c0" / "huge.png").open("wb") as file:
        file.truncate(8 * files[0].size)
    with pytest.raises(DataError, match="holds more than"):
        ingested(text_spec(tmp_path / "in"), tmp_path / "out", modality="image")


@pytest.mark.timeout(60)  # an hour, if each pass read all of it
def test_a_name_without_an_end_is_refused_at_once(tmp_path):
    with pytest.raises(ValueError, match="is not a path"):
        reference.path_of(
            fsspec.filesystem("file"), str(tmp_path), str(tmp_path), "%" + "25" * 1_500_000
        )
