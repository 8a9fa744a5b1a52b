"""`rekindle run CONFIG`: the whole pipeline here and now."""

from pathlib import Path

import click

from rekindle import formats
from rekindle.app.grid import points
from rekindle.app.progress import Progress, RunConsole, step_table
from rekindle.app.run import Options, execute, windows
from rekindle.app.runs import summary
from rekindle.cli.grid import gridded
from rekindle.cli.options import Overrides, answer, config, overrides, shared
from rekindle.cli.rehearse import rehearsed
from rekindle.cli.serve import SERVING, require
from rekindle.errors import RekindleError, RequestError
from rekindle.records import RunRecord, RunSummary
from rekindle.spec.model import Spec


@click.command("run")
@config
@overrides
@click.option("--fresh", is_flag=True, help="Rerun every step; ignore the cache.")
@click.option("--from", "from_step", metavar="STEP",
              help="Rerun this step and all steps that depend on it.")  # fmt: skip
@click.option("--require-promotion", is_flag=True,
              help="Exit with 1 if the candidate was not promoted.")  # fmt: skip
@click.option("--rehearse-preemption", "fault", metavar="FAULT@step=N",
              help="Only train, twice, the second time with a real fault at step N (kill, term "
              "or hang), and compare.")  # fmt: skip
@shared
def command(
    config: Path, overrides: Overrides, fresh: bool, from_step: str | None,
    require_promotion: bool, fault: str | None, home: Path, as_json: bool,
) -> int:  # fmt: skip
    """Retrain, judge and register the model of CONFIG on this machine.

    Steps whose code and inputs have not changed come from the cache. An interrupted run continues
    from its last checkpoint when you rerun the command. A candidate that the gate refuses is a
    success: exit code 0.

    Several values of a field (--set train.lr=1e-4,3e-4 --set train.seed=1,2) make a grid: a
    training for each combination. Only the one with the lowest validation loss is judged on the
    test split and registered.

    A rehearsal (--rehearse-preemption) proves that an interrupted training ends with the same
    losses and weights as an uninterrupted one: exit code 0 if so, else 1. It registers nothing and
    leaves only its record, in the home's folder `rehearsals`."""
    found = points(config, overrides)
    options = Options(home, fresh, from_step)
    if len(found) > 1:
        if fault is not None:
            raise RequestError("a rehearsal takes one value of each field", where="--set")
        best = gridded(found, options, as_json, carry_out)
        return _exit_code(best, require_promotion)
    spec = found[0].spec
    if spec.deploy.after_promotion:
        require(*SERVING)
    if fault is not None:
        return rehearsed(windows(spec)[-1], fault, home, as_json)
    results = [carry_out(one, options, as_json) for one in windows(spec)]
    last = results[-1]
    if as_json:
        earlier = tuple(result.run_id for result in results[:-1])
        answer(last.model_copy(update={"earlier": earlier}))
    return _exit_code(last, require_promotion)


def _exit_code(result: RunSummary, require_promotion: bool) -> int:
    promoted = result.gate is not None and result.gate.promoted
    return 1 if require_promotion and not promoted else 0


def carry_out(spec: Spec, options: Options, as_json: bool) -> RunSummary:
    """Execute one window; prints what came of it."""
    progress = Progress()
    try:
        with progress:
            record = execute(spec, options, progress.changed, progress.event)
    except RekindleError:  # once the live table is gone, which would erase what is printed
        if progress.record is not None and not as_json:
            conclude(progress.record, summary(progress.record, options.home))
        raise
    result = summary(record, options.home)
    if not as_json:
        conclude(record, result)
    if spec.deploy.after_promotion and result.gate and result.gate.promoted:
        from rekindle.app import deploy
        from rekindle.cli.deploy import say, watching

        seen = watching(spec.deploy.min_requests)
        watched = deploy.Options(wait=True, on_event=say, on_traffic=seen)
        deploy.deploy(spec, options.home, watched)
    return result


def conclude(record: RunRecord, result: RunSummary) -> None:
    """The step table, the gate, the model, the card."""
    console = RunConsole(soft_wrap=False)
    console.print(step_table(record, console.width))
    console.print()
    lines = [("run", f"{result.run_id}  {result.status} in {formats.duration(result.seconds)}")]
    if result.window:
        lines.append(("window", formats.window(result.window)))
    if result.metrics:
        lines.append(("metrics", "  ".join(f"{k} {v:.4f}" for k, v in result.metrics.items())))
    if result.gate:
        words = WORDS[result.gate.decision].format(run=result.run_id)
        before = "decided before: " if result.model and not result.model.created else ""
        lines.append(("gate", f"{before}{words}: {result.gate.reason}"))
    lines += [("warning", warning) for warning in result.warnings]
    if model := result.model:
        aliases = f" ({', '.join(model.aliases)})" if model.aliases else ""
        new = "new" if model.created else "known"
        lines.append(("model", f"{model.name} version {model.version}{aliases}, {new}"))
    lines.append(("card", result.card))
    for name, text in lines:
        console.print(f"{name:8}{text}", highlight=False, markup=False, soft_wrap=True)


WORDS = {
    "promoted": "promoted",
    "pending": "passed, but the promotion did not happen",
    "approval_needed": "passed, waits for `rekindle promote {run}`",
    "refused": "refused",
    "rolled_back": "passed, but was rolled back; `rekindle promote {run} --reason WHY` overrides",
}
