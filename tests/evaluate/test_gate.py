"""The gate: a table of who is promoted and who is not, and why."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rekindle.evaluate import evaluate, gate
from rekindle.evaluate.bounds import bounds_of
from rekindle.evaluate.compare import champion_drop_of
from rekindle.objectives.classes.scores import ClassScores
from rekindle.objectives.tokens.scores import TokenScores
from rekindle.records import Churn, Contender, Scores, Slice
from rekindle.spec.model import DataSpec, EvaluateSpec
from rekindle.train.score import _judgement_of

ROWS, CLASSES = 400, 4
NAMES = tuple("abcd")
DATA = DataSpec(source="-")
LABELS = np.random.default_rng(7).integers(0, CLASSES, ROWS)


def contender(accuracy, seed=0, labels=LABELS):
    """Predictions of which exactly `accuracy` are right, each with probability 0.7 on its answer."""
    answers = labels.copy()
    wrong = np.random.default_rng(seed).permutation(len(labels))[
        : round((1 - accuracy) * len(labels))
    ]
    answers[wrong] = (answers[wrong] + 1) % CLASSES
    probabilities = np.full((len(labels), CLASSES), 0.1)
    probabilities[np.arange(len(labels)), answers] = 0.7
    return ClassScores(probabilities, labels, NAMES)


def judge(spec, candidate, champion, slices):
    metric = spec.gate.metric or "accuracy"
    return gate.judge(spec, metric, candidate, champion, slices, "accuracy")


def spec(**fields):
    return EvaluateSpec.model_validate(fields)


def part(candidate, champion, rows=100, name="a", p_value=None):
    return Slice(
        column="c",
        value=name,
        rows=rows,
        candidate={"accuracy": candidate},
        champion={"accuracy": champion},
        p_value=p_value,
    )


FLOOR = {"floor": {"accuracy": 0.8}}
FRESH = {"gate": {"mode": "noninferiority", "margin": 0.05}}
TABLE = [
    ("a first model that reaches the floor is promoted", FLOOR, 0.9, None, (), True, ""),
    ("a first model below the floor is not", FLOOR, 0.7, None, (), False, "floor_accuracy"),
    ("a first model that guesses the majority is not", {}, 0.25, None, (), False, "beats_majority"),
    (
        "a ceiling on log-loss is a floor turned round",
        {"floor": {"log_loss": 0.1}},
        0.99,
        None,
        (),
        False,
        "floor_log_loss",
    ),
    ("a clearly better model is promoted", FLOOR, 0.95, 0.85, (), True, ""),
    ("an equal model is not", FLOOR, 0.9, "same", (), False, "better_than_champion"),
    ("a model better by noise is not", FLOOR, 0.905, 0.9, (), False, "better_than_champion"),
    ("a worse model is not", FLOOR, 0.85, 0.95, (), False, "better_than_champion"),
    (
        "better, but by less than min_delta, is not",
        {"gate": {"min_delta": 0.2}},
        0.95,
        0.85,
        (),
        False,
        "better_than_champion",
    ),
    (
        "better in log-loss, where less is more",
        {"gate": {"metric": "log_loss"}},
        0.97,
        0.8,
        (),
        True,
        "",
    ),
    (
        "better, but below the floor, is not",
        {"floor": {"accuracy": 0.97}},
        0.95,
        0.8,
        (),
        False,
        "floor_accuracy",
    ),
    (
        "a slice that drops too much refuses",
        FLOOR,
        0.95,
        0.85,
        (part(0.7, 0.9),),
        False,
        "slice:c=a",
    ),
    ("a small slice does not decide", FLOOR, 0.95, 0.85, (part(0.0, 1.0, rows=29),), True, ""),
    ("an equal model is not worse", FRESH, 0.9, "same", (), True, ""),
    (
        "a model that may be worse by more than the margin is not promoted",
        FRESH,
        0.87,
        0.9,
        (),
        False,
        "not_worse_than_champion",
    ),
    (
        "a drop that chance explains does not refuse",
        FLOOR,
        0.95,
        0.85,
        (part(0.7, 0.9, p_value=0.06),),
        True,
        "",
    ),
    (
        "a drop that chance does not explain refuses",
        FLOOR,
        0.95,
        0.85,
        (part(0.7, 0.9, p_value=0.04),),
        False,
        "slice:c=a",
    ),
    (
        "a drop that one of ten slices shows by chance does not",
        FLOOR,
        0.95,
        0.85,
        (
            part(0.7, 0.9, p_value=0.04),
            *(part(0.9, 0.9, name=str(i), p_value=0.5) for i in range(9)),
        ),
        True,
        "",
    ),
    (
        "a slice below its floor refuses a first model",
        {"slice_floor": {"accuracy": 0.8}},
        0.9,
        None,
        (part(0.79, 0),),
        False,
        "floor_accuracy:c=a",
    ),
    (
        "a slice at its floor does not",
        {"slice_floor": {"accuracy": 0.8}},
        0.9,
        None,
        (part(0.8, 0),),
        True,
        "",
    ),
    (
        "a small slice has no floor",
        {"slice_floor": {"accuracy": 0.8}},
        0.9,
        None,
        (part(0.1, 0, rows=29),),
        True,
        "",
    ),
    (
        "a slice that lacks the metric is below its floor",
        {"slice_floor": {"roc_auc": 0.8}},
        0.9,
        None,
        (part(0.9, 0),),
        False,
        "floor_roc_auc:c=a",
    ),
    ("a drop within the limit is allowed", FLOOR, 0.95, 0.85, (part(0.85, 0.9),), True, ""),
]


@pytest.mark.parametrize(
    ("fields", "ours", "theirs", "slices", "promoted", "failing"),
    [t[1:] for t in TABLE],
    ids=[t[0] for t in TABLE],
)
def test_the_gate_decides(fields, ours, theirs, slices, promoted, failing):
    candidate = contender(ours)
    champion = (
        candidate if theirs == "same" else None if theirs is None else contender(theirs, seed=1)
    )
    verdict = judge(spec(**fields), candidate, champion, slices)
    assert verdict.promote is promoted, verdict.reason
    assert [c.name for c in verdict.checks if not c.passed] == ([failing] if failing else [])
    assert verdict.reason


@pytest.mark.parametrize("who", ["candidate", "champion"])
def test_what_is_not_a_number_refuses(who):
    broken = contender(0.95)
    broken.probabilities_NC[3, 0] = np.nan
    fine = contender(0.8, seed=1)
    pair = (broken, fine) if who == "candidate" else (contender(0.95), broken)
    verdict = judge(spec(), *pair, ())
    assert not verdict.promote
    assert f"the {who}'s" in verdict.reason


def test_no_examples_refuse():
    empty = ClassScores(np.zeros((0, CLASSES)), np.zeros(0, np.int64), NAMES)
    assert not judge(spec(), empty, empty, ()).promote


def test_the_interval_is_the_same_every_time_and_holds_the_estimate():
    pair = contender(0.95), contender(0.9, seed=1)
    first, second = (judge(spec(), *pair, ()).comparison for _ in range(2))
    assert first == second
    assert first.lower < first.estimate < first.upper


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """Two models of equal skill: in 95 of 100 samples or more the interval must hold zero."""
    generator = np.random.default_rng(0)
    held = 0
    for i in range(100):
        labels = generator.integers(0, CLASSES, 200)
        ours, theirs = (
            contender(float(generator.binomial(200, 0.9)) / 200, seed=1000 * i + k, labels=labels)
            for k in (1, 2)
        )
        found = judge(spec(gate={"resamples": 400}), ours, theirs, ()).comparison
        held += found.lower <= 0 <= found.upper
    assert 93 <= held <= 100


def texts(nats_per_target, rows=300, targets=20, spread=0.1, unigram_nats=5.0, seed=0):
    """Texts of a few targets each, of 4 bytes a target, whose loss differs a little by text."""
    each = np.random.default_rng(7).integers(1, 2 * targets, rows).astype(float)
    noise = np.random.default_rng(seed).normal(0, spread, rows)
    return TokenScores(
        np.maximum(0, nats_per_target + noise) * each, each / 4, each, 4 * each, unigram_nats
    )


def rise(candidate, champion, rows=100):
    losses = ({"log_loss": candidate}, {"log_loss": champion})
    return Slice(column="c", value="a", rows=rows, candidate=losses[0], champion=losses[1])


CEILING = {"floor": {"log_loss": 4.0}}
OF_TOKENS = [
    ("a first model below the ceiling is promoted", CEILING, texts(3.5), None, (), True, ""),
    (
        "a first model above the ceiling is not",
        CEILING,
        texts(4.5),
        None,
        (),
        False,
        "floor_log_loss",
    ),
    (
        "perplexity has a ceiling, too",
        {"floor": {"perplexity": 30}},
        texts(3.5),
        None,
        (),
        False,
        "floor_perplexity",
    ),
    (
        "accuracy of tokens has a floor",
        {"floor": {"token_accuracy": 0.3}},
        texts(3.5),
        None,
        (),
        False,
        "floor_token_accuracy",
    ),
    (
        "a metric that the task lacks is a floor that nothing reaches",
        {"floor": {"accuracy": 0.1}},
        texts(3.5),
        None,
        (),
        False,
        "floor_accuracy",
    ),
    (
        "a first model that knows no more than frequencies is not",
        {},
        texts(5.0, spread=0),
        None,
        (),
        False,
        "beats_unigram",
    ),
    ("a clearly better model is promoted", {}, texts(3.5), texts(3.8, seed=1), (), True, ""),
    ("an equal model is not", {}, texts(3.5), texts(3.5), (), False, "better_than_champion"),
    ("a worse model is not", {}, texts(3.8), texts(3.5, seed=1), (), False, "better_than_champion"),
    (
        "better, but by less than min_delta, is not",
        {"gate": {"min_delta": 0.5}},
        texts(3.5),
        texts(3.8, seed=1),
        (),
        False,
        "better_than_champion",
    ),
    (
        "a slice whose loss rises too much refuses",
        {},
        texts(3.5),
        texts(3.8, seed=1),
        (rise(4.0, 3.9),),
        False,
        "slice:c=a",
    ),
    (
        "a rise within the limit is allowed",
        {},
        texts(3.5),
        texts(3.8, seed=1),
        (rise(3.94, 3.9),),
        True,
        "",
    ),
]


@pytest.mark.parametrize(
    ("fields", "ours", "theirs", "slices", "promoted", "failing"),
    [t[1:] for t in OF_TOKENS],
    ids=[t[0] for t in OF_TOKENS],
)
def test_the_gate_decides_on_language_models(fields, ours, theirs, slices, promoted, failing):
    verdict = gate.judge(spec(**fields), "log_loss", ours, theirs, slices, "log_loss")
    assert verdict.promote is promoted, verdict.reason
    assert [c.name for c in verdict.checks if not c.passed] == ([failing] if failing else [])


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_loss_that_is_not_a_number_refuses(wrong):
    broken = texts(3.5)
    broken.nats_N[3] = wrong
    for pair in ((broken, texts(3.8, seed=1)), (texts(3.5), broken)):
        verdict = gate.judge(spec(), "log_loss", *pair, (), "log_loss")
        assert not verdict.promote
        assert verdict.comparison is None


def test_texts_without_a_byte_to_predict_refuse():
    scores = texts(3.5)
    silent = TokenScores(scores.nats_N, scores.right_N, scores.targets_N, 0 * scores.bytes_N, 5.0)
    assert not gate.judge(spec(), "bits_per_byte", silent, None, (), "bits_per_byte").promote


def test_a_missing_metric_of_a_slice_refuses():
    part = Slice(column="c", value="a", rows=100, candidate={}, champion={"log_loss": 3.9})
    verdict = gate.judge(spec(), "log_loss", texts(3.5), texts(3.8, seed=1), (part,), "log_loss")
    assert [c.name for c in verdict.checks if not c.passed] == ["slice:c=a"]


def test_metrics_of_tokens_are_ratios_of_sums_and_a_worked_example():
    # 6 nats over 2 targets and 2 nats over 6: 8 nats over 8 targets and 16 bytes
    scores = TokenScores(*np.array([[6.0, 2.0], [1, 3], [2, 6], [4, 12]]), 2.0)
    assert scores.metrics == pytest.approx(
        {
            "log_loss": 1.0,
            "perplexity": np.e,
            "token_accuracy": 0.5,
            "bits_per_byte": 8 / np.log(2) / 16,
        }
    )
    twice_the_second = scores.weighted("log_loss", np.array([[0.0, 2.0], [1.0, 1.0]]))
    assert twice_the_second == pytest.approx([4 / 12, 1.0])


def contest(random, rows, lost=0.0, slices=12):
    """The verdict on slices for two models that are right in 80 % of rows, independently of each other in a third of them; the
    candidate loses `lost` points of the first slice."""
    labels = random.integers(0, CLASSES, rows * slices)
    of = np.repeat(np.arange(slices), rows)
    right = random.random((2, len(labels))) < 0.8
    right[1] = np.where(random.random(len(labels)) < 2 / 3, right[0], right[1])
    right[1] &= ~((of == 0) & (random.random(len(labels)) < lost / 0.8))
    champion, candidate = (
        ClassScores(
            np.eye(CLASSES)[np.where(ok, labels, (labels + 1) % CLASSES)] * 0.6 + 0.1, labels, NAMES
        )
        for ok in right
    )
    policy = spec(gate={"resamples": 200}).gate
    rows_of = pa.table({"slices": pa.array([{"of": str(n)} for n in of])})
    parts = evaluate._slices(policy, "accuracy", rows_of, ["of"], candidate, champion, None)
    checks = {c.name: c.passed for c in gate._slice_checks(policy, parts, "accuracy")}
    return checks, parts[0]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [40, 150])
def test_slices_refuse_few_models_that_are_as_good_and_most_that_lost(rows):
    random = np.random.default_rng(rows)
    refused = sum(not all(contest(random, rows)[0].values()) for _ in range(300))
    assert refused <= 0.05 * 300 + 2 * np.sqrt(300 * 0.05 * 0.95)
    found = sum(not contest(random, 1_000, lost=0.10)[0]["slice:of=0"] for _ in range(100))
    assert found >= 80
    _, first = contest(random, rows)
    assert 0.05 < first.detectable < 0.5


@pytest.mark.slow
def test_what_is_detectable_is_detected_in_four_cases_of_five():
    random = np.random.default_rng(1)
    _, first = contest(random, 300, slices=1)
    found = [contest(random, 300, lost=first.detectable, slices=1) for _ in range(200)]
    share = np.mean([part.p_value < 0.05 for _, part in found])
    assert 0.7 <= share <= 0.9


def written(folder, ours, theirs, labels=("a", "b", "c", "a", "b", "c") * 10):
    """The files of a scoring in which the contenders answer the classes `ours` and `theirs`."""
    names = ("a", "b", "c")
    contender = Contender(run_key="k", digest="d", scores="s", precision="fp32", labels=names)
    sides = {"candidate": ours, "champion": theirs} if theirs else {"candidate": ours}
    columns = {
        who: [{"logits": [4.0 * (name == one) for name in names]} for one in answers]
        for who, answers in sides.items()
    }
    hashes = pa.array([bytes([0] * 14) + row.to_bytes(2) for row in range(len(labels))])
    pq.write_table(
        pa.table({"label": list(labels), "hash": hashes, **columns}), folder / evaluate.TABLE
    )
    champion = {"champion": contender, "champion_version": "3"} if theirs else {}
    Scores(
        objective="classes",
        candidate=contender,
        rows=len(labels),
        excluded=0,
        examples="e",
        **champion,
    ).write(folder / evaluate.RECORD)
    return folder


RIGHT = ["a", "b", "c", "a", "b", "c"] * 10


@pytest.mark.parametrize(
    ("most", "passed"), [(None, None), (0.0, False), (0.16, False), (0.17, True), (1.0, True)]
)
def test_answers_that_change_are_counted_and_too_many_refuse(tmp_path, most, passed):
    """Of sixty answers six are mended, three are spoiled and one is wrong in another way."""
    theirs, ours = [*RIGHT], [*RIGHT]
    theirs[:6] = ["b", "c", "a", "b", "c", "a"]
    ours[10:13] = ["c", "a", "b"]
    ours[20], theirs[20] = "a", "b"
    spec_ = spec(gate={"mode": "noninferiority", "margin": 0.5, "max_churn": most})
    found = evaluate.evaluate(spec_, DATA, written(tmp_path, ours, theirs))
    assert found.churn == Churn(answers=60, share=10 / 60, fixed=6, broken=3)
    checks = [check for check in found.checks if check.name == "churn"]
    assert [check.passed for check in checks] == ([] if passed is None else [passed])
    assert found.promote is (passed is not False)
    if passed is False:
        said = f"0.1667 of the answers differ from the champion's, more than the {most:g} allowed"
        assert found.reason == said


def test_rows_that_belong_together_are_drawn_together():
    """Forty patients of ten rows each, of whom all or none are better: the deviation of the difference is that of forty draws."""
    made = np.random.default_rng(0)
    cluster = made.permutation(np.repeat(np.arange(40), 10))
    better = np.isin(cluster, np.arange(12))
    champion = contender(0.5)
    candidate = ClassScores(
        np.where(better[:, None], np.eye(CLASSES)[LABELS], champion.probabilities_NC), LABELS, NAMES
    )
    gate_ = spec(gate={"cluster": "patient"}).gate
    rows, groups = (
        bounds_of(gate_, "accuracy", candidate, champion, one).low_R.std()
        for one in (np.arange(ROWS), cluster)
    )
    gain = (candidate.probabilities_NC.argmax(1) == LABELS).astype(float) - (
        champion.probabilities_NC.argmax(1) == LABELS
    )
    means = np.array([gain[cluster == c].mean() for c in range(40)])
    # one patient more, of whom all ten answers are lost, adds a deviation of its own
    assert groups == pytest.approx(np.hypot(means.std() / np.sqrt(40), 1 / 41), rel=0.1)
    assert groups > 1.5 * rows


def test_the_column_of_clusters_is_no_slice_and_few_values_tell_nothing(tmp_path):
    theirs = [*RIGHT]
    theirs[:20] = ["c", "a", "b"] * 6 + ["c", "a"]
    folder = written(tmp_path, RIGHT, theirs)
    rows = pq.read_table(folder / evaluate.TABLE)
    columns = ("patient", "ward")
    for patients, promoted in ((30, True), (8, False)):
        slices = pa.array(
            [
                {"patient": None if i == 0 else f"p{i % patients}", "ward": "ab"[i % 2]}
                for i in range(60)
            ]
        )
        pq.write_table(rows.append_column("slices", slices), folder / evaluate.TABLE)
        found = evaluate.evaluate(
            spec(gate={"cluster": "patient"}), DataSpec(source="-", slices=columns), folder
        )
        assert {one.column for one in found.slices} == {"ward"}
        assert found.promote is promoted, found.reason
    said = "the 9 values of patient among the test examples tell as much as 8.2 of equal size: it takes 10 to tell models apart"
    assert found.reason == said


@pytest.mark.parametrize(("size", "passed"), [(2_000_000, True), (2_000_001, False), (None, False)])
def test_a_model_that_is_too_large_is_refused(tmp_path, size, passed):
    folder = written(tmp_path, RIGHT, None)
    record = Scores.read(folder / evaluate.RECORD)
    candidate = record.candidate.model_copy(update={"bytes": size})
    record.model_copy(update={"candidate": candidate}).write(folder / evaluate.RECORD)
    found = evaluate.evaluate(spec(max_megabytes=2), DATA, folder)
    assert found.promote is passed
    if size is None:
        assert "was not recorded; run the step `score` again" in found.reason
    elif not passed:
        assert found.reason == "the model takes 2 MB, more than the 2 allowed"
    assert evaluate.evaluate(spec(), DATA, folder).promote


def test_a_first_model_changes_no_answers(tmp_path):
    found = evaluate.evaluate(spec(gate={"max_churn": 0.0}), DATA, written(tmp_path, RIGHT, None))
    assert found.promote, found.reason
    assert found.churn is None


def test_of_texts_without_classes_no_churn_is_known_and_a_limit_refuses(tmp_path):
    """As of a language model of a user's own, of which the config tells nothing."""
    sums = [{"nats": 1.0, "right": 1, "targets": 2, "target_bytes": 4}] * 40
    rows = pa.table({"candidate": sums, "champion": [{**sums[0], "nats": 4.0}] * 40})
    pq.write_table(rows, tmp_path / evaluate.TABLE)
    known = Contender(run_key="k", digest="d", scores="s", precision="fp32", unigram_nats=9.0)
    record = Scores(
        objective="tokens",
        candidate=known,
        champion=known,
        champion_version="3",
        rows=40,
        excluded=0,
        examples="e",
    )
    record.write(tmp_path / evaluate.RECORD)
    assert evaluate.evaluate(spec(), DATA, tmp_path).promote
    found = evaluate.evaluate(spec(gate={"max_churn": 0.5}), DATA, tmp_path)
    assert (found.churn, found.reason) == (None, "there are no classes to compare")


