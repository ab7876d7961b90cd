"""How the interpreter of the writer process is started: with the trainer's modules, and none of its surprises.

It finds the modules that the trainer finds, because its messages are pickles, and a storage may need a plugin. But a
``queue.py`` among the trainer's scripts must not take the place of the standard library's. So nothing of the trainer's
``sys.path`` is in front of the standard library, whatever is in PYTHONPATH or the working directory.
"""

from __future__ import annotations

import os
import sys

from .. import _process_context

__all__ = ["OWN_VARIABLES", "environment", "interpreter"]

_PATH = "DCP_TENSORIZER_PATH"
_GPUS = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "")  # no context, no GPU memory
_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")

OWN_VARIABLES = frozenset({*_GPUS, *_THREADS, "PYTHONPATH"})
"""The environment variables that a process of this package does not take from its trainer."""

# With -S the path is the standard library alone, and with -c a first entry for the working directory, which is not
# there under PYTHONSAFEPATH and before Python 3.11 cannot be switched off. Only then come the installed packages (site)
# and what the trainer has. A zip file or an archive of an editable install is found as any other entry.
_START = f"""
import sys
sys.path[:] = library = [entry for entry in sys.path if entry]
import os, site
try:
    os.getcwd()
except OSError:
    os.chdir("/")
site.main()
given = os.environ.pop({_PATH!r}).split(os.pathsep)
sys.path[:] = library + [entry for entry in dict.fromkeys(given + sys.path) if entry and entry not in library]
from importlib import import_module
import_module(sys.argv[1]).main(sys.argv[2:])
"""

# What the writer process imports, apart from what a storage needs.
_NEEDED = (__name__.partition(".")[0], "fsspec", "isal", "numpy", "torch", "xxhash")


def interpreter() -> list[str]:
    """The beginning of a command. A module, whose ``main`` is called, and its arguments follow."""
    flags = {"-E": sys.flags.ignore_environment, "-s": sys.flags.no_user_site}
    as_here = [flag for flag, is_set in flags.items() if is_set]
    names_of_files = f"utf8={int(sys.flags.utf8_mode)}"
    return [sys.executable, *as_here, "-X", names_of_files, "-W", "ignore", "-S", "-c", _START]


def environment(devices: bool) -> dict[str, str]:
    """The trainer's environment, less its GPUs unless they are to be used, and the way to its modules."""
    given = {name: value for name, value in _process_context.environment().items() if name != "PYTHONPATH"}
    return given | ({} if devices else _GPUS) | _THREADS | {_PATH: os.pathsep.join(_module_path())}


def _module_path() -> list[str]:
    """The trainer's ``sys.path``, in its order, but first of all where the modules that are needed were found.

    Otherwise an entry that the trainer has put in front since it imported them could replace them.
    """
    entries = [entry for entry in sys.path if isinstance(entry, str)]
    try:
        entries = [os.path.abspath(entry) for entry in entries]
    except FileNotFoundError:  # the working directory has been removed, and what is relative to it leads nowhere
        entries = [entry for entry in entries if os.path.isabs(entry)]
    homes = {_home(name) for name in _NEEDED if getattr(sys.modules.get(name), "__file__", None)}
    return sorted(dict.fromkeys([*entries, *sorted(homes)]), key=lambda entry: entry not in homes)


def _home(package: str) -> str:
    """The entry of ``sys.path`` that a package was found in."""
    return os.path.dirname(os.path.dirname(os.path.abspath(str(sys.modules[package].__file__))))
