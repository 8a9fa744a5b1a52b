"""Recognise the two shell scripts that KFP wraps around a lightweight Python component.

The first installs packages with pip, the second writes the component's source to a file and starts
KFP's executor on it (kfp/dsl/component_factory.py). Recognised, they need no shell: the
requirements can be checked before anything runs, and the executor gets our signals itself. Scripts
that differ are left alone, to be run as they are."""

import dataclasses
import re
import shlex

_INSTALL = re.compile(
    r"""\s*if\ !\ \[\ -x\ "\$\(command\ -v\ pip\)"\ \];\ then\s+
        python3\ -m\ ensurepip\ .*?\s+fi\s+
        PIP_DISABLE_PIP_VERSION_CHECK=1\ (?P<pip>python3\ -m\ pip\ install\ .*?)
        \s*&&\ "\$0"\ "\$@"\s*""",
    re.VERBOSE | re.DOTALL,
)
_VENV = re.compile(r"export PIP_DISABLE_PIP_VERSION_CHECK=1\s.*?/activate\"\s", re.DOTALL)
_EXECUTE = re.compile(
    r"""\s*program_path=\$\(mktemp\ -d\)\s+
        printf\ "%s"\ "\$0"\ >\ "\$program_path/ephemeral_component\.py"\s+
        (?:_KFP_RUNTIME=true\s+)?python3\ -m\ kfp\.(?:v2\.)?(?:dsl|components)\.executor_main\s+
        --component_module_path\s+"\$program_path/ephemeral_component\.py"\s+"\$@"\s*""",
    re.VERBOSE,
)
_VALUED_OPTIONS = {
    "-i": "--index-url", "-f": "--find-links", "-c": "--constraint", "-t": "--target",
    **{name: name for name in (
        "--index-url", "--extra-index-url", "--trusted-host", "--find-links", "--constraint",
        "--target", "--prefix", "--root", "--proxy", "--timeout", "--retries", "--cert",
        "--no-binary", "--only-binary", "--progress-bar", "--config-settings", "--python-version",
        "--platform", "--upgrade-strategy",
    )},
}  # fmt: skip
# what they name has to be there, too
_VALUED_REQUIREMENTS = {
    "-r": "--requirement", "--requirement": "--requirement", "-e": "--editable",
    "--editable": "--editable",
}  # fmt: skip
_BARE_OPTIONS = ("--quiet", "--no-warn-script-location")
_RUNTIME = re.compile(r"kfp==2[.\d]*")


@dataclasses.dataclass(frozen=True)
class Command:
    """A container's command without what was recognised. `runtime_requirements` are KFP's own."""

    command: tuple[str, ...]
    source: str = ""
    requirements: tuple[str, ...] = ()
    runtime_requirements: tuple[str, ...] = ()
    pip_options: tuple[str, ...] = ()


def recognise(command: list[str]) -> Command:
    """`command` taken apart: pip requirements first, then the source of the component."""
    found = _recognise_install(command)
    rest = found.command
    executes = len(rest) == 4 and rest[:2] == ("sh", "-ec") and _EXECUTE.fullmatch(rest[2])
    if executes and "{{$" not in rest[3]:  # KFP would fill in placeholders even inside the source
        return dataclasses.replace(found, command=(), source=rest[3])
    return found


def _recognise_install(command: list[str]) -> Command:
    as_it_is = Command(tuple(command))
    if len(command) < 4 or command[:2] != ["sh", "-c"]:
        return as_it_is
    match = _INSTALL.fullmatch(command[2])
    if match is None:
        return as_it_is
    requirements: list[str] = []
    runtime: list[str] = []
    options: dict[tuple[str, ...], None] = {}
    for install in re.split(r"&&|\n", _VENV.sub("\n", match["pip"])):
        if not (words := shlex.split(install)):
            continue
        if words[:4] != ["python3", "-m", "pip", "install"]:
            return as_it_is
        named, asked = _pip_words(words[4:])
        own = "--no-deps" in words or (len(named) == 1 and _RUNTIME.fullmatch(named[0]))
        (runtime if own else requirements).extend(named)
        options |= dict.fromkeys(asked)
    flat = tuple(word for option in options for word in option)
    return Command(tuple(command[3:]), "", tuple(requirements), tuple(runtime), flat)


def _pip_words(words: list[str]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Requirements and options of a `pip install`; users may write any option among packages."""
    requirements: list[str] = []
    options: list[tuple[str, ...]] = []
    rest = iter(words)
    for word in rest:
        if word in _VALUED_REQUIREMENTS:
            requirements.append(f"{_VALUED_REQUIREMENTS[word]}={next(rest, '')}")
        elif word in _VALUED_OPTIONS:
            options.append((_VALUED_OPTIONS[word], next(rest, "")))
        elif not word.startswith("-"):
            requirements.append(word)
        elif word not in (*_BARE_OPTIONS, "--no-deps"):
            options.append((word,))
    return requirements, options
