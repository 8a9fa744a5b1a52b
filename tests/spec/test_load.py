"""Config to Spec: merging, overrides, and every problem at once with its line."""

import pytest

from rekindle.errors import SpecError
from rekindle.spec.load import load_target
from rekindle.spec.model import Spec
from rekindle.spec.section import Section

MINIMAL = "name: x\ntask: text_classification\ndata: {source: sklearn:digits}\n"


@pytest.fixture
def write(tmp_path):
    def writer(text, name="c.yaml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return writer


def problems_of(path, overrides=()):
    with pytest.raises(SpecError) as caught:
        load_target(path, overrides)
    assert caught.value.exit_code == 2
    return caught.value.problems


def test_an_empty_config_is_told_all_that_it_needs(write):
    assert [p.what for p in problems_of(write("# nothing"))] == [
        "name: is missing",
        "task: is missing",
        "data: is missing",
    ]


def test_a_minimal_config_gets_the_defaults_of_the_fields(write):
    spec = load_target(write(MINIMAL))
    assert spec.model_name == "x"
    assert (spec.train.lr, spec.train.precision) == (None, "auto")
    assert spec.data.split.train == 0.8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (({"name": "x"},), "named by its path, not by a dict"),
        (("c.yaml", "train.epochs=3"), "a list such as"),
        (("c.yaml", {"train.epochs": 3}), "a list such as"),
    ],
)
def test_arguments_of_other_types_are_told_as_python_tells_them(arguments, said):
    with pytest.raises(TypeError, match=said):
        load_target(*arguments)


def test_the_spec_is_frozen(write):
    spec = load_target(write(MINIMAL))
    with pytest.raises(ValueError, match="frozen"):
        spec.train.lr = 1.0


def test_overrides_win_and_name_themselves_in_errors(write):
    path = write(MINIMAL)
    assert (
        load_target(
            path, ["train.lr=1e-5", "data.split={train: 0.5, validation: 0.2, test: 0.3}"]
        ).train.lr
        == 1e-5
    )
    (problem,) = problems_of(path, ["train.lr=fast"])
    assert problem.where == "--set train.lr"


def test_extends_merges_mappings_and_replaces_the_rest(write):
    write(
        "name: base\ntask: text_classification\ndata: {source: sklearn:digits, slices: [a]}\ntrain: {lr: 0.1, seed: 3}\n",
        "base.yaml",
    )
    spec = load_target(
        write("extends: base.yaml\nname: child\ndata: {slices: [b]}\ntrain: {lr: 0.2}\n")
    )
    assert (spec.name, spec.train.lr, spec.train.seed, spec.data.slices) == (
        "child",
        0.2,
        3,
        ("b",),
    )


def test_an_error_in_the_base_names_the_base(write):
    write("name: base\ntask: text_classification\ntrain: {lr: -1}\n", "base.yaml")
    (problem,) = problems_of(write("extends: base.yaml\ndata: {source: sklearn:digits}\n"))
    assert "base.yaml:3" in problem.where


def test_extends_in_a_circle_is_refused(write):
    write("extends: c.yaml\n", "base.yaml")
    assert "circle" in problems_of(write("extends: base.yaml\n"))[0].what


def test_relative_paths_start_at_the_folder_of_the_config(write, tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "d.csv").write_text("text,label\n")
    spec = load_target(write(MINIMAL.replace("sklearn:digits", "d.csv"), "deep/c.yaml"))
    assert spec.data.source == str(tmp_path / "deep" / "d.csv")


