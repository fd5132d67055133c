"""Sandboxes for untrusted commands (DESIGN §6): namespaces, or a weaker backend."""

from m2jax.sandbox.api import Capabilities as Capabilities
from m2jax.sandbox.api import ExecResult as ExecResult
from m2jax.sandbox.api import Host as Host
from m2jax.sandbox.api import Limits as Limits
from m2jax.sandbox.api import SandboxError as SandboxError
from m2jax.sandbox.api import SandboxPathError as SandboxPathError
from m2jax.sandbox.api import SandboxUnavailable as SandboxUnavailable
from m2jax.sandbox.api import WorkspaceFull as WorkspaceFull
from m2jax.sandbox.containers import Container as Container
from m2jax.sandbox.containers import ContainerSandbox as ContainerSandbox
from m2jax.sandbox.creation import create as create
from m2jax.sandbox.creation import shutdown as shutdown
from m2jax.sandbox.probe import capabilities as capabilities
from m2jax.sandbox.sandbox import Sandbox as Sandbox
