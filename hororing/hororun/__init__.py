"""hororun: starts the ranks of a job, on this host or on several, and stays until all have ended.

`command` reads the command line, `plan` places ranks on hosts, `job` watches over all of them,
`local` has the processes of one host, `remote` an agent on another, and `output` what they print.
Standard library only; nothing here imports the core.
"""
