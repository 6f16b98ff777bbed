"""Small integers in bytes and words: the one place that knows how codes of 4 and 8 bits lie in int32 words.

A word holds ``32 // bits`` fields, the first in the low bits. Words are read as little-endian bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fields_per_word(bits: int) -> int:
    """How many codes an int32 word holds."""
    return 32 // bits


def _rows(tensor: Tensor) -> Tensor:
    """The tensor with the plain strides of its shape. A view by another element size asks for them even in a
    dimension of size 1, where torch calls any stride contiguous."""
    if tensor.stride() == torch.empty(tensor.shape, device="meta").stride():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def unpack_bytes(raw: Tensor, bits: int) -> Tensor:
    """uint8 [..., B] -> uint8 [..., B * 8 / bits], low nibble first."""
    if bits == 8:
        return raw
    return torch.stack((raw & 15, raw >> 4), dim=-1).flatten(-2)


def pack_bytes(codes: Tensor, bits: int) -> Tensor:
    """uint8 [..., C] -> uint8 [..., C * bits / 8]; C is even for 4 bits. Higher bits of a code are dropped."""
    if bits == 8:
        return codes
    return (codes[..., 0::2] & 15) | (codes[..., 1::2] << 4)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 [R, W] -> uint8 [R, W * 32 / bits] along the last dimension."""
    return unpack_bytes(_rows(words).view(torch.uint8), bits)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """uint8 [R, C] -> int32 [R, ceil(C * bits / 32)]; missing codes of the last word are 0."""
    short = -codes.shape[-1] % fields_per_word(bits)
    if short:
        codes = torch.nn.functional.pad(codes, (0, short))
    return _rows(pack_bytes(codes, bits)).view(torch.int32)


def add_to_fields(words: Tensor, bits: int, amount: int) -> Tensor:
    """Add ``amount`` (+1 or -1) to every field by one addition to the whole int32 word, modulo 2**32.

    A carry or borrow runs into the next field, so -1 undoes +1 for every word.
    """
    ones = sum(1 << shift for shift in range(0, 32, bits))
    total = (words.to(torch.int64) + amount * ones) & 0xFFFFFFFF
    return _rows(total).view(torch.int32)[..., 0::2].contiguous()


def to_signed(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes 0 .. 2**bits - 1 -> int8 with the middle (8 or 128) as 0."""
    if bits == 8:
        return (codes ^ 128).view(torch.int8)
    return codes.view(torch.int8) - 8


def to_unsigned(codes: Tensor, bits: int) -> Tensor:
    """The inverse of `to_signed`: int8 -> uint8, 0 becomes the middle."""
    if bits == 8:
        return codes.view(torch.uint8) ^ 128
    return (codes + 8).view(torch.uint8)


def sign_extend(nibbles: Tensor) -> Tensor:
    """uint8 two's complement nibbles 0 .. 15 -> int8 -8 .. 7."""
    return (nibbles ^ 8).view(torch.int8) - 8


def middle(bits: int) -> int:
    """The zero point of a symmetric code: 8 or 128."""
    return 1 << (bits - 1)
