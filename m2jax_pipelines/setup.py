"""The packages of `m2jax_pipelines`, whose folder is the project's own."""

from setuptools import find_namespace_packages, setup

NAME = 'm2jax_pipelines'
inner = find_namespace_packages(exclude=['build*'])
setup(package_dir={NAME: '.'}, packages=[NAME, *(f'{NAME}.{name}' for name in inner)])
