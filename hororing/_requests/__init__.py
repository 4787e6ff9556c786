"""From a tensor to a request of the core, and back.

It knows the engine and arrays as pointer, dtype and shape. An `Adapter` (adapter.py) tells it about
the arrays of a framework, of which it knows nothing. All adapters use it.

Read first: handles.py (submit, wait, take), then verbs/ (the public verbs for eager arrays) and
persistent.py (a request that is started again and again, as gradients are). arguments.py and
names.py check and name; process_sets.py, objects.py (over plain.py where ranks have proved
nothing), control.py (barrier, join) and compression.py are what their names say.
"""
