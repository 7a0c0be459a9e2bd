"""Step time with capture over step time without, of smdist and of peers, by turns.

    python -m benchmarks.step_time mlp            one case of `cases`
    python -m benchmarks.step_time s3_rate        how much per second, before a step takes 1.15 times

Each peer has a process (per rank) that trains the same model. One after the other is visited: it
trains without capture, with it, and without again, while the others wait; then it is the next one's
turn, and so on for several rounds. A ratio is always of one process at one time. Prints rows as JSON.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from benchmarks.cases import CASES, Case, chosen
from benchmarks.peers.base import WANTED
from benchmarks.pipe import Answer, Failed
from benchmarks.stage import Place, left_out, places, teams
from benchmarks.table import Row
from benchmarks.teams import Team, cpu_s
from benchmarks.timing import median, p99

__all__ = ["Visit", "cost_of_a_save", "labels_of", "measure", "over", "play", "rows_of"]

MB = 1e6
LABELS = {
    "none": "none",
    "smdist": "smdist",
    "smdebug": "smdebug 1.0.34",
    "dcp": "torch DCP async_save",
    "tensorboard": "TensorBoard histograms",
    "torch_save": "torch.save",
    "safetensors": "safetensors",
    "memcpy": "one memcpy",
}
KEEPS_VALUES = ("smdist", "smdebug", "dcp", "torch_save", "safetensors")
# Layers of the MLP, from few bytes to all.
RATES = (*(rf"_{layers}\.(weight|bias)$" for layers in ("0", "4", "2", "[02]")), WANTED)
RATE_BAR = 1.15
AFTERWARDS = 4  # so many steps later what was saved is in the store


class Visit(NamedTuple):
    plain: list[float]  # milliseconds of steps
    captured: list[float]
    plain_cpu: list[float]  # of the training thread alone
    captured_cpu: list[float]
    drain_s: float
    waited_s: float
    server: float  # share of all processors
    helpers: float  # share of one processor
    stored: int  # bytes
    kept: int = 0  # steps that were saved, those to warm up included

    @property
    def ratio(self) -> float:
        return _mean(self.captured) / _mean(self.plain)

    @property
    def added(self) -> float:
        return _mean(self.captured) - _mean(self.plain)

    @property
    def added_cpu(self) -> float:
        return _mean(self.captured_cpu) - _mean(self.plain_cpu)


Played = tuple[dict[str, list[Visit]], dict[str, str], Answer]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def visit(team: Team, case: Case, place: Place, run: str, wanted: str = WANTED) -> Visit:
    url, folder = place.run(run)
    half = max(1, min(case.steps, 20) // 2)
    team.ask("steps", count=2)  # while others had the machine, its caches went cold
    before, before_cpu = team.both_clocks(half)
    details = {"place": url, "wanted": wanted, "budget": case.budget}
    team.ask("attach", how=case.how, interval=case.interval, **details)
    team.ask("steps", count=case.warm_up)
    team.ask("settle")
    begin, server, helpers = time.monotonic(), cpu_s(place.server), team.helpers_cpu_s()
    captured, captured_cpu = team.both_clocks(case.steps)
    took = time.monotonic() - begin
    server, helpers = cpu_s(place.server) - server, team.helpers_cpu_s() - helpers
    answers = team.ask("detach")
    after, after_cpu = team.both_clocks(half)
    stored = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    shutil.rmtree(folder, ignore_errors=True)
    return Visit(
        before + after,
        captured,
        before_cpu + after_cpu,
        captured_cpu,
        max(answer["drain_s"] for answer in answers),
        sum(answer.get("waited_s", 0.0) for answer in answers),
        server / took / (os.cpu_count() or 1),
        helpers / took,
        stored,
        answers[0].get("steps", 0),
    )


def measure(case: Case, rounds: int, out: str | None) -> list[Row]:
    visits, missing, facts = play(case, rounds, out)
    return rows_of(case, visits, missing, facts["nbytes"])


def play(case: Case, rounds: int, out: str | None) -> Played:
    """Everybody's visits, who is missing and why, and what is trained."""
    with places(case.place, out) as (place, logs), teams(case, place, logs) as (found, missing):
        facts = next(iter(found.values())).ask("facts")[0]
        visits: dict[str, list[Visit]] = {peer: [] for peer in found}
        for number in range(rounds):
            order = list(found)
            for peer in order[number % len(order) :] + order[: number % len(order)]:
                if peer not in missing:
                    try:
                        made = visit(found[peer], case.of(peer), place, f"{peer}-{number}")
                        visits[peer].append(made)
                    except Failed as problem:
                        missing[peer] = left_out(peer, problem)
    return visits, missing, facts


