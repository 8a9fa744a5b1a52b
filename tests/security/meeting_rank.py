"""A rank that meets the others, adds up with them, and waits for FOLDER/go: `meeting_rank.py FOLDER`. Used by test_sockets.py."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from rekindle.launch import meeting


def main():
    folder = Path(sys.argv[1])
    if meeting.FILE not in os.environ:  # as a script of the user's does
        dist.init_process_group("gloo")
    else:
        meeting.join("gloo")
    number = torch.ones(1)
    dist.all_reduce(number)
    dist.all_reduce(number, group=dist.new_group())
    place = {name: os.environ.get(name, "") for name in ("MASTER_PORT", meeting.FILE)}
    draft = folder / f"draft-{dist.get_rank()}"
    draft.write_text(json.dumps({"sum": float(number), **place}))
    draft.rename(folder / f"ready-{dist.get_rank()}")
    while not (folder / "go").exists():
        time.sleep(0.02)
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "status").mkdir(exist_ok=True)
        draft = folder / "status/draft"
        draft.write_text(json.dumps({"status": "done"}))
        draft.rename(folder / "status/status.json")
    os._exit(0)


if __name__ == "__main__":
    main()