def test_golden_rows_are_what_their_file_says_wherever_it_lies(write, tmp_path):
    for folder in ("here", "there"):
        write("text,label\na,b\n", f"{folder}/golden.csv")
        write(MINIMAL + "evaluate: {must_pass: golden.csv}\n", f"{folder}/c.yaml")
    found = [load_target(tmp_path / folder / "c.yaml").evaluate for folder in ("here", "there")]
    assert found[0] == found[1]
    assert found[0].must_pass.content == "text,label\na,b\n"
    write('{"text": "a", "label": "b"}\n', "there/golden.jsonl")
    rows = tmp_path / "there" / "golden.jsonl"
    again = load_target(tmp_path / "here/c.yaml", [f"evaluate.must_pass={rows}"]).evaluate
    assert again.must_pass != found[0].must_pass
    assert Spec.model_validate(load_target(tmp_path / "here/c.yaml").model_dump()).must_pass


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("none.csv", None, "cannot read"),
        ("golden.csv", b"text,label\nna\xefve,a\n", "cannot read"),
        ("golden.parquet", b"PAR1", "must_pass.format"),
        ("golden.csv", b"x" * 65_537, "65536"),
    ],
)
def test_a_file_that_holds_no_golden_rows_is_refused_at_its_line(
    write, tmp_path, name, content, what
):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    (problem,) = problems_of(write(MINIMAL + f"evaluate:\n  must_pass: {name}\n"))
    assert what in problem.what
    assert problem.where.endswith("c.yaml:5")


@pytest.mark.parametrize("source", ["sklearn:digits", "s3://b/x.csv", "hub:glue?config=sst2"])
def test_uris_stay_as_they_are(write, source):
    assert (
        load_target(write(MINIMAL.replace("sklearn:digits", f"'{source}'"))).data.source == source
    )


def test_all_problems_are_reported_at_once_each_at_its_line(write):
    text = (
        "name: UPPER\n"
        "task: image_clasification\n"
        "data: {source: sklearn:digits, sorce: x}\n"
        "train:\n"
        "  lr: fast\n"
        "  epochs: 3\n"
        "  steps: 4\n"
        "resources: {spot: yes}\n"
    )
    found = {(p.where.rsplit(":", 1)[-1], p.what.split(":")[0]) for p in problems_of(write(text))}
    assert found == {
        ("1", "name"),
        ("2", "task"),
        ("3", "data.sorce"),
        ("5", "train.lr"),
        ("7", "train.steps"),
        ("8", "resources.spot"),
    }


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("train.epoch=3", "`epochs`"),
        ("data.colums={}", "`columns`"),
        ("lr=3", "`train.lr`"),
        ("evaluate.gate.min_dleta=1", "`min_delta`"),
        ("zzz=1", "known here"),
    ],
)
def test_unknown_keys_suggest_the_nearest(write, key, hint):
    (problem,) = problems_of(write(MINIMAL), [key])
    assert "unknown key" in problem.what
    assert hint in problem.fix


