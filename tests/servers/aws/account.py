"""What an account on AWS says of itself, over HTTP: who asks (sts), buckets (s3), images (ecr), secrets
(secretsmanager). It answers questions only: whatever else is asked is refused and stands in `refused`,
and so is what does not fit botocore's model of the call.

Authority: botocore's models; the error codes of each service's API reference."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit
from xml.sax.saxutils import escape

import botocore.session
from botocore.validate import ParamValidator

ACCOUNT, REGION = "123456789012", "eu-central-1"
_SESSION = botocore.session.get_session()
_JSON = {"AmazonEC2ContainerRegistry_V20150921": "ecr", "secretsmanager": "secretsmanager"}
_QUERY = {"2011-06-15": "sts", "2010-05-08": "iam"}


class Refused(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


@dataclasses.dataclass
class Bucket:
    region: str = REGION
    shared: bool = True  # whether who asks may look at it


class Facts:
    """The account; tests change what it has. `errors` are answered in place of a call: HTTP's status
    and AWS's code."""

    def __init__(self) -> None:
        self.account = ACCOUNT
        self.buckets = {"bucket": Bucket()}
        self.images: dict[str, list[str]] = {"train": ["sha256:" + "0" * 64]}
        self.secrets: set[str] = set()
        self.caller = f"arn:aws:iam::{ACCOUNT}:user/who-asks"
        self.denied: set[Any] = set()  # what IAM says is not allowed
        self.depends: set[str] = set()  # and what depends on where a request comes from
        self.errors: dict[str, tuple[int, str]] = {}
        self.calls: list[str] = []
        self.refused: list[str] = []
        self.lock = threading.Lock()

    def call(self, service: str, operation: str, body: dict[str, Any]) -> Any:
        name = f"{service}:{operation}"
        self.calls.append(name)
        if fault := self.errors.get(name) or self.errors.get(f"{service}:*"):
            raise Refused(*fault, "as the test wants it, for " + name)
        answer = getattr(self, f"{service}_{operation}", None)
        if answer is None:
            raise Refused(400, "UnknownOperationException", f"nobody answers {name}")
        return answer(**body)

    # json

    def ecr_DescribeImages(self, registryId: str, repositoryName: str, imageIds: Any) -> Any:
        if registryId != self.account or repositoryName not in self.images:
            raise Refused(400, "RepositoryNotFoundException", f"no repository {repositoryName}")
        (wanted,) = imageIds
        digest = wanted.get("imageDigest") or "sha256:" + "0" * 64
        if not {digest, wanted.get("imageTag")} & {*self.images[repositoryName]}:
            raise Refused(400, "ImageNotFoundException", f"no image {wanted}")
        return {"imageDetails": [{"imageDigest": digest}]}

    def secretsmanager_DescribeSecret(self, SecretId: str) -> Any:
        if SecretId not in self.secrets:
            raise Refused(400, "ResourceNotFoundException", f"no secret {SecretId}")
        return {"ARN": SecretId}

    # query

    def sts_GetCallerIdentity(self) -> str:
        arn = self.caller.replace(ACCOUNT, self.account)
        return f"<Arn>{arn}</Arn><UserId>A</UserId><Account>{self.account}</Account>"

    def iam_GetRole(self, RoleName: str) -> str:
        role = f"<Path>/ours/</Path><RoleName>{RoleName}</RoleName><RoleId>A</RoleId>"
        arn = f"arn:aws:iam::{self.account}:role/ours/{RoleName}"
        return f"<Role>{role}<Arn>{arn}</Arn><CreateDate>2026-01-01T00:00:00Z</CreateDate></Role>"

    def iam_SimulatePrincipalPolicy(
        self,
        PolicySourceArn: str,
        ActionNames: list[str],
        ResourceArns: list[str],
        ContextEntries: Any,
        Marker: str = "0",
    ) -> str:
        """Two a page; `denied` are actions, or (who, action)."""
        if not re.fullmatch(rf"arn:aws:iam::{self.account}:(user|role)/[\w/-]+", PolicySourceArn):
            raise Refused(400, "InvalidInput", f"Invalid Entity Arn: {PolicySourceArn}")
        (resource,), begin = ResourceArns, int(Marker)
        results = [
            self.simulated(PolicySourceArn, action, resource)
            for action in ActionNames[begin : begin + 2]
        ]
        more = begin + 2 < len(ActionNames)
        found = f"<EvaluationResults>{''.join(results)}</EvaluationResults>"
        marker = f"<Marker>{begin + 2}</Marker>" if more else ""
        return f"{found}<IsTruncated>{str(more).lower()}</IsTruncated>{marker}"

    def simulated(self, who: str, action: str, resource: str) -> str:
        denied = {action, (who, action)} & self.denied
        context = "<member>aws:SourceIp</member>" if action in self.depends else ""
        decision = "implicitDeny" if denied or context else "allowed"
        return (
            f"<member><EvalActionName>{action}</EvalActionName>"
            f"<EvalResourceName>{escape(resource)}</EvalResourceName>"
            f"<EvalDecision>{decision}</EvalDecision>"
            f"<MissingContextValues>{context}</MissingContextValues></member>"
        )

    # rest

    def head_bucket(self, name: str, region: str) -> tuple[int, dict[str, str]]:
        self.calls.append("s3:HeadBucket")
        if fault := self.errors.get("s3:HeadBucket"):
            return fault[0], {}
        found = self.buckets.get(name)
        if found is None:
            return 404, {}
        there = {"x-amz-bucket-region": found.region}
        if not found.shared:
            return 403, there
        return (200 if region == found.region else 301), there


