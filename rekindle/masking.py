"""Text without secrets: what an error, a log or a record may say of them. And without
what steers the terminal that shows it.

Known are the values of the environment variables that a config names (`name_secret`),
those of variables with a name like HF_TOKEN or AWS_SECRET_ACCESS_KEY, and what looks like
a token wherever it comes from: a service may send back what it was sent. A value is also
known as base64 and as a part of a URL. What is shorter than eight characters and not
named by a config is none: it would mask words. Others of the environment are not known
before they are named."""

import base64
import json
import os
import re
from collections.abc import Iterable, Mapping
from urllib.parse import quote, quote_plus

MASK = "***"
_SECRET = re.compile(
    r"TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY"
    r"|(ACCOUNT|STORAGE)_?KEY|(^|_)(SAS|PAT)($|_)|_(PASS|PWD)$|CONNECTION_STRING",
    re.IGNORECASE,
)
_NO_SECRET = re.compile(
    r"_(FILE|PATH|DIR|URL|URI|ENDPOINT|NAME|ID|ARN|REGION|PROVIDER|HELPER|EXPIRATION|EXPIRY)$"
    r"|PARALLELISM|_TYPE$",
    re.IGNORECASE,
)
_SHORTEST, _SHORTEST_NAMED, _SHORTEST_LINE = 8, 4, 16
# SQLAlchemy takes all up to the last @ for a password, also what ends a host elsewhere
DATABASE_LOGIN = (
    r"\b(?:postgres|mysql|mariadb|mssql|oracle|cockroach|mongodb|redis|amqp)[\w+.-]{0,32}://"
    r"[^:@/\s]*:[^@\s/?#]*[/?#][^@\s]{0,512}(?=@)"
)
# what looks like a secret wherever it stands: in texts, in a config, on the card
LOOKS_SECRET = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|sk-[A-Za-z0-9_-]{20,}"
    r"|glpat-[\w-]{20,}|xox[abeoprs]-[\w-]{10,}|AIza[\w-]{35}|AccountKey=[^;\s]{8,}"
    r"|A[KS]IA[0-9A-Z]{16}\b|ya29\.[A-Za-z0-9._-]+"
    r"|eyJ[A-Za-z0-9_-]{8,2000}\.[A-Za-z0-9_-]{8,2000}\.[A-Za-z0-9_-]*)"
    r"|-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[^-]{0,20000}"
    rf"|{DATABASE_LOGIN}|(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"
    r"|(?<=[?&]sig=)[^&\s\"']+|(?<=[?&]code=)[^&\s\"']{40,}"
    r"|(?<=[?&]X-Amz-Signature=)[^&\s\"']+|(?<=[?&]X-Amz-Security-Token=)[^&\s\"']+"
    r"|(?<=[?&]X-Goog-Signature=)[^&\s\"']+|(?<=\bBearer )[A-Za-z0-9._~+/=-]{8,}"
)
_STEERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_STEERS_BUT_COLOUR = re.compile(rf"(\x1b\[[0-9;]{{0,20}}m|\r)|{_STEERS.pattern}")
_named: set[str] = set()  # variables; one process reads one config, or a few


def name_secret(variable: str) -> None:
    """From now on the value of this variable of the environment is a secret."""
    _named.add(variable)


def masked(text: str, environment: Mapping[str, str] | None = None) -> str:
    """The text with `***` in place of every secret."""
    if forms := _forms(environment):
        text = re.sub("|".join(map(re.escape, forms)), MASK, text)
    return LOOKS_SECRET.sub(MASK, text)


def plain(text: str) -> str:
    """With codes in place of what would steer a terminal: escape sequences, carriage
    returns, marks that turn the direction of writing. Data, logs and services may hold
    such."""
    return _STEERS.sub(lambda found: ascii(found[0])[1:-1], text)


def plain_but_colour(text: str) -> str:
    """The same for logs, in which colours and lines that are written over stay."""
    return _STEERS_BUT_COLOUR.sub(lambda found: found[1] or ascii(found[0])[1:-1], text)


class Masked:
    """The same for bytes that come in pieces: a known secret may go across two of them."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._forms = [form.encode() for form in _forms(environment)]
        self._any = re.compile(b"|".join(map(re.escape, self._forms))) if self._forms else None
        self._held = b""

    def feed(self, piece: bytes) -> bytes:
        """What may be shown; the beginning of what may become a secret is held back."""
        if self._any is None:
            return piece
        text, begin = self._held + piece, 0
        shown: list[bytes] = []
        open_ends = self._open(text)
        for match in self._any.finditer(text):
            if any(begin <= end <= match.start() for end in open_ends):
                break  # a longer one may begin there
            shown += [text[begin : match.start()], MASK.encode()]
            begin = match.end()
        end = next((end for end in open_ends if end >= begin), len(text))
        self._held = text[end:]
        return b"".join((*shown, text[begin:end]))

    def rest(self) -> bytes:
        """What was held back, once nothing follows."""
        held, self._held = self._held, b""
        return self._any.sub(MASK.encode(), held) if self._any else held

    def _open(self, text: bytes) -> list[int]:
        """Where something begins that the end of `text` cuts off, in order."""
        found: set[int] = set()
        for form in self._forms:
            begin = max(0, len(text) - len(form) + 1)
            while (begin := text.find(form[:1], begin)) != -1:
                if form.startswith(text[begin:]):
                    found.add(begin)
                begin += 1
        return sorted(found)


def _forms(environment: Mapping[str, str] | None) -> list[str]:
    """Every secret in every form, the longest first, so that none hides in another."""
    known = os.environ if environment is None else environment
    found = {form for value in _values(known) for form in _written(value)}
    return sorted(found - {""}, key=len, reverse=True)


def _values(environment: Mapping[str, str]) -> Iterable[str]:
    for name, value in environment.items():
        if (name in _named and len(value) >= _SHORTEST_NAMED) or (
            tells(name) and len(value) >= _SHORTEST and not _is_file(value)
        ):
            yield value


def tells(name: str) -> bool:
    """Whether the name of a variable says that its value is secret."""
    return bool(_SECRET.search(name) and not _NO_SECRET.search(name))


def _is_file(value: str) -> bool:
    """A path to a secret is none, also where the file may not be read."""
    if not value.startswith("/"):
        return False
    try:
        os.stat(value)  # noqa: PTH116 - Path says nothing of a folder that is closed
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False
    return True


def _written(value: str) -> Iterable[str]:
    """The value as it may stand in a text: in a URL, in JSON, in base64, a line of a key."""
    yield value
    yield value.strip()
    yield quote(value, safe="")
    yield quote_plus(value)
    yield json.dumps(value)[1:-1]
    yield from (e(value.encode()).decode() for e in (base64.b64encode, base64.urlsafe_b64encode))
    for line in value.splitlines() if "\n" in value.strip() else ():
        if len(line) >= _SHORTEST_LINE and not line.startswith("-----"):
            yield line
