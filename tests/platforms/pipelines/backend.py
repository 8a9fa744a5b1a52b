# ruff: noqa
"""Pipelines that KFP's own backend runs otherwise than its SDK documents them, or fails: what
tests/platforms/kubeflow/test_backend.py compiles into forms that avoid it."""

# Components are written as users of KFP write them, hence the noqa.

from typing import List, NamedTuple, Optional

from kfp import dsl

import rekindle

component = dsl.component(base_image="python:3.11", install_kfp_package=False)


@component
def greet(name: str = "nobody") -> str:
    return f"hello, {name}"


@component
def as_str(v: str) -> str:
    return f"{type(v).__name__} {v!r}"


@component
def keys_of(v: dict) -> str:
    return " ".join(v)


@component
def number() -> float:
    return 0.00001


@component
def flaky(folder: str, times: int) -> str:
    import os

    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "tries"), "a") as file:
        file.write("x")
    tries = os.path.getsize(os.path.join(folder, "tries"))
    if tries < times:
        raise RuntimeError(f"try {tries}")
    return f"try {tries}"


@component
def half(x: int) -> float:
    return x / 2


@component
def total(xs: List[float]) -> float:
    return sum(xs)


@component
def told(status: dsl.PipelineTaskFinalStatus, folder: str):
    import os

    with open(os.path.join(folder, "status"), "w") as file:
        file.write(f"{status.state} {status.pipeline_task_name}")


@component
def fails() -> str:
    raise ValueError("as asked")


@component
def optional(v: Optional[str] = None, w: int = 3) -> str:
    return f"{v} {w}"


@component
def braces() -> str:
    return "{{workflow.name}} {{x}} \U0001f389"


@component
def makes(a: dsl.Output[dsl.Artifact]):
    with open(a.path, "w") as file:
        file.write("a")


@component
def reads(a: Optional[dsl.Input[dsl.Artifact]] = None) -> str:
    return "nothing" if a is None else a.uri


# f-strings and facts of the run


@dsl.pipeline(name="gate")
def gate(word: str) -> str:
    with dsl.If(word == "hello, go! 0.00001"):
        a = greet(name="yes")
    with dsl.Else():
        b = greet(name="no")
    return as_str(v=dsl.OneOf(a.output, b.output)).output


@dsl.pipeline(name="text-for-nested")
def text_for_nested(name: str = "go"):
    gate(word=f"{greet(name=name).output}! {number().output}")


@dsl.container_component
def shows(v: str, out: dsl.OutputPath(str)):
    return dsl.ContainerSpec(
        image="python:3.11",
        command=["sh", "-c", 'mkdir -p "$(dirname "$0")" && printf "%s|" "$@" > "$0"'],
        args=[out, f"{dsl.PIPELINE_TASK_NAME_PLACEHOLDER}={v}"],
    )


@dsl.pipeline(name="facts")
def facts(x: str = "X"):
    as_str(v=dsl.PIPELINE_JOB_NAME_PLACEHOLDER)
    as_str(v=f"{dsl.PIPELINE_TASK_NAME_PLACEHOLDER}-{x}")
    shows(v=x)


@dsl.pipeline(name="root")
def root():
    as_str(v=f"{dsl.PIPELINE_ROOT_PLACEHOLDER}/x")


# arguments of containers


@dsl.container_component
def joins(a: str, out: dsl.OutputPath(str), b: str = "the default", n: float = 2.0):
    return dsl.ContainerSpec(
        image="python:3.11",
        command=["sh", "-c", 'mkdir -p "$(dirname "$0")" && printf "%s|" "$@" > "$0"'],
        args=[out, dsl.ConcatPlaceholder([a, "+", b]), dsl.ConcatPlaceholder(["--n=", n]), b, n],
    )


@dsl.pipeline(name="arguments")
def arguments(a: str = "A"):
    joins(a=a)
    joins(a=a, b="B")


@dsl.container_component
def present(out: dsl.OutputPath(str), name: Optional[str] = None):
    return dsl.ContainerSpec(
        image="python:3.11",
        command=["sh", "-c", 'mkdir -p "$(dirname "$0")" && printf "%s|" "$@" > "$0"'],
        args=[
            out,
            dsl.IfPresentPlaceholder(
                input_name="name",
                then=[dsl.ConcatPlaceholder(["--name=", name])],
                else_=["--nobody"],
            ),
        ],
    )


