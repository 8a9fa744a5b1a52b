"""A deployment on SageMaker: an endpoint with a production variant for each version.

A version is a model and the variant of the same name; weights share requests among variants. Each
set of variants is a configuration, named by its content. No call takes a token: names are the
idempotency, and what has one of ours has to carry our tag. An update that fails ends in service
with the configuration before and maybe without a reason, so the configuration is read back.

Authority: botocore's models; docs.aws.amazon.com/sagemaker/latest/dg/monitoring-cloudwatch.html. No
account has been asked."""

import contextlib
import datetime
import email.utils
import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from rekindle.catalog.prices import per_day
from rekindle.errors import PlatformError, RequestError, StepError
from rekindle.platforms.sagemaker.client import where
from rekindle.platforms.sagemaker.doctor import Account
from rekindle.platforms.submission import digest_of, plain_name, problems_in, requests_in
from rekindle.serve.messages import ServedModel, Traffic
from rekindle.serve.staging import stage
from rekindle.spec.deploy import DeploySpec
from rekindle.spec.platforms import SageMakerSpec

SETTLED_SECONDS, LATE_SECONDS = 3_600.0, 60
_TAG, _SPLIT = "rekindle", "rekindle-split"  # whose it is; number and time of the last split
_BUSY = ("Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting")
_STATES = {"Creating": "starting", "Deleting": "stopping", "Failed": "failed"}
_MISSING, _NO_GROUP = "Could not find", "does not exist"
_CONFLICTS = (_MISSING, "Cannot create already existing", "Cannot update in-progress")
_TRIES, _LOG_LINES, _LOG_CHARACTERS = 6, 50, 1_000
_METRICS = ("Invocations", "Invocation5XXErrors", "InvocationModelErrors", "Invocation4XXErrors")
_problem, _request = problems_in(__file__), requests_in(__file__)


