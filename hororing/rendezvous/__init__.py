"""How the processes of a job find one another without MPI: a small store, and its members.

Needs the standard library only, and nothing of the core. `store.Store` is the server, in the
launcher or in rank 0; `client.Member` the connection of a rank; `files` tells where the store is by
a directory that all hosts share, `torch_store` by torch's; `protocol` is what both sides speak.
"""
