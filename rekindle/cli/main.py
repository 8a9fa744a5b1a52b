"""The command line: a file a verb, or for verbs of one thing, loaded when it is called,
and one place where errors become text and exit codes."""

import dataclasses
import importlib
import io
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

import click

from rekindle.errors import Problem, RekindleError, RequestError, did_you_mean, fix_of
from rekindle.masking import masked

# in the order of `rekindle --help`
VERBS = {
    "init": "a starter config, the shipped pipeline and components to change",
    "doctor": "check that a platform has everything that a run needs",
    "plan": "what a run needs, how long it takes and what it costs",
    "run": "run the whole pipeline on this machine",
    "watch": "retrain when new data or the clock make it due",
    "images": "build an image with your code, and push it to a registry",
    "compile": "write the pipeline for a platform",
    "diff": "which steps of a compiled pipeline will run again, and why",
    "submit": "run the pipeline on a platform, once",
    "schedule": "create, list, pause or delete a schedule on a platform",
    "promote": "promote a candidate that is waiting for approval",
    "champion": "which version is champion, since when and why",
    "rollback": "make the champion before the champion again",
    "serve": "answer requests over HTTP with the champion",
    "deploy": "roll the champion out beside the version before, and back if it is worse",
    "predict": "write the champion's predictions for a file",
    "monitor": "whether what is asked and answered is still like what was judged",
    "alarms": "write alarms and a dashboard where a platform is monitored",
    "runs": "list runs, with metric, gate and model version",
    "compare": "what differs between runs, and which model is better",
    "status": "the steps of a run",
    "logs": "what a step printed",
    "cancel": "stop a run",
    "resume": "continue a run that failed or was stopped",
    "report": "the HTML card of a run, and the index of all",
    "gc": "list and remove what old runs left",
}
# verbs that share a file, each a function there of the verb's name
_SHARED = {
    "compile": "definitions",
    "diff": "definitions",
    "report": "pages",
    "compare": "pages",
    "promote": "versions",
    "champion": "versions",
    "rollback": "versions",
    "serve": "serving",
    "predict": "serving",
    "monitor": "serving",
    "status": "following",
    "logs": "following",
    "cancel": "following",
}


class _Verbs(click.Group):
    """Imports a verb's module only when that verb is called, so that `--help` stays
    fast."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        try:
            module = importlib.import_module(f"rekindle.cli.{_SHARED.get(name, name)}")
        except ModuleNotFoundError as error:  # such as pyarrow, of verbs that read the registry
            fix = "pip install 'rekindle[local,serve]'"
            raise RequestError(f"{error.name} is not installed", fix=fix) from error
        function = name if name in _SHARED else "command"
        command: click.Command = getattr(module, function)
        return command

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in VERBS and not name.startswith("-"):
            message = f"there is no command `{name}`"
            hint = did_you_mean(name, VERBS)
            if hint:
                message += f"; {hint}"
            context.fail(message)
        return super().resolve_command(context, args)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


@click.group(
    cls=_Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done, 1 failed, 2 the request is wrong, 75 preempted after a save, "
    "130 interrupted.",
)
@click.version_option(package_name="rekindle", message="rekindle %(version)s")
def cli() -> None:
    """rekindle keeps machine-learning models current: one YAML retrains, judges and
    registers."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    command_line = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        # a terminal that cannot show a letter gets its code
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(invoke(command_line))


def invoke(command_line: list[str]) -> int:
    """Run one command; returns its exit code. Errors are printed, with a traceback only
    under -v, and without secrets."""
    as_json = "--json" in command_line
    try:
        return _run_command(command_line, as_json)
    except OSError as error:  # stdout takes no error either
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        report_errors(_of_the_system(error), as_json=False)
        return 1


def _run_command(command_line: list[str], as_json: bool) -> int:
    try:
        result = cli.main(command_line, prog_name="rekindle", standalone_mode=False)
    except click.ClickException as error:
        return _report_usage(error, as_json)
    # Ctrl-C, or the end of stdin at a question
    except click.Abort:
        print("interrupted", file=sys.stderr)
        return 130
    except (RekindleError, OSError) as error:
        if {"-v", "--verbose"} & {*command_line}:
            _show_traceback()
        if isinstance(error, OSError):
            error = _of_the_system(error)
        report_errors(error, as_json)
        return error.exit_code
    except Exception:  # noqa: BLE001 - shown whole, and the exit code says so
        _show_traceback()  # a mistake of ours: all of it, but for what a library was given
        return 1
    return result if isinstance(result, int) else 0


def report_errors(error: RekindleError, as_json: bool) -> None:
    """The problems of `error`: one JSON object on stdout, or lines on stderr."""
    if as_json:
        from rekindle.cli.options import answer
        from rekindle.outputs import Errors, rows_of

        answer(Errors(errors=rows_of(error)))
        return
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"  # no-color.org
    color = False if is_plain else None  # None: click decides
    for problem in _of_several_steps(error.problems):
        click.secho("error: ", fg="red", bold=True, nl=False, err=True, color=color)
        # problems that a step printed stand below the step that failed
        shown = dataclasses.replace(problem, what=problem.what.replace("\n", "\n    "))
        click.echo(str(shown), err=True)
    if len(error.problems) > 1:
        click.echo(f"{len(error.problems)} problems", err=True)


def _of_several_steps(problems: Iterable[Problem]) -> list[Problem]:
    """The problems, those that differ in the step alone as one, with all their places."""
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for problem in problems:
        step, uses, message = problem.what.partition(" uses ")
        if not uses or not step.startswith("`"):
            step = ""
            message = problem.what
        groups.setdefault((message, problem.fix), []).append((step, problem.where))
    grouped = []
    for (message, fix), rows in groups.items():
        steps = list(dict.fromkeys(step for step, _ in rows if step))
        places = list(dict.fromkeys(where for _, where in rows if where))
        if steps:
            verb = "use" if len(steps) > 1 else "uses"
            message = f"{', '.join(steps)} {verb} {message}"
        grouped.append(Problem(message, "\n         ".join(places), fix))
    return grouped


def _show_traceback() -> None:
    import traceback

    sys.stderr.write(masked(traceback.format_exc()))


def _of_the_system(error: OSError) -> RekindleError:
    """A full disk or a folder without permission, in words."""
    where = str(error.filename or "")
    try:
        Path.cwd()
    except FileNotFoundError:
        return RekindleError(
            "the working directory was deleted",
            where=where,
            fix="change to a folder that exists",
        )
    return RekindleError(
        error.strerror or str(error),
        where=where,
        fix=f"{fix_of(error)}; the same command goes on from there",
    )


def _report_usage(error: click.ClickException, as_json: bool) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":  # since click 8.2; its text is the help
        error.show()
        return 2
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "rekindle"
    fix = f"see `{command} --help`"
    if isinstance(error, click.NoSuchOption):
        field = _field(error.option_name)
        if field:
            fix = f"--set {field}=VALUE"
    refusal = RequestError([Problem(error.format_message(), "", fix, "E-USAGE")])
    report_errors(refusal, as_json)
    return refusal.exit_code


def _field(option: str) -> str:
    """The field of a config that an option is called like, or ""."""
    from rekindle.spec.model import Spec

    name = option.lstrip("-").replace("-", "_")
    for section, field in Spec.model_fields.items():
        for model in (field.annotation, *get_args(field.annotation)):
            if name in getattr(model, "model_fields", ()):
                return f"{field.alias or section}.{name}"
    return ""


if __name__ == "__main__":
    main()