class SageMakerEndpoint:
    """The deployment of `model`; see `rekindle.serve.rollout.Endpoint`."""

    poll_seconds, sees_latency = 15.0, False

    def __init__(self, place: SageMakerSpec, deploy: DeploySpec, model: str) -> None:
        self.place, self.deploy, self.model, self.account = place, deploy, model, Account(place, {})
        self.name = plain_name(model, r"[^a-zA-Z0-9]+", 40, distinct=True)
        host = f"https://runtime.sagemaker.{place.region}.amazonaws.com"
        self.address = f"{host}/endpoints/{self.name}/invocations"
        self.machine = deploy.machine or place.machine

    def usd_per_day(self) -> tuple[str, float | None]:
        return per_day(self.machine, self.place.region, self.deploy.replicas)

    def standing(self) -> Mapping[str, tuple[str, int]]:
        with self.account.client("sagemaker") as api:
            found = self._ours(api, "endpoint", self.name)
        weights, state = _weights(found), _STATES.get(found and found["EndpointStatus"], "ready")
        total = sum(weights.values()) or 1
        return {_version(v): (state, round(100 * weight / total)) for v, weight in weights.items()}

    def create(self, model: ServedModel, number: int) -> None:
        """See `Endpoint.create`. Without another version it has all the weight at once."""
        self._image()
        place, variant = self.place, self._variant(model)
        with self.account.client("sagemaker") as api:
            found = self._settled(api)
            if found and found["EndpointStatus"] == "Failed":  # it can only be deleted
                self.delete()
                found = None
            if variant in (weights := _weights(found)):
                return
            self._clean(api, found)  # an attempt before may have had another image
            body = {"PrimaryContainer": self._served(model), "ExecutionRoleArn": place.role_arn}
            if place.subnets:
                inside = {"Subnets": place.subnets, "SecurityGroupIds": place.security_groups}
                body["VpcConfig"] = inside
            weights[variant] = 0.0 if weights else 100.0
            try:
                self._update(api, found, weights, lambda: self._make(api, "model", variant, body))
            except StepError as error:
                what = f"version {model.version} did not become ready: {error.problems[0].what}"
                raise StepError(f"{what}{self._log_end(variant)}", where=self.name) from None
            self._weigh(api, weights)

    def ask(self, model: ServedModel, body: dict[str, Any]) -> Any:
        with self.account.client("sagemaker-runtime") as api:
            try:
                return json.load(
                    api.invoke_endpoint(
                        EndpointName=self.name,
                        TargetVariant=self._variant(model),
                        ContentType="application/json",
                        Body=json.dumps(body),
                    )["Body"]
                )
            except api.exceptions.ModelError as error:
                raise StepError(f"smoke: {error}", where=self.address) from None

    def split(self, shares: Mapping[str, int], number: int) -> None:
        with self.account.client("sagemaker") as api:
            there = _weights(self._settled(api))
            if missing := shares.keys() - set(map(_version, there)):
                lost = ", ".join(missing)
                raise StepError([_problem("not_running", where=self.name, missing=lost)])
            found = self._weigh(api, {v: float(shares.get(_version(v), 0)) for v in there})
            if found["tags"].get(_SPLIT, "").split(" ")[0] != str(number):
                tag = {"Key": _SPLIT, "Value": f"{number} {_now(found)}"}
                api.add_tags(ResourceArn=found["EndpointArn"], Tags=[tag])

    def observe(self) -> Mapping[str, Traffic]:
        """See `Endpoint.observe`: whole minutes of which CloudWatch has requests and errors."""
        with self.account.client("sagemaker") as api:
            found = self._ours(api, "endpoint", self.name)
        if not found or not (since := found["tags"].get(_SPLIT)):
            return {}
        begin, end = -(-int(since.split(" ")[1]) // 60), (_now(found) - LATE_SECONDS) // 60
        traffic = {}
        with self.account.client("cloudwatch") as api:
            for variant in _weights(found) if end > begin else ():
                asked, failed, wrong, refused = (
                    self._sums(api, variant, metric, begin, end) for metric in _METRICS
                )
                sure = asked.keys() & failed.keys()
                requests = sum(asked[at] for at in sure)
                errors = (max(failed[at], wrong.get(at, 0) - refused.get(at, 0)) for at in sure)
                # the metric has one sum for all of 4xx, a full queue (429) included
                bad = int(sum(refused.get(at, 0) for at in sure))
                failures = int(sum(errors))
                traffic[_version(variant)] = Traffic(int(requests), failures, (), refused=bad)
        return traffic

    def retain(self, versions: set[str], number: int) -> None:
        with self.account.client("sagemaker") as api:
            weights = _weights(found := self._settled(api))
            kept = {v: weight for v, weight in weights.items() if _version(v) in versions}
            self._clean(api, self._update(api, found, kept) if kept != weights else found)

    def delete(self) -> None:
        with self.account.client("sagemaker") as api:
            self._reach(
                api,
                lambda now: now is None,
                lambda now: api.delete_endpoint(EndpointName=self.name),
            )
            self._clean(api, None)

    def publish(self, model: ServedModel, lineage: Mapping[str, str]) -> str:
        """See `Publisher.publish`: of the packages of a group, the champion's alone is approved, so
        that what deploys the newest approved one deploys it."""
        group, title = self.name, f"version {model.version}, {model.digest}"
        words = {k: re.sub(r"[^\w\s.:/=+@-]", " ", v)[:256] for k, v in lineage.items()}
        properties = {k: v for k, v in words.items() if v}
        with self.account.client("sagemaker") as api:
            self._make(api, "model_package_group", group, {})
            pages = api.get_paginator("list_model_packages").paginate(ModelPackageGroupName=group)
            there = [one for page in pages for one in page["ModelPackageSummaryList"]]
            states = {one["ModelPackageArn"]: one["ModelApprovalStatus"] for one in there}
            mine = [one for one in there if one.get("ModelPackageDescription") == title]
            arn: str = (
                mine[0]["ModelPackageArn"]
                if mine
                else api.create_model_package(
                    **_request(
                        "package",
                        group=group,
                        title=title,
                        served=self._served(model),
                        properties=properties,
                        token=f"{model.version}-{model.digest[:20]}",
                    )
                )["ModelPackageArn"]
            )
            changes = {} if states.get(arn, "Approved") == "Approved" else {arn: "Approved"}
            before = (one for one, state in states.items() if state == "Approved" and one != arn)
            for one, state in (changes | dict.fromkeys(before, "PendingManualApproval")).items():
                why = f"version {model.version} is the champion"
                change = {"ModelApprovalStatus": state, "ApprovalDescription": why}
                api.update_model_package(ModelPackageArn=one, **change)
        return arn

    def _served(self, model: ServedModel) -> dict[str, Any]:
        """The container of a version, once its files are in S3."""
        uri = f"{stage(model, self.place.artifact_root)}/"
        return _request("served", image=self._image(), uri=uri)

    def _image(self) -> str:
        if not self.place.image:
            raise RequestError([_problem("no_image")])
        return self.place.image

    def _variant(self, model: ServedModel) -> str:
        return f"{self.name}-v{model.version}-{model.digest[:8]}"

    def _ours(self, api: Any, kind: str, name: str) -> Any:
        """What is described, with its tags; None where there is none, RequestError if not ours."""
        noun = _noun(kind)
        try:
            found = getattr(api, f"describe_{kind}")(**{f"{noun}Name": name})
            pages = api.get_paginator("list_tags").paginate(ResourceArn=found[f"{noun}Arn"])
            found["tags"] = {one["Key"]: one["Value"] for page in pages for one in page["Tags"]}
        except api.exceptions.ClientError as error:
            if any(words in str(error) for words in (_MISSING, _NO_GROUP)):
                return None
            raise
        if found["tags"].get(_TAG) != self.model:
            about = {"noun": noun, "name": name, "tag": _TAG, "model": self.model}
            raise RequestError([_problem("foreign", where=where(self.place), **about)])
        return found

    def _make(self, api: Any, kind: str, name: str, body: Mapping[str, Any]) -> None:
        if self._ours(api, kind, name) is None:
            tags = {**self.place.tags, _TAG: self.model}
            listed = [{"Key": key, "Value": value} for key, value in tags.items()]
            getattr(api, f"create_{kind}")(**{f"{_noun(kind)}Name": name}, **body, Tags=listed)

    def _settled(self, api: Any) -> Any:
        """The endpoint once nothing changes it; None where there is none."""
        give_up = time.monotonic() + SETTLED_SECONDS
        while found := self._ours(api, "endpoint", self.name):
            if (status := found["EndpointStatus"]) not in _BUSY:
                break
            if time.monotonic() > give_up:
                raise StepError(f"it is {status} for {SETTLED_SECONDS:.0f} s", where=self.name)
            time.sleep(self.poll_seconds)
        return found

    def _reach(self, api: Any, done: Callable[[Any], bool], act: Callable[[Any], object]) -> Any:
        """The endpoint once it is as wanted: acts until that is accepted, which it is not while
        what it needs does not show up or something else goes on. Raises StepError."""
        reason, accepted = "", False
        for _ in range(_TRIES):
            if done(found := self._settled(api)):
                return found
            if accepted:
                reason = (found or {}).get("FailureReason", "SageMaker does not say why")
                break
            try:
                act(found)
                accepted = True
            except api.exceptions.ClientError as error:
                if not any(words in (reason := str(error)) for words in _CONFLICTS):
                    raise
                time.sleep(self.poll_seconds)
        raise StepError(reason, where=self.name)

    def _update(
        self,
        api: Any,
        found: Any,
        weights: Mapping[str, float],
        before: Callable[[], object] = lambda: None,
    ) -> Any:
        """The endpoint once it has these variants and no others."""
        name = found["EndpointConfigName"] if found else ""
        there = api.describe_endpoint_config(EndpointConfigName=name) if name else {}
        old = {one["VariantName"]: one for one in there.get("ProductionVariants", ())}
        new = _request("variant", machine=self.machine, count=self.deploy.replicas)
        variants = [
            {"VariantName": v, "ModelName": v, **old.get(v, new), "InitialVariantWeight": w}
            for v, w in sorted(weights.items())
        ]
        key = {"KmsKeyId": self.place.kms_key} if self.place.kms_key else {}
        body = {"ProductionVariants": variants, **key}
        content = digest_of({"": json.dumps(body, sort_keys=True).encode()}, length=8)
        config = {"EndpointConfigName": f"{self.name}-c-{content}"}

        def act(now: Any) -> None:
            before()
            self._make(api, "endpoint_config", config["EndpointConfigName"], body)
            if now is None:
                self._make(api, "endpoint", self.name, config)
            else:
                kept = {"RetainAllVariantProperties": True}
                api.update_endpoint(EndpointName=self.name, **config, **kept)

        return self._reach(api, lambda now: _serves(now) and config.items() <= now.items(), act)

    def _weigh(self, api: Any, weights: Mapping[str, float]) -> Any:
        """The endpoint once its variants have these weights."""
        wanted = [{"VariantName": v, "DesiredWeight": weight} for v, weight in weights.items()]
        return self._reach(
            api,
            lambda now: _serves(now) and _weights(now) == weights,
            lambda now: api.update_endpoint_weights_and_capacities(
                EndpointName=self.name, DesiredWeightsAndCapacities=wanted
            ),
        )

    def _clean(self, api: Any, found: Any) -> None:
        """Delete our models and configurations that the endpoint does not have."""
        kept = {found["EndpointConfigName"], *_weights(found)} if found else set()
        for kind in ("endpoint_config", "model"):
            noun = _noun(kind)
            pages = api.get_paginator(f"list_{kind}s").paginate(NameContains=self.name)
            for name in {one[f"{noun}Name"] for page in pages for one in page[f"{noun}s"]} - kept:
                with contextlib.suppress(RequestError):  # foreign ones stay
                    if self._ours(api, kind, name):
                        try:
                            getattr(api, f"delete_{kind}")(**{f"{noun}Name": name})
                        except api.exceptions.ClientError:
                            if self._ours(api, kind, name):
                                raise  # else the answer to the deletion was lost

    def _sums(self, api: Any, variant: str, metric: str, begin: int, end: int) -> dict[Any, float]:
        """A metric in the minutes of 1970 from `begin` to `end`; at most 1,440 parts of them."""
        of = {"EndpointName": self.name, "VariantName": variant}
        first, last = (datetime.datetime.fromtimestamp(60 * t, datetime.UTC) for t in (begin, end))
        seen = api.get_metric_statistics(
            Namespace="AWS/SageMaker",
            MetricName=metric,
            Statistics=["Sum"],
            Dimensions=[{"Name": name, "Value": value} for name, value in of.items()],
            Period=60 * -(-(end - begin) // 1_440),
            StartTime=first,
            EndTime=last,
        )
        return {one["Timestamp"]: one["Sum"] for one in seen["Datapoints"]}

    def _log_end(self, variant: str) -> str:
        """The end of what the variant's container printed; "" where that cannot be read."""
        group = f"/aws/sagemaker/Endpoints/{self.name}"
        with contextlib.suppress(PlatformError), self.account.client("logs") as api:
            named = {"logGroupName": group, "logStreamNamePrefix": f"{variant}/"}
            streams = api.describe_log_streams(**named)["logStreams"]
            if not streams:  # its container has not begun
                return ""
            newest = max(streams, key=lambda one: one.get("lastEventTimestamp", 0))
            stream = {"logGroupName": group, "logStreamName": newest["logStreamName"]}
            events = api.get_log_events(**stream, limit=_LOG_LINES)["events"]
            lines = [one["message"] for one in events]
            return "; the end of its log:\n" + "\n".join(lines)[-_LOG_CHARACTERS:]
        return ""


def _noun(kind: str) -> str:
    return kind.title().replace("_", "")


def _weights(found: Any) -> dict[str, float]:
    variants = (found or {}).get("ProductionVariants", ())
    return {one["VariantName"]: one["CurrentWeight"] for one in variants}


def _version(variant: str) -> str:
    return variant.split("-")[-2][1:]


def _serves(found: Any) -> bool:
    return bool(found and found["EndpointStatus"] == "InService")


def _now(found: Any) -> int:
    """When the service answered this, by its own clock."""
    date = found["ResponseMetadata"]["HTTPHeaders"]["date"]
    return int(email.utils.parsedate_to_datetime(date).timestamp())
