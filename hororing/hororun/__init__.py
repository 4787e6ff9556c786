"""Starts the ranks of a job, on this host or on several, and waits until all have ended.

`command` reads the command line of hororun. `function` is `hororing.run`, whose ranks execute
`call`. For both, `plan` places ranks on hosts, `start` starts them, `job` watches all of them,
`local` manages the processes of one host, `hosts` and `agent` reach others, and `output` shows what
they print. `elastic` is a job that continues when processes end; `slots` and `discovery` place new
ones. Only `function` and `call` need more than the standard library: cloudpickle.
"""
