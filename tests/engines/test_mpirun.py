"""mpirun starts the ranks in torchrun's place: the same bits, restarts, stops and blame. Real Open MPI, two ranks on gloo."""

import re
import shutil
import signal

import psutil
import pytest

from rekindle.launch.process import is_running
from rekindle.records import TrainingSummary
from rekindle.spec.model import TrainSpec
from tests.support.train_resume import TRAIN, Gang

pytestmark = pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")

MPI = TrainSpec.model_validate({**TRAIN.model_dump(), "launcher": "mpirun"})


@pytest.fixture
def gang(tmp_path, shards):
    return Gang(tmp_path, shards, train=MPI)


@pytest.fixture(scope="module")
def by_torchrun(tmp_path_factory, shards):
    return Gang(tmp_path_factory.mktemp("whole"), shards).start().finish()


def same(gang, by_torchrun):
    assert gang.losses == by_torchrun.losses
    assert gang.weights == by_torchrun.weights


@pytest.mark.slow
def test_a_killed_rank_restarts_all_and_the_bits_are_those_of_torchrun(gang, by_torchrun):
    gang.start().until_committed()
    ranks = gang.workers()
    assert "mpirun" in {p.name() for p in psutil.Process(gang.process.pid).children(recursive=True)}
    ranks[1].send_signal(signal.SIGKILL)
    gang.finish()
    assert "rank 1 was killed by SIGKILL" in gang.said
    assert "restarting all ranks (1 of 3)" in gang.said
    assert re.search(r"resumed from the checkpoint of step [1-5]0 of 60 on 2 ranks", gang.said)
    same(gang, by_torchrun)
    assert TrainingSummary.read(gang.folder / "training-1" / "training.json").world_size == 2


@pytest.mark.slow
def test_hosts_of_a_batch_system_or_of_another_mpirun_are_not_taken(gang, by_torchrun):
    gang.environment = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOBID": "7",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "other[1-2]",
        "SLURM_NODELIST": "other[1-2]",
        "SLURM_TASKS_PER_NODE": "1(x2)",
        "OMPI_MCA_orte_default_hostfile": "/nowhere",
        "OMPI_COMM_WORLD_RANK": "0",
        "PMIX_RANK": "0",
    }
    gang.start().finish()
    same(gang, by_torchrun)


@pytest.mark.slow
def test_a_request_to_stop_saves_and_the_same_command_goes_on(gang, by_torchrun):
    gang.start().until_step(25).process.send_signal(signal.SIGTERM)
    gang.finish(75)
    gang.start().finish()
    same(gang, by_torchrun)


@pytest.mark.slow
def test_nothing_is_left_when_the_step_is_killed(gang):
    gang.start().until_step(15)
    family = [p.pid for p in psutil.Process(gang.process.pid).children(recursive=True)]
    gang.process.kill()
    gang.process.wait()
    psutil.wait_procs([psutil.Process(pid) for pid in family if is_running(pid)], timeout=30)
    assert [pid for pid in family if is_running(pid)] == []


SCRIPT = """
import sys, torch.distributed as dist
dist.init_process_group("gloo")
numbers = [None] * dist.get_world_size()
dist.all_gather_object(numbers, dist.get_rank())
print("together", numbers, flush=True)
if dist.get_rank() == 1:
    raise ValueError("no such luck")
dist.barrier()
"""


@pytest.mark.slow
def test_an_error_of_a_script_names_the_rank_and_what_it_said(gang):
    script = gang.folder / "own.py"
    script.write_text(SCRIPT)
    gang.train = MPI.model_copy(update={"entrypoint": str(script), "max_restarts": 0})
    gang.start().finish(1)
    assert "together [0, 1]" in gang.said
    assert "no such luck" in gang.said
    assert re.search(r"rank 1 ended with exit code 1; after 0 restarts", gang.said)
