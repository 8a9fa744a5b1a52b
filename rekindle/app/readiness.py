"""What `rekindle doctor` answers: whether a config, this machine and a platform are ready
for each other, with every problem at once."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rekindle.app.prepared import NotReadyError, prepare_for, prepare_here
from rekindle.errors import Problem, RequestError
from rekindle.outputs import Readiness, ReadinessCheck, rows_of
from rekindle.platforms.api import platform_of
from rekindle.platforms.checks import Needs, run_checks
from rekindle.platforms.checks import problems as problems_of
from rekindle.records import write_atomically
from rekindle.spec.load import load_target
from rekindle.spec.model import Spec
from rekindle.spec.platforms import PlatformsSpec
from rekindle.spec.yaml_edit import with_values


def readiness_here(spec: Spec, home: Path) -> Readiness:
    """What this machine and the config lack for a run on this machine."""
    try:
        findings = prepare_here(spec, home, thorough=True).findings
        problems: tuple[Problem, ...] = ()
    except NotReadyError as error:
        findings = error.findings
        problems = error.problems
    checks: list[ReadinessCheck] = []
    for finding in findings:
        if finding.problems:
            check = ReadinessCheck(name=finding.name, where="", state="problem", said="")
        else:
            check = ReadinessCheck(name=finding.name, where="", state="ok", said="no problem found")
        checks.append(check)
    errors = rows_of(RequestError(problems)) if problems else ()
    return Readiness(platform="local", checks=tuple(checks), errors=errors)


def readiness_on(spec: Spec | None, platform: str, home: Path) -> Readiness:
    """What a platform and the config lack for each other, and the steps' permissions."""
    sections = spec.platforms if spec else PlatformsSpec()
    target = platform_of(platform, sections)
    definition = None
    needs = Needs()
    problems: list[Problem] = []
    if spec is not None:
        try:
            definition = prepare_for(platform, spec, home).definition
        except NotReadyError as error:
            problems += error.problems
        needs = needs_of(spec, platform)
    checks = run_checks(target.checks(definition, needs))
    problems += problems_of(checks)
    errors = rows_of(RequestError(dict.fromkeys(problems))) if problems else ()
    return Readiness(
        platform=platform,
        permissions=target.permissions(needs),
        checks=checks,
        errors=errors,
    )


def settings_of(readiness: Readiness) -> dict[str, str]:
    """What the config should say by what the platform answered, by dotted paths of
    fields."""
    settings: dict[str, str] = {}
    for check in readiness.checks:
        settings |= check.settings
    return settings


def write_settings(config: Path, settings: Mapping[str, str], overrides: Sequence[str]) -> None:
    """Write settings into the file of a config, and nothing else.

    Raises RequestError, with the file as it was, where that cannot be done, or the config
    would not be valid with them."""
    file = config.resolve()  # of a link, what it leads to
    if file.suffix.lower() not in (".yaml", ".yml"):
        raise RequestError(
            f"{config} is not a YAML config",
            fix="add the lines to the config that names the pipeline: " + ", ".join(settings),
        )
    if not file.stat().st_mode & 0o222:
        fix = f"chmod u+w {config}, or add the lines by hand"
        raise RequestError(f"{config} is read-only, and was left as it is", fix=fix)
    before = file.read_bytes().decode()  # as it is, with its ends of lines
    try:
        _rewrite(file, with_values(before, settings, str(config)))
        load_target(config, overrides)
    except RequestError:
        _rewrite(file, before)
        raise
    except OSError as error:
        message = f"cannot write {config}: {error.strerror}"
        raise RequestError(message, fix="add the lines by hand") from error


def _rewrite(file: Path, text: str) -> None:
    """Give a file another text; its mode stays, and so do its other names."""
    status = file.stat()
    if status.st_nlink > 1:
        file.write_bytes(text.encode())
        return
    write_atomically(file, text)
    file.chmod(status.st_mode)


def needs_of(spec: Spec, platform: str) -> Needs:
    """What the config asks of the platform beyond training."""
    return Needs(
        model=spec.model_name,
        deploys="deploy" in spec.model_fields_set,
        publishes=platform in spec.registration.publish,
        deploys_in_steps=spec.deploy.after_promotion and spec.pipeline is None,
    )
