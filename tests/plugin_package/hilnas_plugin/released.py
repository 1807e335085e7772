"""The same for released folders: torch only."""

import torch
import torch.nn.functional as F
from torch import nn


class S4D(nn.Module):
    """y = SSM(x) + D x; out = W_out gelu(y) * sigmoid(W_gate gelu(y))."""

    takes_padding = True

    def __init__(self, width, eps, state):
        super().__init__()
        self.A_log, self.C = nn.Parameter(torch.zeros(width, state)), nn.Parameter(torch.zeros(width, state))
        self.dt_bias, self.D = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.ones(width))
        self.gate, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x, state, past, padding=None):
        rate = -self.A_log.float().exp()
        decay = (F.softplus(self.dt_bias.float())[:, None] * rate).exp()
        read = self.C.float() * (decay - 1) / rate
        memory, rows = state[0] if state else torch.zeros(len(x), *rate.shape, device=x.device), []
        for t, u in enumerate(x.float().unbind(1)):
            after = decay * memory + u[..., None]
            if padding is not None:  # nothing decays
                after = torch.where(padding.real[:, past + t, None, None], after, memory)
            memory = after
            rows.append((memory * read).sum(-1))
        h = F.gelu(torch.stack(rows, 1).to(x.dtype) + self.D * x)
        return self.out(h) * torch.sigmoid(self.gate(h)), (memory,)


class GeGLU(nn.Module):
    """W_down (gelu(W_gate x) * W_up x)."""

    def __init__(self, d_model, width):
        super().__init__()
        self.gate, self.up = nn.Linear(d_model, width, bias=False), nn.Linear(d_model, width, bias=False)
        self.down = nn.Linear(width, d_model, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.gate(x)) * self.up(x))
