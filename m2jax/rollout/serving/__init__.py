"""One engine as a service: requests from any thread, one thread that calls the engine.

1. `requests`: every field of a request is checked.
2. `scheduler`: it is queued as a `jobs.Job`; the engine's thread takes it.
3. `batcher`: places it in a slot once there are pages (`sequences`) for its prompt.
4. `plan`: chooses the prompts of the next prefill call, until all of this prompt's
   tokens but the last are computed.
5. `drafting` and `plan`: choose how many tokens the next decode calls draft, and
   which slots decode together; `constrained` makes each step's mask for a grammar.
6. `decode_calls`: makes the call, on a CPU in contiguous rows that are reused
   (`kept_contexts`), and reads the sampled tokens.
7. `batcher`: streams them (`on_tokens`). If pages run out, the sequence that started
   last releases its pages and waits again, with its tokens so far.
8. `batcher`: delivers the result when the sequence has ended; its pages stay cached.

Between two calls `scheduler` exchanges the weights (`swap`). `grammars` compiles
grammars; `rate` measures tokens a second; `config` has the settings.
"""
