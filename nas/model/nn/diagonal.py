"""Diagonal state spaces: a linear recurrence with constant complex decays, in chunks.

    m_t = exp(log_decay) m_{t-1} + write u_t          y_t = Re(read m_t)

Within a chunk that is a convolution with the kernel Re(read exp(l log_decay) write) (Gu et al. 2022, "On the
Parameterization and Initialization of Diagonal State Space Models", section 3), which is a product with one Toeplitz
matrix for all chunks; from chunk to chunk only the states are handed on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nas.model.nn.base import Padding
from nas.model.nn.ssd import float32_at_least, in_chunks

_CHUNK = 64
"""Tokens that one Toeplitz matrix takes."""


def diagonal_scan(
    u: Tensor, log_decay: Tensor, write: Tensor, read: Tensor, memory: Tensor, padding: Padding | None
) -> tuple[Tensor, Tensor]:
    """Runs the recurrence over a sequence, of every channel by itself; computed in float32 at least.

    Args:
        u: I numbers for each channel [B, T, D, I].
        log_decay: with a real part below 0, complex [D, N], or stacked [S, D, N].
        write: complex [D, N, I], or stacked.
        read: complex [D, N, O], or stacked.
        memory: before the first token, real and imaginary parts [B, D, N, 2].
        padding: tokens at which nothing decays and nothing is added.

    Returns:
        y [B, T, D, O], of u's type, anything at padding, and the memory after the last token, float32 at least.
    """
    kind, length = u.dtype, u.shape[1]
    with torch.autocast(u.device.type, enabled=False):
        u, memory = float32_at_least(u, memory)
        if padding is None:
            y, memory = _scan(u, log_decay, write, read, memory, torch.full((len(u),), length, device=u.device))
        else:
            order, tokens = text_first(padding, length)
            y, memory = _scan(reordered(u, order), log_decay, write, read, memory, tokens)
            y = reordered(y, order.argsort(1))
    return y.to(kind), memory


def text_first(padding: Padding, length: int) -> tuple[Tensor, Tensor]:
    """Returns an order of a chunk's tokens with text before padding [B, T], and the number of tokens of text [B]."""
    text = padding.text[:, -length:]
    return torch.sort(~text, dim=1, stable=True).indices, text.sum(1)


def reordered(x: Tensor, order: Tensor) -> Tensor:
    """Returns the tokens of x [B, T, ...] in an order [B, T]."""
    return x.take_along_dim(order.view(*order.shape, *(1,) * (x.dim() - 2)), 1)


def complex_of(x: Tensor) -> Tensor:
    """Returns the complex numbers whose real parts are the first half of the last dimension: [..., 2N] -> [..., N]."""
    (x,) = float32_at_least(x)
    return torch.complex(*x.chunk(2, -1))


def _scan(
    u: Tensor, log_decay: Tensor, write: Tensor, read: Tensor, memory: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Does so where row b begins with `lengths[b]` tokens of text, and padding follows."""
    length, chunk = u.shape[1], min(_CHUNK, u.shape[1])
    log_decay, write, read = (x.view(-1, *x.shape[-rank:]) for x, rank in ((log_decay, 2), (write, 3), (read, 3)))
    seeds, inputs, outputs = len(write), write.shape[-1], read.shape[-1]
    ago = torch.arange(chunk + 1, device=u.device)
    powers = (log_decay[..., None] * ago).exp()  # [S, D, N, Q + 1]
    both = (read[..., :, None] * write[..., None, :]).flatten(-2)  # [S, D, N, O I]
    kernel = torch.unflatten((both.mT @ powers[..., :-1]).real, 2, (outputs, inputs))  # [S, D, O, I, Q]
    toeplitz = kernel[..., (ago[:-1, None] - ago[:-1]).clamp(min=0)].tril()  # [S, D, O, I, Q, Q]
    toeplitz = toeplitz.permute(0, 1, 4, 2, 5, 3).flatten(4).flatten(2, 3)  # [S, D, Q O, Q I]

    u = in_chunks(u, chunk)
    count = u.shape[1]
    starts = chunk * torch.arange(count, device=u.device)
    tokens = (lengths[:, None] - starts).clamp(0, chunk)  # of text in each chunk [B, chunks]
    # What is added to the states counts from the end of the text: it is moved to the end of the chunk.
    rows = ago[:-1] - chunk + tokens[..., None]  # [B, chunks, Q]
    ends = u.take_along_dim(rows.clamp(min=0)[..., None, None], 2) * (rows >= 0)[..., None, None]
    columns, ends = (_columns(x, seeds) for x in (u, ends))  # [S, D, Q I, B chunks]
    into = (write[..., None, :] * powers[..., :-1].flip(-1)[..., None]).flatten(-2)  # [S, D, N, Q I]
    out_of = read[..., None, :] * powers[..., 1:, None]  # [S, D, N, Q, O]
    added = torch.unflatten(torch.complex(into.real @ ends, into.imag @ ends), -1, (-1, count))  # [S, D, N, B, chunks]

    carried = torch.view_as_complex(memory.contiguous())
    carried = torch.unflatten(carried, 0, (seeds, -1)).permute(0, 2, 3, 1)  # [S, D, N, B]
    tokens = torch.unflatten(tokens, 0, (seeds, -1))[:, None, None]  # [S, 1, 1, B, chunks]
    before = []
    for i in range(count):
        before.append(carried)
        carried = powers.take_along_dim(tokens[..., i], -1) * carried + added[..., i]
    states_before = torch.stack(before, -1).flatten(3)  # [S, D, N, B chunks]
    out_of = out_of.flatten(3).mT  # [S, D, Q O, N]
    y = toeplitz @ columns + out_of.real @ states_before.real - out_of.imag @ states_before.imag
    y = torch.unflatten(torch.unflatten(y, 2, (chunk, outputs)), -1, (-1, count))  # [S, D, Q, O, B, chunks]
    y = y.permute(0, 4, 5, 2, 1, 3).flatten(0, 1).flatten(1, 2)[:, :length]
    return y, torch.view_as_real(carried.permute(0, 3, 1, 2).flatten(0, 1))


def _columns(u: Tensor, seeds: int) -> Tensor:
    """Maps [S B, chunks, Q, D, I] -> [S, D, Q I, B chunks]."""
    return torch.unflatten(u, 0, (seeds, -1)).permute(0, 4, 3, 5, 1, 2).flatten(4).flatten(2, 3)