@dsl.pipeline(name="presence")
def presence():
    present(name="you")
    present()


# retries, the cache, the end of a run


@dsl.pipeline(name="retries")
def retries(folder: str, other: str):
    flaky(folder=folder, times=3).set_retry(2, backoff_duration="1s", backoff_factor=1)
    flaky(folder=other, times=1)


@dsl.pipeline(name="branches")
def branches(go: bool = True):
    with dsl.If(go == True):
        a = greet(name="yes")
    with dsl.Else():
        b = greet(name="no")
    as_str(v=dsl.OneOf(a.output, b.output))
    greet(name="cached")


@dsl.pipeline(name="status")
def status(folder: str):
    end = told(folder=folder)
    with dsl.ExitHandler(end):
        greet()


# optional inputs


@dsl.pipeline(name="inner")
def inner(v: Optional[str] = None, w: int = 3) -> str:
    return optional(v=v, w=w).output


@dsl.pipeline(name="middle")
def middle(v: Optional[str] = None) -> str:
    return inner(v=v).output


@dsl.pipeline(name="absent")
def absent(v: Optional[str] = None, given: str = "here"):
    middle(v=v)
    middle(v=given)


@dsl.pipeline(name="absent-in-part")
def absent_in_part(v: Optional[str] = None):
    middle(v=v)
    optional(v=v)


# sources


@dsl.pipeline(name="sources")
def sources():
    braces()


# what has no other form


@component
def lengths(xs: List[float]) -> int:
    return len(xs)


@dsl.pipeline(name="nested-collected")
def nested_collected():
    with dsl.ParallelFor([1, 2]) as i:
        with dsl.ParallelFor([10, 20]) as j:
            h = half(x=j)
    lengths(xs=dsl.Collected(h.output))


@dsl.pipeline(name="element-for-loop")
def element_for_loop():
    with dsl.ParallelFor([{"p": [1, 2]}]) as item:
        with dsl.ParallelFor(item.p) as p:
            as_str(v=p)


@dsl.pipeline(name="ignored-output")
def ignored_output():
    greet(name=fails().output).ignore_upstream_failure()


@dsl.pipeline(name="ignored-several")
def ignored_several():
    greet(name="after").after(fails(), number()).ignore_upstream_failure()


@dsl.pipeline(name="ignored-follower")
def ignored_follower():
    after = greet(name="after").after(fails()).ignore_upstream_failure()
    as_str(v=after.output)


@dsl.pipeline(name="metadata")
def metadata():
    reads(
        a=dsl.importer(
            artifact_uri="s3://b/m", artifact_class=dsl.Model, metadata={"l": [1]}
        ).output
    )


@dsl.pipeline(name="metadata-of-run")
def metadata_of_run(v: str = "a"):
    reads(
        a=dsl.importer(artifact_uri="s3://b/m", artifact_class=dsl.Model, metadata={"v": v}).output
    )


@dsl.pipeline(name="importer-https")
def importer_https():
    reads(a=dsl.importer(artifact_uri="https://example.com/m", artifact_class=dsl.Model).output)


@dsl.pipeline(name="importer-https-in-loop")
def importer_https_in_loop():
    with dsl.ParallelFor(["gs://bucket/m", "https://example.com/m"]) as uri:
        reads(a=dsl.importer(artifact_uri=uri, artifact_class=dsl.Model).output)


@dsl.pipeline(name="long-argument")
def long_argument(text: str):
    as_str(v=text)


# what KFP fails at sometimes


@dsl.pipeline(name="emoji-in-constant")
def emoji_in_constant():
    as_str(v="\U0001f389")


@dsl.pipeline(name="text-with-values")
def text_with_values(s: str = 'say "hi"'):
    as_str(v=f"x={s}")


@dsl.pipeline(name="text-without-quotes")
def text_without_quotes(s: str = "plain", n: int = 3):
    as_str(v=f"x={s} {n}")


@dsl.pipeline(name="text-of-plain-items")
def text_of_plain_items():
    with dsl.ParallelFor(["a", "b"]) as item:
        as_str(v=f"x={item}")


@dsl.pipeline(name="text-of-quoted-items")
def text_of_quoted_items():
    with dsl.ParallelFor(["a", 'say "b"']) as item:
        as_str(v=f"x={item}")


