"""Programs on the device: they compute prompts and sample tokens.

1. `engine`: the host calls a compiled program with the weights, the state, rows and
   their page tables, in one of the shapes of `config`. On a mesh `placement` splits it.
2. `calls`: the body of the program, for a chunk of prompts or some steps of decoding.
3. `forward`: runs `model.trunk` on the new tokens of all rows, over the cache.
4. `pages`: in each layer stores their keys and values, and attends to them and all
   before; to decode on a CPU, `contexts` has copied each row's pages into a contiguous
   row.
5. `calls`: computes a decode step's logits, with penalties and a grammar's mask.
6. `sampling`: samples a token for each row, with its log-probability.
7. `calls`: appends it to the slot (`decode_state.Slots`), until the sequence ends; the
   host gets the tokens of all steps (`decode_state.Sampled`).
8. With drafts, `speculative` verifies several tokens in each step, and `modules` drafts
   the next ones, by `masked_attention`.

Axes: S slots, P rows of a call, C new tokens of a row, n pages of a table, N steps.
"""
