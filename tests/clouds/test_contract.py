"""Azure and Google Cloud do what every storage must do."""

import uuid

import pytest

from dcp_tensorizer.testing import StorageTests


@pytest.mark.filterwarnings("ignore:Sending a large body directly")  # aiohttp of a part, in a thread of its own
class TestAzure(StorageTests):
    @pytest.fixture
    def options(self, azure):
        return azure.options()

    @pytest.fixture
    def url(self, azure):
        return azure.url(uuid.uuid4().hex)


@pytest.mark.filterwarnings("ignore:Sending a large body directly")  # aiohttp of a part, in a thread of its own
class TestGoogle(StorageTests):
    @pytest.fixture
    def options(self, google):
        return google.options()

    @pytest.fixture
    def url(self, google):
        return google.url(uuid.uuid4().hex)
