"""Writes chat.jsonl, talks with a made-up bicycle rental's assistant: `python make_chat.py`.

The same seed gives the same bytes. Every answer follows from its question, so that a small model
has something to learn in a minute.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

CONVERSATIONS = 180
SEED = 7
SYSTEM = "You answer for Kestrel Bikes. Be brief and friendly."

STATIONS = {
    "Harbour": ("7:00", "21:00"),
    "Old Mill": ("8:00", "20:00"),
    "Museum": ("9:00", "18:00"),
    "Central": ("6:00", "23:00"),
    "Lakeside": ("8:00", "22:00"),
    "Airport": ("5:00", "23:30"),
    "Botanic Garden": ("9:00", "19:00"),
    "Stadium": ("10:00", "22:00"),
}
PRICES = {
    "city bike": (3, 14),
    "electric bike": (6, 28),
    "cargo bike": (8, 35),
    "tandem": (7, 30),
    "road bike": (5, 24),
    "children's bike": (2, 9),
}
FAULTS = {
    "a flat tyre": "swap it for another bike",
    "a loose chain": "have it put back on",
    "squeaky brakes": "have them adjusted",
    "a dead battery": "exchange the battery",
    "a broken light": "get a clip-on light",
}
EXTRAS = {"helmet": 1, "child seat": 4, "pannier bag": 2, "phone holder": 1, "rain cape": 2}

Exchange = tuple[str, str]


def hours(draw: random.Random) -> Exchange:
    station = draw.choice(list(STATIONS))
    opens, closes = STATIONS[station]
    if draw.random() < 0.5:
        return (
            f"When does the {station} station open?",
            f"The {station} station opens at {opens} and closes at {closes}.",
        )
    return (
        f"How late can I bring a bike back to {station}?",
        f"Until {closes}, when the {station} station closes. It opens again at {opens}.",
    )


def price(draw: random.Random) -> Exchange:
    bike = draw.choice(list(PRICES))
    hour, day = PRICES[bike]
    one = f"an {bike}" if bike.startswith("e") else f"a {bike}"
    count = draw.choice([1, 1, 2, 3])
    if count == 1:
        return (
            f"What does {one} cost?",
            f"{one.capitalize()} costs {hour} euros an hour, or {day} euros for the whole day.",
        )
    return (
        f"How much is {one} for {count} days?",
        f"{count} days with {one} are {count * day} euros, at {day} euros a day.",
    )


def fault(draw: random.Random) -> Exchange:
    what, help_ = draw.choice(list(FAULTS.items()))
    station = draw.choice(list(STATIONS))
    return (
        f"My bike has {what} and I am near {station}.",
        f"Sorry about that! Bring it to the {station} station and we will {help_}."
        if help_.startswith(("swap", "exchange"))
        else f"Sorry about that! At the {station} station you can {help_}, free of charge.",
    )


def extra(draw: random.Random) -> Exchange:
    what, cost = draw.choice(list(EXTRAS.items()))
    euros = "1 euro" if cost == 1 else f"{cost} euros"
    return (
        f"Can I get a {what} with it?",
        f"Yes, a {what} is {euros} a day. Just ask for it at the station.",
    )


TOPICS: dict[str, Callable[[random.Random], Exchange]] = {
    "hours": hours,
    "price": price,
    "fault": fault,
    "extra": extra,
}


def conversations() -> list[dict[str, object]]:
    """All records: `id`, `topic` (of the first question) and `messages`."""
    draw = random.Random(SEED)  # noqa: S311 - a repeatable draw, no secret
    found: dict[str, dict[str, object]] = {}
    while len(found) < CONVERSATIONS:
        topic = draw.choice(list(TOPICS))
        turns = [{"role": "system", "content": SYSTEM}] if draw.random() < 0.3 else []
        chosen = [topic, *draw.sample(sorted(set(TOPICS) - {topic}), draw.choice([0, 0, 1, 2]))]
        for name in chosen:
            question, answer = TOPICS[name](draw)
            turns += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        record = {"id": f"c{len(found) + 1:03}", "topic": topic, "messages": turns}
        found.setdefault(json.dumps(turns), record)
    return list(found.values())


if __name__ == "__main__":
    lines = [json.dumps(record) + "\n" for record in conversations()]
    Path(__file__).with_name("chat.jsonl").write_text("".join(lines))
