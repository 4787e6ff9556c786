"""Code to test: pip install pytest; pytest test_ranks.py"""

import pytest
import torch
import torch.distributed as dist

from hororing.testing import assert_same


@pytest.mark.ranks(2)
def test_the_mean_is_that_of_all_ranks():
    loss = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    assert loss.item() == 0.5
    assert_same(loss)  # on all ranks
