"""One address in front of separate prefill and decode workers. Imports no JAX.

Requests go to a decode worker with the address of a prefill worker, from which it fetches the
prompt's cache itself; the router never asks a prefill worker to do anything. `pool` knows the
workers and `monitor` asks how they are, `policy` chooses among them, `forward` takes a request to
them and its answer back, `app` has the endpoints.
"""
