"""What happens on one host: its ranks, their cores, limits and output, over ssh or here.

It knows processes and pipes, and nothing of jobs. Read first: hosts.py (`LocalHost`, `RemoteHost`),
then local.py, and agent.py, which is local.py behind ssh. guard.py ends ranks if hororun is killed.
"""