def labels_of(case: Case) -> dict[str, str]:
    return LABELS | {"memcpy": "one sum() of each"} if case.how == "five" else LABELS


def rows_of(
    case: Case, visits: dict[str, list[Visit]], missing: dict[str, str], nbytes: int
) -> list[Row]:
    """`nbytes`: of all weights and gradients, which a step that is due saves in full."""
    base = f"step time, {case.title}"
    labels = labels_of(case)
    group = case.title if case.figure else ""
    everyone = [step for made in visits.values() for one in made for step in one.plain]
    rows = [Row(f"{base}: without capture", median(everyone), "ms", p99(everyone))]
    for peer in case.peers:
        if peer in missing or not visits.get(peer):
            note = f"not measured: {missing.get(peer, '')}"
            rows.append(Row(f"{base}: {labels[peer]} / none", None, "x", note=note))
            continue
        made = visits[peer]
        ratios = [one.ratio for one in made]
        worst = p99([step for one in made for step in one.captured]) / p99(
            [step for one in made for step in one.plain]
        )
        rows.append(
            Row(
                f"{base}: {labels[peer]} / none",
                median(ratios),
                "x",
                worst,
                case.bar if peer == "smdist" else None,
                _note(peer, made, case.of(peer), nbytes),
                (min(ratios), max(ratios)),
                group,
                labels[peer],
            )
        )
    if 1 < case.interval <= case.steps and visits.get("smdist"):
        costs = [cost_of_a_save(one.captured, case) for one in visits["smdist"]]
        what = f"{base}: smdist / its own steps between"
        rows.append(Row(what, median(costs), "x", None, case.bar, "", (min(costs), max(costs))))
    for peer, bar in case.at_most.items():
        if visits.get("smdist") and visits.get(peer) and peer not in missing:
            rows.append(over(f"{base}: added by smdist / by {labels[peer]}", visits, peer, bar))
    return rows


def cost_of_a_save(steps: Sequence[float], case: Case) -> float:
    """Mean step over that of the steps in which nothing was saved or stored, of one visit.

    A machine that gets slower or faster from second to second does not show in it.
    """
    by_phase: dict[int, list[float]] = {}
    for index, step in enumerate(steps, case.warm_up):
        by_phase.setdefault(min(index % case.interval, AFTERWARDS), []).append(step)
    between = _mean(by_phase.pop(AFTERWARDS))
    added = sum(_mean(found) - between for found in by_phase.values())
    return 1 + added / (case.interval * between)


def over(
    what: str, visits: dict[str, list[Visit]], peer: str, bar: float, clock: str = "added"
) -> Row:
    """What smdist adds to a step over what `peer` adds, in the visits of one round."""
    ours = [getattr(one, clock) for one in visits["smdist"]]
    theirs = [getattr(one, clock) for one in visits[peer]]
    pairs = [a / b for a, b in zip(ours, theirs, strict=False) if b > 0]
    note = f"{median(ours):.1f} ms, {median(theirs):.1f} ms"
    if median(theirs) <= 0 or not pairs:
        return Row(what, None, "x", None, bar, f"{note}: lost in the noise")
    value = median(ours) / median(theirs)
    return Row(what, value, "x", None, bar, note, (min(pairs), max(pairs)))


