"""Keeps ranks together while each writes or reads its own part: none waits for one that gives no sign of life."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.storage import StorageReader

from .._runtime.torch_compat import set_group_timeout
from ..errors import WriteError
from ..writer import TensorizerStorageWriter
from .agreement import RollCall

_TO_SAY_SO = 30.0  # whoever gives a commit up when its time is over has to tell the others

logger = logging.getLogger("dcp_tensorizer")


class Together:
    """Makes the saves and loads of a group wait no longer than its timeout for a rank that gives no sign of life.

    DCP gathers the ranks' results when each has them. A rank that has written its part within seconds waits there for
    the one that takes minutes, and cannot tell it from one that is gone. So a rank that is at work says so now and
    then, in a small collective of the same group, and those that are ready wait there for the next. Only when all are
    ready do they go on to DCP's own.

    Args:
        group: Of the ranks. Nothing else uses it meanwhile.

    Attributes:
        group: Of the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._calls = RollCall(group, "together")
        self._number = 0
        self._failure: str | None = None

    def accompany_saves(self, writer: TensorizerStorageWriter, commit_seconds: float) -> None:
        """Keeps a writer's saves together; the commit alone, of the coordinator, may take so many seconds."""
        begin, write = writer.storage_meta, writer.write_data
        longer = max(self._calls.timeout, timedelta(seconds=commit_seconds + _TO_SAY_SO))

        def storage_meta() -> Any:
            self._begin()
            return begin()

        def write_data(*arguments: Any) -> Any:
            with self._until_all_have("written", longer):
                return write(*arguments)

        vars(writer).update(storage_meta=storage_meta, write_data=write_data)

    def accompany_load(self, reader: StorageReader) -> None:
        """Keeps the next load by this reader together."""
        read = reader.read_data

        def read_data(*arguments: Any) -> Any:
            with self._until_all_have("read"):
                done = read(*arguments)
                done.wait()
                return done

        self._begin()
        vars(reader).update(read_data=read_data)

    def error_of(self, error: RuntimeError, what: str) -> WriteError:
        """The error of a save or a load, of which a collective has failed."""
        failure, self._failure = self._failure, None
        failure = failure or self._calls.explain(self._number, error, "take part in it")
        gone = WriteError(f"{what}: {failure}")
        gone.__cause__ = error
        return gone

    def _begin(self) -> None:
        """Says that this rank has begun a save or a load, which is planned together."""
        set_group_timeout(self.group, self._calls.timeout)  # a commit has left another
        self._number += 1
        self._calls.here(self._number)

    @contextmanager
    def _until_all_have(self, done: str, then: timedelta | None = None) -> Iterator[None]:
        """Goes on when all ranks have come to the end of the block. A rank that fails inside has, too.

        Args:
            done: What they do inside.
            then: The timeout of what they do afterwards, where that is another one.

        Raises:
            WriteError: one of them gives no sign of life.
        """
        is_done, self._failure = threading.Event(), None
        signs = threading.Thread(target=self._give_signs, args=[is_done, done], name="signs-of-life", daemon=True)
        try:
            signs.start()
            is_beside = True
        except RuntimeError:  # the interpreter is ending, and starts no more
            is_beside = False
        try:
            yield
        finally:
            is_done.set()
            if is_beside:
                signs.join()
            else:
                self._give_signs(is_done, done)
            if self._failure is not None:
                raise WriteError(self._failure)
            if then is not None:
                set_group_timeout(self.group, then)

    def _give_signs(self, is_done: threading.Event, done: str) -> None:
        every = self._calls.patience.total_seconds()
        while True:
            self._number += 1
            is_done.wait(every)
            self._calls.here(self._number)
            ready = torch.tensor(int(is_done.is_set()), device="cpu")
            try:
                dist.all_reduce(ready, op=dist.ReduceOp.MIN, group=self.group)
            except RuntimeError as error:
                self._failure = self._calls.explain(self._number, error, f"say whether they have {done} their part")
                logger.error("%s", self._failure)
                return
            if ready.item():
                return