def test_comparisons_of_one_epoch_share_what_may_go_wrong():
    looks = spec(gate={"looks": 12}).gate
    levels = [1 - gate.confidence_of_look(looks, earlier) for earlier in range(5_000)]
    assert levels[:12] == pytest.approx([0.05 / 24] * 12)
    assert levels[12:24] == pytest.approx([0.05 / 72] * 12)
    assert 0.0498 < sum(levels) < 0.05
    assert gate.confidence_of_look(spec().gate, 4_000) == 0.95


def test_an_epoch_is_how_the_test_split_is_drawn_and_the_looks_at_it_count(tmp_path):
    theirs = ["b" if i % 5 == 0 else answer for i, answer in enumerate(RIGHT)]
    folder = written(tmp_path, RIGHT, theirs)
    asked, first = spec(gate={"looks": 2}), evaluate.evaluate(spec(), DATA, folder)
    assert first.promote
    assert first.comparison.confidence == 0.95
    record = Scores.read(folder / evaluate.RECORD)
    record.model_copy(update={"compared": {first.epoch: 7, "other": 1}}).write(
        folder / evaluate.RECORD
    )
    eighth = evaluate.evaluate(asked, DATA, folder)
    assert (eighth.epoch, eighth.promote) == (first.epoch, False)
    assert eighth.comparison.confidence == pytest.approx(1 - 0.05 / 40)
    assert "] at 99.875%, whose lower bound does not lie above 0" in eighth.reason
    elsewhere = DataSpec.model_validate({"source": "-", "split": {"salt": "spring"}})
    salted = evaluate.evaluate(asked, elsewhere, folder)
    assert salted.epoch not in ("", first.epoch)
    shares = {"source": "-", "split": {"train": 0.7, "validation": 0.2}}
    assert evaluate.evaluate(asked, DataSpec.model_validate(shares), folder).epoch == first.epoch
    assert (salted.promote, salted.comparison.confidence) == (True, pytest.approx(1 - 0.05 / 4))


