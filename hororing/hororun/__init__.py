"""Starts the ranks of a job, on this host or on several, and stays until all have ended.

`command` reads the command line of hororun. `function` is `hororing.run`, whose ranks do `call`.
For both, `plan` places ranks on hosts, `start` starts them, `job` watches over all of them, `local`
has the processes of one host, `hosts` and `agent` reach another, and `output` shows what they
print. `elastic` is a job that goes on when processes end: `slots` and `discovery` tell where it may
start others. But for `function` and `call`, which have cloudpickle: standard library only.
"""
