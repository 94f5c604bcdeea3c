"""``BatchRunner``: runs the requests of batches, some at a time, and writes their results."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cache.durable_files import sync_path
from server.batches.batch_lines import (
    MOST_LINES,
    BadLine,
    BatchTask,
    LineResponse,
    PlainBody,
    ResultJournal,
    ResultLine,
    body_of,
    encode_result,
    failed_line,
    read_lines,
    result_id,
)
from server.batches.batch_record import BatchFault, BatchRecord, BatchRecords, Ending, Status
from server.batches.inner_request import InnerAnswer
from server.batches.tenant_files import StoredFile, TenantFiles
from server.middleware.auth import KeyAccess

logger = logging.getLogger("warmturn.batches")

AT_ONCE = 16  # requests of all batches together
AGAIN = frozenset({429, 503, 507})  # statuses after which a request is tried again, until its batch expires
QUOTA = b'"insufficient_quota"'  # but not with this code
TRIES = 3  # of a request that the server fails on
LONGEST_WAIT = 60.0  # seconds until a request is tried again
SWEEP_SECONDS = 60.0  # between two looks for what has expired
WRITTEN_TOGETHER = 1000  # results that are known at once

T = TypeVar("T")
Asker = Callable[[str, bytes, KeyAccess, dict[str, str]], Coroutine[Any, Any, InnerAnswer]]
Ready = Callable[[str, str, frozenset[str] | None], Awaitable[None]]


class KeyRevoked(Exception):
    """The key of a batch is not valid any more."""


class RunningBatch:
    """A batch that has a task. ``ending``: how it ends when the task is cancelled; None: it is to be continued."""

    def __init__(self, record: BatchRecord) -> None:
        self.record = record
        self.ending: Ending | None = record.ending
        self.task: asyncio.Task[None] | None = None
        self.tasks: list[BatchTask] = []  # that have no result yet, in their order
        self.journals: tuple[ResultJournal, ResultJournal] | None = None  # of answers, and of errors


class BatchRunner:
    """Runs all batches that are not over, from ``start`` to ``close``. What has a result is not run again, whatever
    ends the server; a request whose result was not written yet is, and one that a session or a stored response keeps is
    then answered from the log, as it has an idempotency key.
    """

    def __init__(
        self, records: BatchRecords, files: TenantFiles, find_key: Callable[[str, str], KeyAccess | None]
    ) -> None:
        """``find_key`` gives what the key of a tenant and of this id gives."""
        self.records = records
        self.files = files
        self._find_key = find_key
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._running: dict[str, RunningBatch] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self._ask: Asker | None = None
        self._ready: Ready | None = None

    def start(self, ask: Asker, ready: Ready) -> None:
        """Go on with the batches that are not over. ``ask`` posts a body; ``ready`` waits until the model that an
        endpoint's request means by a name can be asked without an unload of one that is in use.
        """
        self._ask, self._ready = ask, ready
        self._sweeper = asyncio.create_task(self._sweep())
        for record in self.records.unfinished():
            self._begin(record)

    async def close(self) -> None:
        """End all tasks; what they have not finished goes on at the next start."""
        tasks = [running.task for running in self._running.values() if running.task is not None]
        if self._sweeper is not None:
            tasks.append(self._sweeper)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def create(self, record: BatchRecord) -> None:
        """Store a new batch and begin it. Raises OSError."""
        await asyncio.to_thread(self.records.put, record)
        if self._ask is not None:
            self._begin(record)

    async def cancel(self, record: BatchRecord) -> BatchRecord:
        """Have a batch end without its remaining requests. Returns its record as of now. Raises OSError."""
        running = self._running.get(record.id)
        if running is None or running.ending is not None:
            return record
        running.ending = "cancelled"
        running.record = running.record.to("cancelling", ending="cancelled")
        await asyncio.to_thread(self.records.put, running.record)
        if running.task is not None:
            running.task.cancel()
        return running.record

    # --- one batch --------------------------------------------------------------------------------------------

    def _begin(self, record: BatchRecord) -> None:
        running = self._running[record.id] = RunningBatch(record)
        running.task = asyncio.create_task(self._run(running), name=record.id)
        running.task.add_done_callback(lambda _: self._running.pop(record.id, None))

    async def _run(self, running: RunningBatch) -> None:
        """Run a batch to its end. A failure of the disk is no end: the batch goes on after a while, and at the next
        start.
        """
        while not running.record.is_over:
            try:
                if running.ending is None:
                    running.ending = await self._work(running)
                await unbroken(self._end(running, running.ending))
            except asyncio.CancelledError:  # by ``cancel``, or by ``close``
                if running.ending is None:
                    raise
            except OSError as error:
                logger.error("a batch cannot go on now: %s", error.strerror)
                await asyncio.sleep(LONGEST_WAIT)
            except Exception:
                logger.exception("a batch failed")
                fault = BatchFault("server_error", "The server failed on this batch.")
                running.record = msgspec.structs.replace(running.record, faults=(fault,))
                running.ending = "failed"
            finally:
                self._close_journals(running)

    async def _work(self, running: RunningBatch) -> Ending:
        """Do what is left of a batch; how it ends. Raises OSError."""
        if running.record.expires_at <= time.time():
            await self._open(running)
            return "expired"
        if (fault := await self._open(running)) is not None:
            running.record = msgspec.structs.replace(running.record, faults=(fault,))
            return "failed"
        try:
            async with asyncio.timeout(running.record.expires_at - time.time()):
                await self._run_lines(running)
        except TimeoutError:
            return "expired"
        except KeyRevoked:
            fault = BatchFault("key_revoked", "The API key of this batch is not valid any more.")
            running.record = msgspec.structs.replace(running.record, faults=(fault,))
            return "failed"
        return "completed"

    async def _run_lines(self, running: RunningBatch) -> None:
        """Run all requests without a result. Raises OSError, KeyRevoked."""
        room = asyncio.Semaphore(AT_ONCE)
        try:
            async with asyncio.TaskGroup() as group:
                for task in [*running.tasks]:
                    await room.acquire()
                    group.create_task(self._run_line(running, task)).add_done_callback(lambda _: room.release())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _open(self, running: RunningBatch) -> BatchFault | None:
        """Read the input and the results so far; lines that cannot be run get theirs. Why the batch fails; None: it
        does not. Raises OSError.
        """
        bad, fault = await asyncio.to_thread(self._read, running)
        for some in some_of(bad):
            lines = [failed_line(running.record.id, line.number, line.custom_id, line.code) for line in some]
            await self._write(running, lines, [line.number for line in some], failed=True)
        if fault is None and running.record.status == "validating":
            await self._put(running, "in_progress")
        return fault

    def _read(self, running: RunningBatch) -> tuple[list[BadLine], BatchFault | None]:
        """The bad lines without a result, and why the batch fails. Sets what is known of it. Blocking."""
        record, folder = running.record, self.records.folder
        journals = ResultJournal(folder / f"{record.id}.output"), ResultJournal(folder / f"{record.id}.errors")
        running.journals, running.tasks = journals, []
        done = journals[0].done | journals[1].done
        bad: list[BadLine] = []
        total = 0
        try:
            for line in read_lines(self.files.content(record.input_file), record.endpoint):
                total += 1
                if line.number not in done:
                    (bad if isinstance(line, BadLine) else running.tasks).append(line)  # type: ignore[arg-type]
                if total > MOST_LINES:
                    return [], BatchFault("too_many_lines", f"The file has more than {MOST_LINES} lines.")
        except FileNotFoundError:
            return [], BatchFault("input_file_gone", "The input file is not there any more.", "input_file_id")
        running.record = msgspec.structs.replace(
            record, total=total, completed=len(journals[0].done), failed=len(journals[1].done)
        )
        return bad, None if total else BatchFault("empty_file", "The file has no line.", "input_file_id")

    async def _run_line(self, running: RunningBatch, task: BatchTask) -> None:
        """Run one request until it has a result, and write that. Raises OSError, KeyRevoked."""
        record = running.record
        body = await asyncio.to_thread(body_of, self.files.content(record.input_file), task)
        tries = 0
        while True:
            answer = await self._answer(record, task, body)
            tries += answer.status >= 500 and answer.status not in AGAIN
            if not is_tried_again(answer) and (answer.status < 500 or tries >= TRIES):
                break
            await asyncio.sleep(min(LONGEST_WAIT, max(1.0, answer.retry_after or 2.0**tries)))
        result = ResultLine(
            result_id(record.id, task.number),
            task.custom_id,
            LineResponse(answer.status, answer.request_id, msgspec.Raw(answer.body)),
            None,
        )
        failed = not 200 <= answer.status < 300
        await unbroken(self._write(running, [encode_result(result)], [task.number], failed=failed))

    async def _answer(self, record: BatchRecord, task: BatchTask, body: bytes) -> InnerAnswer:
        """The endpoint's answer, as soon as there is a place for the request."""
        assert self._ask is not None
        assert self._ready is not None
        if (access := self._find_key(record.tenant, record.key)) is None:
            raise KeyRevoked
        name = msgspec.json.decode(body, type=PlainBody).model_name
        await self._ready(record.endpoint, name, access.models)
        async with self._slots:
            headers = {"idempotency-key": f"{record.id}-{task.number}"} if is_kept(record.endpoint, body) else {}
            return await asyncio.create_task(self._ask(record.endpoint, body, access, headers))

    async def _write(self, running: RunningBatch, lines: list[bytes], numbers: list[int], *, failed: bool) -> None:
        """Write results and count them. Raises OSError."""
        assert running.journals is not None
        await asyncio.to_thread(running.journals[failed].append, lines, numbers)
        record = running.record
        counts = {"failed": record.failed + len(lines)} if failed else {"completed": record.completed + len(lines)}
        running.record = msgspec.structs.replace(record, **counts)
        self.records.note(running.record)

    async def _end(self, running: RunningBatch, ending: Ending) -> None:
        """Give a batch its files, and say that it is over. Can be repeated. Raises OSError."""
        if running.journals is None:
            await asyncio.to_thread(self._read, running)
        assert running.journals is not None
        if ending == "expired":
            done = running.journals[0].done | running.journals[1].done
            left = [task for task in running.tasks if task.number not in done]
            for some in some_of(left):
                lines = [failed_line(running.record.id, t.number, t.custom_id, "batch_expired") for t in some]
                await self._write(running, lines, [task.number for task in some], failed=True)
        if running.record.ending is None:
            running.record = msgspec.structs.replace(running.record, ending=ending)
            if ending == "completed":
                running.record = running.record.to("finalizing")
            await asyncio.to_thread(self.records.put, running.record)
        there = await asyncio.to_thread(self._publish, running)
        await self._put(running, ending, has_output=there[0], has_errors=there[1])
        for journal in running.journals:
            journal.path.unlink(missing_ok=True)

    def _publish(self, running: RunningBatch) -> tuple[bool, bool]:
        """Make files of the results; which of both there are. Blocking. Raises OSError."""
        record, now = running.record, int(time.time())
        assert running.journals is not None
        there = []
        for journal, id, name in zip(
            running.journals, (record.output_file, record.error_file), ("output", "error"), strict=True
        ):
            if size := journal.path.stat().st_size:
                put_beside(journal.path, self.files.content(id))
                file = StoredFile(
                    id,
                    record.tenant,
                    size,
                    now,
                    f"{record.id}_{name}.jsonl",
                    "batch_output",
                    now + record.output_seconds,
                )
                self.files.add(file)
            there.append(size > 0)
        return there[0], there[1]

    async def _put(self, running: RunningBatch, status: Status, **changes: object) -> None:
        running.record = running.record.to(status, **changes)
        await asyncio.to_thread(self.records.put, running.record)

    def _close_journals(self, running: RunningBatch) -> None:
        for journal in running.journals or ():
            journal.close()
        running.journals = None

    async def _sweep(self) -> None:
        """Delete what has expired, for as long as this runs."""
        while True:
            try:
                for file in self.files.expired():
                    if not self.records.uses(file.id):
                        await asyncio.to_thread(self.files.delete, file.id)
                await asyncio.to_thread(self.records.forget_old)
            except OSError as error:
                logger.error("expired files cannot be deleted now: %s", error.strerror)
            await asyncio.sleep(SWEEP_SECONDS)