def test_what_is_not_compared_is_no_look(tmp_path):
    assert evaluate.evaluate(spec(), DATA, written(tmp_path, RIGHT, None)).epoch == ""


def test_rows_that_are_set_aside_decide_nothing(tmp_path):
    """What the candidate answers there changes what is found there, and nothing else."""
    labels, share = RIGHT * 10, 0.25
    theirs = ["a" if row % 4 == 0 else label for row, label in enumerate(labels)]
    written(tmp_path, labels, theirs, labels)
    aside = evaluate._aside(pq.read_table(tmp_path / evaluate.TABLE), share, "")
    assert 0.2 < aside.mean() < 0.3
    found = evaluate.evaluate(spec(audit=share), DATA, tmp_path)
    assert (found.audit.rows, found.rows) == (aside.sum(), len(labels) - aside.sum())
    assert found.audit.metrics["accuracy"] == 1
    assert found.audit.comparison.estimate == pytest.approx(
        1 - found.audit.champion_metrics["accuracy"]
    )
    spoiled = ["c" if out else label for out, label in zip(aside, labels, strict=True)]
    again = evaluate.evaluate(spec(audit=share), DATA, written(tmp_path, spoiled, theirs, labels))
    assert again.audit.metrics["accuracy"] < 0.5
    assert again.model_copy(update={"audit": found.audit}) == found
    assert evaluate.evaluate(spec(), DATA, tmp_path).audit is None
    other = evaluate._aside(pq.read_table(tmp_path / evaluate.TABLE), share, "spring")
    assert 0.2 < other.mean() < 0.3
    assert (aside & other).mean() < 0.12, "another salt sets other rows aside"


