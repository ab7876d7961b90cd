"""What tests of several folders share.

- States: tensors (`states`), `checkpoints` of any chunks, `models`, `saved_objects`, and what a manager keeps
  (`manager_model`).
- Ranks: real ones (`ranks`), and in one process what DCP does with their planners (`hooks`).
- Processes: programs that run (`processes`), a job that is ended at any moment (`preempted_job`), a device
  (`simulated`), threads that wait for each other (`waiting`), and what a module leaves behind (`leak_check`).
- Servers: `servers`, `sftp_server`, and the `libsodium` that a machine may lack.
- Faults: of connections and files (`faults`), machines (`crash_states`, `crash_scenarios`), an index (`index_edits`).
- Seams: `seams`, where tests of several rooms look inside the package.
"""
