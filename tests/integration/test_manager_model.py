"""Tests of the manager against a model of its behaviour."""

from __future__ import annotations

import uuid

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from ..lab.manager_model import ManagerModel
from ..lab.servers import S3Server

_SETTINGS = settings(
    max_examples=6, stateful_step_count=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def test_on_a_local_disk() -> None:
    """After each save, failure, restart, damage and step back, the folder has the contents that the model predicts."""
    run_state_machine_as_test(ManagerModel, settings=_SETTINGS)


def test_on_an_object_store(s3: S3Server) -> None:
    """The same holds on SeaweedFS, which has neither locks nor directories."""

    class OnS3(ManagerModel):
        url = f"s3://{s3.bucket}/{uuid.uuid4().hex}-{{}}"
        storage_options = s3.options()

    run_state_machine_as_test(OnS3, settings=settings(_SETTINGS, max_examples=2, stateful_step_count=8))
