"""SageMaker's endpoints over HTTP: models, configurations, endpoints that take several looks to change, requests to a
variant (InvokeEndpoint), tags, the log of a container that does not start, and CloudWatch's metrics of requests.

Requests are held against botocore's models. An update whose new variants never become ready ends InService with the
configuration before, and without a reason if `silent`; without RetainAllVariantProperties it resets weights and counts
(hashicorp/terraform-provider-aws#48997, #49069); it needs the configuration before (#40048), and is refused while another
goes on. A new configuration may show up late (CreateEndpoint's documentation). A container answers what the evidence in
S3 says, wrongly if its version is in `wrong`; or it is the server that `containers` names for the version. Time is the service's own: it passes with each look."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.servers import behind
from tests.servers.aws.rest import _PAGE, ACCOUNT, REGION, Account, Refused
from tests.servers.shadow import Answering
from tests.servers.troubles import Broken

_BUSY = ("Creating", "Updating", "Deleting")
_NOUNS = {
    "model": "Model",
    "endpoint-config": "EndpointConfig",
    "endpoint": "Endpoint",
    "model-package-group": "ModelPackageGroup",
}
_LATE = {
    "Invocations": 70,
    "Invocation5XXErrors": 260,
    "InvocationModelErrors": 260,
}  # seconds until a minute is there


class Hosting(Account):
    """An account with endpoints. Versions in `broken` never become ready; `fails` is the share of requests that a version
    fails, `dying` of those that get no answer; `quota` is the number of instances."""

    def __init__(self, s3: Any, pipelines: Any = None) -> None:
        super().__init__(s3, pipelines)
        self.things: dict[str, dict[str, dict[str, Any]]] = {kind: {} for kind in _NOUNS}
        self.broken: set[str] = set()
        self.wrong: set[str] = set()
        self.containers: dict[str, str] = {}
        self.answering = Answering()
        self.crashing: set[str] = set()
        self.fails: dict[str, float] = {}
        self.dying: dict[str, float] = {}
        self.history: list[tuple[float, dict[str, float]]] = []
        self.per_minute, self.ahead, self.quota = 2_000, 0.0, 20
        self.silent = self.late = False
        self.streams = 2  # of the log of each instance
        self.evidence: dict[str, Any] = {}
        self.packages: dict[str, dict[str, Any]] = {}
        for kind, noun in _NOUNS.items():
            for verb in ("create", "describe", "delete"):
                method = getattr(self, f"{verb}_{kind.replace('-', '_')}", None)
                self.operations[f"{verb.title()}{noun}"] = method or self.plain(verb, kind)
            self.operations[f"List{noun}s"] = self.lister(kind)
        self.operations |= {
            "UpdateEndpoint": self.update_endpoint,
            "ListTags": self.list_tags,
            "AddTags": self.add_tags,
            "UpdateEndpointWeightsAndCapacities": self.weigh,
            "GetLogEvents": self.of_endpoints("GetLogEvents", self.endpoint_events),
            "DescribeLogStreams": self.of_endpoints("DescribeLogStreams", self.endpoint_streams),
            "GetMetricStatistics": self.statistics,
            "ListModelPackages": self.list_packages,
            "CreateModelPackage": self.create_package,
            "UpdateModelPackage": self.update_package,
        }

    @property
    def clock(self) -> float:
        return time.time() + self.ahead

    @property
    def endpoint(self) -> dict[str, Any]:
        (found,) = self.things["endpoint"].values()
        return found

    def get(self, kind: str, name: str) -> dict[str, Any]:
        found = self.things[kind].get(name)
        if found is None:
            raise _invalid(f'Could not find {kind.replace("-", " ")} "{_arn(kind, name)}".')
        return found

    def add(self, kind: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        if name in self.things[kind]:
            what = f'{kind.replace("-", " ")} "{_arn(kind, name)}"'
            raise _invalid(f"Cannot create already existing {what}.")
        tags = {one["Key"]: one["Value"] for one in body.pop("Tags", ())}
        self.things[kind][name] = {
            "body": body,
            "tags": tags,
            "made": self.clock,
            "shown": not self.late,
        }
        return {f"{_NOUNS[kind]}Arn": _arn(kind, name)}

    def plain(self, verb: str, kind: str) -> Any:
        noun = _NOUNS[kind]

        def do(**given: Any) -> dict[str, Any]:
            name = given.pop(f"{noun}Name")
            if verb == "describe":
                found = self.get(kind, name)
                known = {f"{noun}Name": name, f"{noun}Arn": _arn(kind, name)}
                return {**found["body"], **known, "CreationTime": found["made"]}
            self.get(kind, name)
            if kind == "model":
                used = [v for one in self.things["endpoint"].values() for v in one["variants"]]
                if name in used:
                    raise _invalid(f"the test allows no deletion of {name}, which is in use")
            del self.things[kind][name]
            return {}

        return do

    def lister(self, kind: str) -> Any:
        noun = _NOUNS[kind]

        def list_(NameContains: str = "", NextToken: str = "0") -> dict[str, Any]:
            names = [name for name in sorted(self.things[kind]) if NameContains in name]
            begin = int(NextToken)
            shown = [
                {
                    f"{noun}Name": name,
                    f"{noun}Arn": _arn(kind, name),
                    "CreationTime": self.things[kind][name]["made"],
                }
                for name in names[begin : begin + _PAGE]
            ]
            more = {"NextToken": str(begin + _PAGE)} if begin + _PAGE < len(names) else {}
            return {f"{noun}s": shown, **more}

        return list_

    def create_model(self, ModelName: str, **body: Any) -> dict[str, Any]:
        uri = body["PrimaryContainer"]["ModelDataSource"]["S3DataSource"]["S3Uri"]
        if not uri.endswith("/"):
            raise _invalid("S3Uri of an S3Prefix has to end with a slash")
        return self.add("model", ModelName, body)

    def create_model_package_group(self, ModelPackageGroupName: str, **body: Any) -> dict[str, Any]:
        return self.add("model-package-group", ModelPackageGroupName, body)

    def describe_model_package_group(self, ModelPackageGroupName: str) -> dict[str, Any]:
        name = ModelPackageGroupName
        arn = _arn("model-package-group", name)
        if name not in self.things["model-package-group"]:
            raise _invalid(f"ModelPackageGroup {arn} does not exist.")
        known = {"ModelPackageGroupName": name, "ModelPackageGroupArn": arn, "CreatedBy": {}}
        return {**known, "ModelPackageGroupStatus": "Completed", "CreationTime": self.clock}

    def list_packages(self, ModelPackageGroupName: str, NextToken: str = "0") -> dict[str, Any]:
        """One a page, the newest first."""
        self.describe_model_package_group(ModelPackageGroupName)
        shown = (
            "ModelPackageArn",
            "ModelPackageGroupName",
            "ModelPackageVersion",
            "CreationTime",
            "ModelPackageStatus",
            "ModelApprovalStatus",
            "ModelPackageDescription",
        )
        mine = [one for one in self.packages.values() if one[shown[1]] == ModelPackageGroupName]
        begin = int(NextToken)
        page = mine[::-1][begin : begin + 1]
        found = [{key: one[key] for key in shown if key in one} for one in page]
        more = {"NextToken": str(begin + 1)} if begin + 1 < len(mine) else {}
        return {"ModelPackageSummaryList": found, **more}

    def create_package(
        self, ModelPackageGroupName: str, ClientToken: str, **body: Any
    ) -> dict[str, Any]:
        """Once a token; its files have to be there."""
        self.describe_model_package_group(ModelPackageGroupName)
        known = [arn for arn, one in self.packages.items() if one["token"] == ClientToken]
        if not known:
            (container,) = body["InferenceSpecification"]["Containers"]
            uri = container["ModelDataSource"]["S3DataSource"]["S3Uri"]
            bucket, _, prefix = uri.removeprefix("s3://").partition("/")
            if not self.s3.list_objects_v2(Bucket=bucket, Prefix=prefix)["KeyCount"]:
                raise _invalid(f"Could not find model data at {uri}.")
            number = len(self.packages) + 1
            arn = f"{_arn('model-package', ModelPackageGroupName)}/{number}"
            self.packages[arn] = {
                **body,
                "ModelPackageArn": arn,
                "ModelPackageGroupName": ModelPackageGroupName,
                "token": ClientToken,
                "ModelPackageVersion": number,
                "CreationTime": self.clock,
                "ModelPackageStatus": "Completed",
            }
            known = [arn]
        return {"ModelPackageArn": known[0]}

    def update_package(self, ModelPackageArn: str, **change: Any) -> dict[str, Any]:
        if ModelPackageArn not in self.packages:
            raise _invalid(f"ModelPackage {ModelPackageArn} does not exist.")
        self.packages[ModelPackageArn] |= change
        return {"ModelPackageArn": ModelPackageArn}

    def create_endpoint_config(self, EndpointConfigName: str, **body: Any) -> dict[str, Any]:
        for one in body["ProductionVariants"]:
            self.get("model", one["ModelName"])
        return self.add("endpoint-config", EndpointConfigName, body)

    def delete_endpoint_config(self, EndpointConfigName: str) -> dict[str, Any]:
        self.get("endpoint-config", EndpointConfigName)
        for one in self.things["endpoint"].values():
            if EndpointConfigName in (one["config"], one["next"]):
                raise _invalid(
                    f"the test allows no deletion of {EndpointConfigName}, which is in use"
                )
        del self.things["endpoint-config"][EndpointConfigName]
        return {}

    def config(self, name: str) -> list[dict[str, Any]]:
        found = self.get("endpoint-config", name)
        if not found["shown"]:
            found["shown"] = True
            raise _invalid(
                f'Could not find endpoint configuration "{_arn("endpoint-config", name)}".'
            )
        variants: list[dict[str, Any]] = found["body"]["ProductionVariants"]
        if sum(one["InitialInstanceCount"] for one in variants) > self.quota:
            what = "The account-level service limit 'ml.m5.xlarge for endpoint usage' is exceeded"
            raise Refused("ResourceLimitExceeded", what)
        return variants

    def create_endpoint(
        self, EndpointName: str, EndpointConfigName: str, Tags: Any
    ) -> dict[str, Any]:
        if EndpointName not in self.things["endpoint"]:
            self.config(EndpointConfigName)
        answer = self.add("endpoint", EndpointName, {"Tags": Tags})
        self.get("endpoint", EndpointName).update(
            config=EndpointConfigName,
            next=EndpointConfigName,
            status="Creating",
            looks=2,
            variants={},
            reason="",
            keep=False,
            modified=self.clock,
            weights={},
        )
        return answer

    def describe_endpoint(self, EndpointName: str) -> dict[str, Any]:
        found = self.get("endpoint", EndpointName)
        self.ahead += 5 if found["status"] in _BUSY else 150
        if found["status"] in _BUSY:
            found["looks"] -= 1
            if found["looks"] <= 0:
                self.arrive(EndpointName, found)
                found = self.get("endpoint", EndpointName)
        variants = [
            {
                "VariantName": name,
                "CurrentWeight": one["weight"],
                "DesiredWeight": one["weight"],
                "CurrentInstanceCount": one["count"],
                "DesiredInstanceCount": one["count"],
            }
            for name, one in found["variants"].items()
        ]
        return {
            "EndpointName": EndpointName,
            "EndpointArn": _arn("endpoint", EndpointName),
            "EndpointConfigName": found["config"],
            "EndpointStatus": found["status"],
            "CreationTime": found["made"],
            "LastModifiedTime": found["modified"],
            **({"ProductionVariants": variants} if variants else {}),
            **({"FailureReason": found["reason"]} if found["reason"] else {}),
        }

    def arrive(self, name: str, found: dict[str, Any]) -> None:
        """What the endpoint was asked for is there, or cannot be."""
        if found["status"] == "Deleting":
            del self.things["endpoint"][name]
            return
        wanted = self.get("endpoint-config", found["next"])["body"]["ProductionVariants"]
        bad = [one["VariantName"] for one in wanted if _version(one["VariantName"]) in self.broken]
        fresh = found["status"] == "Creating"
        found.update(status="InService", reason="", modified=self.clock)
        if found["weights"]:
            for variant, weight in found.pop("weights").items():
                found["variants"][variant]["weight"] = weight
        elif bad:
            reason = f"The primary container for production variant {bad[0]} did not pass the ping health check."
            found.update(reason="" if self.silent and not fresh else reason, next=found["config"])
            found["status"] = "Failed" if fresh else "InService"
        else:
            old = found["variants"] if found["keep"] else {}
            found["config"] = found["next"]
            found["variants"] = {
                one["VariantName"]: old.get(
                    one["VariantName"],
                    {"weight": one["InitialVariantWeight"], "count": one["InitialInstanceCount"]},
                )
                for one in wanted
            }
        found["weights"] = {}
        self.history.append(
            (self.clock, {v: one["weight"] for v, one in found["variants"].items()})
        )

    def idle(self, name: str) -> dict[str, Any]:
        found = self.get("endpoint", name)
        if found["status"] in _BUSY:
            raise _invalid(f'Cannot update in-progress endpoint "{_arn("endpoint", name)}".')
        return found

    def update_endpoint(
        self, EndpointName: str, EndpointConfigName: str, RetainAllVariantProperties: bool = False
    ) -> dict[str, Any]:
        found = self.idle(EndpointName)
        if found["status"] == "Failed":
            raise _invalid("a failed endpoint can only be deleted")
        self.get("endpoint-config", found["config"])
        self.config(EndpointConfigName)
        found.update(
            next=EndpointConfigName, status="Updating", looks=3, keep=RetainAllVariantProperties
        )
        return {"EndpointArn": _arn("endpoint", EndpointName)}

    def weigh(self, EndpointName: str, DesiredWeightsAndCapacities: Any) -> dict[str, Any]:
        found = self.idle(EndpointName)
        weights = {one["VariantName"]: one["DesiredWeight"] for one in DesiredWeightsAndCapacities}
        if not set(weights) <= set(found["variants"]) or not sum(weights.values()):
            raise _invalid(f"weights {weights} are not those of its variants")
        found.update(status="Updating", looks=2, weights=weights)
        return {"EndpointArn": _arn("endpoint", EndpointName)}

    def delete_endpoint(self, EndpointName: str) -> dict[str, Any]:
        self.idle(EndpointName).update(status="Deleting", looks=2)
        return {}

    def heaviest(self, name: str) -> str:
        """The variant with the largest share, which a request gets that names none."""
        variants = self.get("endpoint", name)["variants"]
        return max(variants, key=lambda variant: variants[variant]["weight"])

    def tags_of(self, arn: str) -> dict[str, str]:
        kind, _, name = arn.split(":")[-1].partition("/")
        tags: dict[str, str] = self.get(kind, name)["tags"]
        return tags

    def list_tags(self, ResourceArn: str) -> dict[str, Any]:
        return {"Tags": [{"Key": k, "Value": v} for k, v in self.tags_of(ResourceArn).items()]}

    def add_tags(self, ResourceArn: str, Tags: Any) -> dict[str, Any]:
        self.tags_of(ResourceArn).update({one["Key"]: one["Value"] for one in Tags})
        return {"Tags": Tags}

    def of_endpoints(self, call: str, ours: Any) -> Any:
        """Logs of endpoints, and of jobs as before."""
        theirs = self.operations[call]

        def do(logGroupName: str, **given: Any) -> dict[str, Any]:
            found = ours if logGroupName.startswith("/aws/sagemaker/Endpoints/") else theirs
            answer: dict[str, Any] = found(logGroupName=logGroupName, **given)
            return answer

        return do

    def endpoint_streams(self, logGroupName: str, logStreamNamePrefix: str) -> dict[str, Any]:
        if not any(logStreamNamePrefix.split("-")[-2] == f"v{version}" for version in self.broken):
            raise Refused("ResourceNotFoundException", "The specified log group does not exist.")
        names = [f"{logStreamNamePrefix}i-{i}" for i in range(self.streams)]
        return {
            "logStreams": [
                {"logStreamName": n, "lastEventTimestamp": i} for i, n in enumerate(names)
            ]
        }

    def endpoint_events(self, logGroupName: str, logStreamName: str, limit: int) -> dict[str, Any]:
        said = "error: the files of version 2 are not those that were judged"
        return {"events": [{"message": said if logStreamName.endswith("i-1") else "an older one"}]}

    def invoked(self, name: str, variant: str, body: Any) -> tuple[int, dict[str, Any], str]:
        """As `invoke`, with the faults of the test."""
        try:
            return self.met("InvokeEndpoint", lambda: self.invoke(name, variant, body))
        except Broken as broken:
            if broken.dropped():
                raise ConnectionError from None
            return broken.fault.status, {"Message": "as the test wants it"}, broken.fault.code

    def through(
        self, name: str, variant: str, body: bytes, headers: Any
    ) -> tuple[int, bytes, dict[str, str]]:
        """HTTP's status, the body and headers of what the container of a variant answers."""
        answer = behind.answered(f"{self.containers[_version(variant)]}/invocations", body, headers)
        if answer.status_code == 200:
            return 200, answer.content, {"Content-Type": answer.headers["content-type"]}
        whose = "client" if answer.status_code < 500 else "server"
        message = f'Received {whose} error ({answer.status_code}) from primary with message "{answer.text}"'
        error = {
            "Message": message,
            "OriginalStatusCode": answer.status_code,
            "OriginalMessage": answer.text,
        }
        return 424, json.dumps(error).encode(), {"x-amzn-ErrorType": "ModelError"}

    def invoke(
        self, name: str, variant: str, body: dict[str, Any]
    ) -> tuple[int, dict[str, Any], str]:
        """HTTP's status, the answer and the kind of error."""
        found = self.things["endpoint"].get(name)
        if found is None or variant not in found["variants"]:
            return (
                400,
                {"Message": f"variant {variant} of endpoint {name} not found"},
                "ValidationError",
            )
        if _version(variant) in self.crashing:
            message = 'Received server error (500) from primary with message "CUDA error"'
            return 424, {"Message": message, "OriginalStatusCode": 500}, "ModelError"
        model = self.things["model"][variant]["body"]["PrimaryContainer"]
        uri = model["ModelDataSource"]["S3DataSource"]["S3Uri"]
        if uri not in self.evidence:
            bucket, _, prefix = uri.removeprefix("s3://").partition("/")
            read = self.s3.get_object(Bucket=bucket, Key=f"{prefix}evidence.json")["Body"].read()
            self.evidence[uri] = json.loads(read)
        rows = self.evidence[uri]["smoke"]["rows"]
        answers = self.answering.answers(rows, body["instances"])
        if _version(variant) in self.wrong:
            answers = [{**one, "label": "low"} for one in answers]
        return 200, {"predictions": answers}, ""

    def statistics(self, **given: Any) -> dict[str, Any]:
        """CloudWatch's GetMetricStatistics."""
        metric, of = given["MetricName"], {one["Name"]: one["Value"] for one in given["Dimensions"]}
        assert (given["Namespace"], given["Statistics"]) == ("AWS/SageMaker", ["Sum"])
        begin, end = (int(given[key]) for key in ("StartTime", "EndTime"))
        if (end - begin) / given["Period"] > 1_440 or given["Period"] % 60:
            raise Refused("InvalidParameterCombination", "more than 1,440 data points")
        self.ahead += 60 * (metric == "Invocations")
        points = []
        for minute in range(begin, end, 60):
            weights = next((w for at, w in self.history[::-1] if at <= minute), {})
            share = weights.get(of["VariantName"], 0) / (sum(weights.values()) or 1)
            requests = round(share * self.per_minute)
            failed = round(requests * self.fails.get(_version(of["VariantName"]), 0))
            if requests and metric in _LATE and minute + 60 + _LATE[metric] <= self.clock:
                dead = round(requests * self.dying.get(_version(of["VariantName"]), 0))
                value = {"Invocations": requests, "Invocation5XXErrors": failed}.get(
                    metric, failed + dead
                )
                points.append({"Timestamp": minute, "Sum": float(value)})
        return {"Label": metric, "Datapoints": points[::-1]}  # in no order


