"""The rendezvous of a job's processes without MPI: a small store, and its members.

Needs only the standard library, and nothing of the core. `store.Store` is the server, in the
launcher or in rank 0. `client.Member` is the connection of a rank. `files` finds the store through
a directory that all hosts share, `torch_store` through torch's store. Both sides speak `protocol`.
"""
