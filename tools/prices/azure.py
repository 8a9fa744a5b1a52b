"""What Azure's machines cost, by its Retail Prices API, which asks for no account.

Linux, pay as you go, in US dollars. Spot is what has `Spot` in the name of its SKU. Authority: the
API's reference (api-version 2023-01-01-preview; values of filters are case-sensitive). It has not
been asked from here yet."""

import datetime
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode, urlsplit

from rekindle.catalog.prices import Price
from rekindle.errors import PlatformError
from tools.prices.pages import pages

_URL = "https://prices.azure.com/api/retail/prices"
_SOURCE = "prices.azure.com"
_NAMES_A_FILTER = 10  # or the address grows too long
_LEFT_OUT = ("Windows", "Cloud Services", "Low Priority", "Expired")


def ask(machines: Sequence[str], regions: Sequence[str], today: datetime.date) -> list[Price]:
    """The prices of those of `machines` that `regions` have; a machine without one is left out."""
    prices = list[Price]()
    for region in regions:
        found: dict[tuple[str, bool], dict[str, set[float]]] = {}  # by day of their beginning
        for begin in range(0, len(machines), _NAMES_A_FILTER):
            for item in _items(machines[begin : begin + _NAMES_A_FILTER], region):
                if _counts(item, today):
                    days = found.setdefault((item["armSkuName"], _has(item, "Spot")), {})
                    usd = float(item["retailPrice"])
                    days.setdefault(item["effectiveStartDate"], set()).add(usd)
        for name in machines:
            usual, spot = (_newest(found.get((name, is_spot), {})) for is_spot in (False, True))
            if usual is not None or spot is not None:
                prices.append(Price(name, region, usual, spot, _SOURCE, today))
    return prices


def _newest(days: Mapping[str, set[float]]) -> float | None:
    """The price that began last; none where two did."""
    prices = days[max(days)] if days else set()
    return next(iter(prices)) if len(prices) == 1 else None


def _items(machines: Sequence[str], region: str) -> Iterator[Mapping[str, Any]]:
    names = " or ".join(f"armSkuName eq '{name}'" for name in machines)
    wanted = f"serviceName eq 'Virtual Machines' and armRegionName eq '{region}'"
    wanted += f" and priceType eq 'Consumption' and ({names})"
    asked = {"api-version": "2023-01-01-preview", "currencyCode": "USD", "$filter": wanted}
    for page in pages(f"{_URL}?{urlencode(asked)}", _next, {}, "this may be a mistake of ours"):
        try:
            yield from page["Items"]
        except KeyError:
            raise PlatformError("the answer has no `Items`", where=_URL) from None


def _next(page: Mapping[str, Any]) -> str:
    """The address of the next page; none elsewhere."""
    url = str(page.get("NextPageLink") or "")
    if url and urlsplit(url)[:2] not in (urlsplit(_URL)[:2], ("https", "prices.azure.com:443")):
        raise PlatformError(f"the next page is said to be elsewhere: {url}", where=_URL)
    return url


def _counts(item: Mapping[str, Any], today: datetime.date) -> bool:
    """Whether it is an hour of the machine with Linux, in dollars, by now."""
    return (
        item["unitOfMeasure"] == "1 Hour"
        and item["currencyCode"] == "USD"
        and float(item["retailPrice"]) > 0
        and item["effectiveStartDate"][:10] <= today.isoformat()
        and not any(_has(item, word) for word in _LEFT_OUT)
    )


def _has(item: Mapping[str, Any], word: str) -> bool:
    return any(word in str(item.get(key)) for key in ("productName", "skuName", "meterName"))
