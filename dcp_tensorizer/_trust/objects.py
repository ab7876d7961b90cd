"""Checks that objects in ``torch.save`` data run no code, and loads them.

torch's own weights-only loader is not sufficient. It knows few types of the standard library and none of NumPy. A class
that is added to its list is allowed in the whole process, with any arguments and any state: with a forged dtype, NumPy
would read out of bounds. And the loader calls trusted names before it reaches an untrusted one.
"""

from __future__ import annotations

import enum
import io
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

import torch

from .._runtime.torch_compat import REBUILD_PREFIX, REBUILD_SUBCLASS, pickle_of, trusted_globals
from ..errors import CheckpointError, ReadError, UntrustedObject, describe
from .inert import Inert, Made, Malformed, Named, Unexpected, Value
from .known_types import CALLED, CREATED, PASSIVE, Arguments, Maker, need


def unsafe_globals(content: bytes | IO[bytes], max_opcodes: int | None = None) -> tuple[str, ...]:
    """Returns the names, as ``module.name``, by which a saved object could run code. Nothing is run or imported.

    Common data types of the standard library, NumPy and torch are safe, and so are those that the user passed to
    ``torch.serialization.add_safe_globals``. ``content`` is the ``torch.save`` data, or a file. At most ``max_opcodes``
    opcodes of the pickle are read. Raises `UntrustedObject` if ``torch.save`` would not write ``content``.
    """
    trusted = torch.serialization.get_safe_globals()
    named: list[tuple[Any, str]] = [item if isinstance(item, tuple) else (item, "") for item in trusted]
    allowed = {  # a class method of a builtin class has no module of its own
        name or f"{value.__module__ or value.__self__.__module__}.{value.__qualname__}": value for value, name in named
    }
    try:
        judge = _Judge(
            pickle_of(io.BytesIO(content) if isinstance(content, bytes) else content), allowed, trusted_globals()
        )
        judge.read(max_opcodes)
    except ValueError as error:
        raise UntrustedObject(f"torch.save does not write such an object: {error}") from None
    return tuple(sorted(judge.refused()))


def load_object(content: bytes) -> Any:
    """Loads a saved object. Raises `UntrustedObject` if it could run code."""
    if names := unsafe_globals(content):
        raise UntrustedObject(f"it needs {', '.join(names)}")
    return torch.load(io.BytesIO(content), weights_only=False)


@contextmanager
def loading_object(key: str, path: str) -> Iterator[None]:
    """Turns any error but a `CheckpointError` of loading an object into a `ReadError` that names the key.

    For example, Python or NumPy may lack a type, or the machine a GPU.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise ReadError(f"{key!r} in {path} cannot be loaded: {describe(error)}") from error


def advice(names: Sequence[str]) -> str:
    types = "this type, import its module" if len(names) == 1 else "these types, import their modules"
    return (
        f"If you trust {types} and call torch.serialization.add_safe_globals([{', '.join(names)}]) before the load. If "
        f"you trust the whole checkpoint as you trust a program, pass allow_pickle=True to the reader."
    )


_GETATTR = "builtins.getattr"
_KNOWN = {_GETATTR, *CALLED, *CREATED, *PASSIVE}


class _Judge(Inert):
    """A reader that finds the classes and functions that a pickle of ``torch.save`` must not use.

    It checks the arguments of each call, and each state that would be set. It accepts only protocol 2, that of
    ``torch.save``. ``allowed`` are the names that the user trusts, with any arguments and any state. ``torch_names``
    are the names that ``torch.load`` trusts by default.
    """

    def __init__(self, pickled: bytes, allowed: Mapping[str, Any], torch_names: Collection[str]) -> None:
        super().__init__(pickled, protocol=2)
        self._allowed = allowed
        self._torch = torch_names
        self._refused: set[str] = set()  # names with a call, a state or members that the type would not pickle
        self._unknown: set[str] = set()
        self._owners: set[str] = set()  # names whose attributes are used
        self._members: dict[str, Named] = {}  # the attributes that are used but not called, with their owners

    def refused(self) -> set[str]:
        """Returns the names that would be imported or called without permission.

        For an attribute that is called, such as a nested class, returns the attribute's name. For any other attribute,
        such as a member of an Enum, returns the name of the class that has it, or, if the user trusts this class, the
        attribute's name.
        """
        members = {name if owner.trusted else owner.name for name, owner in self._members.items()}
        return self._refused | (self._unknown - self._owners) | members

    def name(self, module: str, name: str) -> Named:
        if not all(part.isidentifier() for part in (*module.split("."), name)):
            raise Malformed(f"{module}.{name} is not a valid name")
        named = self._stand_in(f"{module}.{name}")
        if not (named.trusted or named.name in _KNOWN or named.name in self._torch):
            self._unknown.add(named.name)
        return named

    def call(self, what: Named, arguments: Arguments) -> Any:
        return self._judge(what, arguments, CALLED)

    def new(self, what: Named, arguments: Arguments) -> Any:
        return self._judge(what, arguments, CREATED)

    def refer(self, reference: Any) -> Value:
        if type(reference) is not tuple or len(reference) != 5 or reference[0] != "storage":
            raise Malformed("it refers to something other than a tensor's storage")
        if type(reference[1]) is not Named or reference[1].name not in self._torch:
            raise Malformed("a tensor's storage is of an unknown type")
        return Value("storage")

    def refuse(self, what: str) -> None:
        if "." not in what:  # a tensor's storage
            super().refuse(what)
        self._refused.add(what)

    def _stand_in(self, name: str) -> Named:
        return Named(name, trusted=name in self._allowed and name != _GETATTR)

    def _attribute(self, args: Arguments) -> Any:
        """Resolves a reference of protocol 2 to a nested class or a method.

        In some releases of Python, such a reference may also be to a member of an Enum.
        """
        if len(args) != 2 or type(args[0]) is not Named or type(args[1]) is not str:
            raise Malformed("it calls getattr with arguments other than a class or a function, and a name")
        owner, attribute = args
        self._members.pop(owner.name, None)
        self._owners.add(owner.name)
        allowed = self._allowed.get(owner.name)
        if isinstance(allowed, enum.EnumMeta) and attribute in allowed.__members__:
            return Made(owner.name, args)
        named = self._stand_in(f"{owner.name}.{attribute}")
        if not (named.trusted or named.name in CALLED):
            self._members[named.name] = owner
        return named

    def _judge(self, what: Named, args: Arguments, makers: Mapping[str, Maker]) -> Any:
        if what.name == _GETATTR:
            return self._attribute(args)
        self._members.pop(what.name, None)
        if what.trusted:
            return Made(what.name, args)
        try:
            if what.name == REBUILD_SUBCLASS and what.name in self._torch:
                # A tensor with attributes or of a subclass: torch calls the first argument with the third.
                need(len(args) == 4 and type(args[0]) is Named and type(args[2]) is tuple)
                need(args[0].trusted or self._rebuilds(args[0].name))
                return self._judge(args[0], args[2], {})
            if what.name in makers:
                return makers[what.name](what.name, args)
            need(self._rebuilds(what.name))
            return Value(what.name)
        except Unexpected:
            self._refused.add(what.name)
            return Made(what.name, args)

    def _rebuilds(self, name: str) -> bool:
        return name.startswith(REBUILD_PREFIX) and name in self._torch
