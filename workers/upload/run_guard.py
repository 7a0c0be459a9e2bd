"""Whether the store still is where this rank entered its run, and has what readers begin with.

A shell may name another server for the same URL, and a bucket or folder can be removed and made
anew while a job writes to it. Without `run.json` and the session nobody finds what is put there.
"""

from __future__ import annotations

import contextlib

from smdist.errors import CorruptObject, ObjectExists, ObjectNotFound, StoreForbidden
from smdist.format.manifest import RUN_KEY, Run, Session, session_key
from smdist.format.stored_json import decode, encode
from smdist.identity import worker_name
from smdist.storage.store import Store
from smdist.workers.upload.retry import Conflict

__all__ = ["Misplaced", "Place", "Refused"]


class Refused(Conflict):
    """This rank has no part in the run that is there, and never will."""


class Misplaced(Refused):
    """The run that this rank entered is not here."""


class Place:
    def __init__(self, store: Store, run: Run, session: Session) -> None:
        self._store, self._run, self._session = store, run, session
        self._session_key = session_key(worker_name(session.rank), session.attempt)

    async def is_whole(self) -> bool:
        """False: what this rank put there when it entered was removed. Misplaced: there is another.

        Where our session is, we are at home, whatever the run is called: on servers that ignore
        conditions a slower rank may have replaced `run.json` just after we had read it.
        """
        try:
            run, session = await self._read(RUN_KEY), await self._read(self._session_key)
        except StoreForbidden:  # who may write and not read has to trust
            return True
        if session is not None:
            self._must_be(session, self._session_key, Session, "session", self._session.session)
        elif run is not None:
            self._must_be(run, RUN_KEY, Run, "run_id", self._run.run_id)
        return run is not None and session is not None

    async def _read(self, key: str) -> bytes | None:
        try:
            return await self._store.get(key)
        except ObjectNotFound:
            return None

    def _must_be(
        self, data: bytes, key: str, kind: type[Run | Session], field: str, own: str
    ) -> None:
        try:
            found = getattr(decode(data, kind, key), field)
        except CorruptObject:
            found = "not readable"
        if found != own:
            raise Misplaced(
                f"{self._store.url} holds another run, or another process's part of it ({field} "
                f"{found}, not {own}): is it the place that the job wrote to?"
            )

    async def restore(self) -> None:
        with contextlib.suppress(ObjectExists):  # another rank was quicker, or another run
            await self._store.put(RUN_KEY, (encode(self._run, RUN_KEY),), if_absent=True)
        key = self._session_key
        await self._store.put(key, (encode(self._session, key),))

    def absent(self) -> Misplaced:
        return Misplaced(
            f"{self._store.url} holds no run {self._run.run_id} of this rank: the job wrote to another "
            "place of that name, or the run was removed there. Check AWS_ENDPOINT_URL, AWS_PROFILE "
            "and the bucket; --force begins the run anew there with what is left"
        )
