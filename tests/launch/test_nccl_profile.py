"""Scripts of a vendor are asked where they are, and only there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rekindle.errors import StepError
from rekindle.launch.rendezvous import Rendezvous
from rekindle.launch.torchrun import PROFILE, variables_of_profile
from tests.ports import free_port

HERE = Path(__file__).parent

SCRIPT = """
export NCCL_NET=plugin
NCCL_PROTO=Simple
export NCCL_MINE=theirs
LD_LIBRARY_PATH=/plugin/lib:$LD_LIBRARY_PATH
OTHER=1
echo "what a script says is no variable"
"""


def test_a_script_of_the_vendor_is_asked_where_all_it_needs_is_there(tmp_path: Path) -> None:
    script, device = tmp_path / "profile.sh", tmp_path / "device"
    script.write_text(SCRIPT)
    device.mkdir()
    before = {"PATH": "/usr/bin:/bin", "NCCL_MINE": "own", "LD_LIBRARY_PATH": "/lib"}
    told, how = variables_of_profile({**before, PROFILE: f"{script}:{device}"})
    assert told == {
        "NCCL_NET": "plugin",
        "NCCL_PROTO": "Simple",
        "LD_LIBRARY_PATH": "/plugin/lib:/lib",
    }
    assert how == f"NCCL as {script} says"
    device.rmdir()
    told, how = variables_of_profile({**before, PROFILE: f"{script}:{device}"})
    assert (told, how) == ({}, f"no GPUDirect between nodes: {device} is not in this container")
    assert variables_of_profile(before) == variables_of_profile({**before, PROFILE: ""}) == ({}, "")


@pytest.mark.parametrize("text", ["echo broken >&2; false", "exit 3", "no-such-command-at-all"])
def test_a_script_that_fails_ends_the_step_and_says_which(tmp_path: Path, text: str) -> None:
    script = tmp_path / "profile.sh"
    script.write_text(text)
    with pytest.raises(StepError, match="tells NCCL of this machine's network failed") as caught:
        variables_of_profile({"PATH": "/usr/bin:/bin", PROFILE: str(script)})
    assert caught.value.problems[0].where == str(script)


RANK = """
import os, pathlib
own = pathlib.Path(__file__).with_name(f"rank-{os.environ['RANK']}.txt")
own.write_text(os.environ.get("NCCL_NET", "") + " " + os.environ.get("LD_LIBRARY_PATH", ""))
"""


@pytest.mark.slow
def test_ranks_on_several_nodes_are_told_and_the_log_says_by_whom(tmp_path: Path) -> None:
    script, rank = tmp_path / "profile.sh", tmp_path / "rank.py"
    script.write_text(SCRIPT)
    rank.write_text(RANK)
    port = free_port()
    train = json.dumps({"entrypoint": "rank.py"})
    nodes = []
    for node in range(2):
        place = Rendezvous(2, node, 1, "127.0.0.1", port, 60.0, "5" * 64)
        env = {
            **os.environ,
            **place.environment(),
            PROFILE: str(script),
            "LD_LIBRARY_PATH": "/own",
            "PYTHONPATH": str(HERE.parents[1]),
        }
        words = [sys.executable, str(HERE / "supervise.py"), str(tmp_path / str(node)), train]
        said = (tmp_path / f"{node}.log").open("w")
        nodes.append(subprocess.Popen([*words, str(rank)], env=env, stdout=said, stderr=said))
    assert [node.wait(120) for node in nodes] == [0, 0], (tmp_path / "0.log").read_text()
    for number in range(2):
        assert (tmp_path / f"rank-{number}.txt").read_text() == "plugin /plugin/lib:/own"
    assert "NCCL_NET=plugin" in (tmp_path / "0.log").read_text()
    assert f"NCCL as {script} says" in (tmp_path / "0.log").read_text()
