"""Engine and gateway over HTTP, as the roles of a run ask each other.

1. `engine_client` sends a request for a completion (`wire`) and is `Serving`.
2. `engine_server` gives it to a scheduler, and sends tokens as they are drawn.
3. `engine_client` asks every second how the engine is, and what has changed in its
   cached pages (`page_log`), by which a router chooses an engine.

`gateway_client` opens sessions of a gateway, and reads its health and its counters.
"""
