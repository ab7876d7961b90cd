"""Replaces torch's storage and planners with this package's, for a whole process: `install`.

Most frameworks do not let the user pass a storage: they make a ``FileSystemWriter(path)`` for every save. So `install`
changes torch's own functions and classes.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from torch.distributed.checkpoint import state_dict_loader as loader
from torch.distributed.checkpoint import state_dict_saver as saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from .._job.options import check_no_local_folder
from .._runtime.torch_compat import PROCESS_EXECUTOR, STORAGE_SETUP
from .._storage.open import absolute_path, is_location
from ..planner import LoadPlanner, SavePlanner
from ..reader import AnyFormatReader
from ..writer import DescribedStager, TensorizerStorageWriter

logger = logging.getLogger("dcp_tensorizer")

_UNDERSTOOD = {"path", "sync_files", "overwrite", "thread_count"}
_IRRELEVANT = {
    "cache_staged_state_dict",
    "single_file_per_rank",
    "per_thread_copy_ahead",
}  # they change how a state is saved, not its content
_EXTENSIONS = "_extension_registry"  # decodes data that torch's own writer encoded


def install(
    *, writer_options: Mapping[str, Any] | None = None, reader_options: Mapping[str, Any] | None = None
) -> None:
    """Replaces torch's own storage and planners with this package's, in this process.

    From then on:

    - ``dcp.save``, ``dcp.async_save`` and ``dcp.load`` with a ``checkpoint_id`` and no storage use this package;
    - ``FileSystemWriter(path, ...)`` makes a `TensorizerStorageWriter` that is also a ``FileSystemWriter`` for
      ``isinstance``;
    - ``FileSystemReader(path)`` makes the reader of `open_reader`, which is also a ``FileSystemReader`` for
      ``isinstance``, and also loads torch's own checkpoints;
    - ``dcp.async_save`` without a stager, and without a storage writer that stages, stages into this package's buffer;
    - ``DefaultSavePlanner(...)`` and ``DefaultLoadPlanner(...)``, which DCP makes by default, make a `SavePlanner` and
      a `LoadPlanner`.

    The replacement also applies to names that were imported before the call. Subclasses, such as torch's
    ``FsspecWriter`` and ``HuggingFaceStorageWriter``, and stagers that are passed to ``async_save`` are not changed. A
    later call to `install` replaces the options.

    Args:
        writer_options: Options of `TensorizerStorageWriter`, for all writers, without ``local`` and ``max_unflushed``.
            Arguments ``sync_files``, ``overwrite`` and ``thread_count`` of a ``FileSystemWriter(...)`` override these
            options, even if their values are torch's defaults.
        reader_options: Options of `TensorizerStorageReader`, for all readers.

    Raises:
        TypeError, ValueError: an option is invalid.
    """
    global _installation
    writer_options, reader_options = dict(writer_options or {}), dict(reader_options or {})
    AnyFormatReader(".", **reader_options)  # checks them
    check_no_local_folder(writer_options)
    stager = TensorizerStorageWriter(**writer_options)
    before, _installation = _installation, _Installation(writer_options, reader_options, stager)
    if before is None:
        _replace()
    else:
        before.stager.close()


def uninstall() -> None:
    """Reverts `install`. Waits for the saves that the stager of `install` has staged. Idempotent."""
    global _installation
    before, _installation = _installation, None
    if before is not None:
        for module, name, original in _replaced:
            setattr(module, name, original)
        _replaced.clear()
        before.stager.close()


@contextmanager
def installed(
    *, writer_options: Mapping[str, Any] | None = None, reader_options: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Installs for a ``with`` block, and then restores the previous state."""
    before = _installation
    install(writer_options=writer_options, reader_options=reader_options)
    try:
        yield
    finally:
        if before is None:
            uninstall()
        else:
            install(writer_options=before.writer_options, reader_options=before.reader_options)


@dataclass(frozen=True, slots=True)
class _Installation:
    writer_options: dict[str, Any]
    reader_options: dict[str, Any]
    stager: TensorizerStorageWriter
    """Stages for saves that have neither a stager nor a writer that stages.

    Once it has staged, closing another writer does not end the writer process.
    """


_installation: _Installation | None = None
_replaced: list[tuple[Any, str, Any]] = []  # module, name, original value


class InstalledWriter(TensorizerStorageWriter, FileSystemWriter):  # type: ignore[misc]
    """Replacement for ``FileSystemWriter``, with its arguments and attributes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = _given(FileSystemWriter, args, kwargs, _UNDERSTOOD | _IRRELEVANT)
        options = {} if _installation is None else _installation.writer_options
        FileSystemWriter.__init__(self, *args, **kwargs)
        super().__init__(**{**options, **{name: value for name, value in given.items() if name in _UNDERSTOOD}})
        self.path = _torch_path(given["path"])
        in_effect = self._options.arguments()
        self.sync_files, self.overwrite = in_effect["sync_files"], in_effect["overwrite"]
        self.thread_count = in_effect["thread_count"]

    @property
    def save_id(self) -> str:
        return super().save_id

    @save_id.setter
    def save_id(self, value: str) -> None:
        """Ignores the id that torch's methods make."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        if checkpoint_id:
            self.path = _torch_path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        FileSystemWriter.set_up_storage_writer(self, is_coordinator, *args, **kwargs)
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)


