"""Masks of 16 random bits an element: their share, their scale, what they follow from, and who uses them."""

import math

import pytest
import torch
from torch import nn

from rekindle.train import dropout

CPU = torch.device("cpu")


def mask(*shape, share=0.1, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return dropout.kept(shape, share, CPU, dtype)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_and_the_scale_of_the_rest_are_right(share):
    count = 1 << 20
    found = mask(1024, 1024, share=share)
    dropped = int((found == 0).sum())
    assert abs(dropped - share * count) < 5 * math.sqrt(count * share * (1 - share))
    assert found[found != 0].unique().tolist() == pytest.approx([1 / (1 - share)])


def test_each_of_the_four_elements_of_a_draw_is_dropped_as_often_and_by_itself():
    gone = mask(1 << 18, 4, share=0.3) == 0
    shares = gone.double().mean(0)
    assert shares.tolist() == pytest.approx([0.3] * 4, abs=5e-3)
    together = torch.corrcoef(gone.double().T) - torch.eye(4)
    assert together.abs().max() < 0.01


@pytest.mark.parametrize("count", [1, 3, 4, 5, 4097])
def test_any_number_of_elements_has_a_mask_in_any_type(count):
    for dtype in (torch.float64, torch.bfloat16):
        found = mask(count, dtype=dtype)
        assert found.shape == (count,)
        assert found.dtype == dtype


def test_a_mask_follows_from_the_seed_alone():
    assert torch.equal(mask(33, 7, seed=1), mask(33, 7, seed=1))
    assert not torch.equal(mask(33, 7, seed=1), mask(33, 7, seed=2))


def test_a_part_is_that_of_the_whole_draw_and_holds_no_more_than_itself():
    whole = mask(6, 5, 7, seed=1)
    torch.manual_seed(1)
    part = dropout.kept((6, 5, 7), 0.1, CPU, torch.float32, slice(2, 4))
    assert torch.equal(part, whole[2:4])
    assert part.untyped_storage().nbytes() == 2 * 5 * 7 * 4


@pytest.mark.parametrize("share", [1e-6, 1e-9])
def test_a_share_below_the_resolution_drops_next_to_nothing(share):
    found = mask(1 << 20, share=share)
    assert int((found == 0).sum()) < 60
    assert torch.isfinite(found).all()


def test_a_network_draws_its_masks_so_while_it_trains_on_a_cpu_and_only_then():
    network = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Dropout(0.0))
    dropout.install(network)
    x = torch.randn(64, 8)
    torch.manual_seed(3)
    ours = network(x)
    assert torch.equal(ours, network[0](x) * mask(64, 8, share=0.5, seed=3))
    (slope,) = torch.autograd.grad(ours.sum(), network[0].bias)
    assert torch.allclose(slope, mask(64, 8, share=0.5, seed=3).sum(0))
    network.eval()
    assert torch.equal(network(x), network[0](x))


def test_a_compiled_network_draws_as_the_compiler_does():
    network = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    dropout.install(network)
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    found = compiled(torch.ones(64, 8))
    assert 0.3 < float((found == 0).double().mean()) < 0.7
