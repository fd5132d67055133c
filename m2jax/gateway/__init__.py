"""The gateway: OpenAI's HTTP dialect in front of the rollout engine (DESIGN §2, law 4).

Agents use plain HTTP and see text; the gateway records the exact token ids,
log-probabilities and policy versions.
"""
