"""How to use dcp_tensorizer: `training` is a job that saves and resumes, `demo` kills it to see what is left."""
