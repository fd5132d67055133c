"""Prompts computed by a separate engine.

1. `decode_engine`: a request gets a slot and pages of the engine that decodes.
2. `break_even`: that engine computes the missing part of a prompt itself if it is
   short; the limit is measured at the start.
3. `handover`: for the rest it asks a prefill engine (`Prefills`), in this process or,
   through `remote_prefill` and `prefill_server`, in another (`connection`).
4. `prefill_engine`: computes the prompt in chunks, and reads the pages of each to the
   host while it computes the next.
5. `remote_prefill`: checks what was received before the engine sees it.
6. `decode_engine`: writes each part to the sequence's own pages; after the last one the
   sequence decodes as on one engine.
7. `decode_engine`: if no pages come, it computes what is missing itself.
"""
