"""Makes anew what is swept away of a run's sockets, its lock and its directories while it lives (:mod:`gpuckpt.supervisor.swept`)."""

from __future__ import annotations

import asyncio
import logging
import os

from gpuckpt import errors
from gpuckpt.supervisor.answering import ControlServer
from gpuckpt.supervisor.places import Place, clear
from gpuckpt.supervisor.swept import LOOK_S

log = logging.getLogger("gpuckpt.run")


async def keep(place: Place, control: ControlServer) -> None:
    """Look after *place*, and after *control*, which listens there, until cancelled. What cannot be made anew is tried again and again, and
    said once."""
    said = ""
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            if place.whole and control.whole:
                continue
            place.again()
            if not control.whole:
                clear(place.control)
                await control.listen()
        except (OSError, errors.GpuckptError) as e:
            why = e.message.partition(";")[0] if isinstance(e, errors.GpuckptError) else e.strerror or str(e)
            if said != why:
                said = why
                log.warning(
                    "its files in %s were removed by somebody else, and cannot be made anew now: %s. It serves on, but nobody finds it "
                    "by its name: kill %d ends it in order",
                    place.directory,
                    why,
                    os.getpid(),
                )
        except Exception:
            log.exception("its files cannot be looked after")
        else:
            said = ""
            log.warning("its files in %s were removed by somebody else, and are made anew", place.directory)
