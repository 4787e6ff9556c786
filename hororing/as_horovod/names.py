"""The table of Horovod's modules and ours. Modules only, not their contents."""

from __future__ import annotations

# A missing module of ours is an error when a script imports it under Horovod's name; once it
# exists, it works without further changes.
MODULES = {
    "horovod": "hororing.as_horovod.horovod",
    "horovod.common": "hororing.as_horovod.horovod.common",
    "horovod.common.basics": "hororing._api.basics",
    "horovod.common.elastic": "hororing.elastic",
    "horovod.common.exceptions": "hororing.as_horovod.horovod.common.exceptions",
    "horovod.common.process_sets": "hororing._requests.process_sets",
    "horovod.common.util": "hororing.as_horovod.horovod.common.util",
    "horovod.runner": "hororing.as_horovod.horovod.runner",
    "horovod.runner.common": "hororing.as_horovod.horovod.runner.common",
    "horovod.runner.common.util": "hororing.as_horovod.horovod.runner.common.util",
    "horovod.runner.common.util.env": "hororing.as_horovod.horovod.runner.common.util.env",
    "horovod.torch": "hororing.torch",
    "horovod.torch.compression": "hororing.torch.compression",
    "horovod.torch.elastic": "hororing.torch.elastic",
    "horovod.torch.elastic.sampler": "hororing.torch.elastic.sampler",
    "horovod.torch.elastic.state": "hororing.torch.elastic.state",
    "horovod.torch.functions": "hororing.torch.functions",
    "horovod.torch.mpi_ops": "hororing.torch.mpi_ops",
    "horovod.torch.optimizer": "hororing.torch.optimizer",
    "horovod.torch.sync_batch_norm": "hororing.torch.sync_batch_norm",
    "horovod.tensorflow": "hororing.tensorflow",
    "horovod.tensorflow.compression": "hororing.tensorflow.compression",
    "horovod.tensorflow.elastic": "hororing.tensorflow.elastic",
    "horovod.tensorflow.functions": "hororing.tensorflow.functions",
    "horovod.tensorflow.keras": "hororing.tensorflow.keras",
    "horovod.tensorflow.keras.callbacks": "hororing.tensorflow.keras.callbacks",
    "horovod.tensorflow.keras.elastic": "hororing.tensorflow.keras.elastic",
    "horovod.tensorflow.mpi_ops": "hororing.tensorflow.mpi_ops",
    "horovod.tensorflow.sync_batch_norm": "hororing.tensorflow.sync_batch_norm",
    "horovod.tensorflow.util": "hororing.tensorflow.util",
    "horovod.keras": "hororing.keras",
    "horovod.keras.callbacks": "hororing.keras.callbacks",
    "horovod.keras.elastic": "hororing.keras.elastic",
    "horovod.ray": "hororing.ray",
    "horovod.spark": "hororing.spark",
}

_ELASTIC = (
    "start the script with hororun --min-np, and use elastic of horovod.torch, horovod.keras or "
    "horovod.tensorflow"
)
_LAUNCH = (
    "call horovod.run, or start the script with hororun or mpirun: hororun -np 4 python -m "
    "hororing.as_horovod train.py (several hosts: -H host1:2,host2:2)"
)
_AGGREGATION = (
    "pass backward_passes_per_step= to DistributedOptimizer of horovod.keras, or add up gradients "
    "before you ask the tape for them"
)
_BUILD = "it describes how Horovod was built; python -m hororing info shows what works here"

# Remedies for missing names: for a name and all names below it.
WAYS_OUT = {
    "horovod.runner": _LAUNCH,
    "horovod.spark": "there are no estimators: train in a function, by horovod.spark.run",
    "horovod.spark.elastic": _ELASTIC,
    "horovod.spark.run_elastic": _ELASTIC,
    "horovod.ray": "use horovod.ray.RayExecutor, with min_workers for elastic jobs",
    "horovod.data": "use a DataLoader with num_workers, which reads ahead as well",
    "horovod.common.basics.HorovodBasics": _BUILD,
    "horovod.common.util.check_installed_version": _BUILD,
    "horovod.common.util.get_ext_suffix": _BUILD,
    "horovod.mxnet": "MXNet is retired; hororing.numpy has the same collectives on arrays",
    "horovod.tensorflow.data": "give every rank its part of the data with Dataset.shard()",
    "horovod.tensorflow.LocalGradientAggregationHelper": _AGGREGATION,
    "horovod.tensorflow.gradient_aggregation": _AGGREGATION,
}


def remedy(name: str) -> str:
    """Return the remedy for a name that does not exist here."""
    while name:
        if name in WAYS_OUT:
            return WAYS_OUT[name]
        name = name.rpartition(".")[0]
    return "docs/migrating.md lists what is available"
