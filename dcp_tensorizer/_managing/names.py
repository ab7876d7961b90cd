"""The names of the directories that steps are in."""

from __future__ import annotations

import re
import string

__all__ = ["StepNames"]

_TRIED = (0, 7, 10, 999, 1000, 123_456, 1_234_567, 2**63 - 1)  # other bases, commas and exponents show in some of them


class StepNames:
    """Names such as ``step-20``, known by their number: ``step-000020`` is the same step.

    Args:
        template: The name with ``{}`` where the number goes; ``{:06}`` pads it.

    Attributes:
        shown: The template with ``N`` for the number, however that is padded: ``step-N``.

    Raises:
        TypeError: it is no string.
        ValueError: it has not one place for a number, or cannot be the name of one directory.
    """

    def __init__(self, template: str) -> None:
        if not isinstance(template, str):
            raise TypeError(f"name must be a str, and is {type(template).__name__}")
        self.template = template
        try:
            parts = [(text, field) for text, field, _, _ in string.Formatter().parse(template)]
            made = [(step, template.format(step)) for step in _TRIED]
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            raise ValueError(f"name={template!r} must have one {{}} for the step: {error}") from None
        if sum(field is not None for _, field in parts) != 1 or "/" in template or "\\" in template:
            raise ValueError(f"name={template!r} must have one {{}} for the step, and no slash")
        prefix = parts[0][0]
        suffix = parts[1][0] if len(parts) > 1 else ""
        self.shown = f"{prefix}N{suffix}"
        self._pattern = re.compile(re.escape(prefix) + r"(\d+)" + re.escape(suffix))
        lost = [name for step, name in made if self.step_in(name) != step]
        if lost or re.search(r"\d$", prefix) or re.match(r"\d", suffix):
            shown = (lost or [made[-1][1]])[0]
            raise ValueError(f"name={template!r}: the number cannot be found again in {shown!r}: use {{}} or {{:06}}")

    def name_of(self, step: int) -> str:
        """The name of a step's directory."""
        return self.template.format(step)

    def step_in(self, name: str) -> int | None:
        """The step whose directory has a name; None if it is of something else."""
        match = self._pattern.fullmatch(name)
        return None if match is None else int(match[1])
