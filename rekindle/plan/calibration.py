"""The planner's times, corrected by trainings that were measured.

A measured training gives one number, its ratio: the seconds of a step over those that
were predicted. On the rows of tests/plan/rows a factor on the whole step did better than
one on computing alone. As all layouts get the same factor, their order stays as it is."""

import dataclasses
import hashlib
import math
from collections.abc import Sequence

from rekindle.outputs import Calibration
from rekindle.plan.cluster import Cluster
from rekindle.plan.constants import CPU, Calibrated, profile_of, spread_of, stamp
from rekindle.plan.search import Option
from rekindle.plan.steptime import StepTime
from rekindle.plan.work import Work


def job_of(work: Work, cluster: Cluster) -> str:
    """A hash of the work of every rank and of the machines: trainings with the same hash
    take the same time."""
    # `repr` of frozen dataclasses of numbers and names is the same in every process
    machines = cluster.gpu.name, cluster.gpus_per_node, cluster.nodes
    return hashlib.sha256(repr((work, machines)).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Speeds:
    """What measured trainings say of the times of others."""

    measured: Sequence[Calibration] = ()

    def profile(self, gpu: str, compiled: bool, engine: str) -> Calibrated:
        """The profile of a GPU, corrected by trainings that were measured on it."""
        published = profile_of(gpu, compiled, engine)
        # a ratio belongs to the formulas and constants that made its prediction (`stamp`)
        current = [run for run in self._like(gpu, compiled, engine) if run.constants == stamp()]
        if not current:
            return published
        # the geometric mean: twice as fast and half as fast cancel out
        factor = math.exp(sum(math.log(run.ratio) for run in current) / len(current))
        runs = ", ".join(run.run_id for run in current[-3:])
        basis = f"measured on {gpu} in {runs}: {factor:.2f} times what was predicted"
        return dataclasses.replace(
            published,
            spread=spread_of("calibrated"),
            basis=basis,
            factor=factor,
            # the spread was measured on GPUs
            guessed=gpu == CPU,
        )

    def applied(self, options: Sequence[Option]) -> list[Option]:
        """The same layouts, all on the same machines, with corrected times.

        A layout that was itself measured takes the time that it took, and its ratio
        corrects the others. Where none was measured, the ratio of other trainings on the
        GPU corrects all."""
        if not options or not self.measured:
            return list(options)
        calibrations = {run.job: run for run in self.measured}
        same_jobs = [calibrations.get(job_of(option.work, option.cluster)) for option in options]
        work = options[0].work
        profile = self.profile(options[0].cluster.gpu.name, work.compile, work.engine)
        measured_sequence = 0
        for option, same_job in zip(options, same_jobs, strict=True):
            if same_job is not None:
                factor = same_job.measured / option.step.seconds
                profile = dataclasses.replace(profile, factor=factor)
                measured_sequence = same_job.sequence
                break
        corrected = []
        for option, same_job in zip(options, same_jobs, strict=True):
            own_profile = profile
            if same_job is not None:
                own_profile = dataclasses.replace(
                    profile,
                    spread=spread_of("same_job"),
                    basis=f"measured in {same_job.run_id}, the same work on such machines",
                    factor=same_job.measured / option.step.seconds,
                    # that the same work takes as long again has not been measured
                    guessed=True,
                )
            terms = option.step.terms.items()
            step = StepTime({name: own_profile.factor * seconds for name, seconds in terms})
            corrected.append(
                dataclasses.replace(
                    option,
                    step=step,
                    profile=own_profile,
                    measured_sequence=measured_sequence,
                )
            )
        return corrected

    def stale(self, gpu: str, compiled: bool, engine: str) -> tuple[str, ...]:
        """Runs whose ratio is not used any more, since the constants or formulas changed."""
        runs = self._like(gpu, compiled, engine)
        return tuple(run.run_id for run in runs if run.constants != stamp())

    def _like(self, gpu: str, compiled: bool, engine: str) -> list[Calibration]:
        """Trainings on the same GPU with the same software."""
        key = gpu, compiled, engine
        return [run for run in self.measured if (run.gpu, run.compiled, run.engine) == key]


@dataclasses.dataclass(frozen=True)
class Known:
    """What a plan knows from earlier runs."""

    speeds: Speeds = dataclasses.field(default_factory=Speeds)
    examples: int | None = None
    """How many examples an epoch had in the run `counted_in`."""
    counted_in: str = ""