@pytest.mark.parametrize("rows", [1, 9, 12])
def test_few_rows_aside_are_measured_and_compared_from_ten_on(tmp_path, monkeypatch, rows):
    monkeypatch.setattr(evaluate, "_aside", lambda table, *_: np.arange(table.num_rows) < rows)
    found = evaluate.evaluate(spec(audit=0.1), DATA, written(tmp_path, RIGHT, RIGHT)).audit
    assert (found.rows, found.metrics["accuracy"], found.comparison is None) == (rows, 1, rows < 10)


def test_a_gate_with_few_rows_says_how_many_it_takes():
    for rows, promoted in ((2, False), (5, False), (6, True)):
        labels = np.arange(rows) % CLASSES
        pair = contender(1.0, labels=labels), contender(0.0, labels=labels)
        verdict = judge(spec(), *pair, ())
        assert verdict.promote is promoted, verdict.reason
        if not promoted:
            assert (
                f"{rows} test rows cannot show a gain, it takes 6 that all speak for it"
                in verdict.reason
            )


def test_equal_answers_on_too_few_rows_do_not_show_that_nothing_is_lost():
    for rows, promoted in ((20, False), (360, False), (380, True)):
        labels = np.arange(rows) % CLASSES
        same = contender(0.9, labels=labels)
        asked = spec(gate={"mode": "noninferiority"})
        verdict = judge(asked, same, same, ())
        assert verdict.promote is promoted, verdict.reason
        assert verdict.comparison.detectable > 0.01
        if not promoted:
            said = f"{rows} test rows that the models answer alike still allow a loss of"
            assert said in verdict.reason
            assert "takes about 368 of them, or a wider evaluate.gate.margin" in verdict.reason


