"""What must hold, whatever the code does: looked at from outside, from the log, the lane and the screens.

None of it knows leases, writers or merges; each check states a fact and raises RuleBrokenError with its own name.
"""

from collections import deque
from typing import TYPE_CHECKING

from shared.limits import IDLE_END_S
from shared.messages import Accepted, Chunk, Dispatch, End, EndedReply, Open, SequencedEntry, unpack_ids
from shared.outcomes import EndReason
from sim.opens import may_go_on, too_many
from sim.trace import brief
from tests.model.world import Process, RuleBrokenError, World

if TYPE_CHECKING:
    from tests.model.actors import Replica, Router
    from tests.model.bus import Ended
    from tests.model.readers import Reader
    from tests.model.scene import Scene

FRESH_S = 2.0  # a writer that appended this lately, and was heard of all the while, is at work
COMMANDS_PER_S_MAX = 60  # of one router, for one reply
MIX = 0xFFFFF


def next_mix(mix: int, token: int) -> int:
    """A fingerprint of all tokens so far."""
    return (mix * 31 + token + 7) & MIX


def next_token(mix: int, attempt: int) -> int:
    """What an attempt writes after tokens of this fingerprint: it tells what stood before it, and who wrote it."""
    return mix * 16 + attempt


class Checks:
    def __init__(self, world: World) -> None:
        self.world = world
        self.scene: Scene
        self.ids: list[int] = []
        self.text = ""
        self.mix = 0
        self.opens: list[Open] = []
        self.end: End | None = None
        self.given_back: set[int] = set()  # attempts that their replicas refused or handed back
        self.stopped_by: set[EndReason] = set()  # what somebody asked for
        self.commands: dict[str, deque[float]] = {}  # per router, when the last ones were given
        self.over: set[int] = set()  # attempts that their replicas said are over

    def fail(self, check: str, detail: str) -> None:
        raise RuleBrokenError(check, f"{detail} (at {self.world.now:.4f} s)")

    # --- the log

    def appended(self, item: SequencedEntry, by: Process) -> None:
        """Called with each entry that the log took, before it stands there."""
        entry = item.entry
        if self.end is not None:
            self.fail("exactly one end, nothing after it", f"{by.name} appended {brief(entry)}")
        if isinstance(entry, Chunk):
            self._chunk_appended(entry, by)
        elif isinstance(entry, Open):
            self._open_appended(entry, by)
        elif isinstance(entry, End):
            self._end_appended(entry, by)

    def _chunk_appended(self, chunk: Chunk, by: Process) -> None:
        if chunk.first_index != len(self.ids):
            self.fail(
                "indices are contiguous", f"{by.name} wrote from {chunk.first_index} after {len(self.ids)} tokens"
            )
        if not self.opens or chunk.attempt != self.opens[-1].attempt:
            self.fail("only the last open may write", f"attempt {chunk.attempt} by {by.name}")
        for token in unpack_ids(chunk.ids):
            if token >> 4 != self.mix:
                self.fail("a token continues what stands before it", f"{by.name}, token {len(self.ids)}")
            self.ids.append(token)
            self.mix = next_mix(self.mix, token)
        self.text += chunk.text

    def _open_appended(self, entry: Open, by: Process) -> None:
        if entry.attempt != len(self.opens) + 1:
            self.fail("attempts count up by one", f"attempt {entry.attempt} after {len(self.opens)}")
        if entry.first_index != len(self.ids):
            self.fail("an open says how many tokens stand", f"{entry.first_index}, but there are {len(self.ids)}")
        if too_many([*self.opens, entry], len(self.ids)):
            self.fail("attempts are bounded", f"attempt {entry.attempt}, {entry.returned} given back")
        if self.opens:
            self._open_needed(self.opens[-1], by)
        self.opens.append(entry)

    def _open_needed(self, before: Open, by: Process) -> None:
        """Whoever is at work, heard of and not refused shall not be replaced."""
        replica, router = self.scene.replica(before.replica), self.scene.router(by.name)
        if before.attempt in self.given_back or before.attempt in self.over:
            return
        if not replica.at_work(before.attempt) or not router.hears(replica, FRESH_S):
            return
        if self.world.now - self.scene.log.grew_s < FRESH_S:
            self.fail("nobody at work is replaced", f"{by.name} replaced {replica.name}, attempt {before.attempt}")

    def _end_appended(self, end: End, by: Process) -> None:
        self.end = end
        swarm = self.world.swarm
        if end.reason in (EndReason.USER_STOP, EndReason.SUPERSEDED) and end.reason not in self.stopped_by:
            self.fail("a reason is true", f"{end.reason} by {by.name}, asked for by nobody")
        if end.reason is EndReason.IDLE and (swarm.present or self.world.now < IDLE_END_S):
            self.fail("a reason is true", f"idle by {by.name} with a client attached")
        if end.reason is EndReason.EXPIRED and self.world.now < swarm.deadline_s:
            self.fail("a reason is true", f"expired by {by.name} before the deadline")
        if end.reason is EndReason.FAILED and may_go_on(self.opens, len(self.ids)):
            self.fail("three attempts before it fails", f"{by.name} gave up after {len(self.opens)} opens")
        if end.reason.natural and len(self.ids) != swarm.length:
            self.fail("a natural end is complete", f"{len(self.ids)} of {swarm.length} tokens")

    # --- routers, writers, cancellers, the lane

    def commanded(self, router: "Router", command: object) -> None:
        """A router that gets nowhere waits before it tries again."""
        recent = self.commands.setdefault(router.name, deque(maxlen=COMMANDS_PER_S_MAX))
        if len(recent) == COMMANDS_PER_S_MAX and self.world.now - recent[0] < 1.0:
            self.fail("nobody tries again without a pause", f"{router.name}, last {brief(command)}")
        recent.append(self.world.now)

    def runs(self, replica: "Replica", dispatch: Dispatch) -> None:
        """What a replica runs was opened for it."""
        for item in self.scene.log.entries:
            if item.seq == dispatch.open_seq and isinstance(item.entry, Open):
                if item.entry.attempt == dispatch.attempt and item.entry.replica == replica.name:
                    return
                break
        self.fail("what runs has been opened", f"{replica.name} runs attempt {dispatch.attempt}")

    def writer_dropped(self, replica: "Replica", own: SequencedEntry | None) -> None:
        """A replica takes itself for replaced, while the last entry of the log is one that it wrote itself."""
        if own is not None:
            self.fail(
                "nobody at work is replaced", f"{replica.name} dropped its attempt over its own {brief(own.entry)}"
            )

    def stop_returned(self) -> None:
        """Whoever was told that a reply is stopped finds an end in its log."""
        if self.end is None:
            self.fail("a stop that returned has ended the reply", "no end stands")

    def left_the_lane(self, ended: "Ended") -> None:
        if self.end is None:
            self.fail("the lane keeps a reply until an end stands", "acked before")
        if ended.stored is None:
            self.fail("the lane keeps a reply until ENDED has it", "acked before")

    def archived(self, reply: EndedReply) -> None:
        if self.end is None or reply.reason is not self.end.reason:
            self.fail("what is archived is what stands in the log", f"{reply.reason}, but {self.end}")
        if unpack_ids(reply.ids) != self.ids or reply.text != self.text:
            self.fail("what is archived is what stands in the log", "other tokens or another text")

    # --- screens

    def shown(self, reader: "Reader", item: SequencedEntry) -> None:
        """A screen shows the log, entry by entry: nothing else, nothing left out, nothing twice."""
        standing = self.scene.log.entries
        at = len(reader.shown)
        if at >= len(standing) or standing[at] != item:
            there = brief(standing[at].entry) if at < len(standing) else "nothing"
            shown = f"{reader.name} shows {brief(item.entry)} as entry {at}, where {there} stands"
            self.fail("a screen shows the log in its order", shown)

    # --- when the weather has been good for long

    def at_rest(self) -> None:
        """Everything has come to its end, on every screen and in every replica."""
        scene = self.scene
        if self.end is None:
            self.fail("every reply ends", "no end stands")
        if not scene.lane.empty:
            self.fail("the lane empties", "a message is still there")
        for reader in scene.readers:
            if len(reader.shown) != len(scene.log.entries):
                self.fail(
                    "every screen sees the end", f"{reader.name} at {len(reader.shown)} of {len(scene.log.entries)}"
                )
        for replica in scene.replicas:
            if replica.blocks_used:
                self.fail("blocks are freed", f"{replica.name} still holds {replica.blocks_used}")
        for router in scene.routers:
            if len(router.table):
                self.fail("no lease outlives its message", f"{router.name} holds {router.table.leases()[0].state}")

    def head(self) -> Accepted:
        entry = self.scene.log.entries[0].entry
        assert isinstance(entry, Accepted)
        return entry


def hears_since(router: "Router", replica: "Replica") -> float | None:
    """Since when this router hears nothing of this replica."""
    times = [since for since in (replica.quiet_since, router.deaf.get(replica.name)) if since is not None]
    return min(times) if times else None
