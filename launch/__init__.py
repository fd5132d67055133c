"""Starts jobs on TPUs: pure functions from a `Launch` to commands, and their printer.

  topology   a slice by generation and shape, and the arithmetic of chips and hosts
  config     Launch, Role, Command: what runs where, and one command line
  project, xpk, jobset, tpu_vm, xm_launch
             one target each: `STEPS` maps the name of a step to Launch → list of
               Commands
  options    the flags of a Launch
  print      `python -m launch.print` prints a step, or runs it with --run

Nothing here imports JAX or m2jax: it runs on a machine that has absl and PyYAML (and,
for `xm_launch`, the extra `launch`). docs/launch.md is the tutorial.
"""
