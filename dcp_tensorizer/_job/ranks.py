"""Collective decisions of a job's ranks, and heartbeats, which distinguish slow ranks from dead ones."""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from .._runtime.ranks import is_distributed
from .._runtime.threads import in_background
from .._runtime.torch_compat import group_store, group_timeout, new_gloo_group, set_group_timeout
from .._saving.saver import Saver
from ..errors import CheckpointError, WriteError, describe, listed_ranks
from ..reader import TensorizerStorageReader

logger = logging.getLogger("dcp_tensorizer")

_T = TypeVar("_T")
_VALUES_SHOWN = 3


class OwnGroup:
    """Separate gloo group of the ranks of ``like`` (None: all ranks), with the timeout of ``like``.

    gloo's own default is 30 minutes. All of these ranks must make their groups in the same order.

    Raises `WriteError` if a rank is gone.
    """

    def __init__(self, like: dist.ProcessGroup | None = None) -> None:
        world = dist.group.WORLD
        assert world is not None
        timeout = group_timeout(like or world)
        try:
            self._made: dist.ProcessGroup | None = (
                dist.new_group(timeout=timeout, backend="gloo") if like is None else new_gloo_group(like, timeout)
            )
        except RuntimeError as error:
            raise WriteError(
                f"the ranks could not make a process group for saves: another rank has ended or does not respond, "
                f"perhaps because the same call has raised an error there. {error}"
            ) from error

    @property
    def group(self) -> dist.ProcessGroup:
        """Returns the group. Raises `WriteError` after `destroy`."""
        if self._made is None:
            raise WriteError("the manager is closed, and its process group is destroyed")
        return self._made

    def destroy(self) -> None:
        """Destroys the group, which ends its threads. Idempotent. No collective may be in progress.

        The ranks need not wait for each other, because messages that a rank has sent still arrive.
        """
        made, self._made = self._made, None
        if made is not None:
            with suppress(ValueError):  # torch has destroyed all groups already
                dist.destroy_process_group(made)


def make_groups(process_group: dist.ProcessGroup | None) -> tuple[OwnGroup | None, OwnGroup | None]:
    """Makes two groups of the ranks of ``process_group`` (None: all ranks): one for `Heartbeats`, one for `Agreement`.

    Two groups are needed, because the collectives of saves run on another thread. If torch.distributed is not
    initialised, returns None for both, or raises `ValueError` if ``process_group`` is given.
    """
    if not is_distributed():
        if process_group is not None:
            raise ValueError("process_group needs torch.distributed, which is not initialised. Initialise it first.")
        return None, None
    return OwnGroup(process_group), OwnGroup(process_group)


class Agreement:
    """Collective decisions of the ranks of ``group`` (None: this rank alone).

    All ranks make the same calls. ``rank`` and ``size`` are those of the group. After `close` has destroyed the
    group, the collective methods raise `WriteError`.
    """

    def __init__(self, group: OwnGroup | None) -> None:
        self._group = group
        self._calls = None if group is None else RollCall(group.group, "agreement")
        self.rank = 0 if group is None else group.group.rank()
        self.size = 1 if group is None else group.group.size()
        self._work: dist.Work | None = None  # the last all-reduce
        self._number = 0

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """Returns whether this rank decides."""
        return self.rank == 0

    def largest(self, *numbers: int) -> list[int]:
        """Returns the maximum over all ranks, for each number. Raises `WriteError` if a rank is gone."""
        if self._group is None or self._calls is None:
            return list(numbers)
        self._number += 1
        tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        try:
            self._work = work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group.group, async_op=True)
            assert work is not None
            try:
                work.wait(self._calls.pause)
            except RuntimeError:
                if work.is_completed():
                    raise
                # Recorded only after a failed wait, because this method runs at each step of training.
                self._calls.here(self._number)
                work.wait()
        except RuntimeError as error:
            raise self._gone(error) from error
        return cast("list[int]", tensor.tolist())

    def gathered(self, own: _T) -> list[_T]:
        """Gathers the values of all ranks, in rank order. Raises `WriteError` if a rank is gone."""
        if self._group is None:
            return [own]
        self._come()
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, own, group=self._group.group)
        except RuntimeError as error:
            raise self._gone(error) from error
        return values

    def check_same(self, options: Mapping[str, object]) -> None:
        """Raises `ValueError` on all ranks unless the reprs of the options are the same on all ranks."""
        texts = {name: repr(value) for name, value in options.items()}
        digest = int.from_bytes(hashlib.blake2b(repr(texts).encode(), digest_size=7).digest(), "big")
        largest, smallest = self.largest(digest, -digest)
        if largest == -smallest:
            return
        assert self._group is not None, "a rank alone agrees with itself"
        ranks: dict[str, dict[str, list[int]]] = {name: {} for name in texts}
        for rank, of_rank in enumerate(self.gathered(texts)):
            for name, text in of_rank.items():
                ranks[name].setdefault(text, []).append(dist.get_global_rank(self._group.group, rank))
        name, values = next((name, values) for name, values in ranks.items() if len(values) > 1)
        shown = [
            f"{text} on rank{'s' if len(those) > 1 else ''} {listed_ranks(those)}" for text, those in values.items()
        ]
        more = ", and something else on other ranks" if len(shown) > _VALUES_SHOWN else ""
        raise ValueError(
            f"the managers of the ranks differ: {name} is {', '.join(shown[:_VALUES_SHOWN])}{more}. Pass the same "
            f"value on every rank."
        )

    def decided(self, decide: Callable[[], _T]) -> _T:
        """Sends the first rank's decision to all ranks. Only the first rank calls ``decide``.

        An error in ``decide`` is raised on every rank of the group, as a `CheckpointError`; without a group, unchanged.
        Raises `WriteError` if a rank is gone.
        """
        self._come()
        outcome: list[Any] = [None, None]
        if self.is_first:
            try:
                outcome = [decide(), None]
            except Exception as error:
                if self._group is None:
                    raise
                outcome = [None, error if isinstance(error, CheckpointError) else CheckpointError(describe(error))]
        if self._group is not None:
            group = self._group.group
            first = dist.get_global_rank(group, 0)
            try:
                dist.broadcast_object_list(outcome, src=first, group=group, device=torch.device("cpu"))
            except RuntimeError as error:
                raise self._gone(error) from error
        result, failure = outcome
        if failure is not None:
            raise failure
        return cast("_T", result)

    def close(self) -> None:
        """Destroys the group. If a collective is still in progress, leaves the group as it is, and does not wait.

        A collective is in progress if a signal handler that has interrupted it calls this method.
        """
        if self._group is not None and (self._work is None or self._work.is_completed()):
            self._work = None  # a reference to it would keep a thread alive
            self._group.destroy()

    def _come(self) -> None:
        """Records that this rank has reached the next collective."""
        if self._calls is not None:
            self._number += 1
            self._calls.here(self._number)

    def _gone(self, error: RuntimeError) -> WriteError:
        assert self._calls is not None
        what = "make the same call to the manager"
        return WriteError(f"the ranks could not agree: {self._calls.explain(self._number, error, what)}")


