"""A deployment on SageMaker: an endpoint with a production variant for each version.

A version is a model and the variant of the same name; weights share requests among
variants. Each set of variants is a configuration, named by its content. No call takes a
token: names are the idempotency, and what has one of ours has to carry our tag. An update
that fails ends in service with the configuration before and maybe without a reason, so
the configuration is read back.

Authority: botocore's models;
docs.aws.amazon.com/sagemaker/latest/dg/monitoring-cloudwatch.html. No account has been
asked."""

import contextlib
import datetime
import email.utils
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard

from rekindle.catalog.prices import per_day
from rekindle.errors import PlatformError, RequestError, StepError
from rekindle.platforms.ownership import OwnerMark
from rekindle.platforms.polling import polls
from rekindle.platforms.sagemaker.client import Client, where
from rekindle.platforms.sagemaker.doctor import Account
from rekindle.platforms.sagemaker.section import SageMakerSpec
from rekindle.platforms.submission import digest_of, plain_name
from rekindle.protojson import Json
from rekindle.serve.messages import ServedModel, Traffic
from rekindle.serve.staging import stage
from rekindle.spec.deploy import DeploySpec

SETTLED_SECONDS = 3_600.0
LATE_SECONDS = 60  # until CloudWatch has a minute
_TAG = "rekindle"  # names the model that a resource belongs to
_SPLIT_TAG = "rekindle-split"  # number and time of the last split
_BUSY = ("Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting")
_STATES = {"Creating": "starting", "Deleting": "stopping", "Failed": "failed"}
# the service has no codes for these, so its messages are looked at
_MISSING = "Could not find"
_NO_GROUP = "does not exist"
_CONFLICTS = (_MISSING, "Cannot create already existing", "Cannot update in-progress")
_TRIES = 6
_LOG_LINES = 50
_LOG_CHARACTERS = 1_000
_METRICS = (
    "Invocations",
    "Invocation5XXErrors",
    "InvocationModelErrors",
    "Invocation4XXErrors",
)