def test_more_looks_take_more_rows_that_agree():
    labels = np.arange(60) % CLASSES
    champion = contender(0.8, labels=labels)
    ours = champion.probabilities_NC.copy()
    wrong = np.flatnonzero(champion.probabilities_NC.argmax(1) != labels)[:7]
    ours[wrong] = np.eye(CLASSES)[labels[wrong]] * 0.6 + 0.1
    candidate = ClassScores(ours, labels, NAMES)
    assert judge(spec(), candidate, champion, ()).promote  # 2^-7 is below 0.025
    assert not judge(spec(gate={"confidence": 0.998}), candidate, champion, ()).promote


def test_texts_of_which_one_holds_most_of_the_tokens_tell_nothing():
    ours, theirs = texts(3.0), texts(3.8, seed=1)
    for scores in (ours, theirs):
        scores.targets_N[0] = 1e6
    verdict = gate.judge(spec(), "log_loss", ours, theirs, (), "log_loss")
    assert not verdict.promote
    assert "differ in length, tell as much as 1.0 of equal size" in verdict.reason


def dropped(folder, judged, rows=200):
    """A scoring in which the champion, which is right in 45 of 60 rows, once was judged so."""
    theirs = ["b" if i % 4 == 0 else answer for i, answer in enumerate(RIGHT)]
    theirs = [
        {"b": "c"}.get(t, t) if i % 4 == 0 and r == "b" else t
        for i, (t, r) in enumerate(zip(theirs, RIGHT, strict=True))
    ]
    written(folder, RIGHT, theirs)
    record = Scores.read(folder / evaluate.RECORD)
    known = {"champion_judged": {"accuracy": judged}, "champion_judged_rows": rows}
    record.model_copy(update=known).write(folder / evaluate.RECORD)
    return folder