@contextlib.contextmanager
def serving(facts: Facts) -> Iterator[str]:
    """The URL of a server that answers for the account."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            name = urlsplit(self.path).path.strip("/")
            region = re.search(r"Credential=[^/]+/\d+/([a-z0-9-]+)/", self.headers["Authorization"])
            assert region
            with facts.lock:
                status, headers = facts.head_bucket(name, region[1])
            self.reply(status, b"", headers)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            with facts.lock:
                self.reply(*_answered(facts, self.headers.get("X-Amz-Target"), body))

        def do_GET(self) -> None:
            facts.refused.append(f"{self.command} {self.path}")
            self.reply(404, b"", {})

        do_PUT = do_DELETE = do_GET

        def reply(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    many = type("Many", (ThreadingHTTPServer,), {"request_queue_size": 64})
    with many(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def _answered(facts: Facts, target: str | None, body: bytes) -> tuple[int, bytes, dict[str, str]]:
    if target:
        prefix, _, operation = target.partition(".")
        service, given = _JSON.get(prefix, prefix.lower()), json.loads(body)
    else:
        given = _nested(dict(parse_qsl(body.decode())))
        service, operation = _QUERY[given.pop("Version")], given.pop("Action")
    try:
        _check(service, operation, given)
        found = facts.call(service, operation, given)
    except Refused as error:
        facts.refused.append(f"{service}:{operation}: {error.message}")
        return error.status, _error(error, bool(target)), {}
    if target:
        return 200, json.dumps(found).encode(), {"Content-Type": "application/x-amz-json-1.1"}
    result = f"<{operation}Result>{found}</{operation}Result>"
    return 200, f"<{operation}Response>{result}</{operation}Response>".encode(), {}


def _nested(given: dict[str, str]) -> dict[str, Any]:
    """`A.member.1.B=x` as {"A": [{"B": "x"}]}."""
    found: dict[str, Any] = {}
    for key, value in given.items():
        inside, (*path, last) = found, key.split(".")
        for part in path:
            inside = inside.setdefault(part, {})
        inside[last] = value
    return {key: _listed(one) for key, one in found.items()}


def _listed(found: Any) -> Any:
    if not isinstance(found, dict):
        return found
    if found.keys() == {"member"}:
        return [_listed(one) for _, one in sorted(found["member"].items(), key=lambda i: int(i[0]))]
    return {key: _listed(one) for key, one in found.items()}


def _check(service: str, operation: str, given: dict[str, Any]) -> None:
    model = _SESSION.get_service_model(service)
    if operation not in model.operation_names:
        raise Refused(400, "UnknownOperationException", f"there is no {service}:{operation}")
    shape = model.operation_model(operation).input_shape
    report = ParamValidator().validate(given, shape)
    if report.has_errors():
        raise Refused(400, "ValidationException", report.generate_report())


def _error(error: Refused, is_json: bool) -> bytes:
    if is_json:
        return json.dumps({"__type": error.code, "message": error.message}).encode()
    inner = f"<Code>{error.code}</Code><Message>{escape(error.message)}</Message>"
    return f"<ErrorResponse><Error>{inner}</Error></ErrorResponse>".encode()
