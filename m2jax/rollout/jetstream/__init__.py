"""The engine for JetStream's drivers: its Engine API, 0.2.2.

1. `adapter`: JetStream's driver calls `JetStreamEngine`, one of its own types.
2. `calls`: `prefill` computes the keys and values of one prompt, a `Prefix`.
3. `calls`: `insert` copies it into the pages of a slot.
4. `calls`: `generate` samples a token for every slot, by the functions of
   `rollout.engine`; the driver reads them (`decode_state.ResultTokens`).
5. `calls`: when the driver ends the request, its slot takes another prefix.

Only `adapter` imports JetStream.
"""
