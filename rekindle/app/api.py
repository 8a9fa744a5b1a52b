"""The notebook's way in: the same objects as the command line, as values to look at.

spec = rekindle.load("configs/digits.yaml", ["train.epochs=5"])
run = rekindle.run(spec)"""

import dataclasses
import html
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from rekindle import formats
from rekindle.app.forecast import Forecast
from rekindle.app.runs import (
    all_runs,
    home_of,
    load_target_spec,
    read_run,
    records_to_compare,
)
from rekindle.errors import RequestError
from rekindle.outputs import Compared
from rekindle.records import ChampionRecord, Deployment, Evidence, RunRecord
from rekindle.report.collect import RunFindings, collect, gate_of, model_of
from rekindle.report.comparison import compared as compare_runs
from rekindle.report.comparison import lines
from rekindle.report.page import render
from rekindle.report.readable_log import lines_of, shown
from rekindle.spec.installed import platform_names
from rekindle.spec.load import load_target
from rekindle.spec.model import Spec


@dataclasses.dataclass(frozen=True, repr=False)
class Run:
    """One execution: its record, and what its steps found out."""

    record: RunRecord
    home: Path

    @cached_property
    def findings(self) -> RunFindings:
        """Everything the steps recorded."""
        return collect(self.record)

    @property
    def id(self) -> str:
        """Names the run; `rekindle report ID` and the others take it."""
        return self.record.run_id

    @property
    def status(self) -> str:
        """`succeeded`, `failed`, ..."""
        return self.record.status

    @property
    def seconds(self) -> float:
        """Wall time."""
        return self.record.seconds

    def refreshed(self) -> "Run":
        """The run as it is now; a run on a platform is asked for there."""
        # imports stand in methods: `import rekindle` has to stay quick
        from rekindle.app.follow import refresh_from_platform

        record = refresh_from_platform(read_run(self.home, self.id), self.home)
        return Run(record, self.home)

    def wait(self) -> "Run":
        """Wait until the run is over, however it ends; shows progress meanwhile."""
        from rekindle.app.follow import wait_until_ended
        from rekindle.app.progress import Progress

        # `run` returns when a run on this machine is over
        if self.record.platform == "local":
            return self.refreshed()
        with Progress() as progress:
            record = wait_until_ended(self.record, self.home, progress.changed)
        return Run(record, self.home)

    def logs(self, step: str | None = None, *, raw: bool = False) -> str:
        """What a step printed, by default the first that failed or the last that began.

        `raw`: with all that launchers print. RequestError where there is no such step, or
        no log."""
        from rekindle.app.follow import log_of, step_with_log

        record = self.refreshed().record
        step_record = step_with_log(record, step)
        log = Path(step_record.failed_log or step_record.log)
        if log.is_file():
            text = log.read_text(encoding="utf-8", errors="replace")
        else:
            text = "".join(log_of(record, step_record, self.home))
        if raw:
            return text
        return "".join(shown(lines_of([text]), live=False, names={}))

    def cancel(self) -> None:
        """Ask the run to stop; its steps save what they can."""
        from rekindle.app.follow import request_cancel

        request_cancel(self.record, self.home)

    def __repr__(self) -> str:
        return f"Run({self.id!r}, {self.status}, {formats.duration(self.seconds)})"

    @property
    def metrics(self) -> dict[str, float]:
        """The candidate's metrics on held-out examples."""
        return dict(self.evidence.metrics)

    @property
    def gate(self) -> dict[str, Any]:
        """`promoted`, `decision` and `reason`, as in `run --json`."""
        gate = gate_of(self.findings)
        return gate.model_dump(mode="json") if gate else {}

    @property
    def model(self) -> dict[str, Any]:
        """`name`, `version` and `aliases` in the registry."""
        model = model_of(self.findings)
        return model.model_dump(mode="json") if model else {}

    @property
    def evidence(self) -> Evidence:
        """Why the candidate was promoted or not.

        LookupError for a run that evaluated nothing."""
        if self.findings.evidence is None:
            raise LookupError(f"the run {self.id} evaluated nothing")
        return self.findings.evidence

    @property
    def history(self) -> list[dict[str, Any]]:
        """A dict for each optimizer step, for `pandas.DataFrame`: step, loss, lr, ..."""
        return [row.model_dump() for row in self.findings.history]

    def plot(self, axes: Any = None) -> Any:
        """Draw the losses by epoch with matplotlib.

        Returns `axes`, or new ones where it is None."""
        try:
            import matplotlib.pyplot as plt
        except ImportError:
            raise RequestError("matplotlib draws plots", fix="pip install matplotlib") from None
        axes = axes or plt.subplots(figsize=(7, 3.5), layout="constrained")[1]
        held_out = [row for row in self.history if row["validation_loss"] is not None]
        colour = None
        for kind, rows, key, style in (
            ("training", self.history, "loss", "-"),
            ("validation", held_out, "validation_loss", "o--"),
        ):
            epochs = [row["epoch"] for row in rows]
            losses = [row[key] for row in rows]
            label = f"{self.id}, {kind}"
            (line,) = axes.plot(epochs, losses, style, color=colour, label=label)
            colour = line.get_color()  # both curves of a run have one colour
        axes.set(xlabel="epoch", ylabel="loss", ylim=(0, None))
        axes.legend(frameon=False)
        return axes

    @property
    def confusion(self) -> list[list[int]]:
        """Counts by true class (row) and predicted class (column), as in `labels`."""
        return [list(row) for row in self.evidence.confusion]

    @property
    def labels(self) -> list[str]:
        """The classes in index order."""
        return list(self.evidence.labels)

    @property
    def card(self) -> Path:
        """The HTML card."""
        return self.home / "runs" / self.id / "card.html"

    def _repr_html_(self) -> str:
        """A step table, the gate and the model, for a notebook's output cell."""
        return render(
            "run.html.j2",
            run=self.record,
            gate=gate_of(self.findings),
            model=self.model,
            evidence=self.findings.evidence,
        )


