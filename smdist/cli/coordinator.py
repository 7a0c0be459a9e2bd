"""`smdist coordinator`: start, show and stop the actor that merges runs while they are written."""

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
from smdist.coordination.ray_actor import launcher, local_head
from smdist.coordination.ray_actor.client import CoordinatorClient
from smdist.coordination.ray_actor.code_package import check_wheel
from smdist.coordination.ray_actor.coordinator import (
    NAMESPACE,
    CoordinatorInfo,
    Settings,
    canonical_url,
    check_watch_url,
)
from smdist.coordination.ray_actor.launcher import Attachment
from smdist.coordination.view.status import RunState, RunStatus
from smdist.errors import CoordinationError, SmdistError
from smdist.messages import printable

__all__ = ["start", "status", "stop"]

_FIRST_RUNS_S = 15.0  # how long `start` waits until each run was read
_FIRST_SCAN_S = 30.0  # and until runs were listed, longer than a request may take
_ANSWER_S = 5.0
_LEASE_KEPT = "its lease was not released, so the next coordinator may have to wait for its end"
_MARGIN_S = 15.0  # after the end of a lease, until a waiting coordinator has noticed
_STYLES = {"active": "green", "lagging": "yellow", "ended": "dim", "lost": "red"}

Runs = dict[str, RunStatus]


def start(address: str, settings: Settings, wheel: Path | None, follow: bool) -> int:
    """Start a coordinator and print its runs; return the exit code.

    It is 0 if the coordinator watches, 1 if something failed. With `follow` it is 0 once the
    coordinator was stopped.
    """
    with _errors_printed() as outcome:
        # Before any Ray is started.
        settings = msgspec.structs.replace(settings, watch=check_watch_url(settings.watch))
        if wheel is not None:
            check_wheel(wheel)
        console = PlainConsole()
        with launcher.attach(address) as ray:
            client = launcher.start(ray, settings, wheel_path=wheel)
            _print_start(console, ray, client.info())
            runs, trouble = _wait_for_runs(client)
            for run in runs.values():
                console.print(_headline(run))
            if trouble:
                console.print(f"trouble: {trouble}. The coordinator keeps trying.")
            elif not runs:
                console.print("no run yet; waiting for the first rank")
            if follow:
                _follow(console, lambda: launcher.find(ray, settings.watch))
                return 0
            if any(run.state is RunState.REFUSED for run in runs.values()):
                runs = _wait_for_lease(console, client, settings.lease_s + _MARGIN_S)
            outcome.code = int(bool(trouble) or _any_error(runs))
    return outcome.code


def status(address: str, watch: str, run: str, as_json: bool) -> int:
    """Print the status of coordinators; return 0 if all answer and none has an error."""
    with _errors_printed() as outcome, launcher.attach(address, start_local=False) as ray:
        answers = [(client.info(), _runs(client, run)) for client in _chosen(ray, watch)]
        if as_json:
            listed = [{"coordinator": info, "runs": runs} for info, runs in answers]
            # Escaped: programs read the same, and nothing controls a terminal.
            text = json.dumps(msgspec.to_builtins(listed, str_keys=True), indent=2)
            print(text.replace("\x7f", "\\u007f"))
        else:
            for info, runs in answers:
                _print_status(PlainConsole(), info, runs)
        outcome.code = int(any(info.trouble or _any_error(runs) for info, runs in answers))
    return outcome.code


def stop(address: str, watch: str) -> int:
    """Stop coordinators, and a local Ray without any; return the exit code."""
    with _errors_printed() as outcome:
        console, local = PlainConsole(), address == "local"
        with ExitStack() as attached:
            try:
                ray = attached.enter_context(launcher.attach(address, start_local=False))
            except SmdistError:
                if not local or not local_head.stop():
                    raise
                console.print("stopped the local Ray, which did not answer")
                return 0
            found = launcher.coordinators(ray)
            if found or watch or not local:
                found = _chosen(ray, watch)
            for client in found:
                console.print(_stop(client))
            left = launcher.coordinators(ray)
        if local and not left and local_head.stop():
            console.print("stopped the local Ray: no coordinator is left")
    return outcome.code


def _stop(client: CoordinatorClient) -> str:
    try:
        watched = client.info(timeout_s=_ANSWER_S).settings.watch
    except (TimeoutError, CoordinationError):
        client.kill()
        return f"killed {client.name}, which did not answer; {_LEASE_KEPT}"
    if client.stop():
        return f"stopped {client.name}; {watched} keeps its snapshots"
    return f"killed {client.name}, which did not stop in time; {watched} keeps its snapshots; {_LEASE_KEPT}"


class _Outcome:
    code = 0


@contextmanager
def _errors_printed() -> Iterator[_Outcome]:
    """Print errors of smdist as messages and set exit code 1."""
    outcome = _Outcome()
    try:
        yield outcome
    except SmdistError as error:
        outcome.code = 1
        complain(error)
    except TimeoutError as error:
        outcome.code = 1
        complain(
            f"the coordinator does not answer: {error}. "
            "If that persists: smdist coordinator stop, then start"
        )
    except ConnectionError as error:
        outcome.code = 1
        complain(f"Ray does not answer any more: {error}")


def _chosen(ray: Attachment, watch: str) -> list[CoordinatorClient]:
    if not watch:
        found = launcher.coordinators(ray)
        if not found:
            raise CoordinationError(
                f"no coordinator on the Ray at {ray.address}. "
                "Start one: smdist coordinator start --watch URL"
            )
        return found
    url = canonical_url(watch)
    client = launcher.find(ray, url)
    if client is None:
        raise CoordinationError(f"no coordinator for {url} on the Ray at {ray.address}")
    return [client]


