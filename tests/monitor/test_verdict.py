"""How often the monitor alarms where nothing changed, and how often it finds what did: streams of numbers and images with
known changes, and (slow) ten months of reviews."""

import collections
import datetime as dt
import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rekindle.errors import DataError
from rekindle.evaluate.compare import holm
from rekindle.modalities import load_modality
from rekindle.modalities.vocabulary import word_hashes
from rekindle.monitor.labels import Label, read_labels
from rekindle.monitor.log import read_log
from rekindle.monitor.verdict import MOST_SLICES, distinct, expected_accuracy, judge
from rekindle.records import CalibrationBin, ClassResult, Evidence, Reference, Slice
from rekindle.spec.model import DataSpec

CONFIGS = Path(__file__).parents[2] / "configs"
PLAIN = Evidence(run_key="", promote=True, reason="", checks=(), metrics={}, rows=0, examples="")
PLAIN_SEEN = PLAIN.model_copy(update={"reference": Reference()})


def evidence_of(rows, labels, right=None, names=()):
    """The evidence of rows of signals and confidence, answered so."""
    inputs = {  # rounded, as a real one is
        name: tuple(round(row[name], 4) for row in rows)
        for name in rows[0]
        if name != "probability"
    }
    reference = Reference(inputs=inputs, confidence=tuple(row["probability"] for row in rows))
    counts = collections.Counter(labels)
    classes = tuple(ClassResult(label=n, rows=0, predicted=counts[n]) for n in names or counts)
    metrics = {} if right is None else {"accuracy": float(np.mean(right))}
    update = {"reference": reference, "classes": classes, "rows": len(rows), "metrics": metrics}
    return PLAIN.model_copy(update=update)


def table(rows, labels):
    facts = zip(rows, labels, strict=True)
    found = [{"id": str(i), "label": label, **row} for i, (row, label) in enumerate(facts)]
    return pa.Table.from_pylist(found)


def stream(draw, count, length=0.0, sure=0.0, share=0.3):
    """Rows of a stream of lengths and confidences, with changes of these sizes, and their labels."""
    rows = [
        {"length": float(n), "probability": float(p)}
        for n, p in zip(
            np.round(draw.lognormal(3 + length, 0.5, count)),
            np.clip(draw.beta(8, 2, count) - sure, 0, 1),
            strict=True,
        )
    ]
    return rows, np.where(draw.random(count) < share, "a", "b").tolist()


def alarms_of(evidence, rows, labels, truth=None, level=0.05):
    return {
        one.name
        for one in judge(evidence, table(rows, labels), truth or {}, 100, level)
        if one.alarm
    }


def test_a_stream_that_does_not_change_rarely_alarms_and_known_changes_are_found():
    draw = np.random.default_rng(0)
    times, found = 100, collections.Counter()
    for _ in range(times):
        evidence = evidence_of(*stream(draw, 300))
        found["nothing"] += bool(alarms_of(evidence, *stream(draw, 300)))
        found["length"] += "length" in alarms_of(evidence, *stream(draw, 300, length=0.3))
        found["confidence"] += "confidence" in alarms_of(evidence, *stream(draw, 300, sure=0.1))
        found["prediction"] += "prediction" in alarms_of(evidence, *stream(draw, 300, share=0.5))
    assert found["nothing"] <= 9  # 5 of 100 on average; more than 9 in 3 of 100 such hundreds
    assert min(found[name] for name in ("length", "confidence", "prediction")) >= 80, found


def repeated(rows, labels, times):
    """Each row so many times, and its content by a hash, as a log has it."""
    known = [{**row, "hash": f"{i}-{row['length']}"} for i, row in enumerate(rows)]
    return known * times, labels * times


def with_probe(rows, labels, times):
    """One text of an uptime check, so many times, among others."""
    probe = {"length": 2.0, "probability": 0.99, "hash": "probe"}
    return repeated(rows, labels, 1)[0] + [probe] * times, labels + ["a"] * times


