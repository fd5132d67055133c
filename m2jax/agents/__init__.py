"""Agents: programs that solve tasks through the gateway and a sandbox's tools."""
