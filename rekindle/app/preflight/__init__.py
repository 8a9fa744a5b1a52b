"""What can be known to be wrong with a config before anything is written, sent or started:
a list of checks.

Each is a small class that says what it needs beside the config. app/prepared.py picks
those whose needs are met at a place, and raises all problems at once, each with its fix.
What only a platform can tell are its own checks (platforms/checks.py)."""

from rekindle.app.preflight.check import (
    CheckResult,
    Need,
    PreflightCheck,
    check_all,
    problems_in,
)
from rekindle.app.preflight.config import (
    AdaptersCheck,
    ArchitectureCheck,
    TaskCheck,
)
from rekindle.app.preflight.machine import (
    DockerCheck,
    EngineCheck,
    FilesCheck,
    HomeCheck,
    LayoutCheck,
    PackagesCheck,
    RegistryCheck,
    SecretsCheck,
)
from rekindle.app.preflight.network import NetworkCheck
from rekindle.app.preflight.rows import FirstRowsCheck

__all__ = ["ANYWHERE", "HERE", "QUICKLY_HERE", "CheckResult", "check_all", "problems_in"]

HERE: tuple[PreflightCheck, ...] = (
    PackagesCheck(),
    FilesCheck(),
    TaskCheck(),
    FirstRowsCheck(),
    ArchitectureCheck(),
    AdaptersCheck(),
    NetworkCheck(),
    LayoutCheck(),
    EngineCheck(),
    SecretsCheck(),
    DockerCheck(),
    RegistryCheck(),
    HomeCheck(),
)
"""What is asked of a config that runs on this machine; a new check is added here."""

QUICKLY_HERE = tuple(check for check in HERE if check.need is not Need.NETWORK)
"""The same, but for what takes seconds."""

ANYWHERE = tuple(check for check in HERE if check.need is Need.NOTHING)
"""What is asked of a config wherever it runs."""