@pytest.mark.parametrize(
    ("count", "repeat"),
    [
        (300, lambda *made: repeated(*made, 1)),
        (200, lambda *made: repeated(*made, 3)),  # each request is retried twice
        (120, lambda *made: repeated(*made, 10)),
        (290, lambda *made: with_probe(*made, 30)),
        (150, lambda *made: with_probe(*made, 120)),
    ],
    ids=["distinct", "retries", "popular texts", "a probe", "a probe of a month"],
)
def test_repeats_are_no_evidence_and_real_changes_are_found_among_them(count, repeat):
    draw = np.random.default_rng(11)
    false, found = 0, collections.Counter()
    for _ in range(60):
        evidence = evidence_of(*stream(draw, 300))
        false += bool(alarms_of(evidence, *repeat(*stream(draw, count))))
        found["length"] += "length" in alarms_of(evidence, *repeat(*stream(draw, count, 0.5)))
        found["sure"] += "confidence" in alarms_of(
            evidence, *repeat(*stream(draw, count, sure=0.2))
        )
    assert false <= 7  # 3 of 60 on average; more than 7 in 1 of 80 such sixties
    assert min(found["length"], found["sure"]) >= 48, found


def test_few_texts_that_are_asked_often_are_too_few_to_tell():
    draw = np.random.default_rng(12)
    evidence = evidence_of(*stream(draw, 300))
    rows, labels = repeated(*stream(draw, 60, length=1.0), 5)
    assert judge(evidence, table(rows, labels), {}, 100, 0.05) == ()
    assert len(distinct(table(rows, labels))) == 60
    old = [{**row, "hash": None} for row in rows]  # a log that does not tell contents
    assert len(distinct(table(old, labels))) == 300


def test_expected_accuracy_counts_each_request():
    bins = (
        CalibrationBin(lower=0.0, upper=0.5, rows=9, confidence=0.3, accuracy=0.2),
        CalibrationBin(lower=0.5, upper=1.0, rows=9, confidence=0.8, accuracy=0.9),
    )
    rows = [{"probability": 0.9, "hash": "x"}] * 3 + [{"probability": 0.1, "hash": "y"}]
    evidence = PLAIN.model_copy(update={"calibration": bins})
    found = expected_accuracy(evidence, table(rows, ["a"] * 4))
    assert found == pytest.approx((3 * 0.9 + 0.2) / 4)


def test_images_that_become_darker_are_found():
    draw = np.random.default_rng(1)

    def pictures(darker, count=200):
        shades = draw.integers(40, 216, (count, 1, 1, 1)) + draw.integers(-40, 40, (count, 8, 8, 1))
        rows = [
            load_modality("image").signals((pixels * (1 - darker)).astype(np.uint8), ())
            for pixels in shades
        ]
        return [{**row, "probability": 0.9} for row in rows], ["a"] * count

    evidence = evidence_of(*pictures(0.0))
    assert alarms_of(evidence, *pictures(0.0)) == set()
    assert alarms_of(evidence, *pictures(0.3)) >= {"brightness"}


def test_accuracy_falls_only_where_labels_say_so():
    draw = np.random.default_rng(2)
    rows, labels = stream(draw, 400)
    right = draw.random(400) < 0.8
    evidence = evidence_of(rows, labels, right)

    def truth(share):
        flip = {"a": "b", "b": "a"}
        return {
            str(i): Label(one if draw.random() < share else flip[one])
            for i, one in enumerate(labels)
        }

    assert "accuracy" in alarms_of(evidence, rows, labels, truth(0.6))
    assert alarms_of(evidence, rows, labels, truth(0.82)) == set()
    few = dict(list(truth(0.1).items())[:99])  # too few to tell
    assert alarms_of(evidence, rows, labels, few) == set()
    (one,) = [
        s
        for s in judge(evidence, table(rows, labels), truth(0.6), 100, 0.05)
        if s.name == "accuracy"
    ]
    assert one.detectable == pytest.approx(0.075, abs=0.01)


BEGIN = dt.datetime(2026, 10, 1, tzinfo=dt.UTC)


def waited(seconds, instances=1):
    """Rows of requests that took so long, one a minute, each of so many instances."""
    return pa.Table.from_pylist(
        [
            {
                "id": "",
                "label": "a",
                "time": BEGIN + dt.timedelta(minutes=i),
                "seconds": float(took),
            }
            for i, took in enumerate(seconds)
            for _ in range(instances)
        ]
    )


def slow(draw, count, median=0.02):
    return draw.lognormal(np.log(median), 0.5, count)


