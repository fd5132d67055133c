"""Starts jobs on TPUs: pure functions from a `Launch` to commands, and their printer.

  topology   a slice by generation and shape, and the arithmetic of chips and hosts
  config     Launch, Role, Command: what is to run where, and one command line
  project, xpk, jobset, tpu_vm, xm_launch
             one target each: `STEPS` maps a step's name to Launch → list of Commands
  options    the flags that make a Launch
  print      `python -m launch.print`: prints a step, or with --run runs it

Nothing here imports JAX or m2jax: it runs on a machine that has absl and PyYAML (and,
for `xm_launch`, the extra `launch`). docs/launch.md is the walk.
"""
