"""Which relays live, judged by a process that may itself be late. Pure: `now` comes in.

A relay says so twice a second, and each frame of its says so too. What it said reaches us a few turns of the event
loop later, so a late turn must not be taken for a silent relay: patience grows with our own lag.
"""

from shared.limits import RELAY_ALIVE_S, RELAY_MISSED_MAX

ROUND_S = RELAY_ALIVE_S / 2  # between two looks
_HOPS = 8  # turns of the loop between the socket and us, with room
_LAG_KEPT = 0.9  # of the worst lag, per round: it is forgotten over a few seconds
_FORGET_S = 60.0


class Lives:
    def __init__(self, now: float) -> None:
        self.lag_s = 0.0  # how late our own rounds have lately been
        self._looked_s = now
        self._heard_s: dict[str, float] = {}

    def heard(self, relay: str, now: float) -> None:
        self._heard_s[relay] = now

    @property
    def relays(self) -> list[str]:
        """All that were heard of lately."""
        return list(self._heard_s)

    def away(self, now: float) -> None:
        """We could not hear anybody until now, so nobody's silence counts."""
        self._heard_s = dict.fromkeys(self._heard_s, now)

    def look(self, now: float) -> set[str]:
        """The relays that have been silent for too long; once a round."""
        late_s = now - self._looked_s - ROUND_S
        self.lag_s = max(late_s, self.lag_s * _LAG_KEPT, 0.0)
        self._looked_s = now
        patience_s = RELAY_ALIVE_S * RELAY_MISSED_MAX + _HOPS * self.lag_s
        silent_s = {relay: now - heard_s for relay, heard_s in self._heard_s.items()}
        for relay, silence_s in silent_s.items():
            if silence_s > _FORGET_S + patience_s:
                del self._heard_s[relay]
        return {relay for relay, silence_s in silent_s.items() if silence_s > patience_s}
