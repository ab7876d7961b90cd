"""Forks a child for each program that `launch` asks for, until stdin ends: ``server.py ADDRESS PYTHON``.

PYTHON is the command that has it fork one.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import marshal
import multiprocessing
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import types
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

# What the package and its tests use of other people, so that it is there: of torch, what `import torch` leaves out.
_IMPORTED = [
    "torch._dynamo",  # torch imports it when the first tensor is distributed
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "fsspec.implementations.local",
    "isal.igzip",
    "msgspec",
    "multiprocessing.pool",
    "multiprocessing.spawn",
    "numpy",
    "rich.progress",
    "rich.table",
    "tensorizer",
    "typer",
    "xxhash",
]
_STREAMS: list[tuple[str, str, dict[str, Any]]] = [
    ("stdin", "r", {}),
    ("stdout", "w", {}),
    ("stderr", "w", {"errors": "backslashreplace", "buffering": 1}),
]
_MOST = 250  # descriptors in one message
_FREE = 200  # from here on no descriptor that a program is given has its number


class _Request(NamedTuple):
    program: list[str]
    environment: dict[str, str]
    folder: str
    umask: int
    descriptors: list[int]


def serve(address: str) -> _Request | None:
    """Returns what is to be run, in a child that is to run it; None in the server, at its end."""
    with selectors.DefaultSelector() as selector, socket.socket(socket.AF_UNIX) as listening:
        listening.bind("\0" + address)
        listening.listen(64)
        selector.register(listening, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            for key, _ in selector.select():
                if key.fileobj is listening:
                    asking, _ = listening.accept()
                    if (request := _fork(selector, asking)) is not None:
                        return request
                elif key.fileobj is sys.stdin:
                    for child in _children(selector):
                        os.kill(child.pid, signal.SIGKILL)
                    return None
                elif selector.get_map().get(key.fileobj) is key:  # an event before it may have ended it
                    key.data.tell(selector, key.fileobj)


class _Child:
    """A program that runs, and whoever has asked for it."""

    def __init__(self, selector: selectors.BaseSelector, pid: int, asking: socket.socket) -> None:
        self.pid, self._asking, self._pidfd = pid, asking, os.pidfd_open(pid)
        for source in (self._asking, self._pidfd):
            selector.register(source, selectors.EVENT_READ, self)

    def tell(self, selector: selectors.BaseSelector, source: object) -> None:
        """Kills it if its launcher was killed; tells its launcher if it has ended."""
        if source is self._asking:
            selector.unregister(self._asking)
            os.kill(self.pid, signal.SIGKILL)
            return
        _, status = os.waitpid(self.pid, 0)
        selector.unregister(self._pidfd)
        os.close(self._pidfd)
        with suppress(KeyError):
            selector.unregister(self._asking)
        with suppress(OSError):
            self._asking.sendall(_number(os.waitstatus_to_exitcode(status)))
        self._asking.close()

    def close(self) -> None:
        """In another child: it belongs to the server."""
        self._asking.close()
        os.close(self._pidfd)


def _children(selector: selectors.BaseSelector) -> set[_Child]:
    return {key.data for key in selector.get_map().values() if key.data is not None}


def _fork(selector: selectors.BaseSelector, asking: socket.socket) -> _Request | None:
    """Forks a child for a request, which is returned in the child alone."""
    told, descriptors, _, _ = socket.recv_fds(asking, 8, _MOST)
    if len(told) < 8:  # it was killed before it could ask
        asking.close()
        return None
    request = _Request(*marshal.loads(_read(asking, int.from_bytes(told, "big"))))
    pid = os.fork()
    if pid:
        for descriptor in descriptors:
            os.close(descriptor)
        asking.sendall(_number(pid))
        _Child(selector, pid, asking)
        return None
    os.setpgid(0, 0)
    for child in _children(selector):
        child.close()
    asking.close()
    for key in selector.get_map().values():
        if key.data is None and key.fileobj is not sys.stdin:
            key.fileobj.close()  # type: ignore[union-attr]
    selector.close()
    held = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _FREE) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(held, request.descriptors, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    return request


def _number(value: int) -> bytes:
    return value.to_bytes(8, "big", signed=True)


def _read(asking: socket.socket, nbytes: int) -> bytes:
    with asking.makefile("rb") as file:
        return file.read(nbytes)


def run(request: _Request, python: str) -> None:
    """Runs a program as an interpreter does that has just been started for it."""
    os.chdir(request.folder)
    os.umask(request.umask)
    os.environ.clear()
    os.environ.update(request.environment)
    for number, (name, mode, options) in enumerate(_STREAMS):
        stream = open(number, mode, closefd=False, **options)  # noqa: SIM115
        for module_name in (name, f"__{name}__"):
            setattr(sys, module_name, stream)
    importlib.import_module("numpy").random.seed()
    multiprocessing.set_executable(python)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    kind, name, arguments = _taken_apart(request.program)
    first = {"-c": "", "-m": request.folder}.get(kind, os.path.dirname(os.path.abspath(name)))
    sys.path[:1] = [first, *filter(None, request.environment.get("PYTHONPATH", "").split(":"))]
    sys.argv = [kind if kind == "-c" else name, *arguments]
    if kind == "-m":
        runpy._run_module_as_main(name)  # type: ignore[attr-defined]
    elif kind == "-c":
        exec(compile(name, "<string>", "exec"), vars(main))
    else:
        main.__file__ = os.path.abspath(name)  # for processes that it spawns, in any directory
        exec(compile(Path(name).read_bytes(), name, "exec"), vars(main))


def _taken_apart(program: list[str]) -> tuple[str, str, list[str]]:
    """The option before a program, its name or code, and its arguments."""
    return (program[0], program[1], program[2:]) if program[0] in ("-c", "-m") else ("", program[0], program[1:])


def end(error: BaseException | None) -> NoReturn:
    """Ends as an interpreter does after its program, but for taking apart all that it has imported."""
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
    elif error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            code = code or 120
    os._exit(code & 0xFF)


if __name__ == "__main__":
    for library in _IMPORTED:
        importlib.import_module(library)
    gc.collect()
    if (asked := serve(sys.argv[1])) is not None:
        try:
            run(asked, sys.argv[2])
        except BaseException as error:
            end(error)
        end(None)
