"""Cloud Logging's language of filters, the few words of it that are spoken to rest.py.

Authority: cloud.google.com/logging/docs/view/logging-query-language."""

from __future__ import annotations

import datetime
import re
from typing import Any


def fits_filter(entry: dict[str, Any], wanted: str) -> bool:
    """Whether an entry fits a filter ; ValueError for one that nobody understands."""
    labels = entry["resource"]["labels"]
    for clause in wanted.split(" AND "):
        match = re.fullmatch(
            r'resource\.type="(?P<type>\w+)"|resource\.labels\.job_id=\((?P<jobs>"\w+"(?: OR "\w+")*)\)|'
            r'resource\.labels\.task_name:"(?P<task>\w+)"|timestamp>="(?P<since>[^"]+)"',
            clause,
        )
        if match is None:
            raise ValueError(f"no filter: {clause}")
        since = match["since"] and datetime.datetime.fromisoformat(match["since"])
        if not all(
            (
                match["type"] in (None, entry["resource"]["type"]),
                match["jobs"] is None or f'"{labels["job_id"]}"' in match["jobs"].split(" OR "),
                match["task"] is None or match["task"] in labels["task_name"],
                not since or datetime.datetime.fromisoformat(entry["timestamp"]) >= since,
            )
        ):
            return False
    return True
