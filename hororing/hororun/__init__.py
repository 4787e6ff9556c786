"""Starts the ranks of a job, on this host or on several, and stays until all have ended.

`command` reads the command line of hororun. `function` is `hororing.run`, whose ranks do `call`.
For both, `plan` places ranks on hosts, `start` starts them, `job` watches over all of them,
`local` has the processes of one host, `hosts` and `agent` reach another, and `output` shows what
they print. But for `function` and `call`, which have cloudpickle: standard library only.
"""