def put_beside(path: Path, other: Path) -> None:
    """Have what is in a durable file in another one too, unless that is there. Raises OSError."""
    if other.exists():
        return
    try:
        os.link(path, other)
    except OSError:  # a file system without links
        shutil.copyfile(path, part := other.with_suffix(".part"))
        os.replace(part, other)
    sync_path(other.parent)


def some_of(lines: Sequence[T]) -> Iterator[Sequence[T]]:
    """The lines, some at a time."""
    return (lines[start : start + WRITTEN_TOGETHER] for start in range(0, len(lines), WRITTEN_TOGETHER))


async def unbroken(work: Coroutine[Any, Any, T]) -> T:
    """Finish ``work`` also when the caller is cancelled meanwhile, which it hears of afterwards."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise


def is_tried_again(answer: InnerAnswer) -> bool:
    """Whether the request may succeed later."""
    if answer.status == 409:
        return answer.retry_after is not None  # its session is busy
    return answer.status in AGAIN and QUOTA not in answer.body


def is_kept(endpoint: str, body: bytes) -> bool:
    """Whether a session or a stored response keeps the request's turn."""
    try:
        asked = msgspec.json.decode(body, type=dict[str, object])
    except msgspec.DecodeError:
        return False  # it will be refused
    if endpoint == "/v1/responses":
        return asked.get("store") is not False
    return asked.get("session_id") is not None or bool(asked.get("store"))
