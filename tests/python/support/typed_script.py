"""What a user's type checker sees: `make lint` runs mypy on this script, nothing runs the script.

A name that mypy does not find in an adapter is an error in every typed training script.
"""

import torch

import hororing
import hororing.keras as hvd_keras
import hororing.numpy as hvd_numpy
import hororing.tensorflow as hvd_tensorflow
import hororing.tensorflow.keras as hvd_tf_keras
import hororing.torch as hvd_torch
from hororing.keras import allreduce as keras_allreduce
from hororing.numpy import allgather, rank
from hororing.tensorflow import allreduce as tensorflow_allreduce
from hororing.torch import Average, init
from hororing.torch import allreduce as torch_allreduce

init()
print(rank(), Average, torch_allreduce, tensorflow_allreduce, keras_allreduce, allgather)
print(hororing.run, hororing.__version__)
for size in (
    hvd_torch.size(),
    hvd_tensorflow.size(),
    hvd_keras.size(),
    hvd_tf_keras.size(),
    hvd_numpy.size(),
):
    print(size + 1)

hvd = hvd_torch
print(hvd.DistributedOptimizer, hvd.SyncBatchNorm, hvd.Compression, hvd.broadcast_parameters)
print(hvd.allgather_object, hvd.synchronize, hvd.ProcessSet, hvd.HororingInternalError, hvd.Sum)
print(hvd.start_timeline, hvd.statistics(), hvd.nccl_built, hvd.mpi_ops, hvd.global_process_set)
print(hvd.elastic.run, hvd.elastic.TorchState, hvd.elastic.ObjectState, hvd.elastic.history)
print(hvd_tensorflow.DistributedGradientTape, hvd_tensorflow.rank_op, hvd_tensorflow.Adasum)
print(hvd_tensorflow.broadcast_variables, hvd_tensorflow.elastic.run, hvd_tensorflow.PeerLostError)
print(hvd_keras.callbacks.MetricAverageCallback, hvd_keras.elastic.run, hvd_keras.barrier)
print(hvd_tf_keras.elastic.KerasState, hvd_tf_keras.elastic.run, hvd_tf_keras.load_model)


model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer.synchronize()
with optimizer.skip_synchronize():
    optimizer.step()
total: torch.Tensor = hvd.allreduce(torch.ones(3), op=hvd.Sum, name="total")


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    state.commit()


train(hvd.elastic.TorchState(model, optimizer, epoch=0))
