"""Text without secrets, and without what steers the terminal that shows it.

This is what errors, logs and records go through before they are shown or kept.

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
# characters that make a secret: of a variable whose name says so, of one that a config names,
# and of a line of a key
_SHORTEST = 8
_SHORTEST_NAMED = 4
_SHORTEST_LINE = 16
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
_read: set[str] = set()  # values of files that a config names


def name_secret(variable: str) -> None:
    """From now on the value of this variable of the environment is a secret."""
    _named.add(variable)


def mask_value(value: str) -> None:
    """From now on this value is a secret."""
    _read.add(value)


def masked(text: str, environment: Mapping[str, str] | None = None) -> str:
    """The text with `***` in place of every secret."""
    forms = _forms(environment)
    if forms:
        text = re.sub("|".join(map(re.escape, forms)), MASK, text)
    return LOOKS_SECRET.sub(MASK, text)


def plain(text: str) -> str:
    """With codes in place of what would steer a terminal: escape sequences, carriage
    returns, marks that turn the direction of writing. Data, logs and services may hold
    such."""
    return _STEERS.sub(lambda match: ascii(match[0])[1:-1], text)


def plain_but_colour(text: str) -> str:
    """The same for logs, in which colours and lines that are written over stay."""
    return _STEERS_BUT_COLOUR.sub(lambda match: match[1] or ascii(match[0])[1:-1], text)


class Masked:
    """The same for bytes that come in pieces: a known secret may go across two of them."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._forms = [form.encode() for form in _forms(environment)]
        self._secrets: re.Pattern[bytes] | None = None
        if self._forms:
            self._secrets = re.compile(b"|".join(map(re.escape, self._forms)))
        self._held_back = b""

    def feed(self, piece: bytes) -> bytes:
        """What may be shown; the beginning of what may become a secret is held back."""
        if self._secrets is None:
            return piece
        text = self._held_back + piece
        shown: list[bytes] = []
        masked_until = 0
        cut_off_starts = self._cut_off_starts(text)
        for match in self._secrets.finditer(text):
            if any(masked_until <= start <= match.start() for start in cut_off_starts):
                break  # a longer one may begin there
            shown += [text[masked_until : match.start()], MASK.encode()]
            masked_until = match.end()
        shown_until = len(text)
        for start in cut_off_starts:
            if start >= masked_until:
                shown_until = start
                break
        self._held_back = text[shown_until:]
        return b"".join((*shown, text[masked_until:shown_until]))

    def rest(self) -> bytes:
        """What was held back, once nothing follows."""
        held_back = self._held_back
        self._held_back = b""
        if self._secrets is None:
            return held_back
        return self._secrets.sub(MASK.encode(), held_back)

    def _cut_off_starts(self, text: bytes) -> list[int]:
        """Where a secret may begin that the end of `text` cuts off, in order."""
        starts: set[int] = set()
        for form in self._forms:
            start = max(0, len(text) - len(form) + 1)
            while (start := text.find(form[:1], start)) != -1:
                if form.startswith(text[start:]):
                    starts.add(start)
                start += 1
        return sorted(starts)


def _forms(environment: Mapping[str, str] | None) -> list[str]:
    """Every secret in every form, the longest first, so that none hides in another."""
    known = os.environ if environment is None else environment
    forms: set[str] = set()
    for value in _values(known):
        forms.update(_written(value))
    forms.discard("")
    return sorted(forms, key=len, reverse=True)


def _values(environment: Mapping[str, str]) -> Iterable[str]:
    for value in _read:
        if len(value) >= _SHORTEST_NAMED:
            yield value
    for name, value in environment.items():
        if name in _named:
            is_secret = len(value) >= _SHORTEST_NAMED
        else:
            is_secret = tells(name) and len(value) >= _SHORTEST and not _is_file(value)
        if is_secret:
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
    yield base64.b64encode(value.encode()).decode()
    yield base64.urlsafe_b64encode(value.encode()).decode()
    if "\n" not in value.strip():
        return
    for line in value.splitlines():
        if len(line) >= _SHORTEST_LINE and not line.startswith("-----"):
            yield line
