"""Agents: programs that solve tasks through the gateway (`agents.agent`)."""

from m2jax.agents.agent import Agent, AgentConfig, Endpoint, Outcome, make

__all__ = ['Agent', 'AgentConfig', 'Endpoint', 'Outcome', 'make']
