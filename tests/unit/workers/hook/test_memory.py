"""Size and place of the buffer, from facts."""

from __future__ import annotations

from pathlib import Path

import pytest

from smdist.workers.hook.buffer_location import (
    MemoryFacts,
    choose_spool,
    default_buffer_bytes,
    free_bytes,
    read_memory,
)

MIB = 1 << 20
GIB = 1 << 30


@pytest.mark.parametrize(
    ("facts", "local_world", "world", "processors", "expected"),
    [
        (MemoryFacts(16 * GIB, None), 1, 1, 4, 2 * GIB),
        (MemoryFacts(16 * GIB, None), 4, 8, 4, 512 * MIB),
        (MemoryFacts(16 * GIB, 8 * GIB), 1, 1, 4, 1 * GIB),
        (MemoryFacts(4 * GIB, 8 * GIB), 1, 1, 4, 512 * MIB),
        (MemoryFacts(2000 * GIB, None), 8, 8, 4, 4 * GIB),
        (MemoryFacts(1 * GIB, None), 8, 8, 4, 64 * MIB),
        (MemoryFacts(16 * GIB, None), None, 100, 4, 512 * MIB),
        (MemoryFacts(None, None), 1, 1, 1, 512 * MIB),
    ],
)
def test_default_buffer(
    facts: MemoryFacts, local_world: int | None, world: int, processors: int, expected: int
) -> None:
    assert default_buffer_bytes(facts, local_world, world, processors) == expected


def put(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 2048 kB\nMemFree: 1 kB\nMemAvailable: 1024 kB\n"}


def test_reads_nested_groups_of_version_2(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/job/task\n",
        "sys/fs/cgroup/job/memory.max": "5000\n",
        "sys/fs/cgroup/job/memory.current": "4000\n",
        "sys/fs/cgroup/job/memory.stat": "anon 1\ninactive_file 500\n",
        "sys/fs/cgroup/job/task/memory.max": "max\n",
        "sys/fs/cgroup/job/task/memory.current": "10\n",
    }
    assert read_memory(put(tmp_path, MEMINFO | files)) == MemoryFacts(1024 * 1024, 1500)


def test_reads_groups_of_version_1_by_their_mount_in_a_container(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/0123\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9000",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "8000",
        "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 7\n",
    }
    assert read_memory(put(tmp_path, MEMINFO | files)).allowed_bytes == 1007


def test_a_huge_limit_of_version_1_is_none(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "8000",
    }
    assert read_memory(put(tmp_path, MEMINFO | files)).allowed_bytes is None


def test_a_system_that_tells_nothing(tmp_path: Path) -> None:
    assert read_memory(tmp_path) == MemoryFacts(None, None)


def test_the_real_machine_has_memory() -> None:
    assert read_memory().free_bytes > 0


def free_where(**spaces: int) -> dict[Path, int]:
    return {Path("/" + name.replace("_", "/")): free for name, free in spaces.items()}


def test_shared_memory_when_it_has_room_for_all_ranks_twice() -> None:
    spaces = free_where(dev_shm=8 * GIB, var_tmp=GIB)
    placement = choose_spool(GIB, {}, spaces.get, 4)
    assert (placement.root, placement.kind, placement.message) == (Path("/dev/shm"), "memory", None)
    assert choose_spool(GIB, {}, spaces.get, 5).kind == "disk"


def test_disk_when_shared_memory_is_small_says_so_once() -> None:
    spaces = free_where(dev_shm=64 * MIB, var_tmp=10 * GIB, tmp=10 * GIB)
    placement = choose_spool(GIB, {}, spaces.get)
    assert (placement.root, placement.kind) == (Path("/var/tmp"), "disk")
    assert placement.message is not None
    for word in ("/dev/shm has 64 MiB", "2048 MiB", "/var/tmp", "SMDIST_SPOOL_DIR"):
        assert word in placement.message


def test_disk_prefers_tmpdir_then_room() -> None:
    assert choose_spool(
        GIB, {"TMPDIR": "/scratch"}, free_where(scratch=2 * GIB, var_tmp=9 * GIB).get
    ).root == Path("/scratch")
    spaces = free_where(scratch=MIB, var_tmp=2 * MIB, tmp=GIB)
    assert choose_spool(GIB, {"TMPDIR": "/scratch"}, spaces.get).root == Path("/tmp")
    spaces = free_where(scratch=MIB, var_tmp=3 * MIB, tmp=2 * MIB)
    assert choose_spool(GIB, {"TMPDIR": "/scratch"}, spaces.get).root == Path("/var/tmp")


@pytest.mark.parametrize(("free", "word"), [(GIB, None), (MIB, "1 MiB free"), (None, "write")])
def test_given_directory_wins(free: int | None, word: str | None) -> None:
    spaces = {Path("/dev/shm"): 90 * GIB, Path("/mine"): free}
    placement = choose_spool(GIB, {"SMDIST_SPOOL_DIR": "/mine"}, spaces.get)
    assert (placement.root, placement.overflow, placement.kind) == (
        Path("/mine"),
        Path("/mine"),
        "given",
    )
    assert (placement.message is None) if word is None else word in str(placement.message)


def test_free_space_of_a_folder_that_is_not_made_yet(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "not" / "yet") == pytest.approx(free_bytes(tmp_path), rel=0.1)
    (tmp_path / "file").write_text("")
    assert free_bytes(tmp_path / "file") is None
