"""Writes ../starter/tickets.csv, requests to a shop and who answers them: `python make_tickets.py`.

The same seed gives the same bytes.
"""

from __future__ import annotations

import csv
import random
from pathlib import Path

SEED, TICKETS = 11, 600
WRONG = 0.06  # share of tickets whose team is a guess
CHANNELS = ("mail", "chat", "phone")

# a sentence of any team names a {thing}; every fourth ticket ends with one that tells nothing
TEAMS = {
    "billing": [
        "I was charged twice for the {thing}",
        "please send the invoice of the {thing}",
        "the refund for the {thing} has not arrived",
        "my card was declined for the {thing}",
        "the discount is missing on the bill of the {thing}",
        "can I pay the {thing} later?",
    ],
    "delivery": [
        "where is my {thing}?",
        "the parcel with the {thing} came open",
        "please send the {thing} to my new address",
        "the {thing} was left at the wrong door",
        "the courier lost the {thing}",
        "tracking says that the {thing} is still in the depot",
    ],
    "repair": [
        "the {thing} broke after a week",
        "the {thing} makes a strange noise",
        "how do I mount the {thing}?",
        "a screw of the {thing} is missing",
        "the {thing} does not fit",
        "is there a spare part for the {thing}?",
    ],
}
THINGS = ("saddle", "lamp", "helmet", "lock", "pump", "bell", "basket", "child seat", "chain")
ENDS = ("thank you", "this is the second time I write", "I need it before Friday", "please hurry")


def tickets() -> list[dict[str, str]]:
    """The rows, in the order of their days."""
    chance, rows = random.Random(SEED), []  # noqa: S311
    for number in range(TICKETS):
        team = chance.choice(list(TEAMS))
        text = chance.choice(TEAMS[team]).format(thing=chance.choice(THINGS))
        if chance.random() < 0.25:
            text += f", {chance.choice(ENDS)}"
        if chance.random() < WRONG:
            team = chance.choice(list(TEAMS))
        month, day = 1 + number * 9 // TICKETS, 1 + number % 28
        rows.append(
            {
                "id": f"t{number + 1:04}",
                "day": f"2026-{month:02}-{day:02}",
                "text": text,
                "team": team,
                "channel": chance.choice(CHANNELS),
            }
        )
    return rows


def main() -> None:
    """Write the file."""
    path = Path(__file__).parent.parent / "starter" / "tickets.csv"
    rows = tickets()
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