# --- naming the ranks that a collective waits for ---------------------------------------------------------------------

_REPORT_SECONDS = 2.0  # timeout for the reports of other ranks
_STORE_SECONDS = 5.0  # timeout for the store: a request to an unreachable host would never end
_CLOSED = "pair closure"  # gloo's error in a group in which an earlier collective has timed out


class RollCall:
    """Record, in a group's store, of the last collective that each rank has reached: it shows which ranks are absent.

    Each rank counts its collectives of the kind ``name``. When it reaches one, it writes the count to the store
    (`here`). For frequent collectives, the rank writes only after a wait of ``pause``, a tenth of ``timeout``.
    """

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self._rank, self._ranks = group.rank(), dist.get_process_group_ranks(group)
        self._store = PrefixStore(f"dcp_tensorizer/{name}", group_store(group))
        self.timeout = group_timeout(group)
        self.pause = self.timeout / 10

    def here(self, number: int) -> None:
        with suppress(RuntimeError):  # if the store's host is gone, the collective fails as well, with the reason
            self._store.set(str(self._rank), str(number))

    def explain(self, number: int, error: BaseException, what: str) -> str:
        """Describes a failed collective, in which this rank waited for the others to do ``what``.

        After a timeout, names the ranks that are absent or do not respond.
        """
        who = f"rank {self._ranks[self._rank]}"
        if _CLOSED in str(error):
            return f"{who}: the ranks went out of sync in an earlier step. Restart the job."
        words = str(error).partition(" This is typically caused")[0]  # the rest of torch's text is general advice
        if "timed out" not in words.lower():
            return f"{who} waited for the others to {what}: another rank has ended, or has made other calls. {words}"
        seconds = f"{self.timeout.total_seconds():g} s, the timeout of its process group,"
        waited = f"{who} has waited {seconds} for the others to {what}"
        finding = in_background(lambda: self._missing(number), name="roll-call", daemon=True)
        try:
            absent, silent = finding.result(_STORE_SECONDS)
        except (FutureTimeout, RuntimeError):
            return f"{waited}. The job's store does not respond either: this host is cut off, or the store is down"
        if absent:
            return f"{waited}. {_have(absent)} not arrived: stopped, busy, or cut off"
        if silent:
            return f"{waited}. {_have(silent)} arrived, but not responded since: stopped, or cut off"
        return f"{waited}. All of them have arrived, so the network between them may be down. {words}"

    def _missing(self, number: int) -> tuple[list[int], list[int]]:
        """Returns the ranks that have not reached the collective, and those that have not reported their own timeout.

        Waits a short time for their reports.
        """
        self.here(number)
        self._store.set(f"{self._rank}-gave-up", str(number))
        others = [rank for rank in range(len(self._ranks)) if rank != self._rank]
        end = time.monotonic() + min(_REPORT_SECONDS, self.pause.total_seconds())
        while True:
            silent = [rank for rank in others if not self._has(f"{rank}-gave-up", number)]
            absent = [rank for rank in silent if not self._has(str(rank), number)]
            if not silent or time.monotonic() > end:
                return [self._ranks[rank] for rank in absent], [self._ranks[rank] for rank in silent]
            time.sleep(0.05)

    def _has(self, key: str, number: int) -> bool:
        return self._store.check([key]) and int(self._store.get(key)) >= number


