"""What a manager compares between its ranks."""

from __future__ import annotations

import ast
import inspect
import textwrap

from dcp_tensorizer import CheckpointManager

MAY_DIFFER = {"copy_options", "must_change", "process_group", "reader_options", "stop_signals", "writer_options"}
"""What no collective depends on: these are of one rank, or of its host."""


def test_every_option_is_compared_unless_it_may_differ() -> None:
    """An option that is left out would let the ranks of a job whose scripts differ wait for each other."""
    init = ast.parse(textwrap.dedent(inspect.getsource(CheckpointManager.__init__)))
    (call,) = (
        node
        for node in ast.walk(init)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "check_same"
    )
    compared = set(ast.literal_eval(ast.List(call.args[0].keys)))  # type: ignore[attr-defined]
    options = inspect.signature(CheckpointManager.__init__).parameters.keys() - {"self"}
    assert compared - options == {"limits.max_consecutive_failures"}  # one of the writer's options
    assert options - compared == MAY_DIFFER
