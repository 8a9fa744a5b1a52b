"""The alarms and the dashboard of a config, on the platform that watches it."""

from pathlib import Path

from rekindle.outputs import Alarm
from rekindle.platforms.alarms import Monitoring, Watch, watches
from rekindle.platforms.api import ConfiguredPlatform, alarms_of
from rekindle.platforms.local.store import slug
from rekindle.platforms.submission import Definition
from rekindle.spec.model import Spec

_DEFAULT_MAX_MS = 1_000.0  # where the config has no limit


def monitoring(
    target: ConfiguredPlatform, spec: Spec, definition: Definition, home: Path
) -> Monitoring:
    """The service that has the alarms of a config; alarm files lie under `home`."""
    folder = home.absolute() / "alarms" / slug(spec.name)
    return alarms_of(target).alarms(definition, spec.model_name, folder)


def compared(service: Monitoring, spec: Spec, *, every: bool = False) -> list[Watch]:
    """The alarms that the config asks for, and whether they are there; changes nothing.

    `every`: also of what is not watched there now, such as an endpoint that is gone."""
    return list(
        watches(
            service,
            every=every,
            config=spec.name,
            max_error_rate=spec.deploy.max_error_rate,
            max_ms=float(spec.deploy.max_p99_ms or _DEFAULT_MAX_MS),
        )
    )


def write(service: Monitoring, alarms: list[Watch], *, force: bool) -> tuple[Alarm, ...]:
    """Write what is missing or other, and with `force` what was edited there by hand;
    returns what became of each."""
    states = {
        "missing": "created",
        "other": "changed",
        "same": "unchanged",
        "edited": "edited",
    }
    written = []
    for alarm in alarms:
        state = states[alarm.state]
        # an edit by hand is overwritten on request only
        if force and alarm.state == "edited":
            state = "changed"
        if state in ("created", "changed"):
            service.put(alarm.kind, alarm.name, alarm.body)
        written.append(Alarm(kind=alarm.kind, name=alarm.name, state=state))
    return tuple(written)
