"""A ``python`` that has its program run by a fork of the server: ``launch.py ADDRESS PYTHON [OPTION]... PROGRAM``.

It takes milliseconds, and so imports only what is built in, or is a single library.
"""

import _socket
import array
import marshal
import os
import signal
import sys

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main(address, python, *arguments):
    if (program := _program(arguments)) is None:
        os.execv(python, [python, *arguments])
    umask = os.umask(0)
    os.umask(umask)
    descriptors = _descriptors()
    server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    server.connect("\0" + address)
    request = marshal.dumps((program, dict(os.environ), os.getcwd(), umask, descriptors))
    told = len(request).to_bytes(8, "big")
    server.sendmsg([told], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", descriptors))])
    server.sendall(request)
    for descriptor in descriptors:  # whoever waits for their end waits for the child
        if descriptor > 2:
            os.close(descriptor)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nothing, descriptor)
    child = _number(server)
    for number in _FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: os.kill(child, number))
    code = _number(server)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def _program(arguments):
    """The program and its arguments, without options that change nothing here; None if there are others."""
    words = list(arguments)
    while words:
        if words[0] in ("-u", "-B", "-Wignore"):
            del words[0]
        elif words[:2] == ["-W", "ignore"]:
            del words[:2]
        elif words[0] in ("-c", "-m") or not words[0].startswith("-"):
            return words
        else:
            return None
    return None


def _descriptors():
    """All that a new program would inherit."""
    found = [int(name) for name in os.listdir("/proc/self/fd")]
    return [number for number in found if number < 3 or _is_inherited(number)]


def _is_inherited(number):
    try:
        return os.get_inheritable(number)
    except OSError:
        return False  # the one that listed them


def _number(server):
    told = server.recv(8, _socket.MSG_WAITALL)
    if len(told) < 8:
        sys.exit("the server of warm interpreters has ended")
    return int.from_bytes(told, "big", signed=True)


main(*sys.argv[1:])
