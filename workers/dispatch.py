"""Which transfer worker gets which job. Pure bookkeeping, no sockets.

Jobs wait in one queue. A worker may have as many under way as its engine has streams (depth); among the
workers with room the one with the fewest bytes under way is chosen, so that a 1 GiB write does not hold up
small ones. When a worker dies, its jobs go back to the head of the queue: a landing write is idempotent,
since the receiver hands its slot to nobody before it hears the end.
"""

from __future__ import annotations

from collections import deque

from mori_mp.shared.messages import Job


class _Worker:
    __slots__ = ("bytes", "depth", "jobs")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.bytes = 0
        self.jobs: dict[int, tuple[Job, float]] = {}


class Dispatcher:
    """The job queue of one control process; time is monotonic seconds, passed in."""

    def __init__(self) -> None:
        self._queue: deque[Job] = deque()
        self._workers: dict[str, _Worker] = {}
        self._owner: dict[int, str] = {}

    @property
    def queued(self) -> int:
        """Jobs that wait for a worker."""
        return len(self._queue)

    @property
    def under_way(self) -> int:
        """Jobs that a worker has."""
        return len(self._owner)

    def add_worker(self, name: str, depth: int) -> None:
        self._workers[name] = _Worker(max(1, depth))

    def remove_worker(self, name: str) -> list[int]:
        """Take a dead worker's jobs back to the head of the queue; returns their write ids."""
        worker = self._workers.pop(name, None)
        if worker is None:
            return []
        for write_id, (job, _) in reversed(worker.jobs.items()):
            del self._owner[write_id]
            self._queue.appendleft(job)
        return list(worker.jobs)

    def submit(self, job: Job) -> None:
        self._queue.append(job)

    def assign(self, now: float) -> list[tuple[str, Job]]:
        """Hand queued jobs to workers with room."""
        assigned: list[tuple[str, Job]] = []
        while self._queue:
            name = self._roomiest()
            if name is None:
                break
            job = self._queue.popleft()
            worker = self._workers[name]
            worker.jobs[job.write_id] = (job, now)
            worker.bytes += sum(job.sizes)
            self._owner[job.write_id] = name
            assigned.append((name, job))
        return assigned

    def owner(self, write_id: int) -> str | None:
        """Return the worker that has a job; None if none does."""
        return self._owner.get(write_id)

    def done(self, write_id: int) -> bool:
        """Note the end of a job; False if no worker has it (a late answer)."""
        name = self._owner.pop(write_id, None)
        if name is None:
            return False
        job, _ = self._workers[name].jobs.pop(write_id)
        self._workers[name].bytes -= sum(job.sizes)
        return True

    def take_queued(self) -> list[Job]:
        """Empty the queue; for when there are no workers and will be none."""
        jobs = list(self._queue)
        self._queue.clear()
        return jobs

    def overdue(self, now: float, limit: float) -> dict[str, list[int]]:
        """Map each worker to its write ids that have taken over limit seconds (plus 5 s per 100 MB)."""
        late: dict[str, list[int]] = {}
        for name, worker in self._workers.items():
            for write_id, (job, started) in worker.jobs.items():
                if now - started > limit + 5.0 * (sum(job.sizes) // 100_000_000):
                    late.setdefault(name, []).append(write_id)
        return late

    def load(self) -> dict[str, int]:
        """Jobs under way by worker."""
        return {name: len(worker.jobs) for name, worker in self._workers.items()}

    def _roomiest(self) -> str | None:
        best: str | None = None
        least = 0
        for name, worker in self._workers.items():
            if len(worker.jobs) < worker.depth and (best is None or worker.bytes < least):
                best, least = name, worker.bytes
        return best