def test_a_champion_that_does_worse_than_when_it_was_judged_is_said(tmp_path):
    found = evaluate.evaluate(spec(), DATA, dropped(tmp_path, 0.95))
    assert found.promote
    assert found.champion_drop.drop == pytest.approx(0.2)
    assert found.champion_drop.p_value < 1e-3
    said = (
        "the champion reaches accuracy 0.75 on these 60 rows and had 0.95 on 200 when it was judged"
    )
    assert said in found.reason
    assert said in found.warnings[0]
    for judged in (0.75, 0.78, 0.6):
        quiet = evaluate.evaluate(spec(), DATA, dropped(tmp_path, judged))
        assert "when it was judged" not in quiet.reason
        assert quiet.warnings == ()


@pytest.mark.parametrize(
    ("most", "judged", "promoted"),
    [(0.1, 0.95, False), (0.25, 0.95, True), (None, 0.95, True), (0.0, 0.78, True)],
)
def test_a_drop_of_the_champion_beyond_what_is_allowed_waits_for_a_person(
    tmp_path, most, judged, promoted
):
    asked = spec(gate={"max_champion_drop": most})
    found = evaluate.evaluate(asked, DATA, dropped(tmp_path, judged))
    assert found.promote is promoted, found.reason
    assert found.is_for_a_person is not promoted
    if not promoted:
        assert (
            "more than the 0.1 of evaluate.gate.max_champion_drop, so a person decides"
            in found.reason
        )
        assert "rekindle promote RUN --reason TEXT" in found.reason


