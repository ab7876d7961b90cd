"""New names of keys by patterns, and the way back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping


class Renaming:
    """Gives keys new names.

    Args:
        rules: New names by patterns, in which only ``*`` has a meaning. The n-th ``*`` of a new name is what the n-th
            of its pattern stands for. The first pattern that matches a key counts. A key that none matches stays as it
            is.

    Attributes:
        unused: The patterns that have matched no key so far.

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
        """The way back, as far as there is one: see `not_inverted`.

        Raises:
            ValueError: a new name has fewer ``*`` than its pattern.
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
    """Two keys that get the same new name; None if there are none."""
    first: dict[str, str] = {}
    for old, new in names.items():
        if first.setdefault(new, old) != old:
            return first[new], old
    return None


def not_inverted(renaming: Renaming, names: Mapping[str, str]) -> tuple[str, str] | None:
    """A key whose new name leads back to another one, and that one; None if there are none."""
    inverse = renaming.inverse()
    return next(((old, back) for old, new in names.items() if (back := inverse.new_name(new)) != old), None)