@dsl.pipeline(name="collected-of-nothing")
def collected_of_nothing(xs: List[int] = []):
    with dsl.ParallelFor(xs) as x:
        h = half(x=x)
    total(xs=dsl.Collected(h.output))


@dsl.pipeline(name="collected-of-branches")
def collected_of_branches():
    with dsl.ParallelFor([1, 2]) as x:
        with dsl.If(x == 2):
            h = half(x=x)
    total(xs=dsl.Collected(h.output))


@dsl.container_component
def no_shell():
    return dsl.ContainerSpec(image="python:3.11", command=["true"])


@dsl.pipeline(name="retries-without-a-shell")
def retries_without_a_shell():
    no_shell().set_retry(2)


@dsl.container_component
def called(out: dsl.OutputPath(str)):
    return dsl.ContainerSpec(
        image="python:3.11",
        command=["sh", "-c", 'mkdir -p "$(dirname "$0")" && printf %s "$1" > "$0"'],
        args=[out, f"{dsl.PIPELINE_JOB_NAME_PLACEHOLDER} {dsl.PIPELINE_ROOT_PLACEHOLDER}"],
    )


@dsl.pipeline(name="called-on-nodes")
def called_on_nodes():
    rekindle.distribute(called(), nodes=2)


# optional inputs behind conditions and loops


@dsl.pipeline(name="deep")
def deep(v: Optional[str] = None) -> str:
    with dsl.ParallelFor([1, 2]) as j:
        optional(v=v, w=j)
    return optional(v=v).output


@dsl.pipeline(name="absent-in-groups")
def absent_in_groups(v: Optional[str] = None, n: Optional[int] = None, go: bool = True):
    with dsl.If(go == True):
        optional(v=v)
    with dsl.ExitHandler(greet()):
        with dsl.ParallelFor([1, 2]):
            optional(v=v, w=n)
            deep(v=v)


@component
def is_there(a: Optional[dsl.Input[dsl.Artifact]] = None) -> bool:
    return a is not None


@dsl.pipeline(name="reading")
def reading(a: Optional[dsl.Input[dsl.Artifact]] = None, go: bool = True) -> bool:
    with dsl.If(go == True):
        with dsl.ParallelFor([1, 2]):
            is_there(a=a)
    return is_there(a=a).output


@dsl.pipeline(name="absent-artifact-in-groups")
def absent_artifact_in_groups(a: Optional[dsl.Input[dsl.Artifact]] = None):
    reading()
    reading(a=makes().output)
    reading(a=a)


@dsl.pipeline(name="text-of-nothing")
def text_of_nothing(v: Optional[str] = None):
    inner(v=f"a{v}")


@dsl.pipeline(name="absent-for-container")
def absent_for_container(b: Optional[str] = None, a: str = "A"):
    joins(a=a, b=b)


@dsl.container_component
def present_or_default(out: dsl.OutputPath(str), name: str = "you", other: str = "others"):
    return dsl.ContainerSpec(
        image="python:3.11",
        command=["sh", "-c", 'mkdir -p "$(dirname "$0")" && printf "%s|" "$@" > "$0"'],
        args=[
            out,
            dsl.IfPresentPlaceholder(
                input_name="name", then=["--name", name, other], else_=["--nobody"]
            ),
        ],
    )


@dsl.pipeline(name="presence-of-defaults")
def presence_of_defaults():
    present_or_default()
    present_or_default(name="me")


@dsl.container_component
def present_in_command(out: dsl.OutputPath(str), name: Optional[str] = None):
    return dsl.ContainerSpec(
        image="python:3.11",
        command=[
            "sh",
            "-c",
            'mkdir -p "$(dirname "$0")" && printf "%s|" "$@" > "$0"',
            out,
            dsl.IfPresentPlaceholder(input_name="name", then=["--name"], else_=["--nobody"]),
        ],
    )


@dsl.pipeline(name="presence-in-command")
def presence_in_command():
    present_in_command(name="you")
    present_in_command()


# dollar signs


@component
def dollars() -> str:
    return "a$$b $(KFP_POD_NAME)"


@dsl.pipeline(name="dollars-in-source")
def dollars_in_source():
    dollars()


