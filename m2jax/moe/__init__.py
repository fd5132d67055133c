"""Mixture of experts: router, experts, balance."""
