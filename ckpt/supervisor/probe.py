"""A golden prompt: what a server answered before it was ever suspended, to be answered the same after each resume."""

from __future__ import annotations

import logging
from typing import Protocol

from gpuckpt import errors

log = logging.getLogger("gpuckpt.run")

PROMPT = "Once upon a time"
TOKENS = 24


class Answers(Protocol):
    async def answers(self, prompt: str, tokens: int) -> dict[str, str]:
        """What each model of the server (adapters too) makes of *prompt*, greedily. Raises :class:`gpuckpt.errors.ServerRefused`."""
        ...


class Probe:
    """The golden answers of one server."""

    def __init__(self, server: Answers) -> None:
        self._server = server
        self._golden: dict[str, str] = {}

    async def learn(self) -> bool:
        """Ask for the first time. False, with words in the log, where the server does not answer such prompts."""
        try:
            self._golden = await self._server.answers(PROMPT, TOKENS)
        except errors.ServerRefused as e:
            log.warning("no golden answer, so answers are not compared after a resume: %s", e.message)
        return bool(self._golden)

    async def check(self) -> None:
        """Ask again. Raises :class:`gpuckpt.errors.WrongAnswer` for another answer; what was not learnt is not compared."""
        if not self._golden:
            return
        now = await self._server.answers(PROMPT, TOKENS)
        for model, golden in self._golden.items():
            if (answer := now.get(model)) != golden:
                raise errors.WrongAnswer(
                    f"after the resume {model} answers {_short(answer)} where it answered {_short(golden)} before it was suspended",
                    hint="start the server again (--restart on-failure does so by itself)",
                )


def _short(text: str | None) -> str:
    return "nothing" if text is None else repr(text[:60])