NO_VALIDATION = "data.split={train: 0.9, validation: 0, test: 0.1}"
CONTRADICTIONS = [
    (
        "spot without checkpoints",
        ["resources.spot=true", "train.checkpoint.every=null"],
        "resources.spot",
    ),
    ("two lengths of training", ["train.epochs=1", "train.steps=2"], "train.steps"),
    ("micro-batch that does not divide", ["train.micro_batch_size=7"], "train.micro_batch_size"),
    (
        "shares that do not add up",
        ["data.split={train: 0.9, validation: 0.2, test: 0.1}"],
        "data.split",
    ),
    ("time split without a time", ["data.split.by=time"], "data.split.by"),
    ("window without a time", ["data.window={size: 1 month}"], "data.window"),
    ("partition without a window", ["data.source=s3://b/{window}/x.csv"], "data.source"),
    ("the same label twice", ["data.labels=[a, a]"], "data.labels"),
    ("a slice with a name of ours", ["data.slices=[label]"], "data.slices"),
    ("one label", ["data.labels=[a]"], "data.labels"),
    ("the address of no cluster", ["data.executor_address=RAY_ADDRESS"], "data.executor_address"),
    ("machines of two kinds", ["data.executor=ray", "data.nodes=2"], "data.nodes"),
    ("a disk for less than three windows", ["data.disk_gb=10"], "data.disk_gb"),
    (
        "less disk than shards for a program",
        ["data.disk_gb=20", "train.engine=trainer"],
        "data.disk_gb",
    ),
    ("floor out of reach", ["evaluate.floor={accuracy: 1.5}"], "evaluate.floor.accuracy"),
    (
        "slice floor out of reach",
        ["data.slices=[plan]", "evaluate.slice_floor={accuracy: 1.5}"],
        "evaluate.slice_floor.accuracy",
    ),
    (
        "slice floor on no slice",
        [
            "data.slices=[plan]",
            "evaluate.gate.cluster=plan",
            "evaluate.slice_floor={accuracy: 0.5}",
        ],
        "evaluate.slice_floor",
    ),
    ("floor without end", ["evaluate.floor={log_loss: .inf}"], "evaluate.floor.log_loss"),
    (
        "slice floor without slices",
        ["data.slices=[]", "evaluate.slice_floor={accuracy: 0.5}"],
        "evaluate.slice_floor",
    ),
    ("password in a URI", ["register.tracking_uri=https://me:pw@host"], "register.tracking_uri"),
    (
        "token in a value",
        ["arguments={t: hf_abcdefghijklmnopqrstuvwx}", "pipeline=p.py:f"],
        "arguments.t",
    ),
    ("arguments without a pipeline", ["arguments={a: 1}"], "arguments"),
    ("unknown task", ["task=translation"], "task"),
    ("pretrained weights without a rate", ["model.source=some/model"], "train.lr"),
    ("a run's weights without a rate", ["model.init_from=run:latest"], "train.lr"),
    ("a champion's weights without a rate", ["model.init_from=champion"], "train.lr"),
    ("updates that bf16 cannot hold", ["train.weights=bf16", "train.lr=5e-5"], "train.weights"),
    (
        "warm-up and decay beyond all steps",
        ["train.lr_schedule=wsd", "train.warmup=0.5", "train.decay=0.6"],
        "train.decay",
    ),
    ("a decay that no schedule has", ["train.decay=0.2"], "train.decay"),
    (
        "a least rate of a constant one",
        ["train.lr_schedule=constant", "train.min_lr_ratio=0.1"],
        "train.min_lr_ratio",
    ),
    (
        "patience without validation",
        ["train.early_stopping_patience=2", NO_VALIDATION],
        "train.early_stopping_patience",
    ),
    (
        "the best without validation",
        ["train.checkpoint.keep_best=true", NO_VALIDATION],
        "train.checkpoint",
    ),
    (
        "patience with a script",
        ["train.early_stopping_patience=2", "train.entrypoint=t.py"],
        "train.early_stopping_patience",
    ),
    (
        "classes of a language model",
        ["task=causal_lm", "train.class_weights=balanced"],
        "train.class_weights",
    ),
    (
        "classes of whole texts of tags",
        ["task=token_classification", "train.sampling=balanced"],
        "train.sampling",
    ),
    (
        "rare classes made up for twice",
        ["train.class_weights=balanced", "train.sampling=balanced"],
        "train.sampling",
    ),
    (
        "a script's word that is never filled in",
        ["train.entrypoint=t.py --data {dta}"],
        "train.entrypoint",
    ),
    (
        "a script's argument in braces",
        ["train.entrypoint=\"t.py --json '{'a': 1}'\""],
        "train.entrypoint",
    ),
    ("a quote in a script's words", ['train.entrypoint="t.py \'x"'], "train.entrypoint"),
    ("no script", ["train.entrypoint=''"], "train.entrypoint"),
    (
        "rows that a language model answers",
        ["task=causal_lm", "evaluate.must_pass={format: csv, content: a}"],
        "evaluate.must_pass",
    ),
    (
        "classes of numbers",
        ["task=text_regression", "data.columns.target=a", "data.labels=[a, b]"],
        "data.labels",
    ),
    (
        "answers of a language model that change",
        ["task=causal_lm", "evaluate.gate.max_churn=0.1"],
        "evaluate.gate.max_churn",
    ),
    ("more answers than there are", ["evaluate.gate.max_churn=1.1"], "evaluate.gate.max_churn"),
    (
        "weight of an unknown class",
        ["data.labels=[a, b]", "train.class_weights={c: 2}"],
        "train.class_weights.c",
    ),
]


@pytest.mark.parametrize(
    ("name", "overrides", "where"), CONTRADICTIONS, ids=[c[0] for c in CONTRADICTIONS]
)
def test_contradictions_between_fields_are_refused(write, name, overrides, where):
    found = problems_of(write(MINIMAL), overrides)
    assert [p.what.split(":")[0] for p in found] == [where]
    assert all(p.fix for p in found)


