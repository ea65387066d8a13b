"""Keeps units running: starts them in stages, starts again what dies and says so, stops all in reverse order.

    prepare ──> running ──> ready ──> died ──> wait a little ──> prepare ...
                   └──────────> died before it was ever ready, again and again: give up, with its last words

Stopping: the last stage first; each unit is asked, waited for, and killed past its deadline.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from ops.processes import Child, describe_exit
from ops.restarts import EXIT_CONFIG, Restarts
from ops.servers import Unit
from shared.errors import ConfigError

PROBE_S = 0.05
PROBE_SLOW_S = 0.5  # once a start takes long
SAY_S = 10.0  # a person who waits is told for what, this often
UNREADY_STOP_S = 3.0  # what was never ready has nothing to finish
SAY_STOP_S = 2.0  # a stop that takes longer says what is waited for
KILLED_S = 5.0  # the kernel needs a moment to take a killed process away
_SENTENCE = "cannot start: "  # how our services begin the one that ends them


class StartError(ConfigError):
    """Something did not come up; the sentence says what and why."""


class Kept:
    """One unit under supervision."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.child: Child | None = None
        self.ready = asyncio.Event()
        self.restarts = Restarts()

    @property
    def pid(self) -> int | None:
        return self.child.pid if self.child is not None and self.child.status is None else None


class Supervisor:
    """`say` tells a person; `changed` is called whenever a process was started or ended."""

    def __init__(self, group: asyncio.TaskGroup, say: Callable[[str], None], changed: Callable[[], None]) -> None:
        self._group, self._say, self._changed = group, say, changed
        self._stages: list[list[Kept]] = []
        self._keepers: list[asyncio.Task[None]] = []

    @property
    def kept(self) -> list[Kept]:
        return [kept for stage in self._stages for kept in stage]

    def launch(self, units: Sequence[Unit]) -> None:
        """Start a stage, all at once. What is launched later is stopped earlier."""
        stage = [Kept(unit) for unit in units]
        self._stages.append(stage)
        for kept in stage:
            self._keepers.append(self._group.create_task(self._keep(kept), name=f"keep {kept.unit.name}"))

    async def all_ready(self) -> None:
        """Wait until everything launched is ready. A unit that does not come up fails the group with StartError."""
        for kept in self.kept:
            await kept.ready.wait()

    # --- one unit ------------------------------------------------------------------------------------

    async def _keep(self, kept: Kept) -> None:
        name = kept.unit.name
        while True:
            status, ready_s, missing = await self._run_once(kept)
            delay_s = kept.restarts.died(ready_s=ready_s, status=status)
            if delay_s is None:
                raise StartError(f"{name} did not come up: {_why(kept, status, missing)}")
            what = f"did not come up: {missing}" if ready_s is None else f"died ({describe_exit(status)})"
            self._say(f"{name} {what}; starting it again in {delay_s:g} s")
            await asyncio.sleep(delay_s)

    async def _run_once(self, kept: Kept) -> tuple[int, float | None, str]:
        """One process from start to end: (exit status, seconds it was ready or None, what was missing until then)."""
        started = time.monotonic()
        try:
            await kept.unit.prepare()
            child = Child(kept.unit.command())
        except (ConfigError, OSError) as error:
            return EXIT_CONFIG, None, str(error)
        kept.child = child
        self._changed()
        missing = await self._until_ready(kept.unit, child)
        if missing is not None:
            if child.status is None:
                await child.stop(kept.unit.stop_s)
            kept.ready.clear()
            return await self._ended(child), None, missing
        ready_at = time.monotonic()
        self._say(f"{kept.unit.name} is ready ({ready_at - started:.1f} s)")
        kept.ready.set()
        self._changed()
        await child.exited()
        kept.ready.clear()
        return await self._ended(child), time.monotonic() - ready_at, ""

    async def _ended(self, child: Child) -> int:
        child.kill_group()  # whatever it had started
        status = await child.exited()
        self._changed()
        return status

    async def _until_ready(self, unit: Unit, child: Child) -> str | None:
        """None once it is ready; otherwise it has ended, or its time is over: why it is not."""
        missing: str | None = "it was not asked yet"
        started, said_s = time.monotonic(), 0.0
        while (waited_s := time.monotonic() - started) < unit.start_s:
            if child.status is not None:
                return f"it ended ({describe_exit(child.status)})"
            missing = await unit.probe()
            if missing is None and child.status is None:  # its own answer, not that of another on its port
                return None
            if waited_s - said_s >= SAY_S:
                said_s = waited_s
                self._say(f"still waiting for {unit.name}: {missing}")
            await asyncio.sleep(PROBE_S if waited_s < SAY_S else PROBE_SLOW_S)
        return f"not ready within {unit.start_s:g} s ({missing})"

    # --- the end -------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Nothing is started again from here on."""
        for keeper in self._keepers:
            keeper.cancel()

    async def stop(self, now: asyncio.Event) -> None:
        """Stop everything, last stage first; once `now` is set, kill what is left. Nothing runs afterwards."""
        self.leave()
        try:
            for stage in reversed(self._stages):
                await asyncio.gather(*(self._stop_one(kept, now) for kept in stage))
        finally:
            for kept in self.kept:
                if kept.child is not None:
                    kept.child.kill_group()

    async def _stop_one(self, kept: Kept, now: asyncio.Event) -> None:
        child = kept.child
        if child is None:
            return
        stop_s = kept.unit.stop_s if kept.ready.is_set() else min(kept.unit.stop_s, UNREADY_STOP_S)
        stopping = asyncio.ensure_future(child.stop(stop_s))
        hurry = asyncio.ensure_future(now.wait())
        try:
            done, _ = await asyncio.wait({stopping, hurry}, timeout=SAY_STOP_S, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                self._say(f"{kept.unit.name} still has something to finish; killed after {stop_s:g} s, or by Ctrl-C")
                await asyncio.wait({stopping, hurry}, return_when=asyncio.FIRST_COMPLETED)
            if not stopping.done():
                child.kill_group()
            if not await asyncio.wait_for(stopping, KILLED_S):
                self._say(f"{kept.unit.name} did not leave by itself and was killed")
        finally:
            hurry.cancel()


def _why(kept: Kept, status: int, missing: str) -> str:
    """Its own sentence when it said that its settings or files are wrong; else what we saw and its last lines."""
    words = kept.child.tail() if kept.child is not None else ""
    if kept.child is None or not words:
        return missing
    last = words.splitlines()[-1]
    if status == EXIT_CONFIG and last.startswith(_SENTENCE):
        return last.removeprefix(_SENTENCE)
    indented = "\n".join(f"    {line}" for line in words.splitlines())
    return f"{missing}\n  The end of {kept.child.command.log}:\n{indented}"
