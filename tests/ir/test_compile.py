"""From a file to IR text: isolated, repeatable, and with the user's own line where it fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rekindle.errors import RekindleError, RequestError, UnsupportedError
from rekindle.ir.compile import compile_pipeline
from rekindle.ir.read.pipeline import read
from tests.quick import first

PIPELINE = """
from kfp import dsl
from helper import WORD

print("loading prints")

@dsl.component(base_image="python:3.11", install_kfp_package=False)
def say(word: str) -> str:
    return word

@dsl.pipeline(name="p")
def p(word: str = WORD):
    say(word=word)
"""


def project(folder: Path, word: str, pipeline: str = PIPELINE) -> Path:
    folder.mkdir()
    (folder / "helper.py").write_text(f"WORD = {word!r}\n")
    (folder / "p.py").write_text(pipeline)
    return folder / "p.py"


@pytest.mark.slow
def test_the_same_names_in_two_folders_do_not_collide(tmp_path: Path) -> None:
    one, two = project(tmp_path / "one", "1"), project(tmp_path / "two", "2")
    words = [read(compile_pipeline(f"{f}:p")).inputs.parameters["word"].default for f in (one, two)]
    assert words == ["1", "2"]


def test_the_same_file_gives_the_same_bytes_and_an_edit_is_seen(tmp_path: Path) -> None:
    file = project(tmp_path / "one", "line\nbreak: 'x'")
    first = compile_pipeline(f"{file}:p")
    assert compile_pipeline("one/p.py:p", cwd=tmp_path) == first
    assert read(first).inputs.parameters["word"].default == "line\nbreak: 'x'"
    (file.parent / "helper.py").write_text("WORD = 'new'\n")
    assert compile_pipeline(str(file)) != first


def test_what_was_compiled_already_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("anything: true\n")
    assert compile_pipeline("p.yaml", cwd=tmp_path) == "anything: true\n"


def test_the_ir_loads_in_kfp(tmp_path: Path) -> None:
    from kfp import components

    text = compile_pipeline(f"{project(tmp_path / 'one', 'x')}:p")
    assert components.load_component_from_text(text).name == "p"


@pytest.mark.parametrize(
    ("old", "new", "says", "line"),
    first(
        3,
        [
            ("say(word=word)", "say(word=3)", "InconsistentType", 13),
            ("from helper", "from no_such_module", "no_such_module", 3),
            ("def p(word", "def p(word word", "SyntaxError", 12),
            ("say(word=word)", "say(wort=word)", "wort", 13),
            ("say(word=word)", "1 / 0", "ZeroDivisionError", 13),
            ("print(", "raise SystemExit(", "SystemExit", 5),
        ],
    ),
)
def test_errors_name_the_line_of_the_user(
    old: str, new: str, says: str, line: int, tmp_path: Path
) -> None:
    file = project(tmp_path / "one", "x", PIPELINE.replace(old, new))
    with pytest.raises(RequestError, match=says) as caught:
        compile_pipeline(f"{file}:p")
    assert caught.value.problems[0].where == f"{file}:{line}"


def test_what_kfp_has_not_implemented_is_unsupported(tmp_path: Path) -> None:
    file = project(tmp_path / "one", "x", PIPELINE.replace("print(", "raise NotImplementedError("))
    with pytest.raises(UnsupportedError):
        compile_pipeline(f"{file}:p")


def test_a_file_that_ends_the_process_is_an_error(tmp_path: Path) -> None:
    file = project(
        tmp_path / "one", "x", "import os, sys; print('bye', file=sys.stderr); os._exit(3)"
    )
    with pytest.raises(RequestError, match="exit code 3; the last line that it printed: bye"):
        compile_pipeline(f"{file}:p")


@pytest.mark.slow
def test_a_kill_from_outside_is_no_fault_of_the_request(tmp_path: Path) -> None:
    file = project(tmp_path / "one", "x", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(RekindleError, match="killed by signal 9; was the memory full") as caught:
        compile_pipeline(f"{file}:p")
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("gone.py:p", "file not found"),
        ("gone.yaml", "cannot read"),
        ("p.txt:p", "names no pipeline"),
        ("one/p.py:", "names no pipeline"),
        ("one/p.py:x y", "names no pipeline"),
        ("one/p.py:other", "there is: p"),
        ("one", "names no pipeline"),
    ],
)
def test_a_target_that_names_nothing_is_refused(target: str, says: str, tmp_path: Path) -> None:
    project(tmp_path / "one", "x")
    with pytest.raises(RequestError, match=says):
        compile_pipeline(target, cwd=tmp_path)


@pytest.mark.slow
def test_several_pipelines_in_a_file_have_to_be_told_apart(tmp_path: Path) -> None:
    file = project(
        tmp_path / "one", "x", PIPELINE + "\n@dsl.pipeline\ndef q():\n    say(word='q')\n"
    )
    with pytest.raises(RequestError, match=r"which pipeline[\s\S]*p, q"):
        compile_pipeline(str(file))


def test_reading_and_executing_import_no_kfp() -> None:
    code = (  # not `google`: some packages of Google's put an empty one into every process
        "import sys, rekindle.platforms.local.execute, rekindle.ir.read.pipeline, rekindle.ir.compile; "
        "import rekindle.platforms.kubeflow.compile; "
        "print(sorted({'kfp', 'torch', 'google.protobuf', 'kubernetes'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done


@pytest.mark.slow
def test_settings_of_a_platform_come_as_a_second_document(tmp_path: Path) -> None:
    text = PIPELINE.replace("say(word=word)", "kubernetes.set_timeout(say(word=word), 60)")
    text = text.replace("from kfp import dsl", "from kfp import dsl, kubernetes")
    compiled = compile_pipeline(f"{project(tmp_path / 'one', 'x', text)}:p")
    assert len(list(yaml.safe_load_all(compiled))) == 2
    assert read(compiled).steps()[0].timeout_seconds == 60.0
