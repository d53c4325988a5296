"""The optimizer of the toy pair's recipe against plain descriptions of its two updates."""

import torch

from data_gen.toy_pair.training import Muon, orthogonal


def test_orthogonal_keeps_the_singular_vectors_and_evens_out_their_values():
    random = torch.randn(24, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u, _, vh = torch.linalg.svd(random, full_matrices=False)
    matrix = u @ torch.diag(torch.logspace(-2, 0, 24, dtype=torch.float64)) @ vh  # singular values from 0.01 to 1
    for given, result in ((matrix, orthogonal(matrix)), (matrix.mT, orthogonal(matrix.mT).mT)):
        assert given.shape in {(24, 40), (40, 24)}
        values = torch.diagonal(u.mT @ result @ vh.mT)
        assert torch.allclose(u.mT @ result @ vh.mT, torch.diag(values), atol=1e-9)
        assert values.min() > 0.1
        assert values.max() < 2


def test_size_of_a_matrix_step_does_not_depend_on_the_gradient():
    steps = []
    for scale in (1.0, 1e3):
        weight = torch.nn.Parameter(torch.zeros(8, 4))
        weight.grad = scale * torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
        Muon([{"params": [weight], "lr": 0.1}]).step()
        steps.append(weight.detach())
    assert torch.allclose(steps[0], steps[1], atol=1e-4)
    assert steps[0].abs().max() > 0.01


def test_adam_groups_are_adam():
    ours, theirs = (torch.nn.Parameter(torch.ones(5)) for _ in range(2))
    mine = Muon([{"params": [ours], "lr": 0.1, "adam": True, "weight_decay": 0.3}])
    reference = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.98), weight_decay=0.3)
    for seed in range(5):
        gradient = torch.randn(5, generator=torch.Generator().manual_seed(seed))
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        mine.step()
        reference.step()
    assert torch.allclose(ours, theirs, atol=1e-6)