@dsl.pipeline(name="dollars-in-argument")
def dollars_in_argument(v: str = "a$$b"):
    as_str(v=v)


@dsl.pipeline(name="dollars-in-constant")
def dollars_in_constant():
    as_str(v="a$$b")


@dsl.pipeline(name="dollars-in-items")
def dollars_in_items():
    with dsl.ParallelFor(["a", "a$$b"]) as item:
        as_str(v=item)


@dsl.pipeline(name="dollars-in-variable")
def dollars_in_variable():
    as_str(v="a").set_env_variable("PASSWORD", "pa$$word")


@dsl.pipeline(name="name-of-pod")
def name_of_pod(v: str = "$(KFP_POD_NAME)"):
    as_str(v=v)


@dsl.pipeline(name="name-of-variable")
def name_of_variable():
    as_str(v="at $(HERE)").set_env_variable("HERE", "home")


@dsl.pipeline(name="other-brackets")
def other_brackets():
    as_str(v="$(date) $(HOME) {{name}} {{ user.name }} {{{x}}} {{#each items}}")


@dsl.pipeline(name="tag-in-constant")
def tag_in_constant():
    as_str(v="run {{workflow.name}}")


@dsl.pipeline(name="tag-in-default")
def tag_in_default(v: str = "{{ inputs.parameters.q }}"):
    as_str(v=v)


@dsl.pipeline(name="tag-in-items")
def tag_in_items():
    with dsl.ParallelFor([{"prompt": "{{item}}"}]) as item:
        as_str(v=item.prompt)


@dsl.pipeline(name="tag-in-variable")
def tag_in_variable():
    as_str(v="a").set_env_variable("TRY", "{{retries}}")


@dsl.pipeline(name="expression-in-key")
def expression_in_key():
    keys_of(v={"{{=1+1}}": 1})


# more that has no other form


@dsl.pipeline(name="fact-in-variable")
def fact_in_variable():
    greet().set_env_variable("RUN", dsl.PIPELINE_JOB_NAME_PLACEHOLDER)


@dsl.pipeline(name="fact-in-items")
def fact_in_items():
    with dsl.ParallelFor([dsl.PIPELINE_JOB_NAME_PLACEHOLDER, "b"]) as item:
        as_str(v=item)


@dsl.pipeline(name="image-with-tag")
def image_with_tag(tag: str = "3.11"):
    greet().set_container_image(f"python:{tag}")


@dsl.pipeline(name="number-of-gpus")
def number_of_gpus(n: int = 1):
    greet().set_accelerator_type("nvidia.com/gpu").set_accelerator_limit(n)


@dsl.pipeline(name="text-of-gpus")
def text_of_gpus(n: str = "1"):
    greet().set_accelerator_type("nvidia.com/gpu").set_accelerator_limit(n)


@dsl.pipeline(name="machine-beside-output")
def machine_beside_output(memory: str = "2G"):
    as_str(v=greet().output).set_memory_limit(memory)


@dsl.pipeline(name="machine-of-output")
def machine_of_output():
    greet().set_memory_limit(greet().output)


@component
def as_number(v: str) -> int:
    return int(v)


@dsl.pipeline(name="machine-of-number")
def machine_of_number():
    greet().set_accelerator_type("nvidia.com/gpu").set_accelerator_limit(as_number(v="1").output)


@dsl.pipeline(name="uri-with-values")
def uri_with_values(name: str = "m"):
    reads(a=dsl.importer(artifact_uri=f"s3://b/{name}", artifact_class=dsl.Model).output)


@dsl.pipeline(name="uri-of-step")
def uri_of_step():
    reads(a=dsl.importer(artifact_uri=greet().output, artifact_class=dsl.Model).output)


@dsl.pipeline(name="uri-of-argument")
def uri_of_argument(uri: str = "s3://b/m"):
    model = dsl.importer(artifact_uri=uri, artifact_class=dsl.Model)
    model.set_display_name("The model")
    reads(a=model.output)


@dsl.container_component
def output_if_present(out: dsl.OutputPath(str), name: Optional[str] = None):
    return dsl.ContainerSpec(
        image="python:3.11",
        command=["sh", "-c", 'mkdir -p "$(dirname "$1")" && echo "$@" > "$1"', "sh"],
        args=[dsl.IfPresentPlaceholder(input_name="name", then=[out, name])],
    )


