"""A request's latents and first token, from the worker that prefills to the one that decodes.

    decode worker                                     prefill worker
    loop -> Fetcher -> link (a thread a worker) ---- connection ----> PrefillServer -> loop
                                 Prefill, Cancel, Done ->
                                 <- Pages with their bytes, Prefilled, Failed

The decode worker asks, with pages reserved for what it asks for; the prefill worker sends full
pages after each chunk and the rest with the first token. Both loops only touch device arrays: what
waits for the network is on other threads. A transfer has one end, on both sides: it is done, it is
cancelled by the one who asked, it failed, or the connection has ended and all of its have failed.
"""
