"""Runs a script or a module with this package's storage instead of torch's; see `dcp_tensorizer.install`.

::

    python -m dcp_tensorizer.run train.py ARGUMENTS
    torchrun --nproc-per-node 8 -m dcp_tensorizer.run train.py ARGUMENTS
    python -m dcp_tensorizer.run -m package.train ARGUMENTS

The replacement also applies in processes that the script spawns with ``multiprocessing``.
"""

from .integrations.install import run

if __name__ in ("__main__", "__mp_main__"):
    run(globals())
