"""The claim on a destination of files, which keeps two calls from writing it at once.

It is a file that names its process, as the lock of a run directory does, and is judged as that one
is: stale once the process is known to be dead, or on another machine, once the file has not changed
while one watched it for a minute. On a local file system one call alone can make it; elsewhere, and
where a stale one is taken over, it is read back after a moment. Two that still pass each other are
told apart before the first file of the destination is touched, where the claim is read again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import uuid
from typing import Any

from ..errors import InvalidInputError
from ..rundir.lock import (
    RENEW_SECONDS,
    SETTLE_SECONDS,
    STALE_SECONDS,
    WATCH_SECONDS,
    Holder,
    Watch,
    holder_of,
    identity,
    read_lock,
)
from ..storage.filesystem import Location
from ..storage.patience import HungError

logger = logging.getLogger(__name__)


class Claim:
    """One call's claim on a destination.

    Args:
        place: the file.
        destination: what is claimed, for messages.

    Attributes:
        token: of this call alone.
    """

    def __init__(self, place: Location, destination: Location) -> None:
        self._place = place
        self._destination = destination
        self.token = uuid.uuid4().hex[:12]
        self._moving = False
        self._ended = threading.Event()
        self._guard = threading.Lock()  # what is said in the file, and the file, change together
        self._renewing = threading.Thread(target=self._renew, name="hsr-claim", daemon=True)

    def take(self) -> None:
        """Take the claim, as soon as it is known to be free or stale.

        Raises:
            InvalidInputError: another call has it.
            OSError: it cannot be written.
        """
        try:
            self._take()
        except HungError:
            raise
        except BaseException:  # such as Ctrl-C: of a process that lives, it would stay for good
            self._delete()
            raise
        self._renewing.start()

    def _take(self) -> None:
        while True:
            stale = left_behind(self._place, self._destination)
            if stale is None and self._place.is_local:
                if self._place.write_new(self._record()):
                    return
                continue
            self._place.write_bytes(self._record())
            time.sleep(SETTLE_SECONDS)
            found = read_lock(self._place) or {}
            if found.get("token") != self.token:
                raise InvalidInputError(_refusal(found, self._place, self._destination))
            return

    def begin_moving(self) -> None:
        """Say that files of the destination change from now on.

        Raises:
            InvalidInputError: another call has taken the claim; nothing was changed.
            OSError: it cannot be read or written.
        """
        with self._guard:
            if not self._is_held():
                raise InvalidInputError(
                    f"the destination {self._destination} was taken over by another call of "
                    "predict_files; this one writes nothing there"
                )
            self._moving = True
            self._place.write_bytes(self._record())

    def release(self, *, unfinished: bool) -> None:
        """Give the claim up.

        Args:
            unfinished: whether the destination is left with a part of the files, which the claim
                then goes on to tell.
        """
        self._ended.set()
        self._renewing.join()
        if not unfinished:
            self._delete()
            return
        with contextlib.suppress(OSError):
            if self._is_held():
                self._place.write_bytes(json.dumps({"moving": True, "ended": True}).encode())

    def _delete(self) -> None:
        with contextlib.suppress(OSError):
            if self._is_held():
                self._place.delete_file()

    def _is_held(self) -> bool:
        return (read_lock(self._place) or {}).get("token") == self.token

    def _record(self) -> bytes:
        said = {"token": self.token, "renewed": time.time(), "moving": self._moving}
        return json.dumps({**said, **identity()}).encode()

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            try:
                with self._guard:
                    # Never over another's: a call thought dead must not take the claim back.
                    if not self._is_held():
                        logger.warning("%s was taken over by another call", self._place)
                        return
                    self._place.write_bytes(self._record())
            except OSError as error:
                logger.warning("%s could not be renewed: %s", self._place, error)


def left_behind(place: Location, destination: Location) -> dict[str, Any] | None:
    """Return the claim of a call that is gone, or ``None`` if there is no claim.

    Where only time will tell, it is watched for a minute at most.

    Args:
        place: the file.
        destination: what is claimed, for messages.

    Raises:
        InvalidInputError: the call that has it lives.
        OSError: it cannot be read.
    """
    watch, told = Watch(), False
    while (found := read_lock(place)) is not None:
        reason = _why_stale(found, watch, place, destination)
        if reason is not None:
            logger.warning("%s is stale (%s)", place, reason)
            return found
        if not told:
            logger.warning(
                "%s is of another machine or container; whether its call lives shows in at most "
                "%.0f s",
                place,
                STALE_SECONDS,
            )
            told = True
        time.sleep(WATCH_SECONDS)
    return None


def _why_stale(
    found: dict[str, Any], watch: Watch, place: Location, destination: Location
) -> str | None:
    """Return why a claim holds no longer; ``None`` if only time will tell."""
    if found.get("ended"):
        return "its call failed while it moved its files"
    # What cannot be read may be about to be written.
    holder = holder_of(found) if found else Holder.ELSEWHERE
    if holder is Holder.GONE:
        return f"process {found.get('pid')} on this machine is gone"
    same = watch.look(found) if holder is Holder.ELSEWHERE else None
    if same is None:
        raise InvalidInputError(_refusal(found, place, destination))
    if same >= STALE_SECONDS:
        return f"{found.get('host', 'its call')} has not renewed it for {STALE_SECONDS:.0f} s"
    return None


def _refusal(found: dict[str, Any], place: Location, destination: Location) -> str:
    return (
        f"the destination {destination} is being written by another call of predict_files (process "
        f"{found.get('pid')} on {found.get('host')}). Wait for it, name another folder, or delete "
        f"{place} if that call is surely dead"
    )
