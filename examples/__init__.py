"""Examples: `training` is a job that saves and resumes, and `demo` kills this job and checks the resumed runs."""
