"""Cached pages: on the device, in host memory, and in a pool that engines share.

1. `prefix_cache`: the longest prefix of a request that the device has, in whole pages.
   `page_journal` reports to routers what is cached, by digests (`page_chain`).
2. `tiers`: while the request waits, its next pages are read from the pool; their keys
   (`page_keys`) depend on the weights and all tokens so far.
3. `pool`: finds them in a store (`usage`), and checks them (`codec`).
4. `host_cache`: has what was read, and what the device has given up.
5. `tiers`: when the request gets its slot, the pages that host memory has are copied
   into its own (`page_layout`); only what follows is computed.
6. `prefix_cache`: the pages that it computes are known to later requests; the least
   recently used are given up when room is needed.
7. `tiers`: a page that is given up is first copied to host memory; with a pool, every
   page is when it becomes known, and from there to the pool.

A *page* is the keys and values of `page_tokens` tokens; `config` has the pool's
settings.
"""