@pytest.mark.slow
def test_by_chance_a_champion_that_is_as_good_seems_to_drop_in_one_of_a_hundred_runs():
    random, alarms = np.random.default_rng(0), 0
    for _ in range(400):
        judged = random.binomial(300, 0.85) / 300
        labels = random.integers(0, CLASSES, 200)
        champion = contender(random.binomial(200, 0.85) / 200, labels=labels)
        record = Scores(
            objective="classes",
            candidate=Contender(run_key="k", digest="d", scores="s", precision="fp32"),
            rows=200,
            excluded=0,
            examples="e",
            champion_judged={"accuracy": judged},
            champion_judged_rows=300,
        )
        drop = champion_drop_of(
            spec(gate={"resamples": 200}).gate, "accuracy", record, champion, None
        )
        alarms += drop.is_sure
    assert alarms <= 400 * 0.01 + 3 * np.sqrt(400 * 0.01)


def test_few_test_rows_are_a_warning_of_a_first_model(tmp_path):
    found = evaluate.evaluate(spec(), DATA, written(tmp_path, RIGHT[:6], None, RIGHT[:6]))
    assert found.promote
    assert "the test split has 6 rows, which tell little of a model" in found.warnings[0]


def test_what_a_champion_reached_is_read_beside_its_files(tmp_path):
    model = tmp_path / "artifacts" / "network"
    model.mkdir(parents=True)
    assert _judgement_of(model).rows == 0
    (model.parent / "evidence.json").write_text("{")
    assert _judgement_of(model).metrics == {}
    evidence = evaluate.evaluate(spec(), DATA, written(tmp_path, RIGHT, None))
    evidence.write(model.parent / "evidence.json")
    known = _judgement_of(model)
    assert (known.rows, known.metrics["accuracy"]) == (60, 1.0)
    assert _judgement_of(None).rows == 0
