"""The gateway: OpenAI's HTTP dialect in front of the rollout engine (DESIGN §2, law 4).

Agents speak plain HTTP and see text; token ids, log-probabilities and policy versions
are recorded here, where they are exact.
"""
