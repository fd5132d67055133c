"""Agents: programs that solve tasks through the gateway's HTTP and a sandbox's tools."""
