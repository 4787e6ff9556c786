"""How this process becomes rank r of n, before there is an engine.

It knows the launchers' variables, networks and the store at which ranks meet, and neither the core
nor a framework. `_engine` and `_api` use it, and hororun for the store and the settings of ranks.

Read first: launchers.py (who started this process?), then job_settings.py and endpoints.py (where
do ranks meet?), bootstrap.py (connect), and rendezvous/ (the store and its protocol). The rest:
networks.py, local_ranks.py (has a rank of this host ended?), limits.py (file descriptors),
private_folder.py (files that only this user can touch), threads.py (our own threads).
"""