def load(path: str | Path, overrides: Sequence[str] = ()) -> Spec:
    """The frozen spec of a config with `overrides`.

    Raises SpecError with all problems."""
    return load_target(path, overrides)


def _resolved(spec: Spec | str | Path, overrides: Sequence[str]) -> Spec:
    """A spec as it is, or the one of a config or pipeline, with `overrides`."""
    return spec if isinstance(spec, Spec) else load_target(spec, overrides)


def _spec_of(target: Spec | str | None, home: Path) -> Spec:
    """The spec behind a spec, a model, a run or a config; None is the latest run."""
    if isinstance(target, Spec):
        return target
    spec, _ = load_target_spec(target, home)
    return spec


def run(
    spec: Spec | str | Path,
    overrides: Sequence[str] = (),
    *,
    home: str | Path | None = None,
    fresh: bool = False,
    from_step: str | None = None,
    quiet: bool = False,
) -> Run:
    """Run the spec's pipeline here and now; unchanged steps come from the cache. `spec`
    is a spec, the path of a config, or a pipeline (`path.py:function`), which are loaded
    with `overrides`. Raises RekindleError; the same call goes on where it stopped."""
    from rekindle.app.prepared import prepare_here
    from rekindle.app.progress import Progress
    from rekindle.app.run import RunOptions, execute

    root = home_of(home)
    prepared = prepare_here(_resolved(spec, overrides), root)
    options = RunOptions(root, fresh, from_step)
    if quiet:
        record = execute(prepared, options)
    else:
        with Progress() as progress:
            record = execute(prepared, options, progress.changed, progress.event)
    return Run(record, root.resolve())


def planned(
    spec: Spec | str | Path,
    overrides: Sequence[str] = (),
    *,
    platform: str = "",
    region: str = "",
    examples: int | None = None,
    prices: Sequence[str | Path] = (),
    home: str | Path | None = None,
) -> Forecast:
    """What training the spec needs, how long it takes and what it costs; the options are
    those of `rekindle plan`.

    What cannot end in time, or would cost more than it may, is in `refused`. Raises
    RekindleError where it cannot be planned, or nothing fits."""
    from rekindle.app.plan import figures

    platforms = ("local", *platform_names())
    if platform and platform not in platforms:
        fix = f"one of {', '.join(platforms)}"
        raise RequestError(f"there is no platform `{platform}`", fix=fix)
    resolved = _resolved(spec, overrides)
    price_files = [Path(path) for path in prices]
    return Forecast(figures(resolved, platform, region, examples, home_of(home), price_files))


