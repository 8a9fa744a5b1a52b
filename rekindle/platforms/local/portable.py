"""Outputs with which a step fails on Kubeflow Pipelines, or a reader gets another text, and
not here.

KFP's backend hands outputs on as protobuf's JSON and through Argo's templates, and takes
artifacts from its own store only. A step gets its inputs in arguments of its pod, in which
Kubernetes makes one dollar sign of two, and Argo fills in names that it knows. What an
output is, is known when a step has ended, so a run here says it then.

Authority: kubeflow/pipelines 2.17.0, backend/src/v2/component/launcher_v2.go and
objectstore/config.go; recorded on it: `invalid value NaN`, Argo's `cannot finish template
replacement` for U+007F."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rekindle.ir.dataflow import ARGO_TAG

_SURROGATE = re.compile("[\ud800-\udfff]")
_DELETE = "\x7f"
_TWO_DOLLARS = "$$"
# the stores that KFP opens; what has another scheme it records as it is
_STORES = ("gs://", "s3://", "minio://")


def sentences(parameters: Mapping[str, Any], uris: Mapping[str, str]) -> Iterator[str]:
    """One for each output of a step that fails on Kubeflow, or is another one there; `uris`
    are those of its artifacts."""
    for name, value in parameters.items():
        reason = _reason(value)
        if reason:
            yield f"the output `{name}` has {reason}: the step fails with it on Kubeflow"
        texts = list(_texts_in(value))
        if any(_TWO_DOLLARS in text for text in texts):
            yield f"the output `{name}` has `$$`: a step that reads it on Kubeflow gets `$`"
        tags = [tag for text in texts for tag in ARGO_TAG.finditer(text)]
        if tags:
            yield (
                f"the output `{name}` has `{tags[0].group()}...`: on Kubeflow Argo fills it in, or "
                "fails at it"
            )
    for name, uri in uris.items():
        if uri.startswith(_STORES):
            yield (
                f"the output `{name}` lies at {uri}: the step fails with it on Kubeflow, unless "
                "that is in its pipeline root"
            )


def _reason(value: Any) -> str:
    """What in a value KFP's backend cannot carry; "" for nothing."""
    match value:
        case float() if not math.isfinite(value):
            return f"the number {value}"
        case str() if _DELETE in value:
            return "the character U+007F"
        case str() if _SURROGATE.search(value):
            return "half of a pair of surrogates"
        case Mapping():
            reasons = [_reason(item) for pair in value.items() for item in pair]
        case list():
            reasons = [_reason(item) for item in value]
        case _:
            reasons = []
    return next((reason for reason in reasons if reason), "")


def _texts_in(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case Mapping():
            for pair in value.items():
                yield from _texts_in(list(pair))
        case list():
            for item in value:
                yield from _texts_in(item)