def _have(ranks: list[int]) -> str:
    return f"Rank {ranks[0]} has" if len(ranks) == 1 else f"Ranks {listed_ranks(ranks)} have"


# --- heartbeats of ranks while each writes or reads its own part -----------------------------------------------------

_ERROR_SECONDS = 30.0  # extra time in which the coordinator reports to the other ranks that a commit timed out


class Heartbeats:
    """Heartbeats of slow ranks during saves, loads and publications.

    Except during a commit, a save or load waits for a silent rank no longer than the group's timeout, and for a slow
    rank without a limit.

    DCP gathers the results of all ranks in a collective. A rank that has written its part within seconds waits there
    for a rank that takes minutes, and cannot distinguish it from a dead rank. So before DCP's collective, a small
    collective of the same group runs repeatedly: busy ranks join it at intervals, and ready ranks wait in it. When all
    ranks are ready, they enter DCP's collective. Nothing else may use ``group`` while heartbeats run. Without a group,
    this rank is alone, and sends no heartbeats.
    """

    def __init__(self, group: OwnGroup | None) -> None:
        self._group = group
        self._calls = None if group is None else RollCall(group.group, "heartbeats")
        self._number = 0
        self._failure: str | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Returns the group, or None if this rank is alone. Raises `WriteError` after `close`."""
        return None if self._group is None else self._group.group

    def close(self) -> None:
        """Destroys the group. No save or load may be in progress."""
        if self._group is not None:
            self._group.destroy()

    def watch_saves(self, saver: Saver) -> None:
        """Sends heartbeats in each save of a writer."""
        if (calls := self._calls) is None:
            return
        commit = timedelta(seconds=saver.options.limits.timeout + _ERROR_SECONDS)
        saver.before_save = lambda: self._start(calls)
        saver.around_write = lambda: self._until_all_have("written", calls, max(calls.timeout, commit))

    def watch_load(self, reader: TensorizerStorageReader) -> None:
        """Sends heartbeats in the next load by this reader."""
        if (calls := self._calls) is not None:
            self._start(calls)
            reader.around_read = lambda: self._until_all_have("read", calls)

    @contextmanager
    def watch(self, done: str) -> Iterator[None]:
        """Sends heartbeats during the ``with`` block, for work between saves that may take longer on one rank.

        ``done`` as in `_until_all_have`.
        """
        if (calls := self._calls) is None:
            yield
            return
        self._start(calls)
        with self._until_all_have(done, calls):
            yield

    def error_of(self, error: BaseException, what: str) -> WriteError | None:
        """Returns the error to raise if a collective of a save or load failed, or None for other kinds of ``error``."""
        is_of_ranks = isinstance(error, RuntimeError) and re.search(rf"gloo/|{_CLOSED}", str(error)) is not None
        if self._calls is None or not is_of_ranks:
            return None
        failure, self._failure = self._failure, None
        failure = failure or self._calls.explain(self._number, error, "take part in this operation")
        gone = WriteError(f"{what}: {failure}")
        gone.__cause__ = error
        return gone

    def _start(self, calls: RollCall) -> None:
        assert self.group is not None
        set_group_timeout(self.group, calls.timeout)  # a commit sets a longer timeout
        self._number += 1
        calls.here(self._number)

    @contextmanager
    def _until_all_have(self, done: str, calls: RollCall, then: timedelta | None = None) -> Iterator[None]:
        """Waits at the end of the ``with`` block until all ranks have reached its end, or have failed inside it.

        ``done`` is the work of the block, as a participle for messages. ``then`` is the group's timeout afterwards;
        None: unchanged. Raises `WriteError` if a rank is unresponsive.
        """
        is_done, self._failure = threading.Event(), None
        arguments = (is_done, done, calls)
        beats = threading.Thread(target=self._beat, args=arguments, name="heartbeats", daemon=True)
        try:
            beats.start()
            has_thread = True
        except RuntimeError:  # the interpreter is shutting down, and starts no more threads
            has_thread = False
        try:
            yield
        finally:
            is_done.set()
            if has_thread:
                beats.join()
            else:
                self._beat(*arguments)
            if self._failure is not None:
                raise WriteError(self._failure)
            if then is not None:
                assert self.group is not None
                set_group_timeout(self.group, then)

    def _beat(self, is_done: threading.Event, done: str, calls: RollCall) -> None:
        every = calls.pause.total_seconds()
        while True:
            self._number += 1
            is_done.wait(every)
            calls.here(self._number)
            ready = torch.tensor(int(is_done.is_set()), device="cpu")
            try:
                dist.all_reduce(ready, op=dist.ReduceOp.MIN, group=self.group)
            except RuntimeError as error:
                self._failure = calls.explain(self._number, error, f"report whether they have {done} their part")
                logger.error("%s", self._failure)
                return
            if ready.item():
                return
