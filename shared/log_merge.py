"""One reader of one token log: live entries and catch-up made one ordered sequence, without holes or repeats.

    live (republished, may be lost, repeated or late)  ──┐
                                                         ├──> deliver in order
    fetched (batched direct get, from the stream)  ──────┘

Each live entry names the one before it on the same key. When that is not the last one delivered, there is a hole:
it is fetched, never skipped. Subscribe first, then `start()`. Pure: the shell fetches and keeps the timer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.limits import LOG_HISTORY_MAX
from shared.messages import Entry, SequencedEntry


@dataclass(frozen=True)
class Fetch:
    """Ask the stream for this key's entries after `after_seq`."""

    after_seq: int


@dataclass(frozen=True)
class Deliver:
    item: SequencedEntry


Command = Fetch | Deliver


class LogMerge:
    def __init__(self, after_seq: int = 0) -> None:
        self.last_seq = after_seq
        self._ahead: dict[int, tuple[int, Entry]] = {}  # seq -> (previous seq, entry), past a hole
        self._fetching = False

    def start(self) -> list[Command]:
        """After the live subscription stands: catch up."""
        return self._fetch()

    def live(self, seq: int, previous_seq: int, entry: Entry) -> list[Command]:
        """A republished entry with its sequence and its key's previous one (0: none)."""
        if seq <= self.last_seq:
            return []
        if len(self._ahead) < LOG_HISTORY_MAX:  # past the bound the fetch brings it anyway
            self._ahead[seq] = (previous_seq, entry)
        delivered = self._drain()
        return delivered + (self._fetch() if self._ahead else [])

    def fetched(self, items: Sequence[SequencedEntry]) -> list[Command]:
        """The answer to a Fetch: this key's entries after `after_seq`, in order, as far as they stood then."""
        self._fetching = False
        commands: list[Command] = []
        for item in items:
            if item.seq > self.last_seq:
                self.last_seq = item.seq
                commands.append(Deliver(item))
        commands += self._drain()
        # A copy of the stream that lags may bring nothing: the next live entry or `quiet` asks again, not we at once.
        return commands + (self._fetch() if self._ahead and commands else [])

    def fetch_failed(self) -> None:
        """No answer; the next live entry or `quiet` asks again."""
        self._fetching = False

    def quiet(self) -> list[Command]:
        """Nothing came for a while: a lost last entry shows no hole, so ask."""
        return self._fetch()

    def _drain(self) -> list[Command]:
        commands: list[Command] = []
        for seq in sorted(self._ahead):
            previous, entry = self._ahead[seq]
            if seq > self.last_seq:
                if previous != self.last_seq:
                    break
                self.last_seq = seq
                commands.append(Deliver(SequencedEntry(seq=seq, entry=entry)))
            del self._ahead[seq]
        return commands

    def _fetch(self) -> list[Command]:
        if self._fetching:
            return []
        self._fetching = True
        return [Fetch(self.last_seq)]
