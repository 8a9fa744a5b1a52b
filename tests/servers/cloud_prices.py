"""What clouds sell and for how much, as their public APIs tell it: AWS's Price List (pricing) and
history of spot prices (ec2), Google's Cloud Billing Catalog, Azure's Retail Prices.

Filters are heeded as each service heeds them, pages are short, and around each price stand those
that are easily taken for it (Windows, capacity reserved, committed use, hosting). What nobody answers
is refused and stands in `refused`. Authority: botocore's models; rows as public projects have kept
them from the services; Google's and Azure's references of the two REST APIs."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qsl
from xml.sax.saxutils import escape

import botocore.session
from botocore.validate import ParamValidator

from tests.servers.tls_hosts import Answer, Asked, Dropped
from tests.servers.troubles import Broken, Troubled

PRICING = "api.pricing.us-east-1.amazonaws.com"
GOOGLE, AZURE = "cloudbilling.googleapis.com", "prices.azure.com"
HOSTS = (PRICING, "*.us-east-1.amazonaws.com", "*.us-west-2.amazonaws.com", GOOGLE, AZURE)
KEY = "AIza-a-key-of-forge"
_A_PAGE = 3
_SESSION = botocore.session.get_session()
_AT = "2026-11-22T08:00:00.000Z"


class Refused(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclasses.dataclass
class Market(Troubled):
    """Tests change what is sold. Dollars an hour: `ec2` and `training` by machine and region, `spot`
    by machine, zone and time, `parts` of Google's by description and region (those of spot too),
    `azure` by machine and region, on demand and spot."""

    ec2: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    training: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    spot: list[tuple[str, str, float, str]] = dataclasses.field(default_factory=list)
    parts: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    azure: dict[tuple[str, str], tuple[float | None, float | None]] = dataclasses.field(
        default_factory=dict
    )
    more: list[Any] = dataclasses.field(default_factory=list)  # rows as the service has them

    def __post_init__(self) -> None:
        super().__init__()

    def answer(self, asked: Asked) -> Answer:
        """What is asked of any of the hosts."""
        route = self._route(asked)
        try:
            return self.met(route[0], route[1])
        except Broken as broken:
            if broken.dropped():
                raise Dropped from None
            fault = broken.fault
            return Answer(fault.status, self._error(asked, fault.status, fault.code), fault.headers)
        except Refused as error:
            self.refused.append(f"{route[0]}: {error}")
            return Answer(error.status, self._error(asked, error.status, error.code))

    def _route(self, asked: Asked) -> tuple[str, Callable[[], Answer]]:
        if asked.host == PRICING:
            operation = asked.headers.get("x-amz-target", "").rpartition(".")[2]
            return f"pricing:{operation}", lambda: self._pricing(operation, asked)
        if asked.host.startswith("ec2."):
            form = dict(parse_qsl(asked.body.decode()))
            return f"ec2:{form.get('Action')}", lambda: self._ec2(form, asked.host.split(".")[1])
        if asked.host == GOOGLE:
            return "google:skus", lambda: self._google(asked)
        if asked.host == AZURE:
            return "azure:prices", lambda: self._azure(asked)
        return f"stranger:{asked}", lambda: _raise(Refused(404, "NotFound", str(asked)))

    def _error(self, asked: Asked, status: int, code: str) -> Any:
        if asked.host == PRICING:
            return {"__type": code, "message": "as the test wants it"}
        if asked.host.startswith("ec2."):
            inner = f"<Code>{code}</Code><Message>as the test wants it</Message>"
            return f"<Response><Errors><Error>{inner}</Error></Errors></Response>".encode()
        if asked.host == GOOGLE:
            details = [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": code}]
            return {"error": {"code": status, "message": "no", "status": "X", "details": details}}
        return {"error": {"code": code, "message": "as the test wants it"}}

    # AWS

    def _pricing(self, operation: str, asked: Asked) -> Answer:
        given = asked.json()
        _check("pricing", operation, given)
        service = given["ServiceCode"]
        if given.get("FormatVersion") != "aws_v1":
            raise Refused(400, "InvalidParameterException", "FormatVersion")
        rows = [row for row in self._products(service) if _passes(row, given.get("Filters", ()))]
        page, token = _page(rows, int(given.get("NextToken", 0)))
        told = {"FormatVersion": "aws_v1", "PriceList": [json.dumps(row) for row in page], **token}
        return Answer(200, told)

    def _products(self, service: str) -> Iterator[dict[str, Any]]:
        yield from (row for row in self.more if row.get("serviceCode") == service)
        if service == "AmazonEC2":
            for (name, region), usd in self.ec2.items():
                usual = {
                    "instanceType": name,
                    "regionCode": region,
                    "operatingSystem": "Linux",
                    "tenancy": "Shared",
                    "preInstalledSw": "NA",
                    "capacitystatus": "Used",
                    "marketoption": "OnDemand",
                }
                yield product(service, usual, usd)
                yield product(service, {**usual, "operatingSystem": "Windows"}, usd * 1.5)
                yield product(service, {**usual, "tenancy": "Dedicated"}, usd * 1.1)
                yield product(service, {**usual, "preInstalledSw": "SQL Std"}, usd * 2)
                yield product(
                    service, {**usual, "capacitystatus": "UnusedCapacityReservation"}, usd
                )
                yield product(service, {**usual, "marketoption": "CapacityBlock"}, usd / 2)
        if service == "AmazonSageMaker":
            for i, ((name, region), usd) in enumerate(self.training.items()):
                usual = {"instanceName": name, "regionCode": region}
                key = ("component", "platoinstancetype")[i % 2]  # the list has either
                yield product(service, {**usual, key: "Training"}, usd)
                yield product(service, {**usual, key: "Hosting"}, usd * 1.2)
                yield product(service, usual, usd * 1.3)

    def _ec2(self, form: dict[str, str], region: str) -> Answer:
        action, version = form.pop("Action"), form.pop("Version")
        given: dict[str, Any] = {"StartTime": form.pop("StartTime")}
        for name, value in form.items():
            word, _, number = name.partition(".")
            renamed = {"InstanceType": "InstanceTypes", "ProductDescription": "ProductDescriptions"}
            if number:
                given.setdefault(renamed[word], []).append(value)
            else:
                given[word] = value
        if version != "2016-11-15" or action != "DescribeSpotPriceHistory":
            raise Refused(400, "InvalidAction", action)
        _check("ec2", action, given)
        if given["ProductDescriptions"] != ["Linux/UNIX"]:
            raise Refused(400, "InvalidParameterValue", str(given))
        rows = [
            f"<item><instanceType>{name}</instanceType><productDescription>Linux/UNIX"
            f"</productDescription><spotPrice>{usd:.6f}</spotPrice><timestamp>{at}</timestamp>"
            f"<availabilityZone>{zone}</availabilityZone></item>"
            for name, zone, usd, at in self.spot
            if name in given["InstanceTypes"] and zone.startswith(region)
        ]
        page, token = _page(rows, int(given.get("NextToken", 0)))
        text = f"<nextToken>{escape(token.get('NextToken', ''))}</nextToken>"
        body = f"<spotPriceHistorySet>{''.join(page)}</spotPriceHistorySet>{text}"
        answer = f"<DescribeSpotPriceHistoryResponse>{body}</DescribeSpotPriceHistoryResponse>"
        return Answer(200, answer.encode(), {"Content-Type": "text/xml"})

    # Google

    def _google(self, asked: Asked) -> Answer:
        if asked.method != "GET" or asked.path != "/v1/services/6F81-5844-456A/skus":
            raise Refused(404, "NOT_FOUND", str(asked))
        if asked.headers.get("x-goog-api-key") != KEY:
            raise Refused(400, "API_KEY_INVALID", "API key not valid")
        if not 0 < int(asked.query.get("pageSize", 1)) <= 5_000:
            raise Refused(400, "INVALID_ARGUMENT", "pageSize")
        skus = [*self.more]
        for (description, region), usd in self.parts.items():
            skus.append(sku(description, region, usd))
            base = re.sub("^Spot Preemptible | attached to Spot .*", "", description)
            skus.append(sku(f"Commitment v1: {base}", region, usd / 2, "Commit1Yr"))
            skus.append(sku(f"{base} Reserved", region, usd / 3))
        page, token = _page(skus, int(asked.query.get("pageToken", 0)))
        return Answer(200, {"skus": page, "nextPageToken": token.get("NextToken", "")})

    # Azure

    def _azure(self, asked: Asked) -> Answer:
        if asked.method != "GET" or asked.path != "/api/retail/prices":
            raise Refused(404, "NotFound", str(asked))
        if asked.query.get("currencyCode") != "USD":
            raise Refused(400, "BadRequest", "currency")
        rows = [row for row in self._items() if _fits(row, asked.query["$filter"])]
        page, token = _page(rows, int(asked.query.get("$skip", 0)))
        following = None
        if token:
            more = "&".join(f"{n}={v}" for n, v in asked.query.items() if n != "$skip")
            following = f"https://{AZURE}/api/retail/prices?{more}&$skip={token['NextToken']}"
            following = following.replace(" ", "%20").replace("'", "%27")
        return Answer(200, {"Items": page, "NextPageLink": following, "Count": len(page)})

    def _items(self) -> Iterator[dict[str, Any]]:
        yield from self.more
        for (name, region), (usual, spot) in self.azure.items():
            if usual is not None:
                yield item(name, region, usual)
                yield item(name, region, usual * 0.9, effectiveStartDate="2024-01-01T00:00:00Z")
                yield item(name, region, usual * 0.8, effectiveStartDate="2999-01-01T00:00:00Z")
                yield item(name, region, usual * 1.1, productName="Virtual Machines Windows")
                yield item(name, region, usual * 0.4, kind=" Low Priority")
                yield item(name, region, usual * 700, type="Reservation", reservationTerm="1 Year")
                yield item(name, region, usual * 500, unitOfMeasure="1/Month")
                yield item(name, region, usual, serviceName="Cloud Services")
                yield item(name, region, usual * 1.2, productName="Series Cloud Services")
                yield item(name, region, usual * 0.7, kind="/Expired")
            if spot is not None:
                yield item(name, region, spot, kind=" Spot")
                yield item(name, region, spot * 1.1, kind=" Spot", productName="X Windows")


def product(service: str, attributes: dict[str, str], usd: float, unit: str = "Hrs") -> Any:
    """A row of the Price List, with a reservation beside the price on demand."""
    dimension = {"unit": unit, "pricePerUnit": {"USD": f"{usd:.10f}"}, "description": "an hour"}
    reserved = {"unit": "Quantity", "pricePerUnit": {"USD": "9"}}
    return {
        "product": {"sku": "S", "productFamily": "Compute", "attributes": attributes},
        "serviceCode": service,
        "terms": {
            "OnDemand": {"S.J": {"priceDimensions": {"S.J.6": dimension}, "effectiveDate": _AT}},
            "Reserved": {"S.R": {"priceDimensions": {"S.R.2": reserved}}},
        },
    }


def sku(description: str, region: str, usd: float, usage: str = "", unit: str = "") -> Any:
    """A row of the Cloud Billing Catalog. `usage` is Preemptible where the description has it so."""
    spot = "Preemptible" if "Spot Preemptible" in description else "OnDemand"
    units, nanos = divmod(round(usd * 1e9), 10**9)
    free = {"startUsageAmount": 0, "unitPrice": {"currencyCode": "USD", "units": "0", "nanos": 0}}
    paid = {"currencyCode": "USD", "units": str(units), "nanos": nanos}
    return {
        "name": "services/6F81-5844-456A/skus/X",
        "skuId": "X",
        "description": f"{description} running in Somewhere",
        "category": {
            "serviceDisplayName": "Compute Engine",
            "resourceFamily": "Compute",
            "resourceGroup": "GPU",
            "usageType": usage or spot,
        },
        "serviceRegions": [region],
        "pricingInfo": [
            {
                "pricingExpression": {
                    "usageUnit": unit or ("GiBy.h" if "Ram" in description else "h"),
                    "tieredRates": [free, {"startUsageAmount": 1, "unitPrice": paid}],
                }
            }
        ],
    }


def item(name: str, region: str, usd: float, kind: str = "", **changes: Any) -> dict[str, Any]:
    """A row of the Retail Prices API."""
    short = name.removeprefix("Standard_").replace("_", "")
    row = {
        "currencyCode": "USD",
        "retailPrice": usd,
        "unitPrice": usd,
        "armRegionName": region,
        "effectiveStartDate": "2025-06-01T00:00:00Z",
        "meterName": f"{short}{kind}",
        "productName": "Virtual Machines Series",
        "skuName": f"{short}{kind}",
        "serviceName": "Virtual Machines",
        "unitOfMeasure": "1 Hour",
        "type": "Consumption",
        "armSkuName": name,
    }
    return {**row, **changes}


def _page(rows: list[Any], begin: int) -> tuple[list[Any], dict[str, str]]:
    end = begin + _A_PAGE
    return rows[begin:end], ({"NextToken": str(end)} if end < len(rows) else {})


def _check(service: str, operation: str, given: dict[str, Any]) -> None:
    model = _SESSION.get_service_model(service)
    if operation not in model.operation_names:
        raise Refused(400, "UnknownOperationException", operation)
    report = ParamValidator().validate(given, model.operation_model(operation).input_shape)
    if report.has_errors():
        raise Refused(400, "ValidationException", report.generate_report())


def _passes(row: dict[str, Any], filters: Any) -> bool:
    attributes = row["product"]["attributes"]
    for one in filters:
        has, kind, value = attributes.get(one["Field"]), one["Type"], one["Value"]
        if kind not in ("TERM_MATCH", "ANY_OF") or len(value) > 1_024:
            raise Refused(400, "InvalidParameterException", str(one))
        if has not in (value.split(",") if kind == "ANY_OF" else [value]):
            return False
    return True


def _fits(row: dict[str, Any], wanted: str) -> bool:
    """OData's filters, as far as they are used; values are case-sensitive."""
    plain = r"(?:\w+ eq '[^']*')"
    if not re.fullmatch(rf"{plain}(?: and (?:{plain}|\({plain}(?: or {plain})*\)))*", wanted):
        raise Refused(400, "BadRequest", f"Invalid OData parameters supplied: {wanted}")
    allowed: dict[str, set[str]] = {}
    for name, value in re.findall(r"(\w+) eq '([^']*)'", wanted):
        allowed.setdefault({"priceType": "type"}.get(name, name), set()).add(value)
    return all(row[name] in values for name, values in allowed.items())


def _raise(error: Exception) -> Any:
    raise error
