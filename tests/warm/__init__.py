"""Interpreters that have imported torch already: programs run in them without the seconds that its import takes.

A server imports torch and other libraries, but nothing of the package. `bin_folder` has a ``python`` and a
``dcp-tensorizer``. Each has the server fork a child, which is given the command's arguments, environment, directory and
descriptors, and its signals. The command ends as the child does, and the child when the command is killed.

Not for what is about the start or the end of an interpreter, nor for the commands as they are installed.
"""

from .start import bin_folder, pids, python

__all__ = ["bin_folder", "pids", "python"]
