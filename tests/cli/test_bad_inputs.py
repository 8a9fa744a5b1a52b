"""A table of bad inputs: exit code 2 before anything is written, or 1 with a clear error and nothing lost.

Each case has a folder of its own, and where something runs a process. No traceback without -v; every problem says what to do.
"""

import json
import os
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from rekindle.cli.main import invoke

ROOT = Path(__file__).parents[2]
GOOD = """\
name: digits
task: image_classification
data: {source: "sklearn:digits"}
train: {steps: 2}
platforms: {local: {ranks: 1}}
"""
TEXT = """\
name: notes
task: text_classification
data: {source: notes.jsonl}
model: {source: {model_type: distilbert, dim: 16, n_layers: 1, n_heads: 2, hidden_dim: 16}}
train: {steps: 2}
platforms: {local: {ranks: 1}}
"""
NOTES = [
    {"text": f"note number {i} is {'good' if i % 2 else 'bad'}", "label": str(i % 2)}
    for i in range(60)
]


def run(folder, *words, env=None, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "rekindle.cli.main", *words],
        cwd=cwd or folder,
        text=True,
        capture_output=True,
        timeout=120,
        env={**os.environ, **(env or {})},
    )


def config(text=GOOD, name="c.yaml"):
    def prepare(folder):
        (folder / name).write_text(text)

    return prepare