class InstalledReader(AnyFormatReader, FileSystemReader):
    """Replacement for ``FileSystemReader``, with its arguments and attributes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = _given(FileSystemReader, args, kwargs, {"path", _EXTENSIONS})
        FileSystemReader.__init__(self, *args, **kwargs)
        super().__init__(given["path"], **({} if _installation is None else _installation.reader_options))
        self.path = _torch_path(given["path"])
        self._extensions = given.get(_EXTENSIONS)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        FileSystemReader.reset(self, checkpoint_id)
        super().reset(checkpoint_id)
        if checkpoint_id:
            self.path = _torch_path(checkpoint_id)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self.storage_data = metadata.storage_data
        self.rank, self.use_collectives = kwargs.get("rank"), kwargs.get("use_collectives", True)


def _torch_path(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Returns the path that torch's ``FileSystem`` would make. A URL, which torch cannot open, stays unchanged."""
    return Path(os.path.expanduser(path)) if isinstance(absolute_path(path), Path) else path


def _replace() -> None:
    process_executor = getattr(saver, PROCESS_EXECUTOR)

    class ProcessExecutor(process_executor):  # type: ignore[misc,valid-type]
        """Executor that sends a writer to the process that saves, because that process has not called `install`."""

        def execute_save(self, *args: Any, storage_writer: Any = None, checkpoint_id: Any = None, **kwargs: Any) -> Any:
            writer = storage_writer or (InstalledWriter(checkpoint_id) if is_location(checkpoint_id) else None)
            return super().execute_save(*args, storage_writer=writer, checkpoint_id=checkpoint_id, **kwargs)

    set_up = getattr(saver, STORAGE_SETUP)

    def storage_setup(storage: Any, checkpoint_id: Any, reader: bool = False) -> Any:
        if storage or not is_location(checkpoint_id):  # torch raises its own error for unknown ids
            return set_up(storage, checkpoint_id, reader)
        return (InstalledReader if reader else InstalledWriter)(checkpoint_id)

    def stager(*args: object) -> DescribedStager:
        assert _installation is not None
        return DescribedStager(_installation.stager)

    for module, name, value in (
        (saver, STORAGE_SETUP, storage_setup),
        (loader, STORAGE_SETUP, storage_setup),
        (saver, "DefaultStager", stager),
        (saver, PROCESS_EXECUTOR, ProcessExecutor),
    ):
        _replaced.append((module, name, getattr(module, name)))
        setattr(module, name, value)
    for cls, ours in _CLASSES.items():
        _make_instead(cls, ours)


_CLASSES: dict[type, type] = {
    FileSystemWriter: InstalledWriter,
    FileSystemReader: InstalledReader,
    DefaultSavePlanner: SavePlanner,
    DefaultLoadPlanner: LoadPlanner,
}
"""torch's classes, and the subclasses that replace them."""


def _make_instead(cls: type, ours: type) -> None:
    """Makes one of torch's classes create objects of ``ours`` from `install` to `uninstall`.

    After `uninstall`, the new ``__new__`` makes torch's own objects. It is never removed, because a class whose
    ``__new__`` was removed accepts no arguments.
    """
    has_path = issubclass(cls, (FileSystemWriter, FileSystemReader))

    def new(made: type, *args: Any, **kwargs: Any) -> Any:
        is_copy = has_path and not (args or kwargs)  # copy or pickle restores one of torch's own objects
        return object.__new__(ours if made is cls and _installation is not None and not is_copy else made)

    cls.__new__ = new  # type: ignore[assignment]


_warned: set[str] = set()


def _given(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], silent: Set[str]) -> dict[str, Any]:
    """Returns the arguments of one of torch's classes, by name.

    Logs a warning, once, for each argument that has no effect here, except for ``silent`` ones and default values.
    """
    bound = inspect.signature(vars(cls)["__init__"]).bind(None, *args, **kwargs)
    _, *given = bound.arguments.items()  # the first is self
    for name, value in given:
        argument = f"{cls.__name__}({name}=...)"
        if name not in silent and value != bound.signature.parameters[name].default and argument not in _warned:
            _warned.add(argument)
            logger.warning("%s has no effect in dcp_tensorizer, and is ignored", argument)
    return dict(given)


# The code of `dcp_tensorizer.run`. It is here, because the script replaces the namespace of that module.

_USAGE = "usage: python -m dcp_tensorizer.run SCRIPT [ARGUMENT ...], or -m MODULE [ARGUMENT ...]"
# Environment variables that name the code to run, for processes that the script spawns.
_SCRIPT = "DCP_TENSORIZER_RUN_SCRIPT"
_MODULE = "DCP_TENSORIZER_RUN_MODULE"


def run(namespace: dict[str, Any]) -> None:
    """Calls `install`, and runs the command line's script or module in the namespace of the main module.

    The name and the ``__spec__`` of the main module stay. A process that the script spawns imports the main module
    again, and so calls this function as well.
    """
    if namespace["__name__"] == "__main__":
        _take_arguments()
    module = os.environ.get(_MODULE)
    code, more = _module(module) if module else _script(os.environ[_SCRIPT])
    sys.argv[0] = more["__file__"]

    install()
    kept = {name: namespace[name] for name in ("__name__", "__spec__", "__builtins__")}
    namespace.clear()
    namespace.update(kept, **more)
    exec(code, namespace)


def _take_arguments() -> None:
    arguments = sys.argv[1:]
    is_module = arguments[:1] == ["-m"]
    arguments = arguments[1:] if is_module else arguments
    if not arguments or arguments[0].startswith("-"):
        raise SystemExit(_USAGE)
    os.environ.pop(_MODULE, None)  # set if the parent process runs a module with `dcp_tensorizer.run`
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
        except ImportError as error:  # the module does not exist, or its package cannot be imported
            spec, reason = None, reason or f" ({error})"
        if spec is not None and spec.submodule_search_locations is None:
            code = getattr(spec.loader, "get_code", lambda _: None)(candidate)
            if code is not None and spec.origin is not None:
                return code, {"__file__": spec.origin, "__package__": spec.parent}
    raise SystemExit(f"dcp_tensorizer.run: cannot run a module named {name}{reason}\n{_USAGE}")
