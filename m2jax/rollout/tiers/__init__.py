"""Cached pages: on the device, in host memory, and in a pool that engines share.

1. `prefix_cache`: the longest prefix of a request that the device has, in whole pages.
   `page_journal` reports to routers what is cached, by digests (`page_chain`).
2. `tiers`: while the request waits, its next pages are read from the pool; their keys
   (`page_keys`) depend on the weights and all tokens so far.
3. `pool`: finds them in a store (`usage`), and checks them (`codec`).
4. `host_cache`: stores pages read from the pool or evicted from the device.
5. `tiers`: when the request gets its slot, its pages in host memory are copied to the
   device (`page_layout`); only the rest is computed.
6. `prefix_cache`: later requests can use the pages that it computes; the least recently
   used are evicted when space is needed.
7. `tiers`: an evicted page is first copied to host memory; with a pool, every page is
   when it is complete, and from there to the pool.

A *page* is the keys and values of `page_tokens` tokens; `config` has the pool's
settings.
"""