@pytest.mark.parametrize(
    ("before", "now", "alarms"),
    [
        (0.02, 0.04, True),
        (0.02, 0.02, False),
        (0.04, 0.02, False),  # slower only
        (0.02, 0.028, False),
        (0.002, 0.004, False),
        (0.8, 1.5, True),  # 1.5 times, and 5 ms
    ],
)
def test_a_server_that_became_slower_is_found(before, now, alarms):
    draw = np.random.default_rng(7)
    times = waited(slow(draw, 500, before)), waited(slow(draw, 500, now))
    (one,) = judge(PLAIN_SEEN, times[1], {}, 100, 0.05, times[0])
    assert (one.name, one.rows, one.alarm) == ("latency", 500, alarms)
    assert (one.before, one.now) == pytest.approx((before, now), rel=0.1)
    assert one.effect == pytest.approx(one.now - one.before)


def test_latency_needs_requests_in_both_windows_and_counts_each_once():
    draw = np.random.default_rng(8)
    many, few = waited(slow(draw, 100)), waited(slow(draw, 99, 9.0), instances=3)
    assert judge(PLAIN_SEEN, few, {}, 100, 0.05, many) == ()
    assert judge(PLAIN_SEEN, many, {}, 100, 0.05, few) == ()
    assert judge(PLAIN_SEEN, many, {}, 100, 0.05, pa.table({})) == ()
    assert judge(PLAIN_SEEN, many, {}, 100, 0.05) == ()
    found = collections.Counter()
    for _ in range(200):  # instances of one request are not measurements of their own
        pair = [waited(slow(draw, 120), instances=8) for _ in range(2)]
        (one,) = judge(PLAIN_SEEN, pair[1], {}, 100, 0.05, pair[0])
        found["below"] += one.p_value < 0.05
    assert found["below"] <= 20


def sliced(*parts, metrics=True):
    """The evidence of slices, (value, rows, accuracy) each, of the column `lang`."""
    slices = tuple(
        Slice(
            column="lang", value=value, rows=count, candidate={"accuracy": right} if metrics else {}
        )
        for value, count, right in parts
    )
    update = {"slices": slices, "rows": 400, "metrics": {"accuracy": 0.8} if metrics else {}}
    return PLAIN_SEEN.model_copy(update=update)


def answered(*parts):
    """Rows that were answered `a`, and their labels: of each slice `right` of `count`."""
    found = [
        Label("a" if i < right else "b", (("lang", value),) if value else ())
        for value, count, right in parts
        for i in range(count)
    ]
    rows = table([{}] * len(found), ["a"] * len(found))
    return rows, {str(i): one for i, one in enumerate(found)}


def test_accuracy_of_a_slice_that_falls_is_found_where_both_sides_have_rows():
    evidence = sliced(("de", 150, 0.8), ("fr", 150, 0.8), ("it", 99, 0.9), ("", 150, 0.9))
    rows, truth = answered(
        ("de", 150, 80),
        ("fr", 150, 121),
        ("it", 120, 0),  # too few were judged
        ("pl", 150, 0),  # was not judged at all
        ("", 150, 0),  # no value, which is no slice either
        ("fr", 0, 0),
    )
    found = {one.name: one for one in judge(evidence, rows, truth, 100, 0.05)}
    assert {name: one.alarm for name, one in found.items()} == {
        "accuracy": True,
        "accuracy:lang=de": True,
        "accuracy:lang=fr": False,
    }
    one = found["accuracy:lang=de"]
    assert (one.before, one.now, one.rows) == pytest.approx((0.8, 80 / 150, 150))
    assert one.effect == pytest.approx(0.8 - 80 / 150)
    few = answered(("de", 99, 0), ("fr", 150, 121))
    assert {one.name for one in judge(evidence, *few, 100, 0.05)} == {
        "accuracy",
        "accuracy:lang=fr",
    }
    assert judge(sliced(("de", 150, 0.8), metrics=False), rows, truth, 100, 0.05) == ()


def test_only_the_most_frequent_slices_are_compared():
    parts = [(f"v{i:02}", 150, 0.8) for i in range(30)]
    now = ((value, 100 + i, 80) for i, (value, _, _) in enumerate(parts))
    rows, truth = answered(*now, ("rare before", 900, 800))  # takes no place of another
    evidence = sliced(*parts, ("rare before", 99, 0.8))
    found = [one.name for one in judge(evidence, rows, truth, 100, 0.05)]
    assert found == ["accuracy", *(f"accuracy:lang=v{29 - i:02}" for i in range(MOST_SLICES))]


