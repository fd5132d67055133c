"""The evolution page: where a lineage is, and why each round was kept or not.

`fold` makes the page's data of the record's lines, and `detail` those of one round;
`source` reads the file in parts, also while it is written; `serving` answers the page's
requests, and writes it as one file. Page, style and scripts are in `viewer.page`.

A record is untrusted: a line that is not as `evolve.record` describes it is counted and
left out, texts are cut and made printable, and the page shows them as text only.
"""
