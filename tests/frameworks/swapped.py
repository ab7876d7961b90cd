"""A pytest plugin that replaces torch_checkpointing's manager by this package's."""

import torch_checkpointing
from torch_checkpointing import checkpoint_manager

from dcp_tensorizer.integrations.torch_checkpointing import TensorizerCheckpointManager

checkpoint_manager.CheckpointManager = torch_checkpointing.CheckpointManager = TensorizerCheckpointManager
