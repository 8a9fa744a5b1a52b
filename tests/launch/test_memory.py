"""What the host has left, read from made-up trees of /proc and /sys."""

import pytest

from rekindle.launch import process

GIB = 1 << 30
MEMINFO = f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {40 * GIB // 1024} kB\n"
V2 = {
    "memory.max": 16 * GIB,
    "memory.current": 10 * GIB,
    "memory.stat": f"anon 1\ninactive_file {3 * GIB}\nactive_file {1 * GIB}\n",
}
V1 = {
    "memory.limit_in_bytes": 8 * GIB,
    "memory.usage_in_bytes": 5 * GIB,
    "memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB}\ntotal_active_file 0\n",
}
CASES = {
    "no limit but the machine's": ("0::/", {"": {**V2, "memory.max": "max"}}, 40),
    "a container of version 2, whose pages of files count as free": ("0::/", {"": V2}, 10),
    "a cgroup below another with less": (
        "0::/a/b",
        {"a/b": {**V2, "memory.max": 20 * GIB}, "a": V2},
        10,
    ),
    "a container of version 1": ("4:memory:/", {"memory": V1}, 4),
    "version 1, where the host's path is not to be seen": ("4:memory:/pods/x", {"memory": V1}, 4),
    "a cgroup that is over its limit": ("0::/", {"": {**V2, "memory.current": 30 * GIB}}, 0),
    "no cgroup at all": ("", {}, 40),
}


@pytest.mark.parametrize("case", CASES)
def test_the_least_that_any_of_them_leaves_is_available(case, tmp_path):
    own, groups, left = CASES[case]
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(f"{own}\n" if own else "")
    (tmp_path / "proc" / "meminfo").write_text(MEMINFO)
    for path, files in groups.items():
        folder = tmp_path / "sys" / "fs" / "cgroup" / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_text(f"{content}\n")
    assert process.available_bytes(tmp_path) == left * GIB


def test_this_machine_has_some_left_and_one_name():
    assert process.available_bytes() > 0
    assert process.memory_identity() == process.memory_identity() != ""