def with_rows(rows, text=TEXT):
    def prepare(folder):
        config(text)(folder)
        (folder / "notes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    return prepare


def read_only_home(folder):
    config()(folder)
    (folder / ".rekindle").write_text("in the way")


def looped_home(folder):
    config()(folder)
    (folder / ".rekindle").symlink_to(".rekindle")


def s(*overrides):
    return ["run", "c.yaml", *(word for one in overrides for word in ("--set", one))]


# name, prepare, words, what stderr must say
REFUSED = [
    (
        "a layout that has no meaning",
        with_rows(NOTES),
        s("platforms.local.ranks=2", "train.layout={cp: 2}"),
        "context parallelism divides",
    ),
    (
        "ranks that do not divide the heads",
        with_rows(NOTES),
        s("platforms.local.ranks=2", "model.source.n_heads=1", "train.layout={tp: 2}"),
        "tp 2 does not divide 1 heads",
    ),
    (
        "more stages than blocks",
        with_rows(NOTES),
        s("platforms.local.ranks=2", "train.layout={pp: 2}"),
        "1 blocks cannot fill 2 stages",
    ),
    ("another number of ranks", with_rows(NOTES), s("train.layout={dp: 3}"), "needs 3 ranks"),
    (
        "what no test has trained",
        with_rows(NOTES),
        s("platforms.local.ranks=2", "train.layout={tp: 2}", "train.precision=fp16"),
        "no test has trained tp with fp16",
    ),
    (
        "texts longer than the model",
        with_rows(NOTES),
        s("model.source.max_position_embeddings=32"),
        "data.max_length is 128, but the model has 32 positions",
    ),
    ("no such config", config(), ["run", "none.yaml"], "none.yaml"),
    ("a folder for a config", config(), ["run", "."], "cannot read"),
    ("an empty config", config(""), ["run", "c.yaml"], "name: is missing"),
    ("not YAML", config("name: [digits"), ["run", "c.yaml"], "c.yaml:1"),
    (
        "a tag that runs code",
        config(GOOD + "x: !!python/object/apply:os.system [id]\n"),
        ["run", "c.yaml"],
        "tag",
    ),
    (
        "a bomb of aliases",
        config(
            "a: &a [" + "x, " * 200 + "]\nb: &b [" + "*a, " * 200 + "]\nc: [" + "*b, " * 200 + "]\n"
        ),
        ["run", "c.yaml"],
        "20,000 values",
    ),
    ("an alias to itself", config("a: &a [*a]\n"), ["run", "c.yaml"], "30 levels"),
    ("two documents", config(GOOD + "---\nname: x\n"), ["run", "c.yaml"], "not valid YAML"),
    ("a key twice", config(GOOD + "name: again\n"), ["run", "c.yaml"], "duplicate key `name`"),
    (
        "a binary file",
        lambda f: (f / "c.yaml").write_bytes(b"\x80\x00\xff"),
        ["run", "c.yaml"],
        "UTF-8",
    ),
    ("an unknown key", config(GOOD + "trian: {}\n"), ["run", "c.yaml"], "did you mean `train`?"),
    ("a wrong type", config(), s("train.lr=fast"), "valid number"),
    ("a word for a boolean", config(), s("resources.spot=yes"), "valid boolean"),
    ("an override without a value", config(), ["run", "c.yaml", "--set", "train.lr"], "a.b=c"),
    ("an override of nothing known", config(), s("train.lrr=1"), "did you mean `lr`?"),
    ("a name that climbs", config(), s("name=../../etc/passwd"), "lower-case letters"),
    ("a model name with a slash", config(), s("register.model_name=a/../b"), "register.model_name"),
    (
        "spot without checkpoints",
        config(),
        ["run", "c.yaml", "--set", "resources.spot=true", "--set", "train.checkpoint.every=null"],
        "train.checkpoint.every",
    ),
    ("epochs and steps", config(), s("train.epochs=1"), "keep one of them"),
    (
        "an unknown task",
        config(),
        s("task=image_clasification"),
        "did you mean `image_classification`?",
    ),
    ("a task file that is not there", config(), s("task=none.py:Task"), "file not found"),
    ("a source that is not there", config(), s("data.source=none.csv"), "no such file or folder"),
    ("a network this task cannot build", config(), s("model.source={channels: [0]}"), "channels"),
    ("an unknown key of the network", config(), s("model.source={chanels: [8]}"), "chanels"),
    ("a hub name for images", config(), s("model.source=resnet-50"), "trains its own network"),
    (
        "a text model without an architecture",
        with_rows(NOTES, TEXT.replace("model_type: distilbert, ", "")),
        ["run", "c.yaml"],
        "model_type",
    ),
    (
        "a folder of weights that is not there",
        config(),
        s("model.init_from=/none/model", "train.lr=1e-4"),
        "folder not found",
    ),
    (
        "a teacher that is not there",
        config(),
        s("model.teacher={source: /none/teacher}"),
        "folder not found: /none/teacher",
    ),
    (
        "a run to start from that is not there",
        config(),
        s("model.init_from=run:none", "train.lr=1e-4"),
        "there are no runs",
    ),
    ("a pipeline that is not there", config(), s("pipeline=none.py:f"), "file not found"),
    ("a script that is not there", config(), s("train.entrypoint=none.py --x"), "file not found"),
    (
        "a secret that is not set",
        config(),
        s("platforms.local.secrets={T: env:REKINDLE_NOT_SET}"),
        "REKINDLE_NOT_SET is not set",
    ),
    (
        "a secret by value",
        config(),
        s("platforms.local.secrets={T: hunter2}"),
        "platforms.local.secrets",
    ),
    (
        "a password in a URI",
        config(),
        s("register.tracking_uri=https://me:secret@host"),
        "password",
    ),
    (
        "a token in the config",
        config(),
        s("model.source={channels: [8], t: hf_aaaaaaaaaaaaaaaaaaaaaaaa}"),
        "secret token",
    ),
    (
        "a tracking URI nobody speaks",
        config(),
        s("register.tracking_uri=ftp://host"),
        "not a tracking URI",
    ),
    ("a home that is a file", read_only_home, ["run", "c.yaml"], "is a file"),
    ("a home that is a link to itself", looped_home, ["run", "c.yaml"], "leads nowhere"),
    ("an unknown step to start from", config(), ["run", "c.yaml", "--from", "fintune"], "finetune"),
    (
        "an unknown verb",
        config(),
        ["rum", "c.yaml"],
        "there is no command `rum`; did you mean `run`?",
    ),
    ("an unknown option", config(), ["run", "c.yaml", "--frsh"], "--fresh"),
    ("a run that is not there", config(), ["status", "none"], "there are no runs"),
    ("a card of nothing", config(), ["report"], "there are no runs"),
    ("a promotion of nothing", config(), ["promote", "latest"], "there are no runs"),
    ("a platform nobody knows", config(), ["compile", "c.yaml", "--platform", "slurm"], "kubeflow"),
    (
        "a cluster without a registry it can reach",
        config(),
        ["compile", "c.yaml", "--platform", "kubeflow"],
        "cannot reach",
    ),
    (
        "a kind of GPU without GPUs",
        config(),
        ["compile", "c.yaml", "--platform", "kubeflow", "--set", "resources.accelerator=H100"],
        "no GPUs to be of that kind",
    ),
    ("extends in a circle", config("extends: c.yaml\n" + GOOD), ["run", "c.yaml"], "circle"),
]


def snapshot(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


@pytest.mark.parametrize(
    ("prepare", "words", "says"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_a_wrong_request_is_refused_before_anything_is_written(
    tmp_path, monkeypatch, capfd, prepare, words, says
):
    prepare(tmp_path)
    before = snapshot(tmp_path)
    monkeypatch.chdir(tmp_path)
    code, said = invoke(words), capfd.readouterr()
    assert code == 2, said
    assert says in said.err
    assert "Traceback" not in said.err
    assert "me:secret" not in said.err
    assert snapshot(tmp_path) == before


def test_errors_as_json_are_one_object(tmp_path):
    config(GOOD + "trian: {}\n")(tmp_path)
    done = run(tmp_path, "run", "c.yaml", "--json", "--set", "train.lr=x")
    said = json.loads(done.stdout)
    assert said["schema_version"] == 1
    assert [sorted(error) for error in said["errors"]] == [["code", "fix", "what", "where"]] * 2


@pytest.fixture(scope="module")
def used(tmp_path_factory):
    """A folder whose registry exists already, which saves each case its creation."""
    folder = tmp_path_factory.mktemp("used")
    with_rows(NOTES)(folder)
    config(GOOD, "digits.yaml")(folder)
    assert run(folder, "run", "digits.yaml").returncode == 0
    return folder


def changed(index, **fields):
    return [{**row, **fields} if i == index else row for i, row in enumerate(NOTES)]


FAILED = [
    ("an empty file", [], "holds no records"),
    ("a missing column", [{"txt": "a", "label": "b"}], "column"),
    ("an empty text in row 8", changed(7, text=" "), "8"),
    ("a null label in row 3", changed(2, label=None), "3"),
    ("a class nobody has in training", [*NOTES, {"text": "the only one", "label": "rare"}], "rare"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "says"), [f[1:] for f in FAILED], ids=[f[0] for f in FAILED])
def test_bad_data_fails_clearly_and_loses_nothing(used, rows, says):
    with_rows(rows)(used)
    before = (used / ".rekindle" / "mlflow.db").read_bytes()
    done = run(used, "run", "c.yaml")
    # what one row shows is seen before anything begins
    assert done.returncode == (2 if says in ("column", "8", "3") else 1), done.stdout + done.stderr
    assert says in done.stderr
    assert "fix:" in done.stderr
    assert "Traceback" not in done.stderr
    tables = (
        sqlite3.connect(used / ".rekindle" / "mlflow.db")
        .execute("select count(*) from model_versions")
        .fetchone()
    )
    assert tables == (1,)
    assert before[:16] == b"SQLite format 3\x00"


@pytest.mark.slow
def test_a_corrupt_shard_is_noticed_and_made_again(used):
    run_id = json.loads(run(used, "run", "digits.yaml", "--json").stdout)["run_id"]
    record = json.loads((used / ".rekindle" / "runs" / run_id / "run.json").read_text())
    step = next(step for step in record["steps"] if step["name"] == "shard")
    shard = min(Path(step["artifacts"]["shards"]["uri"]).glob("*.arrow"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    again = json.loads(run(used, "run", "digits.yaml", "--json").stdout)
    reasons = {step["name"]: step["reason"] for step in again["steps"]}
    assert "shards" in reasons["shard"]
    assert again["status"] == "succeeded"
    assert again["model"]["created"] is False


@pytest.mark.slow
def test_a_read_only_registry_fails_clearly_and_keeps_what_was_trained(used):
    """Not even root may write to a database opened in read-only mode."""
    uri = f"sqlite:///file:{used}/.rekindle/mlflow.db?mode=ro&uri=true"
    done = run(
        used, "run", "digits.yaml", "--set", f"register.tracking_uri={uri}", "--set", "train.seed=5"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "make the registry's database and artifact folder writable" in done.stderr
    assert "Traceback" not in done.stderr
    steps = json.loads(run(used, "status", "latest", "--json").stdout)["steps"]
    assert next(s for s in steps if s["name"] == "finetune")["status"] == "succeeded"


@pytest.mark.slow
def test_an_unreachable_registry_fails_clearly(used):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        done = run(
            used,
            "run",
            "digits.yaml",
            "--set",
            f"register.tracking_uri={uri}",
            env={"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"},
        )
    assert done.returncode == 1
    assert "register.tracking_uri" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_port_in_use_does_not_matter(used):
    """Somebody listens on torch's default port and on the one in MASTER_PORT: ranks meet on a free one."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run(
            used,
            "run",
            "digits.yaml",
            "--set",
            "train.seed=6",
            env={"MASTER_PORT": port, "PET_MASTER_PORT": port},
        )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [["plan", "c.yaml", "--json"], ["status", "none", "--json"]])
def test_an_answer_that_cannot_be_written_is_an_error_on_stderr(tmp_path, words):
    config()(tmp_path)
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "rekindle.cli.main", *words],
            cwd=tmp_path,
            text=True,
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (done.returncode, done.stderr.count("error:")) == (1, 1), done.stderr
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_working_directory_that_was_deleted_is_named_as_the_reason(tmp_path):
    (tmp_path / "gone").mkdir()
    config()(tmp_path)
    words = [sys.executable, "-m", "rekindle.cli.main", "run", str(tmp_path / "c.yaml")]
    done = subprocess.run(
        [
            "sh",
            "-c",
            'cd "$1" && rmdir "$1" && shift && exec "$@"',
            "sh",
            str(tmp_path / "gone"),
            *words,
        ],
        text=True,
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 1
    assert "the working directory was deleted" in done.stderr


def test_a_traceback_is_shown_when_asked_for(tmp_path):
    config()(tmp_path)
    assert "Traceback" in run(tmp_path, "run", "none.yaml", "-v").stderr
