"""New names of keys by patterns, and the reverse."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping


class Renaming:
    """Gives keys new names.

    Args:
        rules: New names by patterns, in which only ``*`` has a meaning. The n-th ``*`` of a new name stands for the
            same text as the n-th of its pattern. The first pattern that matches a key counts. Other keys stay as they
            are.

    Attributes:
        unused: The patterns that have not matched a key yet.

    Raises:
        TypeError: a rule is not of strings.
        ValueError: a new name is empty, or has more ``*`` than its pattern.
    """

    def __init__(self, rules: Mapping[str, str]) -> None:
        self._rules = [(_pattern(old, new), old, new) for old, new in rules.items()]
        self.unused = dict.fromkeys(rules)

    def new_name(self, key: str) -> str:
        """The new name of a key."""
        for pattern, old, new in self._rules:
            if match := pattern.fullmatch(key):
                self.unused.pop(old, None)
                return _filled(new, match.groups())
        return key

    def inverse(self) -> Renaming:
        """The reverse rules, as far as they exist: see `not_inverted`. Raises `ValueError` if a new name has fewer
        ``*`` than its pattern.
        """
        return Renaming({new: old for _, old, new in self._rules})


def _pattern(old: object, new: object) -> re.Pattern[str]:
    if not isinstance(old, str) or not isinstance(new, str):
        raise TypeError(f"rename must give new keys by patterns, both strings, and has {old!r}: {new!r}")
    if not new or new.count("*") > old.count("*"):
        raise ValueError(f"{old!r} cannot become {new!r}: that is empty, or has a * more")
    return re.compile("(.*)".join(map(re.escape, old.split("*"))), re.DOTALL)


def _filled(name: str, parts: Iterable[str]) -> str:
    left = iter(parts)
    return re.sub(r"\*", lambda _: next(left), name)


def collision(names: Mapping[str, str]) -> tuple[str, str] | None:
    """Two keys that get the same new name; None if no two do."""
    first: dict[str, str] = {}
    for old, new in names.items():
        if first.setdefault(new, old) != old:
            return first[new], old
    return None


def not_inverted(renaming: Renaming, names: Mapping[str, str]) -> tuple[str, str] | None:
    """A key whose new name leads back to another key, and that key; None if there is none."""
    inverse = renaming.inverse()
    return next(((old, back) for old, new in names.items() if (back := inverse.new_name(new)) != old), None)
