"""What tests of several folders share.

- States: tensors (`states`), `checkpoints` of any chunks, `models`, `saved_objects`, and which checkpoints a manager
  retains (`manager_model`).
- Ranks: real ones (`ranks`), and DCP's calls of their planners in one process (`hooks`).
- Processes: running programs (`processes`), a job that may be stopped at any moment (`preempted_job`), a simulated
  device (`simulated`), threads that wait for each other (`waiting`), and leftovers of a module (`leak_check`).
- Servers: `servers`, `sftp_server`, and the `libsodium` that a machine may lack.
- Faults: of connections and files (`faults`), of machines (`crash_states`, `crash_scenarios`), and of an index
  (`index_edits`).
- Seams: `seams`, the private parts of the package that tests of several folders use.
"""
