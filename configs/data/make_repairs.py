"""Writes repairs.jsonl, requests with the minutes that each took: `python make_repairs.py`.

The same seed gives the same bytes. A task takes its own time on its own part, twice the time on a
cargo bike, and about three minutes more or less.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

SEED, REPAIRS = 11, 900
PARTS = {
    "chain": 12,
    "brakes": 18,
    "rear wheel": 25,
    "front wheel": 15,
    "gears": 22,
    "saddle": 4,
    "lamp": 9,
    "dynamo": 30,
    "pedals": 5,
    "tyre": 14,
    "lock": 7,
    "fork": 40,
}
TASKS = {"check": 0.5, "replace": 1.3, "fix": 1.0, "clean": 0.7}
BIKES = {"bike": 1.0, "cargo bike": 2.0, "e-bike": 1.4, "tandem": 1.6}
OPENINGS = ("please", "could you", "you promised to", "next week,", "if you can,")


def main() -> None:
    drawn, seen = random.Random(SEED), set[str]()  # noqa: S311 - no secret
    with Path(__file__).with_name("repairs.jsonl").open("w") as file:
        while len(seen) < REPAIRS:
            bike, work, minutes = drawn.choice(list(BIKES)), [], 0.0
            for part in drawn.sample(list(PARTS), drawn.randint(1, 3)):
                task = drawn.choice(list(TASKS))
                work.append(f"{task} the {part}")
                minutes += PARTS[part] * TASKS[task] * BIKES[bike]
            text = f"{drawn.choice(OPENINGS)} {' and '.join(work)} of my {bike}"
            if text in seen:
                continue
            seen.add(text)
            row = {
                "id": f"w{len(seen):04}",
                "text": text,
                "shop": drawn.choice(("north", "south")),
                "minutes": round(max(1.0, minutes + drawn.gauss(0, 3)), 1),
            }
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