def submit(
    spec: Spec | str | Path,
    overrides: Sequence[str] = (),
    *,
    platform: str,
    home: str | Path | None = None,
    token: str | None = None,
) -> Run:
    """Have a platform run the spec's pipeline, once for a `token`; `run.wait()`,
    `run.refreshed()`, `run.logs(STEP)` and `run.cancel()` follow it.

    Raises RekindleError; the same call continues what was cut off. Does not ask for
    consent, which `rekindle submit` does."""
    from rekindle.app.prepared import prepare_for
    from rekindle.app.submit import submit_prepared

    resolved = _resolved(spec, overrides)
    root = home_of(home)
    prepared = prepare_for(platform, resolved, root)
    record, _, _ = submit_prepared(prepared, root, token, lambda outline, plan: None)
    return Run(record, root.resolve())


def deploy(
    spec: Spec | str | Path,
    overrides: Sequence[str] = (),
    *,
    platform: str = "local",
    port: int | None = None,
    wait: bool = False,
    home: str | Path | None = None,
) -> Deployment:
    """Roll the champion out; `wait` for the canary's requests, else call it again.

    Raises RekindleError where it was rolled back. Does not ask for consent, which
    `rekindle deploy` does."""
    from rekindle.app.deploy import DeployOptions, deploy

    resolved = _resolved(spec, overrides)
    deployment = deploy(resolved, home_of(home), DeployOptions(platform, port=port, wait=wait))
    assert deployment is not None  # None is for those who are asked and refuse
    return deployment


def champion(target: Spec | str | None = None, home: str | Path | None = None) -> ChampionRecord:
    """Which version is champion, of the model of a spec, a name, a run or a config (None:
    of the latest run), with its history and where it answers here."""
    from rekindle.app.deploy import champion_here

    root = home_of(home)
    return champion_here(_spec_of(target, root), root)


def rollback(
    target: Spec | str | None, reason: str, to: str = "", home: str | Path | None = None
) -> ChampionRecord:
    """Make the champion before, or `to`, the champion again.

    Deployments of this home follow."""
    from rekindle.app.deploy import champion_here, roll_back

    root = home_of(home)
    spec = _spec_of(target, root)
    roll_back(spec, root, reason, to)
    return champion_here(spec, root)


def runs(home: str | Path | None = None) -> list[Run]:
    """All runs under `home`, oldest first."""
    root = home_of(home).resolve()
    return [Run(record, root) for record in all_runs(root)]


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """Runs side by side; the others are compared with the first."""

    runs: tuple[Run, ...]
    found: Compared

    def plot(self, axes: Any = None) -> Any:
        """Draw the losses of all runs into one plot; as `Run.plot`."""
        for run in self.runs:
            axes = run.plot(axes)
        return axes

    def __repr__(self) -> str:
        return "\n".join(lines(self.found))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


def compare(*runs_or_ids: Run | str, home: str | Path | None = None) -> Comparison:
    """Runs, or their ids, side by side: `rekindle.compare(*rekindle.runs()[-2:])`.

    Raises RekindleError for an id that is not there, fewer than two runs or more than
    twenty."""
    root = home_of(home).resolve()
    given_runs: dict[str, Run] = {}
    records_or_ids: list[RunRecord | str] = []
    for run_or_id in runs_or_ids:
        if isinstance(run_or_id, Run):
            given_runs[run_or_id.id] = run_or_id
            records_or_ids.append(run_or_id.record)
        else:
            records_or_ids.append(run_or_id)
    records = records_to_compare(root, records_or_ids)
    # a run that was given keeps its home and what it has read
    compared_runs = [given_runs.get(record.run_id, Run(record, root)) for record in records]
    pairs = [(run.record, run.findings) for run in compared_runs]
    return Comparison(tuple(compared_runs), compare_runs(pairs))
