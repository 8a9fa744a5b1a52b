"""Every code block of every README is run or loaded, and what the text names exists.

`text` blocks are output and are not compared. Lines of `bash` blocks:

    make TARGET         the target exists and has a line of help; not run (they install)
    python -m pip ...   the extra exists, and `.` is a project; not run (downloads)
    rekindle run ...    options and config are read; run as a whole by the slow test
    rekindle serve, predict, deploy, champion, rollback, curl
                        options are read; run by test_serving.py
    rekindle watch      options are read; run by the test of the loop
    rekindle others     run, on the two runs of the notebook
    cd                  followed

YAML blocks load as specs beside the Python files that the same README names in a first line
`# name.py`; one with a pipeline of its own runs. Other Python blocks are executed."""

from __future__ import annotations

import ast
import csv
import itertools
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from xml.etree import ElementTree

import pytest

import rekindle
from rekindle import errors
from rekindle.app.api import Run
from rekindle.app.grid import points
from rekindle.app.preflight import ANYWHERE, check_all, problems_in
from rekindle.cli.main import VERBS, cli
from rekindle.spec.load import load_target
from rekindle.spec.model import BUILTIN_TASKS
from rekindle.train.look import Question, look
from tests.docs.blocks import ROOT, blocks, commands, lay_out, pages
from tests.docs.conftest import environment

HEAVY = "rekindle run "
SERVED = (
    "rekindle serve ",
    "rekindle predict ",
    "curl ",
    "rekindle deploy ",
    "rekindle champion ",
    "rekindle rollback ",
    "rekindle watch ",
    "rekindle monitor ",
    "rekindle alarms ",
)
NOT_RUN = ("make ", "python -m pip ", "python3 ", *SERVED)  # python3: only where there is a GPU
TRAINS = r"rekindle\.run\(|models:/"  # what a block of Python says that takes long
STARTER = ROOT / "configs" / "starter"
PAGES = pages()
RUN_HERE, OWN_CODE = ROOT / "docs" / "run.md", ROOT / "docs" / "own-code.md"


def _name(block):
    return str(block)


# What the blocks say


def test_every_block_is_of_a_kind_that_is_tested():
    assert blocks()
    assert [str(b) for b in blocks() if b.kind not in ("bash", "yaml", "python", "text")] == []


@pytest.mark.parametrize("block", blocks("bash"), ids=_name)
def test_every_line_of_a_bash_block_is_understood(block, tmp_path):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    if block.readme.parent == STARTER or "tickets.yaml" in block.text:
        shutil.copytree(STARTER, tmp_path, dirs_exist_ok=True)
    for line in commands(block):
        words = shlex.split(line)
        match words:
            case ["make", target, *variables]:
                makefile = (ROOT / "Makefile").read_text()
                assert all(f"\n{name.partition('=')[0]} ?= " in makefile for name in variables)
                assert re.search(rf"^{target}:.*##", makefile, re.MULTILINE)
            case ["python3", "-m", "tests.gpu", *rest]:
                from tests.gpu import __main__ as checks

                checks.options().parse_args(rest)
            case ["python3", "tests/bench/bench_gpu.py", *rest]:
                script = (ROOT / "tests" / "bench" / "bench_gpu.py").read_text()
                assert all(f'"{word}"' in script for word in rest if word.startswith("--"))
            case ["python3", "-m", "pytest", path, *_]:
                assert (ROOT / path).is_dir()
            case ["python", "-m", "pip", ("wheel" | "install"), *rest]:
                _check_pip(rest)
            case ["curl", "-s", url, *_]:
                assert url.startswith("localhost:8080/")
            case ["rekindle", verb, *rest]:
                _check_rekindle(verb, rest, tmp_path)
            case _:
                assert words[0] == "cd", f"nobody tests `{line}`"


def _check_pip(words):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.findall(r"\[([a-z0-9,]+)\]", " ".join(words))
    assert "." in words or extras
    for extra in ",".join(extras).split(",") if extras else []:
        assert extra in project["optional-dependencies"]


