"""Reads of a cloud's public list of prices, page after page, which may be slow or throttled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rekindle.errors import PlatformError, RequestError, UnreachableError
from rekindle.platforms.asking import Unasked
from rekindle.platforms.reads import Said, read

_PAUSES_SECONDS = (1.0, 3.0, 9.0)
_LONGEST_PAUSE_SECONDS = 30.0  # that a service may ask for
_MOST_PAGES = 500
_DENIED = (400, 401, 403)


def pages(
    url: str, following: Callable[[dict[str, Any]], str], headers: Mapping[str, str], login: str
) -> Iterator[dict[str, Any]]:
    """The page at `url` and those that follow, by the address that `following` finds in each.

    "" ends. After throttling, 5xx and silence a page is asked for again, a few times: then
    UnreachableError. RequestError, with `login` as the fix, where access is denied."""
    for _ in range(_MOST_PAGES):
        found = _page(url, headers, login)
        yield found
        url = following(found)
        if not url:
            return
    raise PlatformError(f"a list of prices does not end within {_MOST_PAGES} pages", where=url)


def _page(url: str, headers: Mapping[str, str], login: str) -> dict[str, Any]:
    where = url.partition("?")[0]
    for pause in (*_PAUSES_SECONDS, None):
        try:
            return read(url, headers)
        except Said as error:
            if error.status in _DENIED:
                raise RequestError(str(error), where=where, fix=login) from None
            if error.status != 429 and error.status < 500:
                raise PlatformError(str(error), where=where) from None
            what, asked = str(error), error.headers.get("Retry-After", "")
        except Unasked as error:
            what, asked = str(error), ""
        if pause is not None:
            wished = float(asked) if asked.isdecimal() else 0.0
            time.sleep(min(max(pause, wished), _LONGEST_PAUSE_SECONDS))
    raise UnreachableError(what, where=where, fix="ask again later; the prices that are known stay")
