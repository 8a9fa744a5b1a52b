"""What SageMaker takes: counts, lengths, patterns, names of machines. The rows are in limits.yaml,
with source and date."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rekindle.tables import rows

# an image that the service pulls
ECR = re.compile(r"\d{12}\.dkr\.ecr(?:-fips)?\.[a-z0-9-]+\.amazonaws\.com(\.cn)?/.+")


def limits() -> Mapping[str, Any]:
    """All of them by name."""
    table: Mapping[str, Any] = rows(Path(__file__).with_name("limits.yaml"))
    return table
