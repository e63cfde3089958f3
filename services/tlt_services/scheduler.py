"""The scheduler: hands out requests, slots and steps. Decisions are tlt_pipeline.scheduling; here is only
wiring.

Consumes: `worker.events`, `rollout.completions`, `hidden_states`, `dead_letters` (group `scheduler`),
`weights`. Publishes: `rollout.requests`, `slot.<id>.commands.<role>`, `learner.commands`; the run's status.
Waits for: the learner's first policy version, then a rollout worker, then answers, yields and steps trained.
Unblocked by: any of these, and by time (deadlines, silent workers).

Whatever a turn decides is committed together with the state and the acknowledgements, so a scheduler
killed at any moment goes on as if it had only paused. Files (journal, metrics.jsonl) are written before
that, and may get a line twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tlt_pipeline import messages as m
from tlt_pipeline.actor import Actor, run_service
from tlt_pipeline.blobs import BlobStore, open_hidden_states
from tlt_pipeline.bus import BusError, BusFull, Delivery, Outgoing
from tlt_pipeline.bus.journal import Journal
from tlt_pipeline.models.tokenizer import load_tokenizer
from tlt_pipeline.rundir import RunDir
from tlt_pipeline.scheduling import events as e
from tlt_pipeline.scheduling.admission import note_weights
from tlt_pipeline.scheduling.decisions import decide
from tlt_pipeline.scheduling.shards import forget_missing
from tlt_pipeline.scheduling.state import (
    Settings,
    State,
    adopt_settings,
    from_bytes,
    initial_state,
    to_bytes,
)
from tlt_pipeline.scheduling.status import STATUS_KEY, status_of, waiting_for
from tlt_pipeline.scheduling.waiting import is_over
from tlt_pipeline.tasks.mix import TaskMix
from tlt_services.orders import event_of, order_of
from tlt_services.run_log import RunLog, step_facts
from tlt_services.step_requests import RequestWriter

GROUP = "scheduler"
STATE_KEY = "scheduler"
_QUEUES = (m.EVENTS, m.COMPLETIONS, m.HIDDEN_STATES, m.DEAD_LETTERS)
_TICK_S = 0.1
_COMMIT_S = 1.0
"""At least so often, also when nothing happens: a scheduler that another one has replaced notices by it."""
_STATUS_S = 0.5
_SAY_AGAIN_S = 15.0


class RunEndedBadly(RuntimeError):
    """The run can't go on: what another process said, or a decision. `exit_code` says whose it is to mend."""

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Arrival:
    """A message; `delivery` None where it was a broadcast, which nobody acknowledges."""

    message: m.AnyMessage
    delivery: Delivery | None = None


def main(run_dir: Path, slot: int | None = None) -> int:
    return run_service("scheduler", slot, run_dir, run_scheduler)


async def run_scheduler(actor: Actor) -> None:
    service = await Scheduler.start(actor)
    try:
        await service.run()
    finally:
        service.close()


