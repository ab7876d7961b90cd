"""Tests of the options of a model: dtypes."""

from __future__ import annotations

import pytest
import torch

from dcp_tensorizer._models.layout import ModelOptions


def test_the_dtypes_that_the_error_names_are_accepted() -> None:
    """The error of a dtype that no model is saved with names exactly the dtypes that are."""
    with pytest.raises(ValueError, match=r"got torch\.int8\. Use one of ") as caught:
        ModelOptions(dtype=torch.int8)
    named = {
        getattr(torch, name.removeprefix("torch.")) for name in str(caught.value)[:-1].split("one of ")[1].split(", ")
    }
    for dtype in {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}:
        if dtype in named:
            assert ModelOptions(dtype=dtype).stored_dtype(torch.float32) is dtype
        else:
            with pytest.raises(ValueError, match=f"got {dtype}\\."):
                ModelOptions(dtype=dtype)
