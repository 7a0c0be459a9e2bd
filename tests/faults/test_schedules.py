"""Hundreds of random schedules: rank and uploader are killed, requests fail, and nothing is amiss.

After each, the bucket holds what the rank knew to be safe, once, whole and right, no segment that
nothing names, and no multipart upload. What a schedule is: schedule_plan; how one is judged:
schedule_audit. A failure prints the plan and the command that runs it alone. All 500 run in
`make soak`, a share of them otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path

import pytest

from tests.faults.schedule_driver import Bench, Failed, bench, carry_out
from tests.faults.schedule_plan import draw
from tests.support.sampling import at_most, rotating_share, seed

pytestmark = [pytest.mark.s3, pytest.mark.ranks]

EACH = at_most(50, otherwise=30)
AT_ONCE = 8
# rclone is quick, and takes conditional writes for plain ones; moto keeps conditions.
SHARDS = rotating_share(
    [("rclone", i) for i in range(8)] + [("moto", i) for i in range(8, 10)], 4, kind=itemgetter(0)
)


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Bench]]:
    with (
        bench("rclone", tmp_path_factory.mktemp("rclone")) as rclone,
        bench("moto", tmp_path_factory.mktemp("moto")) as moto,
    ):
        yield {"rclone": rclone, "moto": moto}


@pytest.mark.parametrize(("server", "shard"), SHARDS)
def test_schedules(benches: dict[str, Bench], server: str, shard: int, tmp_path: Path) -> None:
    given, bench = seed(), benches[server]
    numbers = range(EACH * shard, EACH * (shard + 1))
    done: Counter[str] = Counter()
    failures: list[str] = []

    def run(number: int) -> Counter[str]:
        try:
            return carry_out(draw(given, number), bench, tmp_path / str(number))
        except Failed as failed:
            failures.append(str(failed))
            return Counter()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for counted in pool.map(run, numbers):
            done.update(counted)
    print(dict(sorted(done.items())))  # noqa: T201
    assert not failures, f"{len(failures)} of {EACH} schedules failed:\n" + "\n\n".join(failures)
    killed = sum(times for deed, times in done.items() if deed.startswith("kill "))
    assert killed >= EACH // 10, "hardly anything was killed"
    assert done["complete"] >= EACH // 10, "hardly anything came in parts"
    assert done["lose after"] >= EACH // 10, "hardly an answer was lost"