def _note(peer: str, made: list[Visit], case: Case, nbytes: int) -> str:
    """`case` is that of the peer, which may have had fewer steps than others."""
    steps = case.warm_up + case.steps
    parts = [f"{median([one.added for one in made]):+.1f} ms per step"]
    if (drain := median([one.drain_s for one in made])) > 0.05:
        parts.append(f"then {drain:.1f} s until all was stored")
    if waited := sum(one.waited_s for one in made):
        parts.append(f"waited {waited:.1f} s for room")
    if helpers := median([one.helpers for one in made]):
        parts.append(f"its processes use {helpers:.0%} of a processor")
    if server := median([one.server for one in made]):
        parts.append(f"the server {server:.0%} of all")
    if case.budget is not None:
        parts.append(f"{median([one.kept for one in made]):.0f} of {steps} steps were saved")
        return "; ".join(parts)
    due = len(range(0, steps, case.interval))
    expected = due * nbytes * case.ranks if case.how == "full" else 0
    stored = min(one.stored for one in made)
    if peer in KEEPS_VALUES and stored < 0.95 * expected:
        parts.append(f"STORED {stored / MB:.0f} MB OF {expected / MB:.0f}")
    return "; ".join(parts)


def not_due(case: Case, rounds: int, out: str | None) -> list[Row]:
    """Forwards in pairs, with the callback and without, over whole steps."""
    added: list[float] = []
    whole: list[float] = []
    ratios = []
    with places(case.place, out) as (place, logs), teams(case, place, logs) as (found, _):
        team = found["smdist"]
        for number in range(rounds):
            url, folder = place.run(f"run-{number}")
            team.ask("attach", how=case.how, interval=case.interval, place=url)
            team.ask("steps", count=case.warm_up)
            team.ask("settle")
            steps, _ = team.both_clocks(10)
            answer = team.ask("toggled", count=case.steps)[0]
            team.ask("detach")
            shutil.rmtree(folder, ignore_errors=True)
            pairs = list(zip(answer["with"], answer["without"], strict=True))
            added += [a - b for a, b in pairs]
            whole += steps
            ratios.append(1 + median([a - b for a, b in pairs]) / median(steps))
    value = 1 + median(added) / median(whole)
    note = f"{1e3 * median(added):+.0f} us of {median(whole):.1f} ms"
    spread = (min(ratios), max(ratios))
    return [Row(f"step time, {case.title}", value, "x", None, case.bar, note, spread)]


def s3_rate(rounds: int, steps: int, out: str | None) -> list[Row]:
    case = Case("s3_rate", "", place="s3", peers=("smdist",), steps=steps)
    visits: dict[str, list[Visit]] = {wanted: [] for wanted in RATES}
    with places(case.place, out) as (place, logs), teams(case, place, logs) as (found, _):
        for number in range(rounds):
            for i, wanted in enumerate(RATES):
                run = f"{i}-{number}"
                visits[wanted].append(visit(found["smdist"], case, place, run, wanted))
    what = f"highest rate under {RATE_BAR} x, every step, MLP of 6 M, loopback S3"
    best, points = 0.0, []
    for made in visits.values():
        stored = median([one.stored for one in made]) / (case.warm_up + case.steps)
        rate = stored / MB / (median([_mean(one.captured) for one in made]) / 1e3)
        ratio = median([one.ratio for one in made])
        server = median([one.server for one in made])
        points.append(f"{rate:.0f} MB/s: {ratio:.3f} x, server {server:.0%} of all processors")
        if ratio < RATE_BAR:
            best = max(best, rate)
    return [Row(what, best, "MB/s", note="; ".join(points))]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.step_time")
    parser.add_argument("case", choices=[*(case.name for case in CASES), "s3_rate"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="per visit; fewer than the case has")
    parser.add_argument("--out", help="folder to store runs in")
    given = parser.parse_args(arguments)
    if given.case == "s3_rate":
        rows = s3_rate(given.rounds, given.steps or 20, given.out)
    else:
        case = chosen(given.case)
        case = case.shorter(given.steps) if given.steps else case
        rows = (not_due if case.not_due else measure)(case, given.rounds, given.out)
    sys.stdout.write(msgspec.json.encode(rows).decode() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
