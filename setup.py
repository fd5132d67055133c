"""The packages of the distribution: m2jax, and in it the jobs and their configs.

`experiments` and `configs` are names that others' projects have too, so they are
installed as folders of `m2jax/_jobs`, where the command `m2jax` finds them.
"""

from setuptools import find_namespace_packages, setup

jobs = {f'm2jax._jobs.{name}': name for name in ('configs', 'experiments')}
packages = find_namespace_packages(include=['m2jax', 'm2jax.*'])
setup(package_dir=jobs, packages=[*packages, *jobs])
