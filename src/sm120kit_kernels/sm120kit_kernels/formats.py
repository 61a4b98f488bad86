"""The block-scaled formats: types of values and scale factors, and the layout of scale factors in memory."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7 of FP4; bit 3 is the sign (OCP Microscaling Formats 1.0, section 5.3.3)."""

ROWS, FACTORS = 128, 4
"""Size of a block of scale factors in memory: 128 rows with 4 neighbours along K each, 512 bytes."""


@dataclass(frozen=True)
class Format:
    """A block-scaled format.

    ``vector`` values along K share a scale factor of type ``scale_type``. ``packed`` is the number of values per byte: two for
    FP4, with the lower index in the lower nibble. ``largest`` is the largest finite value, ``exponent`` the exponent of its
    power of two.
    """

    name: str
    value_type: torch.dtype
    packed: int
    vector: int
    scale_type: torch.dtype
    largest: float
    exponent: int


FORMATS = {
    format.name: format
    for format in (
        Format("nvfp4", torch.uint8, 2, 16, torch.float8_e4m3fn, 6.0, 2),
        Format("mxfp4", torch.uint8, 2, 32, torch.float8_e8m0fnu, 6.0, 2),
        Format("mxfp8", torch.float8_e4m3fn, 1, 32, torch.float8_e8m0fnu, 448.0, 8),
    )
}


def get(name: str) -> Format:
    """A format by name.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in FORMATS:
        raise ValueError(f"format={name!r} is not supported; formats: {', '.join(FORMATS)}")
    return FORMATS[name]


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below ``value``."""
    return (value + multiple - 1) // multiple * multiple


def scale_shape(rows: int, k: int, form: Format) -> tuple[int, int]:
    """Rows and columns of the scale factors of a ``rows`` x ``k`` matrix in blocks of 128x4."""
    return round_up(rows, ROWS), round_up(k // form.vector, FACTORS)


def swizzle_scales(scales: Tensor) -> Tensor:
    """Scale factors ``[rows, K / vector]`` in the order of the tensor cores, padded with zeros to complete blocks of 128x4.

    Factor (r, c) of a block is at byte ``16 * (r % 32) + 4 * (r // 32) + c``; blocks follow each other along K, then along
    rows (PTX ISA, tcgen05 "scale factor layout"; the same for mma.sync kernels that load them by TMA). The result is
    ``[rows rounded up to 128, columns to 4]`` of the same type; its rows do not correspond to rows of the matrix.
    """
    if scales.dim() != 2:
        raise ValueError(f"scales has shape {tuple(scales.shape)}; expected [rows, K / vector]")
    rows, columns = scales.shape
    high, wide = round_up(rows, ROWS), round_up(columns, FACTORS)
    filled = pad(scales.view(torch.uint8), (0, wide - columns, 0, high - rows))
    blocks = filled.reshape(high // ROWS, 4, 32, wide // FACTORS, FACTORS).permute(0, 3, 2, 1, 4)
    return blocks.reshape(high, wide).view(scales.dtype)


def unswizzle_scales(blocks: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of :func:`swizzle_scales`: ``[rows, columns]`` without the padding."""
    high, wide = round_up(rows, ROWS), round_up(columns, FACTORS)
    if tuple(blocks.shape) != (high, wide):
        raise ValueError(
            f"scales have shape {tuple(blocks.shape)}; {rows}x{columns} scale factors in blocks of 128x4 have {(high, wide)}"
        )
    flat = blocks.view(torch.uint8).reshape(high // ROWS, wide // FACTORS, 32, 4, FACTORS).permute(0, 3, 2, 1, 4)
    return flat.reshape(high, wide)[:rows, :columns].contiguous().view(blocks.dtype)


def swizzle_grouped_scales(scales: Tensor, offsets: Tensor) -> Tensor:
    """Swizzle the scale factors of all groups into separate blocks; group g has rows ``offsets[g]:offsets[g + 1]``."""
    bounds = offsets.tolist()
    groups = [swizzle_scales(scales[start:end]) for start, end in itertools.pairwise(bounds)]
    return torch.cat([group.view(torch.uint8) for group in groups]).view(scales.dtype)
