"""pytest -n 2 runs this in seconds; conftest.py is all the set-up there is."""

import gradients
import pytest
import torch
import torch.distributed as dist

import hororing.testing


@pytest.fixture
def model(inputs):
    torch.manual_seed(0)
    return torch.nn.Linear(inputs.shape[1], 1)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("bias", [True, False])
def test_the_mean_of_gradients_is_that_of_one_large_batch(model, inputs, bias):
    model.bias.requires_grad_(bias)
    model(inputs).square().mean().backward()
    expected = model.weight.grad.clone()

    model.zero_grad()
    mine = inputs.chunk(dist.get_world_size())[dist.get_rank()]
    model(mine).square().mean().backward()
    gradients.average_gradients(model)

    torch.testing.assert_close(model.weight.grad, expected)
    hororing.testing.assert_same([each.grad for each in model.parameters()])


@pytest.mark.ranks(2, backend="gloo")  # the same code on another backend
def test_gradients_on_gloo(model, inputs):
    model(inputs).mean().backward()
    gradients.average_gradients(model)
    hororing.testing.assert_same(model.weight.grad)


@pytest.mark.ranks(2)
def test_a_rank_without_a_batch_says_so(model, inputs):
    with hororing.testing.raises_on(1, RuntimeError, match="does not require grad"):
        loss = model(inputs).mean() if dist.get_rank() == 0 else torch.zeros(1)
        loss.backward()
