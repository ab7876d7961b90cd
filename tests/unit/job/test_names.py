"""Names of steps' directories, which are recognised by their numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_tensorizer._job.steps import StepNames


@given(
    step=st.integers(0, 10**12), template=st.sampled_from(["step-{}", "{}", "step-{:06}", "global_step{}", "a.{}+b"])
)
def test_a_number_is_found_again(step: int, template: str) -> None:
    """For any template, the step can be parsed back out of its name."""
    names = StepNames(template)
    assert names.step_in(names.name_of(step)) == step


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-12", 12),
        ("step-000012", 12),
        ("step-", None),
        ("step-1.5", None),
        ("old-step-12", None),
        ("step-12x", None),
    ],
)
def test_names_are_known_by_their_number(name: str, step: int | None) -> None:
    """Padding does not matter, and other names are not steps."""
    assert StepNames("step-{}").step_in(name) == step


@pytest.mark.parametrize("template", ["step-{:,}", "step-{:_}", "step-{:x}", "step-{:o}", "step-{:g}"])
def test_a_template_that_shows_large_numbers_otherwise(template: str) -> None:
    """Templates that format large numbers with separators or exponents are refused."""
    with pytest.raises(ValueError, match=r"the step cannot be parsed back out of .*\. Use \{\} or \{:06\}"):
        StepNames(template)


@pytest.mark.parametrize("template", ["step", "{}-{}", "a/{}", "step-{", "1{}", "{}0", "{:x}{}", "{name}", "{:.2f}"])
def test_templates_that_make_no_sense(template: str) -> None:
    """A template needs exactly one field, whose number can be parsed back."""
    with pytest.raises(ValueError, match=r"^name="):
        StepNames(template)
