"""How to use dcp_tensorizer: `training` is a job that saves and resumes, and `demo` kills it and checks the rest."""
