"""How the gradients of a torch optimizer are reduced while backward runs.

Each file owns one thing, and imports only those above it:

    weights                  how much a backward pass counts: numbers, and one request for their sum
    step                     the step in progress: passes, phase, queue, handles in flight, failures
    routes                   how a gradient travels: alone, as sparse rows, as a member of a group
    gradient                 one parameter: its hook, its state, its persistent request
    grouping, auto_groups    who travels together; `hororing.torch.compression` has more of them
    sharing                  which optimizer reduces a parameter of several
    following                the gradients of an optimizer, whose parameters come and go
    reducer                  what an optimizer's hooks, backward passes and `step()` do, in order
    distributed, adasum      the mixins that optimizers get
    grad_scaler              what is changed in torch.amp.GradScaler

Read `reducer` first, then `step`. Only `hororing.torch` imports this package, and it knows no other
framework.
"""
