"""What data, logs and services say is shown, and steers nothing."""

import pytest
import yaml

from rekindle.app.progress import Progress
from rekindle.errors import DataError, SpecError
from rekindle.masking import MASK, masked, plain, plain_but_colour
from rekindle.platforms.local.store import slug
from rekindle.report.texts import without_credentials
from rekindle.spec.load import load_target

TITLE = "\x1b]0;owned\x07"
STEERING = [TITLE, "\x1b[2J", "\x9b2J", "\r", "\x08", "\u202e", "\u2066", "\x00", "\x7f"]


@pytest.mark.parametrize("code", STEERING)
def test_an_error_shows_what_would_steer_the_terminal(code):
    said = str(DataError(f"label {code}x", where=f"row {code}", fix=f"mend {code}"))
    assert not set(code) & set(said) - set("]0;owned[2J")
    assert "label \\" in said


def test_text_stays_as_it_is():
    text = "plain\n\ttext: ä, 漢字, 🙂, é"
    assert plain(text) == plain_but_colour(text) == text


def test_logs_keep_colours_and_lines_that_are_written_over():
    assert plain_but_colour("\x1b[1;31mred\x1b[0m 10%\r20%") == "\x1b[1;31mred\x1b[0m 10%\r20%"
    assert plain_but_colour(TITLE + "\x1b[2J") == "\\x1b]0;owned\\x07\\x1b[2J"


def test_a_notice_shows_it_too(capsys):
    with Progress() as progress:
        progress.event("ingest", {"event": "notice", "text": f"a {TITLE} b"})
    assert capsys.readouterr().err == "  ingest: a \\x1b]0;owned\\x07 b\n"


@pytest.mark.timeout(60)  # minutes, if it grew with the square
def test_the_card_takes_time_in_proportion():
    without_credentials("-eyJ" * 100_000)


def test_a_notice_forges_no_line_of_another_step(capsys):
    with Progress() as progress:
        progress.event("ingest", {"event": "notice", "text": "a\n✓ finetune 1.0 s"})
    assert capsys.readouterr().err == "  ingest: a\n    ✓ finetune 1.0 s\n"


@pytest.mark.timeout(60)  # minutes, if it grew with the square
@pytest.mark.parametrize(
    "piece",
    [
        "eyJ",
        "eyJhbGciOi-",
        "eyJhbGciOiJ.",
        "eyJaaaaaaaa.bbbbbbbb-",
        "://a:",
        "sk-",
        "redis.",
        "redis+",
    ],
)
def test_masking_takes_time_in_proportion(piece):
    text = piece * (400_000 // len(piece))
    masked(text, {})


def test_a_password_ends_at_the_last_at_of_a_database():
    assert masked("see postgresql://me:be/fore@db/x now", {}) == f"see {MASK}@db/x now"
    assert masked("see https://mlflow:5000/a@b now", {}) == "see https://mlflow:5000/a@b now"


def test_tokens_are_found_all_the_same():
    token = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P"
    assert masked(f"sent {token} and id-{token}", {}) == f"sent {MASK} and id-{MASK}"


@pytest.mark.parametrize(
    "name", ["..", "../../../etc/x", "/etc/x", "a/../../b", "a\x00b", "a" * 500, "", ".ssh"]
)
def test_a_name_of_a_platform_is_one_segment_of_a_path(name):
    found = slug(name)
    assert found
    assert "/" not in found
    assert not found.startswith(".")
    assert len(found) < 140


def test_names_that_differ_stay_apart():
    names = ["a b", "a_b", "a/b", "a.b!", "a" * 130, "a" * 131]
    assert len({slug(name) for name in names}) == len(names)


def config(folder, field, uri):
    """A config with a URI in one of its fields."""
    sections = {"data": {"source": "sklearn:digits"}, "register": {}}
    sections[field][{"data": "source", "register": "tracking_uri"}[field]] = uri
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"name": "m", "task": "image_classification", **sections}))
    return path