@dsl.pipeline(name="output-in-presence")
def output_in_presence():
    output_if_present(name="a")


@dsl.pipeline(name="text-for-exit")
def text_for_exit(x: str = "1"):
    with dsl.ExitHandler(inner(v=f"end {x}")):
        greet()


@dsl.pipeline(name="exit-without-status")
def exit_without_status():
    with dsl.ExitHandler(greet()):
        greet()


@component
def told_alone(status: dsl.PipelineTaskFinalStatus):
    print(status)


@dsl.pipeline(name="ignored-status-follower")
def ignored_status_follower():
    end = told_alone().after(greet()).ignore_upstream_failure()
    greet().after(end)


@dsl.pipeline(name="choice-of-importers")
def choice_of_importers(go: bool = True):
    with dsl.If(go == True):
        a = dsl.importer(artifact_uri="s3://b/m", artifact_class=dsl.Artifact)
    with dsl.Else():
        b = dsl.importer(artifact_uri="s3://b/n", artifact_class=dsl.Artifact)
    reads(a=dsl.OneOf(a.output, b.output))


@dsl.pipeline(name="half-or-double")
def half_or_double(x: int) -> float:
    with dsl.If(x == 1):
        a = half(x=1)
    with dsl.Else():
        b = half(x=4)
    return dsl.OneOf(a.output, b.output)


@dsl.pipeline(name="collected-of-choices")
def collected_of_choices():
    with dsl.ParallelFor([1, 2]) as x:
        h = half_or_double(x=x)
    total(xs=dsl.Collected(h.output))


@dsl.pipeline(name="choice-of-conditions")
def choice_of_conditions(go: bool = True):
    with dsl.If(go == True):
        a = greet()
        with dsl.If(a.output == "x"):
            greet()
    with dsl.Else():
        b = greet()
    as_str(v=dsl.OneOf(a.output, b.output))


@dsl.pipeline(name="status-of-conditions")
def status_of_conditions():
    with dsl.ExitHandler(told_alone()):
        a = greet()
        with dsl.If(a.output == "x"):
            greet()


@dsl.pipeline(name="ends-with-condition")
def ends_with_condition() -> str:
    a = greet()
    with dsl.If(a.output == "x"):
        greet()
    return a.output


@dsl.pipeline(name="status-of-inner-conditions")
def status_of_inner_conditions():
    with dsl.ExitHandler(told_alone()):
        as_str(v=ends_with_condition().output)


@component
def as_list(v: str) -> List[str]:
    return [v]


@dsl.pipeline(name="choice-of-loops")
def choice_of_loops(go: bool = True):
    with dsl.If(go == True):
        a = greet()
        with dsl.ParallelFor(as_list(v=a.output).output) as item:
            as_str(v=item)
    with dsl.Else():
        b = greet()
    as_str(v=dsl.OneOf(a.output, b.output))


@dsl.pipeline(name="status-of-loops")
def status_of_loops(xs: List[str] = []):
    with dsl.ExitHandler(told_alone()):
        with dsl.ParallelFor(xs) as item:
            as_str(v=item)


@dsl.pipeline(name="loops-with-turns")
def loops_with_turns(go: bool = True):
    with dsl.ExitHandler(told_alone()):
        with dsl.If(go == True):
            a = greet()
            with dsl.ParallelFor(["x"]) as item:
                as_str(v=item)
        with dsl.Else():
            b = greet()
        as_str(v=dsl.OneOf(a.output, b.output))
    with dsl.ParallelFor(as_list(v="x").output) as item:
        as_str(v=item)


@dsl.pipeline(name="returned-choice")
def returned_choice(go: bool = True) -> str:
    with dsl.If(go == True):
        a = greet(name="yes")
    with dsl.Else():
        b = greet(name="no")
    return dsl.OneOf(a.output, b.output)


@dsl.pipeline(name="nested-choices")
def nested_choices():
    returned_choice(go=False)
    as_str(v=returned_choice().output)


@dsl.container_component
def says(text: str):
    return dsl.ContainerSpec(image="python:3.11", command=["echo"], args=[text])


@dsl.pipeline(name="text-of-step-in-argument")
def text_of_step_in_argument():
    says(text=greet().output)


@dsl.pipeline(name="argument-in-argument")
def argument_in_argument(text: str = "x"):
    says(text=text)
