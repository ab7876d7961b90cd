"""A plugin of pytest that puts this package's manager in the place of torch_checkpointing's."""

import torch_checkpointing
from torch_checkpointing import checkpoint_manager

from dcp_tensorizer.integrations.torch_checkpointing import TensorizerCheckpointManager

checkpoint_manager.CheckpointManager = torch_checkpointing.CheckpointManager = TensorizerCheckpointManager
