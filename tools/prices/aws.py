"""What machines of AWS cost: EC2's and SageMaker's by the Price List API, spot by EC2's history of
it. boto3 is imported when that is asked.

EC2's are Linux, shared, without capacity reserved; SageMaker's are those of training. SageMaker's
list has no spot. Every zone of a region has a spot price of its own: the one in the middle counts,
of those that are below on-demand. Authority: botocore's models of pricing and ec2, and products of
the Price List as Karpenter asks for them. No account has been asked yet."""

import collections
import contextlib
import datetime
import json
import logging
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rekindle.catalog.prices import Price
from rekindle.errors import PlatformError, RequestError, UnreachableError
from rekindle.platforms.submission import BUG

log = logging.getLogger(__name__)

PERMISSIONS = ("pricing:GetProducts", "ec2:DescribeSpotPriceHistory")
_SOURCE, _SPOT_SOURCE = "Price List API", "EC2's history of spot prices"
_HOME = "us-east-1"  # the Price List API is in few regions, and tells of all
_SETTINGS: Mapping[str, Any] = {
    "retries": {"mode": "standard", "total_max_attempts": 5},
    "connect_timeout": 10,
    "read_timeout": 30,
    "user_agent_extra": "rekindle",
}
_EC2 = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
    "marketoption": "OnDemand",
}
_NOT_LOGGED_IN = (
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidClientTokenId",
    "UnrecognizedClientException",
    "AuthFailure",
    "InvalidSignatureException",
    "SignatureDoesNotMatch",
)
_DENIED = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation")
_LATER = ("Throttl", "RequestLimitExceeded", "TooManyRequests", "Internal", "ServiceUnavailable")


def ask(machines: Sequence[str], regions: Sequence[str], today: datetime.date) -> list[Price]:
    """The prices of those of `machines` that `regions` have, by EC2's names, and by SageMaker's of
    the same (`ml.`); a machine without one is left out."""
    with _connected() as client:
        pricing = client("pricing", _HOME)
        found: list[Price] = []
        for region in regions:
            usual = _on_demand(pricing, "AmazonEC2", "instanceType", machines, region)
            spot = _spot(client("ec2", region), usual, region) if usual else {}
            found += [
                Price(name, region, usd, spot.get(name), _SOURCE, today, _SPOT_SOURCE, today)
                if name in spot
                else Price(name, region, usd, None, _SOURCE, today)
                for name, usd in usual.items()
            ]
            names = [f"ml.{name}" for name in machines]
            trained = _on_demand(pricing, "AmazonSageMaker", "instanceName", names, region)
            found += [Price(n, region, usd, None, _SOURCE, today) for n, usd in trained.items()]
        return found


@contextlib.contextmanager
def _connected() -> Iterator[Callable[[str, str], Any]]:
    """Clients by service and region; what they raise, in words."""
    try:
        from boto3.session import Session
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as error:
        what = f"{error.name} is not installed here"
        raise RequestError(what, where="aws", fix="pip install boto3") from None
    session, config = Session(), Config(**_SETTINGS)
    try:
        yield lambda service, region: session.client(service, region_name=region, config=config)
    except (BotoCoreError, ClientError) as error:
        raise _explained(error) from error


def _explained(error: Exception) -> PlatformError | RequestError:
    from botocore import exceptions as of

    response: Any = getattr(error, "response", {})
    code = str(response.get("Error", {}).get("Code", ""))
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    what = str(error).splitlines()[0]
    nobody = of.NoCredentialsError | of.PartialCredentialsError | of.ProfileNotFound
    if isinstance(error, nobody | of.TokenRetrievalError | of.SSOError) or code in _NOT_LOGGED_IN:
        fix = "aws sso login, or set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        fix += "; a region may have to be enabled first" if code == "AuthFailure" else ""
        return RequestError(what, where="aws", fix=fix)
    if code in _DENIED:
        return RequestError(what, where="aws", fix=f"ask for {' and '.join(PERMISSIONS)}")
    silent = isinstance(error, of.ConnectionError | of.HTTPClientError)
    if silent or status == 429 or status >= 500 or code.startswith(_LATER):
        fix = "ask again later; the prices that are known stay"
        return UnreachableError(what, where="aws", fix=fix)
    return PlatformError(what, where="aws", fix=BUG)


def _on_demand(
    pricing: Any, service: str, name_key: str, names: Sequence[str], region: str
) -> dict[str, float]:
    """Dollars an hour by machine; a machine of two prices has none."""
    found: dict[str, float] = {}
    twice = set()
    exact = {"regionCode": region, **(_EC2 if service == "AmazonEC2" else {})}
    filters = [{"Type": "TERM_MATCH", "Field": f, "Value": value} for f, value in exact.items()]
    filters.append({"Type": "ANY_OF", "Field": name_key, "Value": ",".join(names)})
    pages = pricing.get_paginator("get_products").paginate(
        ServiceCode=service, Filters=filters, FormatVersion="aws_v1"
    )
    for told in (json.loads(text) for page in pages for text in page["PriceList"]):
        attributes = told["product"]["attributes"]
        name = attributes.get(name_key, "")
        # SageMaker's list says in one way or the other which price is that of training
        kinds = [str(attributes.get(key)).lower() for key in ("component", "platoinstancetype")]
        if name not in names or not (service == "AmazonEC2" or "training" in kinds):
            continue
        for usd in _usd(told):
            if found.setdefault(name, usd) != usd:
                twice.add(name)
    if twice:
        log.warning("%s tells two prices of %s in %s", service, ", ".join(sorted(twice)), region)
    return {name: found[name] for name in names if name in found and name not in twice}


def _usd(told: Mapping[str, Any]) -> Iterator[float]:
    for term in told.get("terms", {}).get("OnDemand", {}).values():
        for dimension in term["priceDimensions"].values():
            usd = float(dimension["pricePerUnit"].get("USD") or 0)
            if usd > 0 and dimension["unit"].lower() in ("hrs", "hours"):
                yield usd


def _spot(ec2: Any, usual: Mapping[str, float], region: str) -> dict[str, float]:
    """By machine, what the zone in the middle asks now."""
    newest: dict[tuple[str, str], tuple[datetime.datetime, float]] = {}
    pages = ec2.get_paginator("describe_spot_price_history").paginate(
        InstanceTypes=list(usual),
        ProductDescriptions=["Linux/UNIX"],
        StartTime=datetime.datetime.now(datetime.UTC),
    )
    for told in (row for page in pages for row in page["SpotPriceHistory"]):
        at = told["InstanceType"], told["AvailabilityZone"]
        one = told["Timestamp"], float(told["SpotPrice"])
        if re.fullmatch(rf"{re.escape(region)}[a-z]", at[1]) and one > newest.get(at, (one[0], 0)):
            newest[at] = one
    zones = collections.defaultdict(list)
    for (name, _), (_, usd) in newest.items():
        if 0 < usd < usual.get(name, math.inf):
            zones[name].append(usd)
    return {name: statistics.median_high(usd) for name, usd in zones.items()}
