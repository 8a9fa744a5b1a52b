"""Promotes in a process of its own: `promote_once.py URL NAME VERSION EVIDENCE LEASE ANSWER IN_TIME`."""

import sys
from pathlib import Path

from rekindle.records import Registration
from rekindle.registry import promotion
from rekindle.registry.models import Registry
from rekindle.spec.model import RegisterSpec

url, name, version, evidence, lease, answer, in_time = sys.argv[1:]
promotion.LEASE, promotion.ANSWER, promotion.IN_TIME = float(lease), float(answer), float(in_time)
home = str(Path(evidence).with_suffix(".home"))
where = Registry(RegisterSpec(tracking_uri=url), name, home)
registered = Registration(
    name=name,
    version=version,
    aliases=(),
    created=True,
    decision="pending",
    tracking_uri=url,
    tags={},
)
print(promotion.promote(where, registered, Path(evidence)).decision)