def test_a_scripts_unknown_word_is_named_with_those_there_are(write):
    (problem,) = problems_of(
        write(MINIMAL), ["train.entrypoint=t.py --data {dta} --x {{a}} --m {model}"]
    )
    assert problem.what == "train.entrypoint: unknown placeholder `{dta}`"
    assert problem.fix.startswith("did you mean `{data}`? there are {data}, {model}, {checkpoints}")


@pytest.mark.parametrize(
    ("overrides", "proposed"),
    [
        (["task=text_classification", "model.source=bert-base-cased"], "`lr: 3e-5`"),
        (
            ["task=text_classification", "model.source=bert-base-cased", "model.lora={}"],
            "`lr: 4e-4`",
        ),
        (["task=causal_lm", "model.source=org/llm"], "`lr: 2e-5`"),
        (["task=causal_lm", "model.source=org/llm", "model.lora={}"], "`lr: 2e-4`"),
        (["task=image_classification", "model.init_from=champion"], "`lr: 1e-4`"),
    ],
)
def test_the_rate_that_is_missing_is_proposed_by_kind_of_model_and_adapters(
    write, overrides, proposed
):
    (problem,) = problems_of(write(MINIMAL), overrides)
    assert proposed in problem.fix
    rate = proposed.strip("`").partition(" ")[2]
    assert load_target(write(MINIMAL), [*overrides, f"train.lr={rate}"]).train.lr == float(rate)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.source={model_type: distilbert}"],
        ["model.source=some/model", "train.entrypoint=mine.py"],
        ["train.weights=bf16", "train.lr=8e-5"],
        ["train.weights=bf16"],
        ["train.weights=bf16", "train.lr=2e-5", "model.lora={}"],
    ],
)
def test_rates_that_mean_something_are_taken(write, overrides):
    load_target(write(MINIMAL), overrides)


TYPES = [
    ("text for a number", "train.lr=fast"),
    ("number in quotes", "train.seed='3'"),
    ("yes for true", "resources.spot=yes"),
    ("fraction for a count", "train.steps=2.5"),
    ("negative", "train.lr=-1"),
    ("not a number", "train.lr=.nan"),
    ("infinite", "train.lr=.inf"),
    ("list for a section", "train=[1]"),
    ("null for a section", "train=null"),
    ("unknown choice", "train.lr_schedule=square"),
    ("name with a path", "name=../../etc"),
    ("name with a slash", "register.model_name=a/b"),
    ("secret by value", "platforms.local.secrets={T: abc}"),
    ("bad duration", "data.window={size: a while}"),
    ("bad date", "data.window={size: 1 month, end: yesterday}"),
    ("a huge number", "train.steps=" + "9" * 30),
    ("init from nothing", "model.init_from=nowhere"),
    ("text for a list", "data.slices=a"),
]


@pytest.mark.parametrize("override", [t[1] for t in TYPES], ids=[t[0] for t in TYPES])
def test_wrong_types_and_values_are_refused(write, override):
    found = problems_of(write(MINIMAL), [override])
    assert all(p.what and p.where.startswith("--set") for p in found)


@pytest.mark.parametrize("override", ["train.lr", "=3", "a..b=3", ""])
def test_malformed_overrides_are_refused(write, override):
    assert "a.b=c" in problems_of(write(MINIMAL), [override])[0].what


def test_files_that_are_no_config_are_refused(tmp_path):
    assert "file not found" in problems_of(tmp_path / "none.yaml")[0].what
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in problems_of(tmp_path / "binary.yaml")[0].what
    assert "cannot read" in problems_of(tmp_path)[0].what
    (tmp_path / "large.yaml").write_text("a: " + "x" * 1_100_000)
    assert "at most" in problems_of(tmp_path / "large.yaml")[0].what


def test_every_field_is_documented():
    def undocumented(section, prefix=""):
        for name, field in section.model_fields.items():
            if not field.description:
                yield f"{prefix}{name}"
            inner = field.annotation
            if isinstance(inner, type) and issubclass(inner, Section):
                yield from undocumented(inner, f"{prefix}{name}.")

    assert list(undocumented(Spec)) == []


def test_what_monitors_read_starts_at_the_configs_folder_and_no_text_stays_none(write):
    path = write(MINIMAL + "monitor: {log: said, labels: ''}\n")
    found = load_target(path).monitor
    assert (found.log, found.labels) == (str(path.parent / "said"), "")
