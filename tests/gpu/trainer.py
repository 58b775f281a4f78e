"""Trains a network on all that is free of a GPU: four steps of SGD with momentum. Prints the losses, and MiB taken and of the card; 1 if it did not learn."""

from __future__ import annotations

import sys

import torch

WIDTH, ROWS, STEPS, SPARE_BYTES = 8192, 1024, 4, 3 << 30
torch.manual_seed(0)
free, total = torch.cuda.mem_get_info()
layer_bytes = 3 * 2 * WIDTH * WIDTH + 4 * 2 * ROWS * WIDTH  # weights, gradients, momentum; what the backward pass needs
weights = [(torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16) / WIDTH**0.5).requires_grad_() for _ in range((free - SPARE_BYTES) // layer_bytes)]
optimiser = torch.optim.SGD(weights, lr=1.0, momentum=0.9, foreach=False)
x, target = (torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2))
losses = []
for _ in range(STEPS):
    y = x
    for w in weights:
        y = y + 0.1 * torch.tanh(y @ w)
    loss = (y - target).float().square().mean()
    loss.backward()
    optimiser.step()
    optimiser.zero_grad(set_to_none=False)
    losses.append(loss.item())
rest = torch.empty(max(0, torch.cuda.mem_get_info()[0] - (1 << 30)), dtype=torch.uint8, device="cuda")  # so that nothing else had room
rest.fill_(1)
torch.cuda.synchronize()
print(*(f"{loss:.4f}" for loss in losses), torch.cuda.memory_reserved() >> 20, total >> 20)
sys.exit(0 if losses[-1] < losses[0] else 1)
