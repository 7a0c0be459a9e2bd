"""Whatever happens to stored objects: no wrong value, no foreign exception, and damage is named.

Each case is a number: `SMDIST_MUTATION=<number>` runs that one alone. All 2004 run in `make soak`,
otherwise a share of them that changes from day to day.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from smdist.coordination.service.merge_once import merge_once
from smdist.errors import SmdistError
from smdist.storage import LocalStore, open_store
from smdist.storage import loop_thread as sync
from smdist.storage.store import Store
from tests.faults.mutations import Known, built, damage, damaged, ended, judge, live, read
from tests.servers.s3 import Server, aws, rclone
from tests.support.sampling import rotating_share

__all__ = ["aws", "rclone"]

LOCAL, REMOTE = 480, 28  # 2004 in all
ONE_IN = 5  # coprime to MERGE_EVERY, so that a share has its part of merges
ALONE = os.environ.get("SMDIST_MUTATION")


MERGE_EVERY = 6  # of runs that are not merged: what is merged of them then is right, too


def suffer(known: Known, first: int, count: int) -> None:
    merged = any(key.startswith("merged/") for key in known.objects)
    for number in [int(ALONE)] if ALONE else rotating_share(range(first, first + count), ONE_IN):
        change = damage(known, random.Random(number))
        try:
            with damaged(known, change):
                judge(known, change, read(known.store))
                if not merged and number % MERGE_EVERY == 0:
                    merge(known)
                    judge(known, change, read(known.store))
        except Exception as error:
            raise AssertionError(f"mutation {number} ({change}): {error!r}") from error
        finally:
            if not merged:
                for key in sync.run(known.store.list("merged/")):
                    sync.run(known.store.delete(key))


def merge(known: Known) -> None:
    with contextlib.suppress(SmdistError):
        sync.run(merge_once(known.store))


@pytest.mark.parametrize(
    ("make", "merged", "first"),
    [(ended, False, 0), (ended, True, 10_000), (live, False, 20_000), (live, True, 30_000)],
)
def test_in_a_directory(
    make: Callable[[Store, str, int], Known], merged: bool, first: int, tmp_path: Path
) -> None:
    suffer(built(make, LocalStore(str(tmp_path / "run")), merged=merged), first, LOCAL)


@pytest.mark.parametrize(
    ("make", "merged", "first"),
    [(ended, False, 40_000), (ended, True, 50_000), (live, False, 60_000)],
)
def test_in_a_bucket(
    make: Callable[[Store, str, int], Known],
    merged: bool,
    first: int,
    rclone: Server,
    aws: pytest.MonkeyPatch,
) -> None:
    store = open_store(rclone.url(rclone.make_bucket(f"mutations-{first}")))
    try:
        suffer(built(make, store, merged=merged), first, REMOTE)
    finally:
        sync.run(store.close())
