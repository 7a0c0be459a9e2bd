"""`smdist coordinator`: start, see and stop the actor that merges runs while they are written."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
from rich.table import Table
from rich.text import Text

from smdist.cli.console import PlainConsole, complain
from smdist.coordination.ray_actor import launcher
from smdist.coordination.ray_actor import local_head as local_ray
from smdist.coordination.ray_actor.client import CoordinatorClient
from smdist.coordination.ray_actor.coordinator import (
    NAMESPACE,
    CoordinatorInfo,
    Settings,
    canonical_url,
    check_watch_url,
)
from smdist.coordination.ray_actor.launcher import Attachment
from smdist.coordination.view.status import RunStatus
from smdist.errors import CoordinationError, SmdistError
from smdist.messages import printable

__all__ = ["start", "status", "stop"]

_LOOK_S = 15.0  # how long `start` waits for something to tell about the runs
_REACH_S = 30.0  # and for the first look at the place, more than a request may take
_ANSWER_S = 5.0
_LEASE = "its lease was not handed back, the next one may have to wait for that"
_MARGIN_S = 15.0  # after a lease has ended, until who stands by has noticed
_BAD = {"refused", "superseded", "failed"}
_STYLES = {"active": "green", "lagging": "yellow", "ended": "dim", "lost": "red"}


def start(address: str, settings: Settings, wheel: Path | None, follow: bool) -> int:
    """Exit code: 0 when it watches, 1 when something said no; with `follow`, 0 once it is stopped."""
    with _told() as outcome:
        # Before any Ray is started.
        settings = msgspec.structs.replace(settings, watch=check_watch_url(settings.watch))
        if wheel is not None:
            launcher.check_wheel(wheel)
        console = _console()
        with launcher.attach(address) as ray:
            client = launcher.start(ray, settings, wheel_path=wheel)
            where = client.info()
            _print_start(console, ray, where)
            runs, trouble = _first_look(client)
            for one in runs.values():
                console.print(_headline(one))
            if trouble:
                console.print(f"trouble: {trouble}; it goes on trying")
            elif not runs:
                console.print("no run there yet; it waits for the first rank")
            if follow:
                _follow(console, lambda: launcher.find(ray, settings.watch))
                return 0
            if any(one.state == "refused" for one in runs.values()):
                runs = _stand_by(console, client, settings.lease_s + _MARGIN_S)
            outcome.code = int(bool(trouble) or any(one.state in _BAD for one in runs.values()))
    return outcome.code


def status(address: str, watch: str, run: str, as_json: bool) -> int:
    """Exit code: 0 when a coordinator answered and every run it was asked for is in its hands."""
    with _told() as outcome, launcher.attach(address, start_local=False) as ray:
        found = _chosen(ray, watch)
        answers = [(client.info(), _runs(client, run)) for client in found]
        if as_json:
            listed = [{"coordinator": where, "runs": runs} for where, runs in answers]
            # Escaped: programs read the same, and a terminal shows what is there.
            text = json.dumps(msgspec.to_builtins(listed, str_keys=True), indent=2)
            print(text.replace("\x7f", "\\u007f"))
        else:
            for where, runs in answers:
                _print_status(_console(), where, runs)
        outcome.code = int(
            any(where.trouble for where, _ in answers)
            or any(one.state in _BAD for _, runs in answers for one in runs.values())
        )
    return outcome.code


def stop(address: str, watch: str) -> int:
    with _told() as outcome:
        console, local = _console(), address == "local"
        with ExitStack() as attached:
            try:
                ray = attached.enter_context(launcher.attach(address, start_local=False))
            except SmdistError:
                if not local or not local_ray.stop():
                    raise
                console.print("stopped the local Ray, which did not answer")
                return 0
            found = launcher.coordinators(ray)
            if found or watch or not local:
                found = _chosen(ray, watch)
            for client in found:
                console.print(_stop(client))
            left = launcher.coordinators(ray)
        if local and not left and local_ray.stop():
            console.print("stopped the local Ray, as nothing else ran on it")
    return outcome.code


def _stop(client: CoordinatorClient) -> str:
    try:
        watched = client.info(timeout_s=_ANSWER_S).settings.watch
    except (TimeoutError, CoordinationError):
        client.kill()
        return f"{client.name} did not answer, and was ended; {_LEASE}"
    if client.stop():
        return f"stopped {client.name}; {watched} keeps its snapshots"
    return f"{client.name} did not stop in time, and was ended; {watched} keeps its snapshots; {_LEASE}"


class _Outcome:
    code = 0


@contextmanager
def _told() -> Iterator[_Outcome]:
    """Our own errors are for people: their message, and exit code 1."""
    outcome = _Outcome()
    try:
        yield outcome
    except SmdistError as error:
        complain(error)
        outcome.code = 1
    except TimeoutError as error:
        complain(
            f"the coordinator does not answer: {error}; "
            "if that lasts: smdist coordinator stop, then start"
        )
        outcome.code = 1
    except ConnectionError as error:
        complain(f"Ray does not answer any more: {error}")
        outcome.code = 1


def _console() -> PlainConsole:
    return PlainConsole(highlight=False, soft_wrap=True)


def _chosen(ray: Attachment, watch: str) -> list[CoordinatorClient]:
    if not watch:
        found = launcher.coordinators(ray)
        if not found:
            raise CoordinationError(
                f"no coordinator on the Ray at {ray.address}: smdist coordinator start --watch URL"
            )
        return found
    url = canonical_url(watch)
    client = launcher.find(ray, url)
    if client is None:
        raise CoordinationError(f"no coordinator for {url} on the Ray at {ray.address}")
    return [client]


def _runs(client: CoordinatorClient, run: str) -> dict[str, RunStatus]:
    if not run:
        return client.runs()
    one = client.status(run)
    return {one.url: one}


def _first_look(client: CoordinatorClient) -> tuple[dict[str, RunStatus], str]:
    """Runs, once there is something to tell about each, and what keeps it from finding some."""
    began = time.monotonic()
    while True:
        where, runs = client.info(), client.runs()
        waited_s = time.monotonic() - began
        if not where.looked and not where.trouble:
            if waited_s > _REACH_S:
                return runs, f"{where.settings.watch} gives no answer"
        elif waited_s > _LOOK_S or all(
            one.state not in ("opening", "waiting") for one in runs.values()
        ):
            return runs, where.trouble
        time.sleep(0.1)


def _stand_by(
    console: PlainConsole, client: CoordinatorClient, most_s: float
) -> dict[str, RunStatus]:
    """Wait for the lease of another one, which ends by itself if that one died with its Ray."""
    console.print(
        f"it stands by, and takes over when the lease of the other one ends; waiting {most_s:.0f} s "
        "for that (Ctrl-C ends this command, not the coordinator)",
    )
    deadline, told = time.monotonic() + most_s, set[str]()
    try:
        while True:
            runs = client.runs()
            for url, one in runs.items():
                if one.state not in ("refused", "opening", "waiting") and url not in told:
                    told.add(url)
                    console.print(_headline(one))
            if len(told) == len(runs):
                return runs
            if time.monotonic() > deadline:
                if any(one.state == "refused" for one in runs.values()):
                    console.print("the other one lives; this one goes on standing by")
                return runs
            time.sleep(0.5)
    except KeyboardInterrupt:
        console.print("the coordinator goes on")
        return client.runs()


def _follow(console: PlainConsole, find: Callable[[], CoordinatorClient | None]) -> None:
    """Tell what changes until interrupted, or until somebody has stopped the coordinator."""
    told, missed = dict[str, str](), False
    console.print("following; Ctrl-C ends this command, not the coordinator")
    try:
        while (client := find()) is not None:
            try:
                runs, missed = client.runs(), False
            except CoordinationError:  # it has ended since, and its name goes a moment later
                if missed:
                    raise
                runs, missed = {}, True
            for url, one in runs.items():
                line = _headline(one)
                if told.get(url) != line:
                    told[url] = line
                    console.print(line)
            time.sleep(1.0)
        console.print("the coordinator was stopped")
    except KeyboardInterrupt:
        console.print("the coordinator goes on")


# -- what people see -----------------------------------------------------------------------------


def _print_start(console: PlainConsole, ray: Attachment, where: CoordinatorInfo) -> None:
    kind = "a Ray of this user on this machine" if ray.local else "Ray"
    option = launcher.option(ray)
    watch = shlex.quote(where.settings.watch)
    rows = {
        "runs on": f"{kind}, {ray.address} (process {where.pid} on {where.host})",
        "namespace": NAMESPACE,
        "name": where.name,
        "watches": f"{where.settings.watch}, every {where.settings.interval_s:g} s",
        "lost after": f"{where.settings.lost_after_s:g} s without a sign of life",
        "see": f"smdist coordinator status{option}",
        "stop": f"smdist coordinator stop{option} --watch {watch}",
    }
    for name, value in rows.items():
        console.print(Text(f"{name:<12}", style="dim").append(printable(value), style="default"))


def _headline(one: RunStatus) -> str:
    counts = ", ".join(
        f"{number} {status}"
        for attempt in one.attempts[-1:]
        for status, number in attempt.ranks.items()
    )
    parts = [f"{one.run_id or one.url}: {one.state}"]
    if one.detail:
        parts.append(one.detail)
    if counts:
        parts.append(f"ranks: {counts}")
    step = one.latest_complete.get("GLOBAL", -1)
    if step >= 0:
        parts.append(f"complete up to step {step}")
    return "; ".join(parts)


def _print_status(
    console: PlainConsole, where: CoordinatorInfo, runs: dict[str, RunStatus]
) -> None:
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(where.since))
    console.print(
        f"{where.name} in {NAMESPACE}, process {where.pid} on {where.host} since {since}, "
        f"watches {where.settings.watch}",
    )
    if where.trouble:
        console.print(f"trouble: {where.trouble}", style="red")
    if not runs:
        console.print("no run there yet")
    for one in runs.values():
        console.print()
        console.print(f"{one.run_id}  {one.url}", style="bold")
        console.print(_headline(one))
        console.print(
            f"steps: {one.complete_steps} of {one.steps} complete, last one seen {one.last_step}; "
            f"snapshot {one.number}; {one.manifests} manifests read",
        )
        console.print(_rank_table(one))
        for text in one.troubles:
            console.print(f"trouble: {text}", style="yellow")


def _rank_table(one: RunStatus) -> Table:
    table = Table("rank", "status", "last step", "behind", "last seen", "reason")
    for line in one.ranks:
        behind = f"{line.behind_steps} steps, {line.behind_s:.0f} s" if line.behind_steps else ""
        table.add_row(
            str(line.rank),
            Text(line.status, style=_STYLES.get(line.status, "")),
            str(line.step) if line.step >= 0 else "-",
            behind,
            f"{max(0.0, one.time - line.last_seen):.0f} s ago" if line.last_seen else "never",
            Text(printable(line.reason)),
        )
    return table