def _check_rekindle(verb, words, folder):
    command = cli.get_command(None, verb)
    assert command is not None, f"there is no verb {verb}"
    values = command.make_context(verb, list(words)).params
    if verb == "run":
        assert points(folder / values["config"], values["overrides"])
    elif "config" in values:
        load_target(folder / values["config"], values.get("overrides", ()))


@pytest.mark.parametrize("block", blocks("yaml"), ids=_name)
def test_a_yaml_block_loads_as_a_spec(block, tmp_path):
    lay_out(block.readme, tmp_path)
    (tmp_path / "config.yaml").write_text(block.text)
    spec = rekindle.load(tmp_path / "config.yaml")
    for path in (spec.train.entrypoint, spec.pipeline, spec.task if ".py:" in spec.task else ""):
        if path:
            assert (tmp_path / path.split()[0].rpartition("/")[2].partition(":")[0]).is_file()


@pytest.mark.parametrize("block", blocks("yaml"), ids=_name)
def test_a_yaml_block_asks_for_what_can_run(block, tmp_path):
    """What doctor asks of a config alone, in this process where it needs torch."""
    lay_out(block.readme, tmp_path)
    (tmp_path / "config.yaml").write_text(block.text)
    spec = rekindle.load(tmp_path / "config.yaml")
    if spec.model.source == {}:
        pytest.skip("it shows some sections, and names no model")
    assert problems_in(check_all(ANYWHERE, spec, tmp_path)) == []
    texts = spec.task in BUILTIN_TASKS and spec.task != "image_classification"
    if (
        texts
        and spec.data is not None
        and isinstance(spec.model.source, dict)
        and spec.model.source
    ):
        assert look(Question(task=spec.task, data=spec.data, model=spec.model)) == []


@pytest.mark.slow
@pytest.mark.parametrize("block", [b for b in blocks("yaml") if "\npipeline:" in b.text], ids=_name)
def test_a_pipeline_of_ones_own_runs(block, tmp_path, sh):
    lay_out(block.readme, tmp_path)
    (tmp_path / "config.yaml").write_text(block.text)
    said = sh(tmp_path, "rekindle run config.yaml && rekindle logs --step count")
    assert " lines" in said


