"""What `dcp_tensorizer.run` does, kept out of the namespace that it gives to the script."""

from __future__ import annotations

import importlib.util
import os
import sys
from types import CodeType
from typing import Any

__all__ = ["run"]

_USAGE = "usage: python -m dcp_tensorizer.run SCRIPT [ARGUMENT ...], or -m MODULE [ARGUMENT ...]"
# They tell the processes that the script spawns what to run.
_SCRIPT = "DCP_TENSORIZER_RUN_SCRIPT"
_MODULE = "DCP_TENSORIZER_RUN_MODULE"


def run(namespace: dict[str, Any]) -> None:
    """Installs, and runs what the command line names in the namespace of the main module.

    That keeps its name and its ``__spec__``. So a process that the script spawns, which imports the main module again,
    comes here as well.
    """
    if namespace["__name__"] == "__main__":
        _take_arguments()
    module = os.environ.get(_MODULE)
    code, more = _module(module) if module else _script(os.environ[_SCRIPT])
    sys.argv[0] = more["__file__"]

    from ._install import install  # not before: what is wrong with the arguments is said without torch

    install()
    kept = {name: namespace[name] for name in ("__name__", "__spec__", "__builtins__")}
    namespace.clear()
    namespace.update(kept, **more)
    exec(code, namespace)


def _take_arguments() -> None:
    """Makes the arguments and the search path those of the script."""
    arguments = sys.argv[1:]
    is_module = arguments[:1] == ["-m"]
    arguments = arguments[1:] if is_module else arguments
    if not arguments or arguments[0].startswith("-"):
        raise SystemExit(_USAGE)
    os.environ.pop(_MODULE, None)  # of one that has run this one
    sys.argv = arguments
    if is_module:
        sys.path[0] = os.getcwd()
        os.environ[_MODULE] = arguments[0]
    else:
        os.environ[_SCRIPT] = os.path.abspath(arguments[0])
        sys.path[0] = os.path.dirname(os.environ[_SCRIPT])


def _script(path: str) -> tuple[CodeType, dict[str, Any]]:
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        raise SystemExit(f"dcp_tensorizer.run: {path} cannot be read: {error}\n{_USAGE}") from None
    return compile(source, path, "exec", dont_inherit=True), {"__file__": path, "__package__": None}


def _module(name: str) -> tuple[CodeType, dict[str, Any]]:
    reason = ""
    for candidate in (name, f"{name}.__main__"):
        try:
            spec = importlib.util.find_spec(candidate)
        except ImportError as error:  # there is none, or what it is in cannot be imported
            spec, reason = None, reason or f" ({error})"
        if spec is not None and spec.submodule_search_locations is None:
            code = getattr(spec.loader, "get_code", lambda _: None)(candidate)
            if code is not None and spec.origin is not None:
                return code, {"__file__": spec.origin, "__package__": spec.parent}
    raise SystemExit(f"dcp_tensorizer.run: there is no module {name} that can be run{reason}\n{_USAGE}")
