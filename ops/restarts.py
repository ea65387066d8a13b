"""When something that died is started again, and when trying is given up. Pure."""

from dataclasses import dataclass

DELAY_S_MIN = 0.1
DELAY_S_MAX = 5.0
STEADY_S = 10.0  # ready this long: the next death is a new story
FIRST_TRIES = 3  # starts that never became ready, before the first that did
EXIT_CONFIG = 2  # a program's word that its settings or files are wrong: trying again cannot help


@dataclass
class Restarts:
    """The story of one unit. During its first start it may be given up; once it has been ready, never."""

    was_ready: bool = False  # at any time
    failures: int = 0  # deaths since it last was steady

    def died(self, *, ready_s: float | None, status: int) -> float | None:
        """Seconds until the next start, or None to give up. `ready_s`: how long it was ready; None: it never was."""
        self.was_ready = self.was_ready or ready_s is not None
        if ready_s is not None and ready_s >= STEADY_S:
            self.failures = 0
        self.failures += 1
        if not self.was_ready and (status == EXIT_CONFIG or self.failures >= FIRST_TRIES):
            return None
        return min(DELAY_S_MIN * 2.0 ** min(self.failures - 1, 16), DELAY_S_MAX)