@contextlib.contextmanager
def serving(account: Hosting) -> Iterator[str]:
    """The URL of a server that answers for the account."""

    class Handler(BaseHTTPRequestHandler):
        disable_nagle_algorithm = True
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["Content-Length"]))
            try:
                if target := self.headers["X-Amz-Target"]:
                    service, _, call = target.partition(".")
                    status, found = account.answer(service, call, json.loads(raw or b"{}"))
                    self.reply(
                        status,
                        json.dumps(found).encode(),
                        {"Content-Type": "application/x-amz-json-1.1"},
                    )
                else:
                    self.runtime(raw)
            except ConnectionError:
                self.close_connection = True

        def runtime(self, raw: bytes) -> None:
            name = self.path.split("/")[2]
            variant = self.headers["X-Amzn-SageMaker-Target-Variant"] or account.heaviest(name)
            invoked = {"x-Amzn-Invoked-Production-Variant": variant}
            if _version(variant) in account.containers:
                status, content, headers = account.through(name, variant, raw, self.headers)
                self.reply(status, content, {**headers, **invoked})
                return
            done = account.invoked(name, variant, json.loads(raw))
            headers = {**invoked, "Content-Type": "application/json"}
            headers |= {"x-amzn-ErrorType": done[2]} if done[2] else {}
            self.reply(done[0], json.dumps(done[1]).encode(), headers)

        def reply(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def date_time_string(self, timestamp: float | None = None) -> str:
            return formatdate(account.clock, usegmt=True)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def _version(variant: str) -> str:
    return variant.split("-")[-2].removeprefix("v")


def _arn(kind: str, name: str) -> str:
    return f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:{kind}/{name}"


def _invalid(message: str) -> Refused:
    return Refused("ValidationException", message)
