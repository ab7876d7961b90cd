"""The page "from training to serving" does what it says: its own commands are run on a checkpoint of the demo's job."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter
from examples.model import ByteTransformer
from examples.training import build

from .. import warm
from ..lab.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = Path("demo-output/checkpoints/step-000030")


def _save(rank, path):
    """As the demo saves, sharded over the ranks; without having learnt anything."""
    app = build(rank.world_size)
    with TensorizerStorageWriter(thread_count=1) as writer:
        dcp.async_save({"app": app}, checkpoint_id=path, storage_writer=writer, process_group=rank.saves).result()


def test_the_page_takes_a_checkpoint_to_a_server(tmp_path):
    """What stock tensorizer loads generates the same bytes as the model that the checkpoint is loaded into."""
    run_ranks(2, _save, tmp_path / CHECKPOINT)
    model = ByteTransformer()
    weights = get_model_state_dict(model)
    dcp.load({"app": {"model": weights}}, storage_reader=TensorizerStorageReader(tmp_path / CHECKPOINT), no_dist=True)
    model.load_state_dict(weights)
    commands = re.findall(
        r"^```bash\n(.*?)^```", (ROOT / "docs" / "guides" / "export.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert len(commands) == 2
    done = subprocess.run(
        ["bash", "-e", "-c", "".join(commands)],
        cwd=tmp_path,
        env=os.environ
        | {
            "PATH": f"{warm.bin_folder()}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *_, converted, generated = done.stdout.splitlines()
    assert converted.startswith("model.tensors: 78 tensors")
    assert generated == str(model.eval().generate(b"def ", 60))