class Scheduler:
    def __init__(self, actor: Actor, state: State, tasks: TaskMix, blobs: BlobStore, log: RunLog) -> None:
        self.actor, self.bus, self.config = actor, actor.bus, actor.config
        self.state = state
        self.tasks, self.blobs, self.run_log = tasks, blobs, log
        self.run_folder = RunDir(actor.run_dir)
        self.journal = Journal(self.run_folder.journal)
        self.arrived: asyncio.Queue[list[Arrival]] = asyncio.Queue(maxsize=8)
        self.writer: RequestWriter | None = None
        self.committed_at = -_COMMIT_S
        self.shown_at = 0.0
        self.said = ("", 0.0)

    @classmethod
    async def start(cls, actor: Actor) -> Scheduler:
        """From the saved state where there is one, else from the run directory."""
        config, run = actor.config, RunDir(actor.run_dir)
        tasks = await asyncio.to_thread(TaskMix, config.task, config.seed)
        settings = Settings.of(config, len(tasks.held_out()) if config.task.eval_every else 0)
        blobs, log = open_hidden_states(config.hidden_states, run, actor.redis_url), RunLog(run, config)
        saved = await actor.bus.load_state(STATE_KEY)
        if saved is None:
            await asyncio.to_thread(_clear, blobs)
            known = max((record.drafter_version for record in log.read().values()), default=0)
            state = initial_state(settings, time.time(), drafter_floor=known)
        else:
            state = forget_missing(adopt_settings(from_bytes(saved), settings), blobs.names())
            actor.log.info("going on from the saved state", step=state.trained)
        return cls(actor, state, tasks, blobs, log)

    def close(self) -> None:
        self.journal.close()
        self.run_log.close()

    # --- the loop -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until the run is over or the process is asked to stop. Raises RunEndedBadly."""
        await self._act([e.Restarted(), e.Tick()], [])
        async with asyncio.TaskGroup() as group:
            readers = [group.create_task(self._read(stream)) for stream in _QUEUES]
            readers.append(group.create_task(self._listen()))
            while not (is_over(self.state) or self.actor.stopping.is_set()):
                await self._turn()
            for reader in readers:
                reader.cancel()
        await self._show(last=True)
        if self.state.finished:
            await self._conclude()

    async def _read(self, stream: str) -> None:
        deliveries = await self.bus.recover(stream, GROUP)
        while True:
            if deliveries:
                await self.arrived.put([Arrival(delivery.message, delivery) for delivery in deliveries])
            deliveries = await self.bus.read(stream, GROUP, count=256, block_s=2.0)

    async def _listen(self) -> None:
        """All that is still kept: what a restart hears twice changes nothing."""
        after = "0"
        while True:
            heard = await self.bus.listen(m.WEIGHTS, after, block_s=2.0)
            if heard:
                after = heard[-1][0]
                await self.arrived.put([Arrival(message) for _, message in heard])

    async def _turn(self) -> None:
        """One round: what arrived meanwhile, decided and carried out in one step."""
        arrivals: list[Arrival] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TICK_S):
                arrivals += await self.arrived.get()
        while not self.arrived.empty():
            arrivals += self.arrived.get_nowait()
        events: list[e.Event] = [e.Tick()]
        for arrival in arrivals:
            if isinstance(arrival.message, m.Completion):
                self.journal.append(arrival.message)
            events.append(event_of(arrival.message))
        await self._act(events, [arrival.delivery for arrival in arrivals if arrival.delivery])
        self._say_waiting()
        await self._show()

    async def _act(self, events: Sequence[e.Event], acks: Sequence[Delivery]) -> None:
        before, state, commands = self.state, self.state, list[e.Command]()
        for event in events:
            state, more = decide(state, event, time.time())
            commands += more
        if before.next_step is None and state.next_step is not None:
            await asyncio.to_thread(self.run_log.begin, state.trained)
        try:
            appends = await self._prepare(commands)
        except ValueError:
            # The user's to mend. The state stays as it was: the step is tried again when the run is resumed.
            await self._commit(before, [], self._shutdowns("the run can't go on: the scheduler's log says why"))
            raise
        self.state = state
        if acks or commands or time.monotonic() - self.committed_at > _COMMIT_S:
            await self._commit(state, acks, appends)
        for command in commands:
            if isinstance(command, e.Fail):
                await self._show(last=True)
                raise RunEndedBadly(command.reason, command.code)

    async def _commit(self, state: State, acks: Sequence[Delivery], appends: Sequence[Outgoing]) -> None:
        body = to_bytes(state)

        async def commit() -> bool:
            try:
                await self.bus.commit(state_key=STATE_KEY, state=body, acks=acks, appends=appends)
            except BusFull:
                return False
            return True

        if not await commit():
            await self.actor.wait_for("room in the queues (are the workers running?)", commit)
        self.committed_at = time.monotonic()

    # --- carrying out ---------------------------------------------------------------------------------------

    async def _prepare(self, commands: Sequence[e.Command]) -> list[Outgoing]:
        """Does what leaves traces outside Redis; returns what the commit sends."""
        appends: list[Outgoing] = []
        for command in commands:
            match command:
                case e.SubmitStep():
                    appends += await self._write_requests(command)
                case e.RecordStep():
                    await asyncio.to_thread(self.run_log.append, command.record)
                    await asyncio.to_thread(self._remove_orphans)
                    self.actor.log.info("step done", **step_facts(command.record))
                    self.actor.metrics.set("step", command.record.step + 1)
                    self.actor.metrics.set("reward", command.record.reward)
                case e.DropShards():
                    await asyncio.to_thread(self._delete_blobs, command.blobs)
                case e.Note():
                    (self.actor.log.warning if command.warning else self.actor.log.info)(command.text, **command.fields)
                case e.SendShutdown():
                    appends += self._shutdowns(command.reason)
                case e.GrantLease() | e.AssignShards() | e.RecallLease() | e.RollBack() | e.SendTrainStep():
                    appends.append(order_of(command))
                case e.Finish() | e.Fail():
                    pass
        return appends

    async def _write_requests(self, order: e.SubmitStep) -> list[Outgoing]:
        if self.writer is None:
            published = await self.bus.latest("policy")
            assert isinstance(published, m.WeightsPublished)
            tokenizer = load_tokenizer(self.run_folder.weights / published.path)
            self.writer = RequestWriter(self.config, self.tasks, tokenizer)
        requests = await asyncio.to_thread(self.writer.write, order)
        for request in requests:
            self.journal.append(request)
        facts = {"step": order.step, "policy_version": order.policy_version, "requests": len(requests)}
        self.actor.log.info("admitted" if order.purpose == "train" else "evaluating", **facts)
        return [Outgoing(m.REQUESTS, request) for request in requests]

    def _delete_blobs(self, names: Sequence[str]) -> None:
        with self._tidying():
            for name in names:
                self.blobs.delete(name)

    def _remove_orphans(self) -> None:
        orphans = 0
        with self._tidying():
            orphans = self.blobs.remove_unknown({shard.blob for shard in self.state.shards})
        if orphans:
            self.actor.metrics.count_skipped("hidden_states_orphaned", orphans)
            self.actor.log.info("hidden states of a worker that died removed", shards=orphans)

    @contextlib.contextmanager
    def _tidying(self) -> Generator[None]:
        """Shards that a Redis in trouble keeps are collected later, or go with their ttl: not worth the run."""
        try:
            yield
        except BusError as error:
            self.actor.metrics.count_skipped("hidden_states_not_deleted")
            self.actor.log.warning("hidden states not deleted", reason=str(error))

    def _shutdowns(self, reason: str) -> list[Outgoing]:
        slots = range(len(self.state.slots))
        streams = [m.slot_commands(slot, role) for slot in slots for role in ("rollout", "drafter-trainer")]
        return [Outgoing(stream, m.Shutdown(reason=reason)) for stream in [*streams, m.LEARNER_COMMANDS]]

    async def _conclude(self) -> None:
        state = self.state
        for _, message in await self.bus.listen(m.WEIGHTS, "0", block_s=0.0):
            if isinstance(message, m.WeightsPublished):
                state = note_weights(state, message)  # drafters of the last moment count too
        summary = await asyncio.to_thread(self.run_log.summarise, state.trained, state.account, state.evals)
        with self._tidying():
            await asyncio.to_thread(_clear, self.blobs)
        shown = ("steps", "reward_first", "reward_last", "acceptance_length_last", "dead_letters")
        self.actor.log.info("run complete", **{name: round(summary[name], 4) for name in shown})

    # --- what others see ------------------------------------------------------------------------------------

    async def _show(self, *, last: bool = False) -> None:
        now = time.time()
        if now - self.shown_at < _STATUS_S and not last:
            return
        self.shown_at = now
        status = status_of(self.state, self.actor.run_id, now)
        self.actor.metrics.set("requests_outstanding", self.state.outstanding)
        try:
            await self.bus.load_state(STATUS_KEY)
            await self.bus.commit(state_key=STATUS_KEY, state=status.model_dump_json().encode())
        except BusError as error:
            # A picture of the run is not worth the run; what is wrong with Redis shows at the next commit.
            self.actor.metrics.count_skipped("status_not_written")
            self.actor.log.warning("status not written", reason=str(error))

    def _say_waiting(self) -> None:
        """At once when it changes, and every 15 s."""
        whom, (said, at) = waiting_for(self.state, time.time()) or "", self.said
        if whom and (whom != said or time.monotonic() - at > _SAY_AGAIN_S):
            self.actor.log.info(f"waiting for {whom}")
            self.said = (whom, time.monotonic())
        elif not whom:
            self.said = ("", 0.0)


def _clear(blobs: BlobStore) -> None:
    """Shards of an earlier life, or of a run that is over: nobody will ask for them."""
    for name in blobs.names():
        blobs.delete(name)
