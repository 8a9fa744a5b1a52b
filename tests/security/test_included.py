"""What goes into an image that is pushed: no keys, nothing hidden, nothing from elsewhere."""

import pytest

from rekindle.errors import RequestError
from rekindle.platforms.user_code import included


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    for name in (
        "prompts/a.txt",
        "prompts/b/c.txt",
        "prompts/cache/d.bin",
        "train.py",
        ".env",
        ".ssh/id_rsa",
        "sub/server.pem",
        "sub/key.KEY",
        "sub/id_ed25519",
        "sub/.hidden/x.txt",
        "sub/ok.json",
        "sub/__pycache__/x.pyc",
        ".git/config",
        "notes.md",
        "data.csv",
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return folder


def taken(folder, *patterns):
    found = included([str(folder / pattern) for pattern in patterns or ["."]], folder)
    return {path.relative_to(folder).as_posix() for path in found}


def test_neither_keys_nor_hidden_files_are_taken(project):
    assert taken(project) == {
        "prompts/a.txt",
        "prompts/b/c.txt",
        "prompts/cache/d.bin",
        "train.py",
        "sub/ok.json",
        "notes.md",
        "data.csv",
    }
    assert taken(project, "*", "**") == taken(project)


def test_a_file_that_is_named_by_itself_is_taken(project):
    assert taken(project, ".env", "sub/server.pem") == {".env", "sub/server.pem"}


@pytest.mark.parametrize("target", ["/etc/hostname", "../../outside", "/etc"])
def test_a_link_that_leads_out_is_refused(project, target):
    (project.parent / "outside").write_text("secret")
    (project / "sub" / "link").symlink_to(target)
    with pytest.raises(RequestError, match="a link that leads out of"):
        taken(project)
    (project / ".dockerignore").write_text("**/link\n")
    assert "sub/ok.json" in taken(project)


def test_a_folder_that_is_a_link_out_counts_where_it_is_named_and_is_refused_else(project):
    other = project.parent / "other"
    other.mkdir()
    (other / "x.txt").write_text("secret")
    (project / "shared").symlink_to(other)
    for pattern in ("shared", "shared/*", "shared/**/*"):
        assert list(included([str(project / pattern)], project)) == [other / "x.txt"]
    with pytest.raises(RequestError, match="a link that leads out of"):
        taken(project, "**/x.txt")


def test_a_link_to_a_key_is_left_out_like_the_key(project):
    (project / "plain").symlink_to("sub/server.pem")
    assert "plain" not in taken(project)


def test_a_link_inside_is_taken_where_it_is(project):
    (project / "sub" / "link.json").symlink_to("ok.json")
    assert "sub/link.json" in taken(project)


@pytest.mark.parametrize(
    ("lines", "left_out"),
    [
        ("*.md", {"notes.md"}),
        ("/data.csv\n# notes.md\n\n", {"data.csv"}),
        ("prompts", {"prompts/a.txt", "prompts/b/c.txt", "prompts/cache/d.bin"}),
        ("prompts/\n!prompts/b", {"prompts/a.txt", "prompts/cache/d.bin"}),
        ("*.txt", set()),
        ("**/*.txt", {"prompts/a.txt", "prompts/b/c.txt"}),
        ("**/cache", {"prompts/cache/d.bin"}),
        ("prompts/?.txt", {"prompts/a.txt"}),
        ("prompts/[^b].txt\nprompts/[a-c]", {"prompts/a.txt", "prompts/b/c.txt"}),
        ("*\n!train.py", None),
    ],
)
def test_dockerignore_leaves_out_what_docker_would(project, lines, left_out):
    everything = taken(project)
    (project / ".dockerignore").write_text(lines)
    expected = {"train.py"} if left_out is None else everything - left_out
    assert taken(project) == expected


def test_it_agrees_with_dockers_own_client(project):
    """docker-py is what MLflow and kfp build images with."""
    build = pytest.importorskip("docker.utils.build")
    for name in ("x.log", "a/x.log", "a/b/x.log", "a/b/keep.log", "tmp1/x", "tmpa/x", "a.b/c"):
        path = project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    for lines in (
        ["*.log"],
        ["**/*.log", "!**/keep.log"],
        ["a/*/x.log"],
        ["tmp[0-9]"],
        ["a", "!a/b"],
        ["a.b"],
        ["**"],
        ["**/b"],
        ["a/**/x.log"],
        ["*/x.log"],
        ["prompts/**", "!prompts/b/c.txt"],
    ):
        (project / ".dockerignore").write_text("\n".join(lines))
        plain = {p for p in build.exclude_paths(str(project), lines) if (project / p).is_file()}
        visible = {p for p in plain if not any(part.startswith(".") for part in p.split("/"))}
        keys = {p for p in visible if p.endswith((".pem", ".KEY", "id_ed25519", ".pyc"))}
        assert taken(project) == visible - keys, lines
