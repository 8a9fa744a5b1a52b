"""Executors of the IR -> `Container` (image, command, args, env, resources) or the fields
of an `Importer` (an artifact from outside); all other kinds of executor are refused.

Recognised are the two shell scripts that KFP wraps around a lightweight Python component:
the first installs packages with pip, the second writes the component's source to a file
and starts KFP's executor on it (kfp/dsl/component_factory.py). Then they need no shell:
the requirements can be checked before anything runs, and the executor gets our signals
itself. Scripts that differ are left alone, to be run as they are."""

import itertools
import re
import shlex
from pathlib import Path
from typing import Any

from rekindle.ir import placeholders, scripts
from rekindle.ir.graph import Container, Resources
from rekindle.ir.placeholders import Argument, Reference, Template
from rekindle.ir.read.raw import MAX_BYTES, Fields, malformed
from rekindle.tables import rows

_OTHER_KINDS = {
    "resolver": "resolvers look up artifacts in a metadata store",
    "customJob": "custom jobs run on Vertex AI only",
}
# The IR says each resource twice: as a float (legacy), and as a quantity, which is to be believed.
_RESOURCES = (
    ("cpu_request", "resourceCpuRequest", "cpuRequest"),
    ("cpu_limit", "resourceCpuLimit", "cpuLimit"),
    ("memory_request", "resourceMemoryRequest", "memoryRequest"),
    ("memory_limit", "resourceMemoryLimit", "memoryLimit"),
)

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
# options of `pip install`, and how those that a value follows are written in a Container
_PIP: dict[str, Any] = rows(Path(__file__).with_name("pip_options.yaml"))
_RUNTIME = re.compile(r"kfp==2[.\d]*")


def read_executor(executor: Fields) -> Container | dict[str, Any] | None:
    """The executor's container, or fields of an `Importer`; None, with a refusal, for others."""
    other_kinds = [kind for kind in _OTHER_KINDS if executor.has(kind)]
    for kind in other_kinds:
        executor.any(kind)  # also where it says nothing more
        executor.refusals.add(f"`{kind}` is not supported: {_OTHER_KINDS[kind]}", executor.at(kind))
    if other_kinds:
        return None
    content: Container | dict[str, Any]
    if executor.has("importer"):
        content = _import(executor.fields("importer"))
    elif executor.has("container"):
        content = _container(executor.fields("container"))
    else:
        raise malformed(None, "a container or an importer", executor.where)
    executor.close()
    return content


def _import(fields: Fields) -> dict[str, Any]:
    source = fields.fields("artifactUri")
    if source.has("runtimeParameter"):
        name = source.take("runtimeParameter", str, "")
        uri = Template((Reference(("inputs", "parameters", name)),))
    else:
        uri = placeholders.parse(source.take("constant", str, ""), source.at("constant"))
    fields.any("typeSchema")  # the component's output says it, too
    fields.take("reimport", bool, False)  # an importer is looked at each time
    metadata = fields.take("metadata", dict, {})
    return {
        "uri": uri,
        "metadata": placeholders.parse_value(metadata, fields.at("metadata")),
        "to_workspace": fields.take("downloadToWorkspace", bool, False),
    }


def _container(fields: Fields) -> Container:
    written_words = [str(word) for word in fields.take("command", list, [])]
    words = scripts.without_prefixes(written_words)
    args = [str(word) for word in fields.take("args", list, [])]
    env: dict[str, Argument] = {}
    for variable in fields.list_of("env"):
        name = variable.take("name", str, "")
        value = variable.take("value", str, "")
        env[name] = placeholders.parse(value, variable.at("value"))
    fields.any("lifecycle")  # a setting of the step
    return Container(
        image=fields.take("image", str, ""),
        as_written=_arguments(words, fields.at("command")),
        args=_arguments(args, fields.at("args")),
        env=env,
        resources=_resources(fields.fields("resources")),
        **recognised(words, fields.at("command")),
    )


def _arguments(words: list[str], where: str) -> tuple[Argument, ...]:
    return tuple(placeholders.parse_argument(word, f"{where}[{i}]") for i, word in enumerate(words))


def _resources(fields: Fields) -> Resources:
    quantities = {}
    for name, key, legacy_key in _RESOURCES:
        legacy_number = fields.take(legacy_key, float, 0.0)
        legacy_text = ""
        if legacy_number:
            unit = "G" if "memory" in name else ""
            legacy_text = f"{legacy_number:g}{unit}"
        quantities[name] = fields.take(key, str, legacy_text)
    accelerator = fields.fields("accelerator")
    legacy_kind = accelerator.any("type")
    legacy_count = accelerator.any("count")
    quantities["accelerator_type"] = str(accelerator.any("resourceType") or legacy_kind or "")
    quantities["accelerator_count"] = str(accelerator.any("resourceCount") or legacy_count or "")
    return Resources(**quantities)


def recognised(command: list[str], where: str) -> dict[str, Any]:
    """`command` as fields of a Container: what it installs with pip, and the component's source."""
    installed = {}
    if len(command) >= 4 and command[:2] == ["sh", "-c"]:
        match = _INSTALL.fullmatch(command[2])
        if match:
            installed = _installs(match["pip"])
    words = command[3:] if installed else command
    executes = len(words) == 4 and words[:2] == ["sh", "-ec"] and _EXECUTE.fullmatch(words[2])
    if executes and "{{$" not in words[3]:  # KFP would fill in placeholders even inside the source
        return {**installed, "source": words[3]}
    if len(words) == 4 and words[:3] == ["sh", "-ec", scripts.UNPACK]:
        try:
            return {**installed, "source": scripts.unpacked(words[3], MAX_BYTES)}
        except ValueError as error:
            raise malformed(str(error), "a packed source", where) from error
    return {**installed, "command": _arguments(words, where)}


def _installs(script: str) -> dict[str, tuple[str, ...]]:
    """What a script of `pip install` installs; nothing for a script that does something else."""
    requirements: list[str] = []
    runtime: list[str] = []
    options: dict[tuple[str, ...], None] = {}
    for install in re.split(r"&&|\n", _VENV.sub("\n", script)):
        words = shlex.split(install)
        if not words:
            continue
        if words[:4] != ["python3", "-m", "pip", "install"]:
            return {}
        packages, pip_options = _pip_words(words[4:])
        # the SDK installs itself so
        is_kfp = len(packages) == 1 and _RUNTIME.fullmatch(packages[0])
        if is_kfp or "--no-deps" in words:
            runtime += packages
        else:
            requirements += packages
        options |= dict.fromkeys(pip_options)
    return {
        "requirements": tuple(requirements),
        "runtime_requirements": tuple(runtime),
        "pip_options": tuple(itertools.chain.from_iterable(options)),
    }


def _pip_words(words: list[str]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Requirements and options of a `pip install`; users may write any option among packages."""
    requirements: list[str] = []
    options: list[tuple[str, ...]] = []
    remaining_words = iter(words)
    for word in remaining_words:
        if word in _PIP["requirements"]:
            value = next(remaining_words, "")
            requirements.append(f"{_PIP['requirements'][word]}={value}")
        elif word in _PIP["valued"]:
            options.append((_PIP["valued"][word], next(remaining_words, "")))
        elif not word.startswith("-"):
            requirements.append(word)
        elif word not in _PIP["left out"]:
            options.append((word,))
    return requirements, options
