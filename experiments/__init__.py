"""One short absl main per job."""
