"""A cloud's public list of prices, page after page: it may be slow or throttled, and each page is
asked for a few times."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rekindle.errors import PlatformError, RequestError, UnreachableError
from rekindle.http import HttpError, request, retried

TIMEOUT_SECONDS = 8.0
_PAUSES_SECONDS = (1.0, 3.0, 9.0)
_MOST_PAGES = 500


def pages(
    url: str, following: Callable[[dict[str, Any]], str], headers: Mapping[str, str], login: str
) -> Iterator[dict[str, Any]]:
    """The pages from `url` on, each at the address that `following` finds in the one before (""
    ends). UnreachableError after some tries; RequestError, with `login` as the fix, where access is
    denied."""
    for _ in range(_MOST_PAGES):
        found = _page(url, headers, login)
        yield found
        url = following(found)
        if not url:
            return
    raise PlatformError(f"a list of prices does not end within {_MOST_PAGES} pages", where=url)


def _page(url: str, headers: Mapping[str, str], login: str) -> dict[str, Any]:
    where = url.partition("?")[0]
    try:
        return retried(
            lambda: request(url, headers, timeout_seconds=TIMEOUT_SECONDS), _PAUSES_SECONDS
        )
    except HttpError as error:
        if error.transient:
            fix = "ask again later; the prices that are known stay"
            raise UnreachableError(str(error), where=where, fix=fix) from None
        if error.status in (400, 401, 403):
            raise RequestError(str(error), where=where, fix=login) from None
        raise PlatformError(str(error), where=where) from None
