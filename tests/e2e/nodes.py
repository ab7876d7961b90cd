"""A training job for torchrun (``python -m tests.e2e.nodes train|resume``): FSDP, with its checkpoints in S3.

From the environment: URL and OPTIONS (JSON) of the checkpoint, RESULT, the file for rank 0's account of its state.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter

from .training import AppState, ToyModel, full, train


def main(mode):
    torch.set_num_threads(1)
    url, options = os.environ["URL"], json.loads(os.environ["OPTIONS"])
    dist.init_process_group("gloo")
    saves = dist.new_group(backend="gloo")
    torch.manual_seed(dist.get_rank())
    model = ToyModel()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    app = AppState(model, optimizer)
    with TensorizerStorageWriter(storage_options=options) as writer:
        if mode == "train":
            states = []
            for step in range(3):
                train(model, optimizer)
                states.append(full(app.state_dict()))
                future = dcp.async_save(
                    {"app": app}, checkpoint_id=f"{url}/{step}", storage_writer=writer, process_group=saves
                )
            train(model, optimizer)  # what is saved is what was there before
            future.result()
        else:
            states = []
            for step in range(3):
                reader = TensorizerStorageReader(f"{url}/{step}", storage_options=options)
                dcp.load({"app": app}, storage_reader=reader, process_group=saves)
                states.append(full(app.state_dict()))
            train(model, optimizer)
            dcp.async_save(
                {"app": app}, checkpoint_id=f"{url}/resumed", storage_writer=writer, process_group=saves
            ).result()
    if dist.get_rank() == 0:
        torch.save({"world": dist.get_world_size(), "states": states}, os.environ["RESULT"])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