def test_labels_come_with_the_slices_of_their_row(tmp_path, caplog):
    file = tmp_path / "labels.jsonl"
    rows = [
        {"id": "k", "label": "old", "lang": "de", "plan": "free"},
        {"id": "k", "label": "new", "lang": "fr"},  # the last row with a label counts, as a whole
        {"id": "k", "label": None, "lang": "it", "plan": "free"},
        {"id": "l", "label": "x", "lang": ["de"], "plan": 3.0},  # no text, and one of a number
        {"id": "other", "label": "x", "lang": "de"},
        {"id": "", "label": "x", "lang": "de"},  # of no request, though some came without an id
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {"source": "r.jsonl", "columns": {"label": "label", "key": "id"}}
    data = DataSpec(**fields, slices=("lang", "plan"))
    assert read_labels(data, "text", str(file), {"k", "l", "m", ""}) == {
        "k": Label("new", (("lang", "fr"),)),
        "l": Label("x", (("plan", "3"),)),
    }
    assert not caplog.text
    data = DataSpec(**fields, slices=("lang", "country"))
    assert read_labels(data, "text", str(file), {"l"}) == {"l": Label("x")}
    assert "accuracy of slices is not compared" in caplog.text
    assert "there is no column `country`" in caplog.text
    caplog.clear()
    with pytest.raises(DataError, match="no column `class`"):
        read_labels(
            DataSpec(**{**fields, "columns": {"label": "class", "key": "id"}}, slices=("lang",)),
            "text",
            str(file),
            {"l"},
        )
    assert not caplog.text  # which would say of slices what is wrong with all


def everything(draw, count, accuracy=(0.9, 0.8, 0.7), took=0.02):
    """A month with all kinds of signals: rows, answers, labels by id with slices of two columns."""
    rows, asked = stream(draw, count)
    rows = [
        {**row, "seconds": one, "time": BEGIN + dt.timedelta(minutes=i)}
        for i, (row, one) in enumerate(zip(rows, slow(draw, count, took).tolist(), strict=True))
    ]
    langs, plans = np.arange(count) % 3, draw.integers(0, 2, count)
    right = draw.random(count) < np.array(accuracy)[langs]
    truth = {
        str(i): Label(
            asked[i] if right[i] else "c", (("lang", f"{langs[i]}"), ("plan", f"{plans[i]}"))
        )
        for i in range(count)
    }
    return rows, asked, truth, right


@pytest.mark.slow
def test_with_latency_and_slices_a_stream_that_does_not_change_rarely_alarms():
    """And without the floors of effects, too: by Holm's steps alone."""
    draw, times, found = np.random.default_rng(12), 200, collections.Counter()
    changes = {"nothing": {}, "slice": {"accuracy": (0.9, 0.8, 0.5)}, "latency": {"took": 0.04}}
    for turn in range(times):
        rows, asked, truth, right = everything(draw, 420)
        parts = collections.defaultdict(list)
        for name, label in truth.items():
            for part in label.slices:
                parts[part].append(right[int(name)])
        slices = tuple(
            Slice(column=column, value=value, rows=len(of), candidate={"accuracy": np.mean(of)})
            for (column, value), of in parts.items()
        )
        bare = [{name: row[name] for name in ("length", "probability")} for row in rows]
        evidence = evidence_of(bare, asked, right).model_copy(update={"slices": slices})
        before = table(rows, asked)
        for kind, changed in changes.items():
            if changed and turn >= 40:
                continue
            rows, asked, truth, _ = everything(draw, 420, **changed)
            signals = judge(evidence, table(rows, asked), truth, 100, 0.05, before)
            assert len(signals) == 3 + 1 + 3 + 2 + 1
            found[kind] += any(one.alarm for one in signals)
            found[f"{kind}, no floor"] += any(holm([one.p_value for one in signals], 0.05))
            found[f"{kind} by name"] += any(
                one.alarm and one.name == {"slice": "accuracy:lang=2"}.get(kind, kind)
                for one in signals
            )
    print(dict(found))
    assert found["nothing"] <= times * 0.05
    assert found["nothing, no floor"] <= times * 0.05
    assert found["slice by name"] >= 32  # of 40
    assert found["latency by name"] == 40


@pytest.mark.parametrize("count", [10, 99])
def test_too_few_rows_say_nothing(count):
    draw = np.random.default_rng(3)
    assert judge(evidence_of(*stream(draw, 300)), table(*stream(draw, count)), {}, 100, 0.05) == ()
    assert judge(evidence_of(*stream(draw, count)), table(*stream(draw, 300)), {}, 100, 0.05) == ()


def test_rows_that_are_all_alike_and_classes_that_are_one_are_no_alarm_against_themselves():
    rows, labels = [{"length": 5.0, "unknown": 0.0, "probability": 0.5}] * 200, ["a"] * 200
    evidence = evidence_of(rows, labels, names=("a", "b"))
    assert alarms_of(evidence, rows, labels) == set()
    assert "prediction" in alarms_of(evidence, rows, ["b"] * 200)


def test_shares_of_short_texts_that_do_not_change_are_no_alarm():
    """1/3, of which a reference keeps four digits."""
    rows = [{"unknown": share, "probability": 0.9} for share in (1 / 3, 0.0, 0.0)] * 100
    evidence = evidence_of(rows, ["a"] * 300)
    found = {one.name: one for one in judge(evidence, table(rows, ["a"] * 300), {}, 100, 0.05)}
    assert (found["unknown"].alarm, found["unknown"].p_value > 0.3) == (False, True)
    assert found["unknown"].effect == pytest.approx(0, abs=1e-12)


def test_many_rows_do_not_alarm_about_nothing():
    """50,000 rows tell a hundredth of a deviation from none; it is below the floor of effects."""
    draw = np.random.default_rng(4)
    evidence = evidence_of(*stream(draw, 2_000))
    assert alarms_of(evidence, *stream(draw, 50_000, length=0.02)) == set()


def test_a_network_that_is_broken_is_not_confident():
    """NaN, over which tests pass."""
    draw = np.random.default_rng(5)
    evidence = evidence_of(*stream(draw, 500))
    rows, asked = stream(draw, 500)
    rows = [{**row, "probability": math.nan} for row in rows]
    assert "confidence" in alarms_of(evidence, rows, asked)


def test_confidence_that_the_test_split_never_had_is_taken_as_it_is():
    bins = tuple(
        CalibrationBin(lower=one, upper=one + 0.1, rows=9, confidence=one, accuracy=accuracy)
        for one, accuracy in ((0.5, 0.4), (0.8, 0.9))
    )
    evidence = PLAIN.model_copy(update={"calibration": bins})
    for sure, expected in ((0.55, 0.4), (0.85, 0.9), (0.3, 0.3), (0.7, 0.7), (1.0, 1.0)):
        rows = table([{"probability": sure}], ["a"])
        assert expected_accuracy(evidence, rows) == pytest.approx(expected)
    assert expected_accuracy(PLAIN, table([{"probability": 0.5}], ["a"])) is None


def written(folder, name, **row):
    """A file of the log, of one row at this minute of an hour."""
    file = folder / "tickets/date=2026-10-01/hour=10" / f"{name}.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([{"model": "m", **row}]), file)
    return file


def test_of_two_answers_for_a_key_the_later_one_counts(tmp_path):
    """Whatever the files of an hour are called."""
    begin = dt.datetime(2026, 10, 1, 10, tzinfo=dt.UTC)
    for minute, name, label in ((50, "a", "new"), (10, "b", "old")):
        time = begin + dt.timedelta(minutes=minute)
        written(tmp_path, name, id="k", time=time, label=label)
    rows = read_log(str(tmp_path), "tickets", "m", begin, begin + dt.timedelta(days=1)).rows
    update = {"rows": 1, "metrics": {"accuracy": 0.5}}
    plain = PLAIN.model_copy(update={**update, "reference": Reference(inputs={}, confidence=())})
    (accuracy,) = judge(plain, rows, {"k": Label("new")}, 1, 0.05)
    assert (accuracy.now, accuracy.rows) == (1.0, 1)


def test_a_file_that_began_on_the_day_before_is_read(tmp_path):
    """It lies where its first row does, and holds what waited for minutes."""
    midnight = dt.datetime(2026, 10, 2, tzinfo=dt.UTC)
    written(tmp_path, "a", id="k", time=midnight + dt.timedelta(minutes=3), label="new")
    assert "date=2026-10-01" in str(next(tmp_path.rglob("a.parquet")))
    for days, count in ((0, 1), (-1, 0)):
        start = midnight + dt.timedelta(days=days)
        found = read_log(str(tmp_path), "tickets", "m", start, start + dt.timedelta(days=1))
        assert found.total == count


@pytest.mark.parametrize("size", [0, 400])
def test_a_file_of_the_log_that_is_cut_short_is_named(tmp_path, size):
    begin = dt.datetime(2026, 10, 1, 10, tzinfo=dt.UTC)
    file = written(tmp_path, "a", id="k", time=begin, label="new")
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(DataError, match="cannot be read") as caught:
        read_log(str(tmp_path), "tickets", "m", begin, begin + dt.timedelta(days=1))
    assert caught.value.problems[0].where == str(file)


def test_files_of_another_release_count_as_far_as_they_go(tmp_path):
    begin = dt.datetime(2026, 10, 1, 10, tzinfo=dt.UTC)
    span = begin, begin + dt.timedelta(days=1)
    written(tmp_path, "a", id="k", time=begin, label="x", colour="red")
    written(tmp_path, "b", id="l", time=begin, label="y", length=3.0)
    rows = read_log(str(tmp_path), "tickets", "m", *span).rows
    assert sorted(rows.column("id").to_pylist()) == ["k", "l"]
    assert set(rows.column("length").to_pylist()) == {None, 3.0}
    assert "colour" not in rows.column_names
    odd = written(tmp_path, "c", id="k", time="yesterday", label="x")
    with pytest.raises(DataError, match="cannot be read") as caught:
        read_log(str(tmp_path), "tickets", "m", *span)
    assert caught.value.problems[0].where == str(odd)


def test_holm_stops_at_the_first_that_chance_explains():
    assert holm([0.04, 0.001, 0.03], 0.05) == [False, True, False]
    assert holm([], 0.05) == []


def test_a_larger_weight_has_a_larger_part_of_the_level():
    """0.05 in parts of 1, 4 and 1: 0.008, 0.033 and 0.008; then what is left in parts of 1 and 1."""
    assert holm([0.02, 0.03, 0.3], 0.05, [1.0, 4.0, 1.0]) == [True, True, False]
    assert holm([0.02, 0.03, 0.3], 0.05) == [False, False, False]
    assert holm([0.009, 0.04, 0.3], 0.05, [1.0, 4.0, 1.0]) == [False, False, False]


@pytest.mark.slow
def test_the_vocabulary_drift_of_the_reviews_is_found_from_july_on():
    """As ../facts on drift detectors measured it: a TF-IDF classifier of 300 texts, 150 held out, a month of 150 rows."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    rows = [
        json.loads(line) for line in (CONFIGS / "data" / "reviews.jsonl").read_text().splitlines()
    ]
    months = {
        m: [row for row in rows if row["month"] == m] for m in sorted({r["month"] for r in rows})
    }

    def judged(train, held):
        vectors = TfidfVectorizer(ngram_range=(1, 2))
        model = LogisticRegression(C=10, max_iter=500)
        model.fit(vectors.fit_transform([r["text"] for r in train]), [r["label"] for r in train])
        words = frozenset(word_hashes(row["text"] for row in train))

        def answered(part):
            odds = model.predict_proba(vectors.transform([row["text"] for row in part]))
            found = [load_modality("text").signals(row["text"], words) for row in part]
            sure = [
                {**row, "probability": float(p)} for row, p in zip(found, odds.max(1), strict=True)
            ]
            return sure, model.classes_[odds.argmax(1)].tolist()

        evidence = evidence_of(*answered(held), names=tuple(model.classes_))
        return lambda part: judge(evidence, table(*answered(part)), {}, 100, 0.05)

    draw = np.random.default_rng(0)
    pool, false = [row for month in list(months)[:4] for row in months[month]], 0
    for _ in range(200):
        picked = [pool[i] for i in draw.permutation(len(pool))]
        signals_of = judged(picked[:300], picked[300:450])
        false += any(one.alarm for one in signals_of(picked[450:600]))
    first = [row for month in list(months)[:3] for row in months[month]]
    found, barely = collections.Counter(), collections.Counter()
    for _ in range(120):
        picked = [first[i] for i in draw.permutation(len(first))]
        signals_of = judged(picked[:300], picked[300:])
        for month in list(months)[4:]:
            seen_now = signals_of(months[month])
            found[month] += any(one.alarm for one in seen_now)
            barely[month] += any(one.name == "unknown" and one.p_value < 0.01 for one in seen_now)
    print(f"false alarms: {false} of 200; of 120 references found:", dict(found))
    print("by unknown words at p < 0.01, the detector of the facts:", dict(barely))
    assert false <= 10
    for month, bar in (("2026-07", 0.83), ("2026-08", 0.70), ("2026-09", 0.97), ("2026-10", 1.0)):
        assert found[month] >= barely[month], month
        # the bar is of 30 references: two deviations of such a share, and of ours
        assert found[month] / 120 >= bar - 2 * math.sqrt(bar * (1 - bar) * (1 / 30 + 1 / 120)), (
            month
        )
