"""Memory, collectives and roofline of a run, compiled ahead of time without a TPU.

`plan.make` compiles the programs of a workload for a slice (libtpu on any machine,
facts/jax-anchors.md §0.1, §4), reads memory from the compiler, collectives and HBM
bytes from the compiled HLO, counts FLOPs by hand, and adds up a roofline.
"""
