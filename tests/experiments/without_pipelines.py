"""`python -m tests.experiments.without_pipelines JOB FLAG…`: experiments.JOB where
m2jax_pipelines is not installed."""

import runpy
import sys

sys.modules['m2jax_pipelines'] = None
job = sys.argv.pop(1)
runpy.run_module(f'experiments.{job}', run_name='__main__', alter_sys=True)
