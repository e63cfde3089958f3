"""A run in virtual time around the scheduler's core: workers that crash, messages that come late, twice or
reordered.

The world keeps what the bus promises (work at least once, one result a request, commands in order) and
nothing more. It checks the invariants of design section 5 while it goes; `World(seed).run()` ends, or says
why it can't.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque

from tests.unit.scheduling_checks import check_state
from tests.unit.scheduling_parts import (
    DEADLINE_S,
    LEASE_S,
    MAX_ATTEMPTS,
    TIMEOUT_S,
    Clock,
    Request,
    Rollout,
    Trainer,
    heartbeat,
    letter,
    random_settings,
    shard,
    stamp,
    weights,
)
from tlt_pipeline import messages as m
from tlt_pipeline.scheduling import events as e
from tlt_pipeline.scheduling.decisions import decide
from tlt_pipeline.scheduling.ids import RequestId
from tlt_pipeline.scheduling.records import StepRecord
from tlt_pipeline.scheduling.state import Settings, State, from_bytes, initial_state, to_bytes


class World(Clock):
    def __init__(self, seed: int, settings: Settings | None = None, trouble: float = 1.0) -> None:
        super().__init__(seed, trouble)
        self.settings = settings or random_settings(self.random)
        self.state: State = initial_state(self.settings, self.now)
        self.saved = self.state
        self.scheduler_up = True
        self.mail: list[e.Event] = []
        self.requests: dict[str, Request] = {}
        self.queue: deque[str] = deque()
        self.batches: set[frozenset[str]] = set()
        self.trained: Counter[str] = Counter()
        self.buried: set[str] = set()
        self.published = 0
        self.records: list[StepRecord] = []
        self.leases = [0] * self.settings.slots
        self.rollouts = [Rollout(slot) for slot in range(self.settings.slots)]
        self.trainers = [Trainer(slot) for slot in range(self.settings.slots)]
        self.shards = 0
        self.finished = False
        self.failed: str | None = None
        self.seen: Counter[str] = Counter()

    # --- time -----------------------------------------------------------------------------------------------

    def run(self, limit_s: float = 2000.0) -> World:
        for worker in self.rollouts:
            self.later(self.random.uniform(0, 3), lambda w=worker: self.start_rollout(w))
        for trainer in self.trainers:
            self.later(self.random.uniform(0, 5), lambda t=trainer: self.start_trainer(t))
        self.later(self.random.uniform(0, 3), lambda: self.tell(weights("policy", 0)))
        self.later(0.25, self.tick)
        self.later(1.0, self.beat)
        while not self.finished and self.failed is None:
            at, _, action = heapq.heappop(self.agenda)
            assert at < 1000.0 + limit_s, f"no progress: {self.state}"
            self.now = at
            action()
        return self

    def tick(self) -> None:
        self.later(0.25, self.tick)
        if self.scheduler_up and self.chance(0.003):
            self.crash_scheduler()
        if self.scheduler_up:
            self.hear(e.Tick())

    def beat(self) -> None:
        self.later(1.0, self.beat)
        for worker in self.rollouts:
            if worker.up:
                self.tell(heartbeat("rollout", worker.slot, worker.lease, self.now))
                if self.chance(0.03):
                    self.crash_rollout(worker)
        for trainer in self.trainers:
            if trainer.up:
                self.tell(heartbeat("drafter-trainer", trainer.slot, trainer.lease, self.now))
                if self.chance(0.03):
                    self.crash_trainer(trainer)

    # --- messages to the scheduler --------------------------------------------------------------------------

    def tell(self, event: e.Event) -> None:
        """Arrives once, sooner or later; sometimes twice."""
        for _ in range(2 if self.chance(0.05) else 1):
            slow = self.random.uniform(0, 2) if self.chance(0.2) else self.random.uniform(0, 0.02)
            self.later(slow, lambda: self.hear(event))

    def hear(self, event: e.Event) -> None:
        if not self.scheduler_up:
            self.mail.append(event)
            return
        before = self.state.account
        self.state, commands = decide(self.state, event, self.now)
        check_state(self, before)
        if commands or not isinstance(event, e.Tick):
            self.saved = self.state
        for command in commands:
            self.obey(command)

    def crash_scheduler(self) -> None:
        self.scheduler_up = False
        self.seen["scheduler_crash"] += 1
        self.later(self.random.uniform(0, 2 * TIMEOUT_S), self.restart_scheduler)

    def restart_scheduler(self) -> None:
        self.scheduler_up, self.state = True, from_bytes(to_bytes(self.saved))
        mail, self.mail = self.mail, []
        for event in [e.Restarted(), *mail]:
            self.hear(event)

    # --- commands of the scheduler --------------------------------------------------------------------------

    def obey(self, command: e.Command) -> None:
        match command:
            case e.SubmitStep():
                self.submit(command)
            case e.GrantLease():
                self.grant(command)
            case e.RecallLease():
                trainer = self.trainers[command.slot]
                trainer.commands.append(command)
                self.later(0.01, lambda: self.wake_trainer(trainer))
            case e.AssignShards():
                slot = self.state.slots[command.slot]
                assert slot.holder == "drafter" and slot.lease == command.lease and command.bodies
            case e.SendTrainStep():
                self.train(command)
            case e.RecordStep():
                self.records.append(command.record)
            case e.Finish():
                self.finished = True
            case e.Fail():
                self.failed = command.reason
            case e.DropShards():
                self.seen[command.reason] += len(command.blobs)
            case e.Note():
                self.seen[command.text] += 1

    def submit(self, order: e.SubmitStep) -> None:
        assert order.policy_version <= self.published
        if order.purpose == "train":
            assert 0 <= order.step - order.policy_version <= self.settings.max_staleness
        for prompt, index in itertools.product(range(order.prompts), range(order.group_size)):
            name = str(RequestId(order.purpose, order.step, prompt, index))
            assert name not in self.requests, "admitted twice"
            self.requests[name] = Request(order.policy_version)
            self.queue.append(name)

    def grant(self, grant: e.GrantLease) -> None:
        # Presumed dead is not dead: only where there is trouble may two overlap.
        assert grant.lease > self.leases[grant.slot], "lease numbers grow"
        self.leases[grant.slot] = grant.lease
        rollout, trainer = self.rollouts[grant.slot], self.trainers[grant.slot]
        if grant.holder == "rollout":
            overdue = trainer.recalled_at is not None and self.now - trainer.recalled_at > DEADLINE_S / 2
            assert not trainer.lease or overdue or self.trouble, "trains while rollout has the slot"
            rollout.commands.append(grant)
            self.later(0.01, lambda: self.wake_rollout(rollout))
        else:
            assert not (rollout.up and rollout.running) or self.trouble, "decodes while the drafter has the slot"
            trainer.commands.append(grant)
            self.later(0.01, lambda: self.wake_trainer(trainer))

    def train(self, order: e.SendTrainStep) -> None:
        assert order.step == self.published, "steps are trained in order, each on the version before"
        for name in order.request_ids:
            self.trained[name] += 1
            request = self.requests[name]
            assert request.settled and name not in self.buried
            assert order.step - request.version <= self.settings.max_staleness, "too stale"
        assert order.request_ids and list(order.request_ids) == sorted(order.request_ids)
        if self.settings.colocated:
            assert all(slot.holder == "learner" for slot in self.state.slots)
        self.later(self.random.uniform(0.1, 3), lambda: self.end_training(order))

    def end_training(self, order: e.SendTrainStep) -> None:
        if self.chance(0.1):  # the learner crashed and does it again
            self.later(self.random.uniform(1, 5), lambda: self.end_training(order))
            return
        self.published = order.step + 1
        facts = {"trained": len(order.request_ids), "learner_s": 0.1, "policy_version": order.step + 1}
        self.tell(weights("policy", order.step + 1))
        self.tell(m.StepTrained(step=order.step, **facts, **stamp("learner", -1, self.now)))

    # --- rollout workers ------------------------------------------------------------------------------------

    def start_rollout(self, worker: Rollout) -> None:
        worker.up, worker.life = True, worker.life + 1
        self.tell(m.WorkerStarted(role="rollout", **stamp("rollout", worker.slot, self.now)))
        self.wake_rollout(worker)

    def crash_rollout(self, worker: Rollout) -> None:
        self.seen["rollout_crash"] += 1
        worker.up, worker.lease, worker.running = False, 0, set()
        self.later(self.random.choice([0.5, 3 * TIMEOUT_S]), lambda: self.start_rollout(worker))

    def wake_rollout(self, worker: Rollout) -> None:
        while worker.up and worker.commands:
            worker.lease = worker.commands.popleft().lease
            self.take([n for n, r in self.requests.items() if r.owner == f"r{worker.slot}" and not r.settled], worker)
            self.pull(worker)

    def pull(self, worker: Rollout) -> None:
        while worker.lease and len(worker.running) < 2:
            if self.queue:
                self.take([self.queue.popleft()], worker)
                continue
            stuck = [n for n, r in self.requests.items() if not r.settled and r.owner and self.stale(n, r)]
            if not stuck:
                break
            self.take(stuck[:1], worker)
        if worker.lease and not worker.running:
            lease, worker.lease = worker.lease, 0
            self.tell(m.WorkerIdle(lease=lease, **stamp("rollout", worker.slot, self.now)))

    def stale(self, name: str, request: Request) -> bool:
        held = any(name in worker.running for worker in self.rollouts if worker.up)
        return not held and self.now - request.owned_at > LEASE_S

    def take(self, names: list[str], worker: Rollout) -> None:
        for name in names:
            request = self.requests[name]
            if name in worker.running:
                continue
            request.attempts, request.owner, request.owned_at = request.attempts + 1, f"r{worker.slot}", self.now
            if request.attempts > MAX_ATTEMPTS or self.chance(0.004):
                request.settled = True
                self.buried.add(name)
                self.tell(letter(name))
                continue
            worker.running.add(name)
            seconds = self.random.expovariate(1 / 2.0)
            self.later(seconds, lambda n=name, life=worker.life: self.complete(n, worker, life))

    def complete(self, name: str, worker: Rollout, life: int) -> None:
        if not worker.up or worker.life != life or name not in worker.running:
            return
        worker.running.discard(name)
        request = self.requests[name]
        assert not request.settled
        request.settled = True
        tokens = self.random.randint(1, 50)
        self.tell(e.CompletionSeen(name, request.version, self.random.random(), tokens, tokens // 2, tokens // 3))
        if self.random.random() < 0.5:
            self.shards += 1
            size, held_out = self.random.randint(1, 10), self.random.random() < 0.2
            self.tell(shard(self.shards, request.version, size, held_out=held_out))
        self.pull(worker)

    # --- drafter trainers -----------------------------------------------------------------------------------

    def start_trainer(self, trainer: Trainer) -> None:
        trainer.up, trainer.life = True, trainer.life + 1
        self.tell(m.WorkerStarted(role="drafter-trainer", **stamp("drafter-trainer", trainer.slot, self.now)))
        self.wake_trainer(trainer)

    def crash_trainer(self, trainer: Trainer) -> None:
        self.seen["trainer_crash"] += 1
        trainer.up, trainer.lease = False, 0
        self.later(self.random.choice([0.5, 3 * TIMEOUT_S]), lambda: self.start_trainer(trainer))

    def wake_trainer(self, trainer: Trainer) -> None:
        while trainer.up and trainer.commands:
            command = trainer.commands.popleft()
            if isinstance(command, e.GrantLease):
                trainer.lease, trainer.since, trainer.recalled_at = command.lease, self.now, None
                if self.chance(0.1):
                    reason = self.random.choice(["no_data", "budget", "error: out of memory"])
                    self.later(0.3, lambda n=command.lease, why=reason: self.give_back(trainer, n, why))
            elif command.lease == trainer.lease:
                trainer.recalled_at = self.now
                wait = self.random.uniform(0, 3 * DEADLINE_S) if self.chance(0.2) else 0.1
                self.later(wait, lambda n=command.lease: self.give_back(trainer, n, "recalled"))

    def give_back(self, trainer: Trainer, lease: int, reason: str) -> None:
        if not trainer.up or trainer.lease != lease:
            return
        trainer.lease = 0
        trained_s = (self.now - trainer.since) * self.random.choice([0.5, 1.0, 1.5])
        facts = {"seconds": 0.1, "trained_s": trained_s, "tokens_trained": 10, "reason": reason}
        if self.random.random() < 0.5:
            self.shards += 1
            self.tell(weights("drafter", self.shards))
        self.tell(m.WorkerYielded(lease=lease, **facts, **stamp("drafter-trainer", trainer.slot, self.now)))
