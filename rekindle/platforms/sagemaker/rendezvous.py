"""What SageMaker tells the hosts of a training job -> `Rendezvous`.

/opt/ml/input/config/resourceconfig.json has `hosts` (algo-1, algo-2, ...) and `current_host`; a
host's number decides its rank, so algo-2 comes before algo-10."""

import json
import re
from pathlib import Path

from rekindle.errors import RequestError
from rekindle.launch.rendezvous import Rendezvous

RESOURCES = Path("/opt/ml/input/config/resourceconfig.json")
PORT = 29_400


def rendezvous(gpus: int, resources: Path = RESOURCES) -> Rendezvous:
    """The host's place."""
    try:
        raw = json.loads(resources.read_text(encoding="utf-8"))
        hosts, here = sorted(map(str, raw["hosts"]), key=_natural), str(raw["current_host"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{resources} cannot be read: {error!r}") from error
    if here not in hosts:
        what = f"the host {here} is not one of {', '.join(hosts)}"
        raise RequestError(what, where=str(resources))
    place = Rendezvous(len(hosts), hosts.index(here), max(1, gpus), hosts[0], PORT)
    return place.checked(str(resources))


def _natural(host: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", host)]
