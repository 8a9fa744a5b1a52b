"""KFP's shell wrappers are recognised exactly as its compiler writes them, and only then."""

from __future__ import annotations

import pytest
from kfp.dsl import component_factory

from rekindle.ir.graph import Container
from rekindle.ir.read.containers import recognised


def recognise(command: list[str]) -> Container:
    return Container(image="", **recognised(command, ""))


def words(container: Container) -> list[str | None]:
    return [getattr(word, "literal", None) for word in container.command]


def install(**options: object) -> list[str]:
    command = component_factory._get_packages_to_install_command(**options)
    return [*command, "python3", "-m", "x"]


def test_the_default_preamble_is_kfp_itself() -> None:
    found = recognise(install())
    assert words(found) == ["python3", "-m", "x"]
    assert found.requirements == ()
    assert found.runtime_requirements[0].startswith("kfp==")
    assert len(found.runtime_requirements) == 2


@pytest.mark.parametrize(
    "packages",
    [["a"], ["a==1.0", "b[x]>=2,<3"], ["c; python_version<'3.9'"], ["git+https://x.y/z@main"]],
)
@pytest.mark.parametrize("kfp", [True, False])
@pytest.mark.parametrize("venv", [True, False])
def test_packages_are_told_apart_from_kfp(packages: list[str], kfp: bool, venv: bool) -> None:
    found = recognise(install(packages_to_install=packages, install_kfp_package=kfp, use_venv=venv))
    assert found.requirements == tuple(packages)
    assert bool(found.runtime_requirements) is kfp
    assert words(found) == ["python3", "-m", "x"]


def test_index_options_are_kept_for_the_hint() -> None:
    found = recognise(
        install(packages_to_install=["a"], pip_index_urls=["https://one", "https://two"])
    )
    assert sorted(zip(found.pip_options[::2], found.pip_options[1::2], strict=True)) == [
        ("--extra-index-url", "https://two"),
        ("--index-url", "https://one"),
        ("--trusted-host", "https://one"),
        ("--trusted-host", "https://two"),
    ]
    assert found.requirements == ("a",)


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["sh", "-c", "echo hi"],
        ["sh", "-c", 'pip install a && "$0" "$@"', "x"],
        ["python3", "-m", "kfp.dsl.executor_main"],
    ],
)
def test_other_commands_are_left_alone(command: list[str]) -> None:
    assert words(recognise(command)) == command
    assert recognised(command, "").keys() == {"command"}


def test_a_preamble_with_anything_else_in_it_is_left_alone() -> None:
    command = install(packages_to_install=["a"])
    command[2] = command[2].replace("python3 -m pip install", "python3 -m pip download")
    assert words(recognise(command)) == command
    assert recognised(command, "").keys() == {"command"}


def test_options_among_the_packages_are_no_packages_and_never_run_by_the_shell() -> None:
    packages = ["-U", "a", "--pre", "-c", "limits.txt", "--no-binary=:all:", "-r", "more.txt"]
    found = recognise(install(packages_to_install=packages))
    assert words(found) == ["python3", "-m", "x"]
    assert found.requirements == ("a", "--requirement=more.txt")
    assert found.pip_options == ("-U", "--pre", "--constraint", "limits.txt", "--no-binary=:all:")


def test_kfp_of_a_version_that_the_author_chose_is_kfp_itself() -> None:
    found = recognise(install(kfp_package_path="kfp==2.4.0"))
    assert found.requirements == ()
    assert found.runtime_requirements == ("kfp==2.4.0",)
