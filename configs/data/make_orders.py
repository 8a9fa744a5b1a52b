"""Writes orders.jsonl, messages with a tag for each word: `python make_orders.py`.

The same seed gives the same bytes. Many words have several meanings (June is a person and a month,
Stone a name and part of a product), so that only their context tells the tag.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

SEED, ORDERS = 7, 600
TYPES = ("PERSON", "CITY", "PRODUCT", "DAY")

CHOICES = {
    name: text.split(", ")
    for name, text in {
        "FIRST": "Austin, April, June, Florence, Victoria, Max, Nora, Omar, Priya, Lena, Tom, "
        "Grace, Paris, Carl",
        "LAST": "Stone, Wheeler, May, Rivers, Berg, Costa, Novak, Lake, Chain, Meyer, Lindt, March",
        "CITY": "New York, San Jose, Den Haag, Bad Homburg, Porto Alegre, Austin, Florence, "
        "Victoria, Paris, Lyon, Porto, Berlin, Leeds, Bergen, Utrecht, Mobile, Reading",
        "PRODUCT": "rear light, chain guard, inner tube, brake pads, cargo rack, child seat, "
        "bottle cage, rain cover, steel frame, repair stand, touring wheel, pump, bell, saddle, "
        "chain, helmet, pedals, lock, mudguards, stone-guard",
        "DAY": "the 3rd of May, June 12, March 4, next Friday, tomorrow, April 1, late August",
        "COUNT": "two, a, one more, 3, 12, the same",
    }.items()
}
SENTENCES = [
    "Please send COUNT PRODUCT to PERSON in CITY .",
    "PERSON ordered COUNT PRODUCT for DAY and it never came .",
    "Can I pick up the PRODUCT in CITY before DAY ?",
    "My name is PERSON , I live in CITY .",
    "The PRODUCT that PERSON sold me in CITY broke before DAY .",
    "Is there a shop in CITY that repairs a PRODUCT ?",
    "We may move to CITY in spring .",
    "It was a march through the rain , but the PRODUCT held .",
    "PERSON will be in CITY until DAY , so deliver to PERSON instead .",
    "Cancel the order of DAY , please .",
    "I was reading about your PRODUCT .",
    "A stone hit the PRODUCT near CITY .",
    "Thank you for the quick help !",
    "Change the address to CITY and the name to PERSON .",
    "Does COUNT PRODUCT fit the PRODUCT of PERSON ?",
    "JUST PERSON speaking , where is my PRODUCT ?",
]


def order(pick: random.Random) -> tuple[list[str], list[str]]:
    """The words of a sentence, and their tags."""
    words, tags = [], []
    for part in pick.choice(SENTENCES).split():
        if part == "PERSON":
            last = [pick.choice(CHOICES["LAST"])] if pick.random() < 0.6 else []
            found = " ".join([pick.choice(CHOICES["FIRST"]), *last])
        else:
            found = pick.choice(CHOICES[part]) if part in CHOICES else part
        inside = found.split()
        words += inside
        inner = f"I-{part}" if part in TYPES else "O"
        tags += [inner] * len(inside)
        if part in TYPES:
            tags[-len(inside)] = f"B-{part}"
    return words, tags


def main() -> None:
    """Write the file beside this one."""
    pick = random.Random(SEED)  # noqa: S311 - a repeatable draw, no secret
    rows: dict[tuple[str, ...], list[str]] = {}
    while len(rows) < ORDERS:
        words, tags = order(pick)
        rows.setdefault(tuple(words), tags)
    lines = [
        json.dumps(
            {
                "id": f"o{number:04}",
                "tokens": words,
                "tags": tags,
                "channel": pick.choice(["mail", "chat", "phone"]),
            }
        )
        for number, (words, tags) in enumerate(rows.items(), 1)
    ]
    Path(__file__).with_name("orders.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