class SageMakerEndpoint:
    """The deployment of `model`; see `rekindle.serve.rollout.Endpoint`."""

    poll_seconds = 15.0

    def __init__(self, place: SageMakerSpec, deploy: DeploySpec, model: str) -> None:
        self.place = place
        self.deploy = deploy
        self.mark = OwnerMark("tag", _TAG, model)
        self.account = Account(place, {})
        self.name = plain_name(model, r"[^a-zA-Z0-9]+", 40, distinct=True)
        host = f"https://runtime.sagemaker.{place.region}.amazonaws.com"
        self.address = f"{host}/endpoints/{self.name}/invocations"
        self.machine = deploy.machine or place.machine

    def usd_per_day(self) -> tuple[str, float | None]:
        return per_day(self.machine, self.place.region, self.deploy.replicas)

    def standing(self) -> Mapping[str, tuple[str, int]]:
        with self.account.client("sagemaker") as sagemaker:
            endpoint = self._describe_ours(sagemaker, "endpoint", self.name)
        if endpoint is None:
            return {}
        state = _STATES.get(endpoint["EndpointStatus"], "ready")
        weights = _weights(endpoint)
        total = sum(weights.values()) or 1  # all weights may be 0
        return {
            _version_of(variant): (state, round(100 * weight / total))
            for variant, weight in weights.items()
        }

    def create(self, model: ServedModel, number: int) -> None:
        """See `Endpoint.create`.
        Without another version it has all the weight at once."""
        self._image()  # refuses before anything is asked
        variant = self._variant_of(model)
        with self.account.client("sagemaker") as sagemaker:
            endpoint = self._settled(sagemaker)
            if endpoint and endpoint["EndpointStatus"] == "Failed":  # it can only be deleted
                self.delete()
                endpoint = None
            weights = _weights(endpoint)
            if variant in weights:
                return
            self._delete_unused(sagemaker, endpoint)  # an attempt before may have had another image
            body = self._model_body(model)
            # the first version gets all requests at once, a later one none before `split`
            weights[variant] = 0.0 if weights else 100.0
            try:
                self._set_variants(
                    sagemaker,
                    endpoint,
                    weights,
                    before=lambda: self._create_missing(sagemaker, "model", variant, body),
                )
            except StepError as error:
                message = f"version {model.version} did not become ready: {error.problems[0].what}"
                raise StepError(f"{message}{self._log_end(variant)}", where=self.name) from None
            self._set_weights(sagemaker, weights)

    def ask(self, model: ServedModel, body: dict[str, Any]) -> Any:
        with self.account.client("sagemaker-runtime") as runtime:
            try:
                response = runtime.invoke_endpoint(
                    EndpointName=self.name,
                    TargetVariant=self._variant_of(model),
                    ContentType="application/json",
                    Body=json.dumps(body),
                )
                return json.load(response["Body"])
            except runtime.exceptions.ModelError as error:
                raise StepError(f"smoke: {error}", where=self.address) from None

    def split(self, shares: Mapping[str, int], number: int) -> None:
        with self.account.client("sagemaker") as sagemaker:
            variants = {v: _version_of(v) for v in _weights(self._settled(sagemaker))}
            missing = shares.keys() - set(variants.values())
            if missing:
                message = f"version {', '.join(missing)} does not run any more"
                raise StepError(message, where=self.name, fix="deploy it again")
            weights = {v: float(shares.get(version, 0)) for v, version in variants.items()}
            endpoint = self._set_weights(sagemaker, weights)
            # the same split, repeated, does not count from zero
            if endpoint["tags"].get(_SPLIT_TAG, "").split(" ")[0] != str(number):
                tag = {"Key": _SPLIT_TAG, "Value": f"{number} {_answered_at(endpoint)}"}
                sagemaker.add_tags(ResourceArn=endpoint["EndpointArn"], Tags=[tag])

    def observe(self) -> Mapping[str, Traffic]:
        """See `Endpoint.observe`:
        whole minutes of which CloudWatch has requests and errors."""
        with self.account.client("sagemaker") as sagemaker:
            endpoint = self._describe_ours(sagemaker, "endpoint", self.name)
        if endpoint is None or not endpoint["tags"].get(_SPLIT_TAG):
            return {}  # nothing is counted before the first split
        split_at = int(endpoint["tags"][_SPLIT_TAG].split(" ")[1])
        begin_minute = -(-split_at // 60)  # the first whole one
        end_minute = (_answered_at(endpoint) - LATE_SECONDS) // 60
        if end_minute <= begin_minute:
            return {}
        with self.account.client("cloudwatch") as cloudwatch:
            return {
                _version_of(variant): self._traffic(cloudwatch, variant, begin_minute, end_minute)
                for variant in _weights(endpoint)
            }

    def _traffic(
        self, cloudwatch: Client, variant: str, begin_minute: int, end_minute: int
    ) -> Traffic:
        """The requests of a variant in the minutes of 1970 from `begin_minute` to
        `end_minute`."""
        invocations, server_errors, model_errors, client_errors = (
            self._sums(cloudwatch, variant, metric, begin_minute, end_minute) for metric in _METRICS
        )
        requests = 0.0
        errors = 0.0
        refused = 0.0
        for minute in invocations.keys() & server_errors.keys():
            requests += invocations[minute]
            # the metric has one sum for all of 4xx, a full queue (429) included
            refused_then = client_errors.get(minute, 0)
            refused += refused_then
            errors += max(server_errors[minute], model_errors.get(minute, 0) - refused_then)
        return Traffic(int(requests), int(errors), (), refused=int(refused))

    def retain(self, versions: set[str], number: int) -> None:
        with self.account.client("sagemaker") as sagemaker:
            endpoint = self._settled(sagemaker)
            weights = _weights(endpoint)
            retained = {v: weight for v, weight in weights.items() if _version_of(v) in versions}
            if retained != weights:
                endpoint = self._set_variants(sagemaker, endpoint, retained)
            self._delete_unused(sagemaker, endpoint)

    def delete(self) -> None:
        with self.account.client("sagemaker") as sagemaker:
            self._act_until(
                sagemaker,
                is_done=lambda endpoint: endpoint is None,
                act=lambda endpoint: sagemaker.delete_endpoint(EndpointName=self.name),
            )
            self._delete_unused(sagemaker, None)

    def publish(self, model: ServedModel, lineage: Mapping[str, str]) -> str:
        """See `Publisher.publish`: of the packages of a group, the champion's alone is
        approved, so that what deploys the newest approved one deploys it."""
        group = self.name
        title = f"version {model.version}, {model.digest}"
        with self.account.client("sagemaker") as sagemaker:
            self._create_missing(sagemaker, "model_package_group", group, {})
            pages = sagemaker.get_paginator("list_model_packages")
            packages = []
            for listed in pages.paginate(ModelPackageGroupName=group):
                packages += listed["ModelPackageSummaryList"]
            arn = _arn_of_package(packages, title)
            if arn is None:
                request = self._package_request(model, group, title, lineage)
                arn = str(sagemaker.create_model_package(**request)["ModelPackageArn"])
            states = {p["ModelPackageArn"]: p["ModelApprovalStatus"] for p in packages}
            changes = {}
            # this one is approved before another loses that
            if states.get(arn, "Approved") != "Approved":
                changes[arn] = "Approved"
            for other_arn, state in states.items():
                if other_arn != arn and state == "Approved":
                    changes[other_arn] = "PendingManualApproval"
            for changed_arn, state in changes.items():
                sagemaker.update_model_package(
                    ModelPackageArn=changed_arn,
                    ModelApprovalStatus=state,
                    ApprovalDescription=f"version {model.version} is the champion",
                )
        return arn

    def _package_request(
        self, model: ServedModel, group: str, title: str, lineage: Mapping[str, str]
    ) -> Json:
        """The request for a package of the registry, which is approved."""
        properties = {}
        for key, value in lineage.items():
            plain = re.sub(r"[^\w\s.:/=+@-]", " ", value)[:256]  # what the service takes
            if plain:
                properties[key] = plain
        return {
            "ModelPackageGroupName": group,
            "ModelPackageDescription": title,
            "ModelApprovalStatus": "Approved",
            "InferenceSpecification": {
                "Containers": [self._container(model)],
                "SupportedContentTypes": ["application/json"],
                "SupportedResponseMIMETypes": ["application/json"],
            },
            "CustomerMetadataProperties": properties,
            "ClientToken": f"{model.version}-{model.digest[:20]}",
        }

    def _model_body(self, model: ServedModel) -> Json:
        """What CreateModel takes beside name and tags, once the version's files are in
        S3."""
        body: Json = {
            "PrimaryContainer": self._container(model),
            "ExecutionRoleArn": self.place.role_arn,
        }
        if self.place.subnets:
            body["VpcConfig"] = {
                "Subnets": self.place.subnets,
                "SecurityGroupIds": self.place.security_groups,
            }
        return body

    def _container(self, model: ServedModel) -> Json:
        """The container of a version; uploads the version's files to S3."""
        uri = f"{stage(model, self.place.artifact_root)}/"
        source = {"S3DataType": "S3Prefix", "CompressionType": "None", "S3Uri": uri}
        return {"Image": self._image(), "ModelDataSource": {"S3DataSource": source}}

    def _image(self) -> str:
        if not self.place.image:
            raise RequestError(
                "a version needs an image",
                where="platforms.sagemaker.image",
                fix="name one of rekindle in ECR, by its digest",
            )
        return self.place.image

    def _variant_of(self, model: ServedModel) -> str:
        return f"{self.name}-{model.deployed_name}"

    def _describe_ours(self, sagemaker: Client, kind: str, name: str) -> Json | None:
        """A resource with its `tags`;
        None where there is none, RequestError if it is not ours."""
        noun = _noun(kind)
        try:
            resource: Json = getattr(sagemaker, f"describe_{kind}")(**{f"{noun}Name": name})
            pages = sagemaker.get_paginator("list_tags").paginate(
                ResourceArn=resource[f"{noun}Arn"]
            )
            resource["tags"] = {tag["Key"]: tag["Value"] for page in pages for tag in page["Tags"]}
        except sagemaker.exceptions.ClientError as error:
            if _MISSING in str(error) or _NO_GROUP in str(error):
                return None
            raise
        self.mark.check(f"{noun} {name}", resource["tags"], where(self.place))
        return resource

    def _create_missing(
        self, sagemaker: Client, kind: str, name: str, body: Mapping[str, Any]
    ) -> None:
        """Create a resource with our tag, unless it is there."""
        if self._describe_ours(sagemaker, kind, name) is None:
            tags = {**self.place.tags, **self.mark.tags}
            listed = [{"Key": key, "Value": value} for key, value in tags.items()]
            create = getattr(sagemaker, f"create_{kind}")
            create(**{f"{_noun(kind)}Name": name}, **body, Tags=listed)

    def _settled(self, sagemaker: Client) -> Json | None:
        """The endpoint once nothing changes it; None where there is none."""
        status = ""
        for _ in polls(SETTLED_SECONDS, self.poll_seconds):
            endpoint = self._describe_ours(sagemaker, "endpoint", self.name)
            if endpoint is None:
                return None
            status = endpoint["EndpointStatus"]
            if status not in _BUSY:
                return endpoint
        raise StepError(f"it is {status} for {SETTLED_SECONDS:.0f} s", where=self.name)

    def _act_until(
        self,
        sagemaker: Client,
        is_done: Callable[[Json | None], bool],
        act: Callable[[Json | None], object],
    ) -> Json | None:
        """The endpoint once `is_done`: acts until that is accepted, which it is not while
        what it needs does not show up or something else goes on. Raises StepError."""
        reason = ""
        is_accepted = False
        for _ in range(_TRIES):
            endpoint = self._settled(sagemaker)
            if is_done(endpoint):
                return endpoint
            if is_accepted:
                # it has settled since, on something else
                reason = (endpoint or {}).get("FailureReason", "SageMaker does not say why")
                break
            try:
                act(endpoint)
                is_accepted = True
            except sagemaker.exceptions.ClientError as error:
                reason = str(error)
                if not any(conflict in reason for conflict in _CONFLICTS):
                    raise
                time.sleep(self.poll_seconds)
        raise StepError(reason, where=self.name)

    def _set_variants(
        self,
        sagemaker: Client,
        endpoint: Json | None,
        weights: Mapping[str, float],
        before: Callable[[], object] = lambda: None,
    ) -> Json | None:
        """The endpoint once it has these variants and no others;
        `before` runs before each try."""
        body = self._config_body(sagemaker, endpoint, weights)
        # a configuration cannot be changed, so that its name says what is in it
        content = digest_of({"": json.dumps(body, sort_keys=True).encode()}, length=8)
        config_name = f"{self.name}-c-{content}"
        config = {"EndpointConfigName": config_name}

        def act(endpoint: Json | None) -> None:
            before()
            self._create_missing(sagemaker, "endpoint_config", config_name, body)
            if endpoint is None:
                self._create_missing(sagemaker, "endpoint", self.name, config)
            else:
                # what autoscaling has set stays
                sagemaker.update_endpoint(
                    EndpointName=self.name, **config, RetainAllVariantProperties=True
                )

        # an update that fails ends in service with the configuration before
        return self._act_until(
            sagemaker,
            lambda now: _in_service(now) and now.get("EndpointConfigName") == config_name,
            act,
        )

    def _config_body(
        self, sagemaker: Client, endpoint: Json | None, weights: Mapping[str, float]
    ) -> Json:
        """A configuration with these variants; those that the endpoint has stay as they
        are, but for their weights."""
        existing = {}
        if endpoint:
            name = endpoint["EndpointConfigName"]
            config = sagemaker.describe_endpoint_config(EndpointConfigName=name)
            for variant in config.get("ProductionVariants", ()):
                existing[variant["VariantName"]] = variant
        new = {
            "InstanceType": self.machine,
            "InitialInstanceCount": self.deploy.replicas,
            "ContainerStartupHealthCheckTimeoutInSeconds": 900,
        }
        variants = []
        for name, weight in sorted(weights.items()):
            variant = {"VariantName": name, "ModelName": name, **existing.get(name, new)}
            variant["InitialVariantWeight"] = weight
            variants.append(variant)
        body: Json = {"ProductionVariants": variants}
        if self.place.kms_key:
            body["KmsKeyId"] = self.place.kms_key
        return body

    def _set_weights(self, sagemaker: Client, weights: Mapping[str, float]) -> Json:
        """The endpoint once its variants have these weights."""
        desired = [{"VariantName": v, "DesiredWeight": weight} for v, weight in weights.items()]
        endpoint = self._act_until(
            sagemaker,
            lambda now: _in_service(now) and _weights(now) == weights,
            lambda now: sagemaker.update_endpoint_weights_and_capacities(
                EndpointName=self.name, DesiredWeightsAndCapacities=desired
            ),
        )
        assert endpoint is not None  # it is in service
        return endpoint

    def _delete_unused(self, sagemaker: Client, endpoint: Json | None) -> None:
        """Delete our models and configurations that the endpoint does not have."""
        used = {endpoint["EndpointConfigName"], *_weights(endpoint)} if endpoint else set()
        for kind in ("endpoint_config", "model"):
            noun = _noun(kind)
            pages = sagemaker.get_paginator(f"list_{kind}s").paginate(NameContains=self.name)
            names = {resource[f"{noun}Name"] for page in pages for resource in page[f"{noun}s"]}
            for name in names - used:
                with contextlib.suppress(RequestError):  # foreign ones stay
                    self._delete_ours(sagemaker, kind, name)

    def _delete_ours(self, sagemaker: Client, kind: str, name: str) -> None:
        """Delete a resource, if it is there; RequestError if it is not ours."""
        if self._describe_ours(sagemaker, kind, name) is None:
            return
        try:
            getattr(sagemaker, f"delete_{kind}")(**{f"{_noun(kind)}Name": name})
        except sagemaker.exceptions.ClientError:
            # it is gone if only the answer to a first try was lost
            if self._describe_ours(sagemaker, kind, name):
                raise

    def _sums(
        self,
        cloudwatch: Client,
        variant: str,
        metric: str,
        begin_minute: int,
        end_minute: int,
    ) -> dict[datetime.datetime, float]:
        """A metric in the minutes of 1970 from `begin_minute` to `end_minute`, by the
        time at which a period begins; the service gives at most 1,440 periods."""
        period_minutes = -(-(end_minute - begin_minute) // 1_440)
        statistics = cloudwatch.get_metric_statistics(
            Namespace="AWS/SageMaker",
            MetricName=metric,
            Statistics=["Sum"],
            Dimensions=[
                {"Name": "EndpointName", "Value": self.name},
                {"Name": "VariantName", "Value": variant},
            ],
            Period=60 * period_minutes,
            StartTime=datetime.datetime.fromtimestamp(60 * begin_minute, datetime.UTC),
            EndTime=datetime.datetime.fromtimestamp(60 * end_minute, datetime.UTC),
        )
        return {point["Timestamp"]: point["Sum"] for point in statistics["Datapoints"]}

    def _log_end(self, variant: str) -> str:
        """The end of what the variant's container printed;
        "" where that cannot be read."""
        group = f"/aws/sagemaker/Endpoints/{self.name}"
        with contextlib.suppress(PlatformError), self.account.client("logs") as logs:
            streams = logs.describe_log_streams(
                logGroupName=group, logStreamNamePrefix=f"{variant}/"
            )["logStreams"]
            if not streams:  # its container has not begun
                return ""
            newest = max(streams, key=lambda stream: stream.get("lastEventTimestamp", 0))
            events = logs.get_log_events(
                logGroupName=group,
                logStreamName=newest["logStreamName"],
                limit=_LOG_LINES,
            )["events"]
            text = "\n".join(event["message"] for event in events)
            return f"; the end of its log:\n{text[-_LOG_CHARACTERS:]}"
        return ""


def _arn_of_package(packages: Iterable[Json], title: str) -> str | None:
    """The ARN of the first package with this description."""
    for package in packages:
        if package.get("ModelPackageDescription") == title:
            return str(package["ModelPackageArn"])
    return None


def _noun(kind: str) -> str:
    """The name of a kind of resource in requests: `endpoint_config` is EndpointConfig."""
    return kind.title().replace("_", "")


def _weights(endpoint: Json | None) -> dict[str, float]:
    """The weight of each variant."""
    if endpoint is None:
        return {}
    variants = endpoint.get("ProductionVariants", ())
    return {variant["VariantName"]: variant["CurrentWeight"] for variant in variants}


def _version_of(variant: str) -> str:
    """The version that a variant's name ends in: 7 of `tickets-v7-0123abcd`."""
    return variant.split("-")[-2][1:]


def _in_service(endpoint: Json | None) -> TypeGuard[Json]:
    return endpoint is not None and endpoint["EndpointStatus"] == "InService"


def _answered_at(endpoint: Json) -> int:
    """When the service answered this, in seconds of 1970 by its own clock."""
    date = endpoint["ResponseMetadata"]["HTTPHeaders"]["date"]
    return int(email.utils.parsedate_to_datetime(date).timestamp())
