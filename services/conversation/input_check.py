"""The question to safety before anything is generated."""

from services.conversation.figures import Figures
from shared.bus import Bus
from shared.errors import BusTimeoutError, NoRespondersError, RefusedError
from shared.limits import SAFETY_INPUT_S
from shared.messages import SafetyCheck, SendMessage, Verdict, decoder, encode
from shared.outcomes import Refusal, RefusalKind
from shared.subjects import Names
from shared.telemetry import Journal

_verdict = decoder(Verdict)


class InputCheck:
    """`fail_open`: without an answer a message passes, journalled and counted; else it is refused for now."""

    def __init__(self, bus: Bus, names: Names, journal: Journal, figures: Figures, *, fail_open: bool) -> None:
        self._bus, self._names, self._journal, self._figures = bus, names, journal, figures
        self._fail_open = fail_open

    async def ask(self, message: SendMessage) -> None:
        """Returns when the message may be answered; raises RefusedError: FLAGGED, UNAVAILABLE."""
        words = [item.text for item in message.items]
        if message.echo.instructions is not None:
            words.insert(0, message.echo.instructions)
        check = SafetyCheck(stage="input", text="\n".join(words))
        try:
            answer = await self._bus.request(self._names.safety_check, encode(check), timeout_s=SAFETY_INPUT_S)
        except (BusTimeoutError, NoRespondersError):
            self._unanswered(message)
            return
        verdict = _verdict.decode(answer.data)
        if not verdict.flagged:
            self._figures.input_checks.labels("passed").inc()
            return
        self._figures.input_checks.labels("flagged").inc()
        self._journal.note(
            "input_flagged",
            request_id=message.request_id,
            user=message.principal.user,
            category=verdict.category,
            rule=verdict.rule,
        )
        raise RefusedError(
            Refusal(
                kind=RefusalKind.FLAGGED,
                message=f"This message was not answered: it falls under {verdict.category or 'the content policy'}.",
                param="input",
            )
        )

    def _unanswered(self, message: SendMessage) -> None:
        self._figures.input_checks.labels("unavailable").inc()
        self._journal.note("input_unchecked", request_id=message.request_id, passed=self._fail_open)
        if not self._fail_open:
            raise RefusedError(
                Refusal(
                    kind=RefusalKind.UNAVAILABLE,
                    message="The safety check does not answer. Try again in a few seconds.",
                    retry_after_s=5.0,
                )
            )
