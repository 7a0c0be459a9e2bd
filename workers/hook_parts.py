"""What a hook is made of, and what it can be asked. Framework-neutral."""

from __future__ import annotations

import logging
from typing import Generic, TypeVar

from smdist.collection import Collection
from smdist.config import HookConfig
from smdist.identity import ModeKeys, worker_name
from smdist.planning import Planner
from smdist.workers import lifecycle
from smdist.workers.capture import Usage
from smdist.workers.mishaps import Mishaps
from smdist.workers.outlet import Outlet, Sink, Whereabouts
from smdist.workers.recorder import Recorder
from smdist.workers.script_values import Reading, ScriptValues
from smdist.workers.steps import StepClock

__all__ = ["HookParts"]

T = TypeVar("T")


class HookParts(Generic[T]):
    def _put_together(
        self,
        config: HookConfig,
        reading: Reading[T],
        collection_type: type[Collection],
        where: Whereabouts,
    ) -> None:
        self._config = config
        self._log = logging.getLogger("smdist")
        self._active = lifecycle.enabled()  # False once nothing will be saved any more
        self._described = False
        self._manager = config.build_manager(collection_type)
        self._planner = Planner(config, self._manager)
        self._clock = StepClock()
        self._mishaps = Mishaps(config.on_error, self._log)
        self._outlet: Outlet[T] = Outlet(
            config, where, reading.host, self._log, self._mishaps.trouble
        )
        self._recorder: Recorder[T] = Recorder(reading.describe)
        self._values = ScriptValues(reading, self._clock, self._planner, self._recorder, self._sink)

    def _sink(self) -> Sink[T] | None:
        raise NotImplementedError

    # -- collections --------------------------------------------------------------------------

    def get_collection(self, name: str, create: bool = True) -> Collection:
        """The collection of that name, created if it is missing; changes hold from the next step."""
        return self._manager.get(name, create)

    def get_collections(self) -> dict[str, Collection]:
        return self._manager.get_collections()

    def add_collection(self, collection: Collection | str) -> None:
        self._manager.add(collection)

    # -- questions ----------------------------------------------------------------------------

    @property
    def out_dir(self) -> str:
        return self._config.out_dir

    @property
    def worker(self) -> str:
        """Which worker this process is; may change until something is saved."""
        return worker_name(self._outlet.identity.rank)

    @property
    def mode(self) -> ModeKeys:
        return self._clock.mode

    @property
    def mode_steps(self) -> dict[ModeKeys, int]:
        """The last step that began, by mode; -1 where none did."""
        return self._clock.mode_steps

    @property
    def global_step(self) -> int:
        return self._clock.step

    @property
    def errors(self) -> int:
        """How many errors of smdist's own this job was not bothered with."""
        return self._mishaps.count

    def usage(self) -> Usage | None:
        """Bytes and steps captured, stored and dropped; None while nothing was saved."""
        capture = self._outlet.capture
        return None if capture is None else capture.usage()