@pytest.mark.parametrize(
    ("field", "uri"),
    [
        ("register", "https://tok3n-0123456789@mlflow.example/api"),
        ("register", "https://mlflow.example/?token=abcdef0123"),
        ("register", "https://mlflow.example/api?x=1&access_token=abcdef0123"),
        ("data", "https://data.example/a.csv?sig=abcdef"),
        ("data", "https://data.example/a.csv?api_key=abcdef"),
        ("data", "https://me:word@data.example/a.csv"),
        ("data", "HTTPS://me:word@data.example/a.csv"),
        ("data", "simplecache::https://me:word@data.example/a.csv"),
        ("data", "https://data.example/a.csv?X-Goog-Signature=abcdef"),
        ("data", "https://data.example/a.csv#token=abcdef"),
        ("data", "https://data.example/a;token=abcdef/a.csv"),
        ("data", "https://data.example/a.csv?key=abcdef"),
        ("data", "https://data.example/a.csv?%2570assword=abcdef"),
        ("data", "hub:org/name?hf_token=abcdef"),
        ("register", "mssql+pyodbc:///?odbc_connect=UID%3Dme%3BPWD%3Dabcdef"),
    ],
)
def test_a_secret_in_a_uri_is_refused(tmp_path, field, uri):
    with pytest.raises(SpecError, match="a config is no place for one"):
        load_target(config(tmp_path, field, uri))


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"teacher": {"source": "https://me:word@h.example/m"}}},
        {"model": {"tokenizer": "https://me:word@h.example/m"}},
        {"train": {"entrypoint": "train.py --db postgresql://me:word@h.example/db"}},
        {"pipeline": "p.py:p", "arguments": {"db": "postgresql://me:word@h.example/db"}},
        {"pipeline": "p.py:p", "arguments": {"all": [{"db": "https://word@h.example"}]}},
        {"register": {"tracking_uri": "postgresql://me:before/after@db/x"}},
        {"register": {"tracking_uri": "mysql+pymysql://me:before?after@db/x"}},
        {"pipeline": "p.py:p", "arguments": {"store": "AccountName=x;AccountKey=QUJDREVGR0g="}},
        {"pipeline": "p.py:p", "arguments": {"git": "github_pat_11ABCDEFG0abcdefghijkl_mnop"}},
        {"data": {"source": "https://data.example/a.csv?pass=abcdef"}},
    ],
    ids=str,
)
def test_a_secret_in_a_uri_is_refused_wherever_it_stands(tmp_path, sections):
    path = config(tmp_path, "data", "sklearn:digits")
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **sections}))
    with pytest.raises(SpecError, match="a config is no place for one"):
        load_target(path)


@pytest.mark.parametrize(
    ("field", "uri"),
    [
        ("register", "postgresql://me@host/mlflow"),
        ("register", "https://mlflow.example/?workspace=a&page=2"),
        ("data", "s3://bucket/a@b.csv"),
    ],
)
def test_a_uri_without_one_is_not(tmp_path, field, uri):
    load_target(config(tmp_path, field, uri))


@pytest.mark.parametrize(
    "text",
    [
        "hf_" + "a" * 34,
        "ghp_" + "a" * 36,
        "github_pat_" + "a" * 22,
        "sk-" + "a" * 40,
        "glpat-" + "a" * 20,
        "xoxb-1234567890",
        "AIza" + "a" * 35,
        "AKIA" + "A" * 16,
        "ASIA" + "A" * 16,
        "ya29.a0AfH6SMBx",
        "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEabcdefgh",
        "https://h/f?code=" + "a" * 44,
        "https://a/c?sv=1&sig=abc%2Fdefghijklmnopq%3D",
        "s3://b/k?X-Amz-Signature=0123456789abcdef",
        "https://me:word@host/a",
        "redis://:word@host/0",
        "Authorization: Bearer abcdefghijkl",
    ],
    ids=lambda text: text[:12],
)
def test_one_list_of_secrets_serves_messages_configs_and_the_card(tmp_path, text):
    assert "***" in masked(text, {})
    assert "•••" in without_credentials(text)
    path = config(tmp_path, "data", "sklearn:digits")
    read = {**yaml.safe_load(path.read_text()), "pipeline": "p.py:p", "arguments": {"a": text}}
    path.write_text(yaml.safe_dump(read))
    with pytest.raises(SpecError, match="a config is no place for one"):
        load_target(path)


def test_a_password_without_a_uri_is_refused(tmp_path):
    path = config(tmp_path, "data", "sklearn:digits")
    for text in ("host=h password=abc dbname=d", "Server=h;PWD = abc"):
        read = {**yaml.safe_load(path.read_text()), "pipeline": "p.py:p", "arguments": {"a": text}}
        path.write_text(yaml.safe_dump(read))
        with pytest.raises(SpecError, match="a config is no place for one"):
            load_target(path)