@pytest.mark.parametrize("block", blocks("python"), ids=_name)
def test_a_python_block_uses_names_that_exist(block):
    """Of `rekindle` and of a `run`; and it parses."""
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "rekindle":
                assert node.attr in rekindle.__all__
            if node.value.id == "run":
                assert hasattr(Run, node.attr)


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(b, marks=[pytest.mark.slow] if re.search(TRAINS, b.text) else [])
        for b in blocks("python")
        if not b.file
    ],
    ids=_name,
)
def test_a_python_block_without_a_file_name_runs(block, tmp_path, sh):
    for folder in ("configs", "components"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    if "models:/tickets" in block.text:
        shutil.copytree(STARTER, tmp_path, dirs_exist_ok=True)
        assert "promoted: first model" in sh(tmp_path, "rekindle run tickets.yaml")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", block.text],
        cwd=tmp_path,
        env=environment(),
        text=True,
        stderr=subprocess.STDOUT,
        stdout=subprocess.PIPE,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout


def _lines_and_folders(folder):
    """Every line that can run here, with the folder it runs in; examples lie where they do in a
    clone."""
    shutil.copytree(ROOT / "configs" / "plan", folder / "configs" / "plan")
    shutil.copytree(STARTER, folder / "starter")
    here, page = folder, None
    for block in blocks("bash"):
        first = folder / "starter" if block.readme.parent == STARTER else folder
        here, page = here if block.readme == page else first, block.readme
        for line in commands(block):
            if line.startswith("cd "):
                here = here / line.removeprefix("cd ")
            elif not line.startswith(NOT_RUN):
                # it asks a person first, and there is none here
                yield f"{line} --yes" if line.startswith("rekindle gc") else line, here


@pytest.mark.slow
def test_the_everyday_commands_work_on_the_runs_of_the_notebook(executed, tmp_path, sh):
    home, _ = executed
    for line, folder in _lines_and_folders(tmp_path):
        if folder != tmp_path and not (folder / ".rekindle").exists():
            (folder / ".rekindle").symlink_to(home / ".rekindle")
        if not line.startswith(HEAVY):
            assert sh(folder, line).strip()


# The long way


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_everyday_commands_work_in_a_new_folder(tmp_path, sh):
    for line, folder in _lines_and_folders(tmp_path):
        assert sh(folder, line).strip()


@pytest.mark.slow
def test_the_config_of_ones_own_trains_on_such_a_file(tmp_path, sh):
    block = next(b for b in blocks("yaml") if "tickets.csv" in b.text)
    about = {"billing": ("invoice", "refund", "card"), "login": ("password", "code", "account")}
    with (tmp_path / "tickets.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["body", "team", "product"])
        for i, (team, product) in enumerate(itertools.product([*about] * 100, ("app", "shop"))):
            rows.writerow([f"no {i}: my {about[team][i % 3]} for {i % 7} is wrong", team, product])
    (tmp_path / "tickets.yaml").write_text(block.text)
    assert "promoted: first model" in sh(tmp_path, "rekindle run tickets.yaml")


@pytest.mark.slow
def test_the_loop_goes_round_as_the_pages_say(tmp_path, sh):
    lines = {
        line for b in blocks("bash") for line in commands(b) if line.startswith("rekindle watch ")
    }
    assert lines == {"rekindle watch tickets.yaml --once"}
    shutil.copytree(STARTER, tmp_path, dirs_exist_ok=True)
    (line,) = lines
    config = (tmp_path / "tickets.yaml").read_text()
    (tmp_path / "tickets.yaml").write_text(f"{config}\ntriggers: {{new_rows: 20}}\n")
    assert "ran because no run was judged before; " in sh(tmp_path, line)
    assert "skipped because the data have not changed since tickets-" in sh(tmp_path, line)
    data = tmp_path / "tickets.csv"
    head, *rows = data.read_text().splitlines(keepends=True)
    data.write_text("".join([head, *rows, *rows[:19]]))
    assert "skipped because 19 new rows (due from 20)" in sh(tmp_path, line)
    data.write_text("".join([head, *rows, *rows[:20]]))
    assert "ran because 20 new rows (due from 20); tickets-" in sh(tmp_path, line)


@pytest.mark.slow
def test_the_torchrun_script_trains_and_is_judged(tmp_path, sh):
    block = next(b for b in blocks("yaml") if "entrypoint:" in b.text)
    lay_out(block.readme, tmp_path)
    (tmp_path / "config.yaml").write_text(block.text)
    said = sh(tmp_path, "rekindle run config.yaml && rekindle logs --step finetune")
    assert "epoch 4 loss" in said
    assert "promoted: first model" in said


@pytest.mark.slow
def test_the_task_of_ones_own_trains(tmp_path, sh):
    lay_out(OWN_CODE, tmp_path)
    text = "name: inverted\ntask: inverted.py:Inverted\ndata: {source: sklearn:digits}\n"
    (tmp_path / "config.yaml").write_text(text + "train: {epochs: 1}\n")
    assert "inverted version 1 (champion)" in sh(tmp_path, "rekindle run config.yaml")


# What the text names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", text)
    local = [a or b for a, b in targets if "://" not in (a or b)]
    assert [t for t in local if not (page.parent / t.partition("#")[0]).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_fields_and_options_in_the_text_exist(page):
    text = page.read_text(encoding="utf-8")
    for section, rest in re.findall(r"`(data|model|train|evaluate|register)\.([a-z_.]+)", text):
        if rest.partition(".")[0] not in ("py", "yaml", "json", "keras"):
            _check_field(section, *rest.strip(".").split("."))
    for verb, option in re.findall(r"`rekindle (\w+)[^`]*?(--[a-z-]+)", text):
        assert option in _options(verb)
    if page.name == "README.md":
        known = set().union(*map(_options, VERBS))
        assert set(re.findall(r"`(--[a-z-]+)`", text)) <= known


def _check_field(*path):
    """Fails where the spec has no such field."""
    kinds = [rekindle.Spec]
    for part in path:
        models = [kind for kind in kinds if hasattr(kind, "model_fields")]
        fields = {f.alias or n: f for model in models for n, f in model.model_fields.items()}
        assert part in fields, f"the spec has no field {'.'.join(path)}"
        annotation = fields[part].annotation
        kinds = [annotation, *getattr(annotation, "__args__", ())]


def _options(verb):
    command = cli.get_command(None, verb)
    below = list(getattr(command, "commands", {}).values())  # of `schedule`
    return {o for one in (command, *below) if one for p in one.params for o in p.opts}


def test_the_exit_codes_are_those_of_the_errors():
    line = re.search(r"^Exit codes: .*$", RUN_HERE.read_text(), re.MULTILINE)
    codes = {e.exit_code for e in vars(errors).values() if hasattr(e, "exit_code")}
    assert {int(code) for code in re.findall(r"\d+", line[0])} == {0, *codes}


def test_the_readme_of_the_library_lists_every_folder():
    text = (ROOT / "rekindle" / "README.md").read_text()
    listed = set(re.findall(r"^\| `([a-z]+)/`", text, re.MULTILINE))
    folders = {p.parent.name for p in (ROOT / "rekindle").glob("*/__init__.py")}
    assert listed == folders


def test_the_readme_of_the_tests_lists_folders_that_exist():
    text = (ROOT / "tests" / "README.md").read_text()
    listed = re.findall(r"^\| `([a-z/]+)/`", text, re.MULTILINE)
    assert listed
    assert [name for name in listed if not (ROOT / "tests" / name).is_dir()] == []


def test_the_readme_of_the_components_says_which_steps_are_cached():
    from rekindle.ir.compile import compile_pipeline
    from rekindle.ir.graph import Step
    from rekindle.ir.read.pipeline import read

    def steps(dag):
        for node in dag.nodes.values():
            yield from [node] if isinstance(node, Step) else steps(node.dag)

    text = (ROOT / "components" / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|.*\| (yes|never)[^|]*\|$", text, re.MULTILINE)
    target = "pipelines/continuous_deployment.py:continuous_deployment"
    graph = read(compile_pipeline(str(ROOT / target)))
    assert {name: cached == "yes" for name, cached in rows} == {
        step.name: step.cache for step in steps(graph.dag)
    }


def test_a_decision_has_its_day_and_its_five_lines():
    heads = [
        "- **Context** (20",
        "- **Choice:** ",
        "- **Rejected:** ",
        "- **Cost:** ",
        "- **Undo:** ",
    ]
    _, *decisions = re.split(r"^### ", (ROOT / "DECISIONS.md").read_text(), flags=re.MULTILINE)
    assert decisions
    for decision in decisions:
        title, *lines = filter(None, decision.partition("\n## ")[0].splitlines())
        items = [line for line in lines if not line.startswith("  ")]  # others continue an item
        assert len(items) == len(heads), title
        assert all(map(str.startswith, items, heads)), title


def test_the_files_that_an_addition_touches_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:rekindle|tests|docs|configs)/[\w./-]+)`", text)
    assert len(paths) > 50
    # NAME.py or NAME/ is new, the folder that it is in is not
    known = [re.sub(r"[\w.]*NAME.*", "", path) for path in paths]
    assert [path for path in known if not (ROOT / path).exists()] == []


def test_the_picture_of_the_flow_names_every_step():
    path = ROOT / "docs" / "flow.svg"
    text = path.read_text(encoding="utf-8")
    words = " ".join(ElementTree.fromstring(text).itertext())
    for step in (
        "fingerprint",
        "ingest",
        "shard",
        "finetune",
        "score",
        "evaluate",
        "register",
        "promote",
    ):
        assert step in words


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.svg")), ids=lambda path: path.name)
def test_a_picture_is_one_file_with_a_dark_side_and_words_for_those_who_cannot_see_it(path):
    text = path.read_text(encoding="utf-8")
    names = {child.tag.rpartition("}")[2] for child in ElementTree.fromstring(text)}
    assert {"title", "desc"} <= names
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"href=|url\((?!#)|<script|<image", text)
