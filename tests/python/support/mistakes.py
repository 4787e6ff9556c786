"""Typical mistakes of users, by name: `hororun -np 2 python mistakes.py shapes`.

test_mistakes.py measures what each prints.
"""

import os
import sys
import time

import numpy as np

import hororing.numpy as hvd


def forgot_init():
    hvd.allreduce(np.ones(3), name="x")


def shapes():
    hvd.init()
    hvd.allreduce(np.ones(3 + hvd.rank()), name="x")


def broadcast_shapes():
    hvd.init()
    hvd.broadcast(np.ones((3, 3 + hvd.rank())), root_rank=0, name="weight")


def dtypes():
    hvd.init()
    hvd.allreduce(np.ones(3, np.float32 if hvd.rank() else np.float64), name="x")


def operations():
    hvd.init()
    hvd.allreduce(np.ones(3), op=hvd.Sum if hvd.rank() else hvd.Max, name="x")


def roots():
    hvd.init()
    hvd.broadcast(np.ones(3), root_rank=hvd.rank(), name="x")


def no_such_root():
    hvd.init()
    hvd.broadcast(np.ones(3), root_rank=99, name="x")


def splits():
    hvd.init()
    hvd.alltoall(np.ones(6), splits=[9] * hvd.size(), name="x")


def not_an_array():
    hvd.init()
    hvd.allreduce("text", name="x")


def no_such_dtype():
    hvd.init()
    hvd.allreduce(np.ones(3, np.complex64), op=hvd.Max, name="x")


def same_name():
    hvd.init()
    first = hvd.allreduce_async(np.ones(1 << 20), name="x")
    second = hvd.allreduce_async(np.ones(1 << 20), name="x")
    hvd.synchronize(first), hvd.synchronize(second)


def fewer_batches():
    hvd.init()
    for step in range(5 - hvd.rank() % 2):
        hvd.allreduce(np.ones(3), name=f"gradient.{step}")


def metric_of_rank_0():
    hvd.init()

    def evaluate():
        return hvd.allreduce(np.ones(1), name="metric")

    if hvd.rank() == 0:
        evaluate()
    hvd.allreduce(np.ones(3), name="gradient")


def different_names():
    hvd.init()
    if hvd.rank() == 0:
        hvd.allreduce(np.ones(3), name="layer.first")
    else:
        hvd.allreduce(np.ones(3), name="layer.second")


def no_process_set():
    hvd.init()
    hvd.allreduce(np.ones(3), name="x", process_set=hvd.ProcessSet([0, 1]))


def set_of_others():
    only = hvd.ProcessSet([1])
    hvd.init(process_sets=[only])
    hvd.allreduce(np.ones(3), name="x", process_set=only)


def set_of_nobody():
    hvd.init(process_sets=[hvd.ProcessSet([0, 77])])


def raises():
    hvd.init()

    def load(step):
        if hvd.rank() == 1 and step == 1:
            raise ValueError("bad batch")

    for step in range(3):
        load(step)
        hvd.allreduce(np.ones(3), name="x")


def raises_everywhere():
    hvd.init()
    open("/nonexistent/data.csv")  # noqa: SIM115


def raises_before_init():
    import no_such_module  # noqa: F401


def chained():
    hvd.init()
    try:
        {}["lr"]
    except KeyError as error:
        raise RuntimeError("the configuration lacks lr") from error


def exits_with_3():
    hvd.init()
    if hvd.rank() == 1:
        sys.exit(3)
    hvd.allreduce(np.ones(3), name="x")


def exits_with_text():
    hvd.init()
    sys.exit("no data here")


def leaves_without_word():
    hvd.init()
    if hvd.rank() == 1:
        os._exit(0)
    hvd.allreduce(np.ones(3), name="x")


def killed():
    hvd.init()
    if hvd.rank() == 1:
        os.kill(os.getpid(), 9)
    hvd.allreduce(np.ones(3), name="x")


def crashes():
    hvd.init()
    if hvd.rank() == 1:
        import ctypes

        ctypes.string_at(0)
    hvd.allreduce(np.ones(3), name="x")


def late():
    """With HORORING_STALL_WARNING_S=1."""
    hvd.init()

    def load_batch():
        time.sleep(2)

    if hvd.rank() == 1:
        load_batch()
    hvd.allreduce(np.ones(3), name="x")


def interrupted():
    """Until Ctrl-C."""
    hvd.init()
    hvd.barrier()
    print("begun", flush=True)
    while True:
        hvd.allreduce(np.ones(3), name="x")
        time.sleep(0.01)


def timeline_of_nothing():
    """With --timeline."""
    hvd.init()


def arguments():
    import argparse

    argparse.ArgumentParser().parse_args(["--no-such-flag"])


def torch_shapes():
    import torch

    import hororing.torch as hvd

    hvd.init()
    torch.nn.Linear(3, 4)(torch.ones(2, 5))


def torch_backward():
    import torch

    import hororing.torch as hvd

    hvd.init()
    model = torch.nn.Linear(3 + hvd.rank(), 1)
    parameters = model.named_parameters()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), parameters)
    model(torch.ones(2, 3 + hvd.rank())).sum().backward()
    optimizer.step()


def torch_broadcast():
    import torch

    import hororing.torch as hvd

    hvd.init()
    model = torch.nn.Linear(3 + hvd.rank(), 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def torch_fewer_batches():
    import torch

    import hororing.torch as hvd

    hvd.init()
    model = torch.nn.Linear(3, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    parameters = model.named_parameters()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), parameters)
    for _ in range(4 - hvd.rank() % 2):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()


def torch_cuda():
    import torch

    import hororing.torch as hvd

    hvd.init()
    torch.ones(3).cuda()


def keras_without_optimizer():
    import keras

    import hororing.keras as hvd

    hvd.init()
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0, callbacks=callbacks)


def keras_shapes():
    import keras

    import hororing.keras as hvd

    hvd.init()
    width = 3 + hvd.rank()
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    model.fit(np.ones((8, width)), np.ones((8, 1)), verbose=0)


def tf_shapes():
    import tensorflow as tf

    import hororing.tensorflow as hvd

    hvd.init()

    @tf.function
    def step(x):
        return hvd.allreduce(x, name="x")

    step(tf.ones(3 + hvd.rank()))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
