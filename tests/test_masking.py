"""Text without secrets, in whatever form they come."""

from __future__ import annotations

import base64
import json
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle import masking
from rekindle.masking import Masked, masked

SECRET = 'pa"ss/word+with=everything'
KEY = "-----BEGIN KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASC\n-----END KEY-----\n"
HERE = {"MY_TOKEN": SECRET, "A_PRIVATE_KEY": KEY, "KIND_OF_PLACE": "production", "PATH": "/usr/bin"}


@pytest.fixture(autouse=True)
def nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests name variables, for as long as the process lives."""
    monkeypatch.setattr(masking, "_named", set())


@pytest.mark.parametrize(
    "text",
    [
        SECRET,
        quote(SECRET, safe=""),
        json.dumps({"a": SECRET}),
        KEY.splitlines()[1],
        KEY,
        base64.b64encode(SECRET.encode()).decode(),
        f"https://me:{quote(SECRET, safe='')}@host/a",
    ],
    ids=["as it is", "in a URL", "in JSON", "a line of a key", "a key", "in base64", "in a login"],
)
def test_a_secret_of_the_environment_is_masked_in_every_form(text: str) -> None:
    shown = masked(f"<{text}>", HERE)
    assert "***" in shown
    assert not any(part in shown for part in ("word", "MIIE", quote(SECRET, safe="")))


@pytest.mark.parametrize(
    "text",
    [
        "hf_" + "a" * 34,
        "ya29.a0AfH6SMBx",
        "Authorization: Bearer abcdefghijkl",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
        "https://a.blob.core.windows.net/c?sv=1&sig=abc%2Fdef%3D&se=2",
        "https://me:secret@host/",
        "https://s3/b?X-Amz-Signature=0123456789abcdef",
    ],
)
def test_what_looks_like_a_token_is_masked_wherever_it_comes_from(text: str) -> None:
    assert "***" in masked(text, {})


@pytest.mark.parametrize(
    "text",
    [
        "there is no bucket of production in /usr/bin",
        "abfs://lake@acc.dfs.core.windows.net/r",
        "https://mlflow.example.com:5000/a?page=2",
        "sha256:" + "0" * 64,
        "env:HF_TOKEN",
        "arn:aws:secretsmanager:eu-central-1:123456789012:secret:hub",
        "steps@p.iam.gserviceaccount.com",
        "W. Europe Standard Time",
        "0 3 * * 1",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert masked(text, HERE) == text


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        ("HF_TOKEN", True),
        ("aws_secret_access_key", True),
        ("MLFLOW_TRACKING_PASSWORD", True),
        ("AZURE_STORAGE_SAS_TOKEN", True),
        ("OPENAI_API_KEY", True),
        ("GITHUB_PAT", True),
        ("AWS_ACCESS_KEY_ID", False),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", False),
        ("SECRET_NAME", False),
        ("TOKENIZERS_PARALLELISM", False),
        ("PATTERN", False),
        ("MONKEY", False),
        ("SASHA", False),
    ],
)
def test_a_variable_is_known_by_its_name(name: str, is_secret: bool) -> None:
    assert (masked("<a-planted-value>", {name: "a-planted-value"}) == "<***>") == is_secret


@given(
    st.lists(st.sampled_from([SECRET, SECRET[:5], "x\n", KEY, "pa", KEY[:20], SECRET + "more"])),
    st.integers(1, 9),
)
def test_pieces_are_masked_like_the_whole(words: list[str], size: int) -> None:
    here = {**HERE, "LONGER_TOKEN": SECRET + "more"}
    text = "".join(words).encode()
    stream, whole = Masked(here), Masked(here)
    shown = b"".join(stream.feed(text[i : i + size]) for i in range(0, len(text), size))
    assert shown + stream.rest() == whole.feed(text) + whole.rest()
    assert SECRET.encode() not in shown
    assert b"MIIE" not in shown


def test_a_line_is_shown_at_once() -> None:
    assert Masked(HERE).feed(b"loss 0.5\n") == b"loss 0.5\n"
