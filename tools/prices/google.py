"""What Compute Engine's machines cost, by the Cloud Billing Catalog, for an API key.

Google bills CPUs, memory and GPUs one by one: a machine costs their sum (skus.yaml has how they are
called), without local SSDs, disks and what Vertex AI adds for managing. Authority: the reference of
cloudbilling v1, services.skus.list. It has not been asked from here yet."""

import datetime
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from rekindle.catalog.machines import Machine, machine
from rekindle.catalog.prices import Price
from rekindle.errors import PlatformError, RequestError
from rekindle.platforms.vertex.limits import limits
from rekindle.tables import rows
from tools.prices.pages import pages

KEY = "GOOGLE_API_KEY"
_URL = "https://cloudbilling.googleapis.com/v1/services/6F81-5844-456A/skus"  # Compute Engine
_SOURCE = "Cloud Billing Catalog"
_DESCRIPTION = re.compile(
    r"(?:Spot Preemptible )?(?P<part>.+?)(?: attached to Spot Preemptible VMs)? running in .+"
)
_USAGES = {"OnDemand": False, "Preemptible": True}
_Rates = dict[tuple[str, str, bool], float]  # part, region, whether it is spot


def ask(machines: Sequence[str], regions: Sequence[str], today: datetime.date) -> list[Price]:
    """The prices of those of `machines` that `regions` have; a machine without one is left out."""
    key = os.environ.get(KEY, "")
    if not key:
        fix = f"make a key that may use cloudbilling.googleapis.com, and set {KEY}"
        raise RequestError("reading Google's prices needs an API key", where=KEY, fix=fix)
    families = rows(Path(__file__).with_name("skus.yaml"))["families"]
    parts = {
        family[key] for family in families.values() for key in ("core", "ram") if key in family
    }
    parts |= {part for family in families.values() for part in family.get("gpu", ())}
    rates = _rates(parts, set(regions), key)
    only_spot, found = limits()["custom_job"]["not_on_demand"], list[Price]()
    for each in map(machine, machines):
        family = families.get(each.name.rpartition("-")[0])
        for region in regions if family else ():
            usual, spot = (_sum(each, family, region, rates, is_spot) for is_spot in (False, True))
            usual = None if each.name in only_spot else usual
            if usual is not None or spot is not None:
                found.append(Price(each.name, region, usual, spot, _SOURCE, today))
    return found


def _rates(parts: set[str], regions: set[str], key: str) -> _Rates:
    """Dollars an hour of each part by region; a part of two prices has none."""
    found: _Rates = {}
    twice = set()
    for sku in _skus(key):
        match = _DESCRIPTION.fullmatch(sku.get("description", ""))
        is_spot = _USAGES.get(sku.get("category", {}).get("usageType"))
        if match is None or match["part"] not in parts or is_spot is None:
            continue
        usd = _usd(sku)
        for region in regions.intersection(sku.get("serviceRegions", ())):
            at = match["part"], region, is_spot
            if usd is not None and found.setdefault(at, usd) != usd:
                twice.add(at)
    return {at: usd for at, usd in found.items() if at not in twice}


def _skus(key: str) -> Iterator[Mapping[str, Any]]:
    asked = {"pageSize": 2000, "currencyCode": "USD"}

    def following(page: Mapping[str, Any]) -> str:
        token = page.get("nextPageToken")
        return f"{_URL}?{urlencode({**asked, 'pageToken': token})}" if token else ""

    # in a header, since addresses are told in errors
    fix = f"give {KEY} a key of a project that uses cloudbilling.googleapis.com"
    for page in pages(f"{_URL}?{urlencode(asked)}", following, {"X-Goog-Api-Key": key}, fix):
        try:
            yield from page["skus"]
        except KeyError:
            raise PlatformError("the answer has no `skus`", where=_URL) from None


def _usd(sku: Mapping[str, Any]) -> float | None:
    """An hour of it, or of a GiB of it; the last of its tiers, which is what many hours cost."""
    told = sku["pricingInfo"][-1]["pricingExpression"]
    if told["usageUnit"] not in ("h", "GiBy.h"):
        return None
    price = told["tieredRates"][-1]["unitPrice"]
    usd = int(price.get("units") or 0) + int(price.get("nanos") or 0) / 1e9
    return usd if usd > 0 and price.get("currencyCode", "USD") == "USD" else None


def _sum(
    each: Machine, family: Mapping[str, Any], region: str, rates: _Rates, is_spot: bool
) -> float | None:
    total = 0.0
    parts = (("core", each.vcpus), ("ram", each.memory_bytes and each.memory_bytes / 2**30))
    needed = [([family[key]], amount) for key, amount in parts if key in family]
    if each.gpus:
        needed.append((family["gpu"], each.gpus))
    for names, amount in needed:
        known = {rates[at] for name in names if (at := (name, region, is_spot)) in rates}
        if len(known) != 1 or amount is None:
            return None
        total += known.pop() * amount
    return round(total, 6)
