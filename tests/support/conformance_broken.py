"""What tests share with conformance/test_broken.py."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

OTHERS = [
    None,
    "",
    0,
    -1,
    1.5,
    True,
    [],
    {},
    "x",
    ["x"],
    {"x": 1},
    [None],
    10**30,
    "../x",
    "{{$}}",
    "{{$.inputs.parameters['x']}}",
    '{"Concat": [1]}',
    '{"IfPresent": {"InputName": "x"}}',
]


Place = tuple[Any, ...]


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    yield at
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*at, key))


def broken(documents: list[Any], chance: random.Random) -> list[Any]:
    """The documents with one part of them gone, or something else there."""
    made = copy.deepcopy(documents)
    *way, last = chance.choice([place for place in places(made) if len(place) > 1])
    around = made
    for key in way:
        around = around[key]
    if chance.random() < 0.4:
        del around[last]
    else:
        around[last] = copy.deepcopy(chance.choice(OTHERS))
    return made
