"""Tickets of a support desk, week by week: texts with words by class."""

import datetime as dt
import json
import random
from pathlib import Path

WORDS = {
    "billing": ["invoice", "charge", "refund", "payment", "card", "price", "bank", "fee"],
    "delivery": ["parcel", "courier", "late", "box", "shipping", "tracking", "lost", "door"],
    "account": ["login", "password", "email", "locked", "reset", "code", "profile", "sign"],
    "returns": ["return", "exchange", "size", "label", "swap", "worn", "wrong", "refit"],
}
NEWER = {
    "billing": ["wallet", "iban", "sepa", "voucher"],
    "delivery": ["locker", "drone", "depot", "van"],
    "account": ["passkey", "token", "authenticator", "biometric"],
    "returns": ["refurb", "collect", "credit", "warranty"],
}
TECHNICAL = ["crash", "screen", "update", "battery", "freeze", "install", "driver", "bug"]
PLAIN = ["the", "my", "is", "was", "it", "to", "please", "help", "since", "today", "again", "when"]
ROWS = 150
FIRST_WEEK = dt.date(2026, 1, 5)
WRONG = 0.05  # of the labels, by chance


def write_week(
    folder: Path,
    week: int,
    *,
    column: str = "body",
    label: str = "",
    newer: bool = False,
    technical: bool = False,
    region: bool = False,
) -> None:
    """Write the tickets of a week, a text in `column`; `label`: the one that all of them get by
    mistake; `newer`: words of another year; `technical`: a class more; `region`: a field more."""
    chance = random.Random(week)
    words = dict(WORDS)
    if newer:
        words = {name: [*words[name][:3], *NEWER[name]] for name in words}
    if technical:
        words["technical"] = TECHNICAL
    classes = list(words)
    lines = []
    for number in range(ROWS):
        topic = chance.choice(classes)
        length = chance.randint(5, 14)
        text = [
            chance.choice(words[topic] if chance.random() < 0.45 else PLAIN) for _ in range(length)
        ]
        mistaken = chance.random() < WRONG
        row = {
            "id": f"{week}-{number}",
            column: " ".join(text),
            "team": label or (chance.choice(classes) if mistaken else topic),
            "product": chance.choice(["phone", "web"]),
            "day": str(FIRST_WEEK + dt.timedelta(weeks=week - 1, days=chance.randrange(7))),
        }
        if region:
            row["region"] = chance.choice(["eu", "us"])
        lines.append(json.dumps(row) + "\n")
    folder.mkdir(exist_ok=True)
    (folder / f"w{week:02}.jsonl").write_text("".join(lines))
