"""Alarms and a dashboard of a config where a platform's runs, checks and servers are watched."""

from pathlib import Path

from rekindle.outputs import Alarm
from rekindle.platforms.alarms import Monitoring, Watch, watches
from rekindle.platforms.local.store import slug
from rekindle.platforms.platform import Platform
from rekindle.platforms.submission import Definition
from rekindle.spec.model import Spec

_MS = 1_000.0  # where the config has no limit


def monitoring(there: Platform, spec: Spec, definition: Definition, home: Path) -> Monitoring:
    """Where they are kept; those that are files lie under `home`."""
    return there.alarms(definition, spec.model_name, home.absolute() / "alarms" / slug(spec.name))


def compared(service: Monitoring, spec: Spec, *, every: bool = False) -> list[Watch]:
    """What the config asks for, and what of it is there; changes nothing. `every`: also of what is
    not watched there now, such as an endpoint that is gone."""
    return list(
        watches(
            service,
            every=every,
            config=spec.name,
            max_error_rate=spec.deploy.max_error_rate,
            max_ms=float(spec.deploy.max_p99_ms or _MS),
        )
    )


def write(service: Monitoring, found: list[Watch], *, force: bool) -> tuple[Alarm, ...]:
    """Write what is missing or other, and with `force` what was edited there."""
    words = {"missing": "created", "other": "changed", "same": "unchanged", "edited": "edited"}
    told = []
    for one in found:
        overwrites = force and one.state == "edited"
        if overwrites or one.state in ("missing", "other"):
            service.put(one.kind, one.name, one.body)
        state = "changed" if overwrites else words[one.state]
        told.append(Alarm(kind=one.kind, name=one.name, state=state))
    return tuple(told)