def _runs(client: CoordinatorClient, run: str) -> Runs:
    if not run:
        return client.runs()
    found = client.status(run)
    return {found.url: found}


def _any_error(runs: Runs) -> bool:
    return any(run.state.is_error for run in runs.values())


def _wait_for_runs(client: CoordinatorClient) -> tuple[Runs, str]:
    """Wait until each run was read once; return the runs, and why runs cannot be listed."""
    began = time.monotonic()
    while True:
        info, runs = client.info(), client.runs()
        waited_s = time.monotonic() - began
        if not info.looked and not info.trouble:
            if waited_s > _FIRST_SCAN_S:
                return runs, f"{info.settings.watch} does not answer"
        elif waited_s > _FIRST_RUNS_S or not any(run.state.is_starting for run in runs.values()):
            return runs, info.trouble
        time.sleep(0.1)


def _wait_for_lease(console: PlainConsole, client: CoordinatorClient, max_s: float) -> Runs:
    """Wait for the end of another coordinator's lease, which comes if that one died with its Ray."""
    console.print(
        f"standing by: waiting up to {max_s:.0f} s for the other coordinator's lease to end "
        "(Ctrl-C ends this command, not the coordinator)",
    )
    deadline, printed = time.monotonic() + max_s, set[str]()
    try:
        while True:
            runs = client.runs()
            for url, run in runs.items():
                waits = run.state is RunState.REFUSED or run.state.is_starting
                if not waits and url not in printed:
                    printed.add(url)
                    console.print(_headline(run))
            if len(printed) == len(runs):
                return runs
            if time.monotonic() > deadline:
                if any(run.state is RunState.REFUSED for run in runs.values()):
                    console.print("the other coordinator is alive; this one keeps standing by")
                return runs
            time.sleep(0.5)
    except KeyboardInterrupt:
        console.print("the coordinator keeps running")
        return client.runs()


def _follow(console: PlainConsole, find: Callable[[], CoordinatorClient | None]) -> None:
    """Print changes until interrupted, or until the coordinator was stopped."""
    printed, failed = dict[str, str](), False
    console.print("following; Ctrl-C ends this command, not the coordinator")
    try:
        while (client := find()) is not None:
            try:
                runs, failed = client.runs(), False
            except CoordinationError:  # it has just ended; Ray keeps its name for a moment
                if failed:
                    raise
                runs, failed = {}, True
            for url, run in runs.items():
                line = _headline(run)
                if printed.get(url) != line:
                    printed[url] = line
                    console.print(line)
            time.sleep(1.0)
        console.print("the coordinator was stopped")
    except KeyboardInterrupt:
        console.print("the coordinator keeps running")


# -- output --------------------------------------------------------------------------------------


def _print_start(console: PlainConsole, ray: Attachment, info: CoordinatorInfo) -> None:
    kind = "your own Ray on this machine" if ray.local else "Ray"
    option, settings = launcher.address_option(ray), info.settings
    rows = {
        "runs on": f"{kind}, {ray.address} (process {info.pid} on {info.host})",
        "namespace": NAMESPACE,
        "name": info.name,
        "watches": f"{settings.watch}, every {settings.interval_s:g} s",
        "lost after": f"{settings.lost_after_s:g} s without a sign of life",
        "see": f"smdist coordinator status{option}",
        "stop": f"smdist coordinator stop{option} --watch {shlex.quote(settings.watch)}",
    }
    for name, value in rows.items():
        console.print(Text(f"{name:<12}", style="dim").append(printable(value), style="default"))


def _headline(run: RunStatus) -> str:
    counts = ", ".join(
        f"{number} {status}"
        for attempt in run.attempts[-1:]
        for status, number in attempt.ranks.items()
    )
    parts = [f"{run.run_id or run.url}: {run.state}"]
    if run.detail:
        parts.append(run.detail)
    if counts:
        parts.append(f"ranks: {counts}")
    step = run.latest_complete.get("GLOBAL", -1)
    if step >= 0:
        parts.append(f"complete up to step {step}")
    return "; ".join(parts)


def _print_status(console: PlainConsole, info: CoordinatorInfo, runs: Runs) -> None:
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(info.since))
    console.print(
        f"{info.name} in {NAMESPACE}, process {info.pid} on {info.host} since {since}, "
        f"watches {info.settings.watch}",
    )
    if info.trouble:
        console.print(f"trouble: {info.trouble}", style="red")
    if not runs:
        console.print("no run yet")
    for run in runs.values():
        console.print()
        console.print(f"{run.run_id}  {run.url}", style="bold")
        console.print(_headline(run))
        console.print(
            f"steps: {run.complete_steps} of {run.steps} complete, last one seen {run.last_step}; "
            f"snapshot {run.number}; {run.manifests} manifests read",
        )
        console.print(_rank_table(run))
        for text in run.troubles:
            console.print(f"trouble: {text}", style="yellow")


def _rank_table(run: RunStatus) -> Table:
    table = Table("rank", "status", "last step", "behind", "last seen", "reason")
    for line in run.ranks:
        behind = f"{line.behind_steps} steps, {line.behind_s:.0f} s" if line.behind_steps else ""
        table.add_row(
            str(line.rank),
            Text(line.status, style=_STYLES.get(line.status, "")),
            str(line.step) if line.step >= 0 else "-",
            behind,
            f"{max(0.0, run.time - line.last_seen):.0f} s ago" if line.last_seen else "never",
            Text(printable(line.reason)),
        )
    return table
