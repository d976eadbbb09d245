"""DeepGEMM's grouped products of rows, under its names and arguments, by prebuilt kernels.

`import aotmm.deep_gemm as deep_gemm` in the place of `import deep_gemm` is the whole switch (docs/experts.md). Every
function launches on torch's current stream, copies nothing to the host, and can be captured.

Source of the semantics: github.com/deepseek-ai/DeepGEMM, version 2.6.1, csrc/apis/gemm.hpp.
"""

from __future__ import annotations

import torch

import aotmm

_ALIGNMENT = 128  # rows at which groups of the contiguous layout begin
# Rows of a, rows of b, and elements of K that share a scale; those of a alone, and of b.
_RECIPES = (1, 128, 128), (1, 128), (128, 128)
_SIGNLESS = 0x7FFFFFFF  # makes -1, of no group, the largest number
Scaled = tuple[torch.Tensor, torch.Tensor]

__all__ = [
    "get_mk_alignment_for_contiguous_layout",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nt_masked",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
]


def get_mk_alignment_for_contiguous_layout() -> int:
    """Return the number of rows at whose multiples the groups of a contiguous layout begin."""
    return _ALIGNMENT


def m_grouped_bf16_gemm_nt_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,  # noqa: FBT001, FBT002 - DeepGEMM's signature
    ensure_zero_padding: bool = True,  # noqa: FBT001, FBT002
    expected_m_for_psum_layout: int | None = None,
) -> None:
    """Write a[rows of group g] @ b[g].T to d for every group. Groups begin at multiples of 128 rows.

    Rows between the end of a group and the next multiple are computed with it, as DeepGEMM does on Hopper.

    Args:
        a: bf16 (M, K).
        b: bf16 (groups, N, K).
        d: bf16 (M, N), written.
        grouped_layout: int32 on the device: (M), the group of each row, -1 of none; or the end of each group (groups).
        compiled_dims: not used: nothing is compiled.
        use_psum_layout: grouped_layout has ends.
        ensure_zero_padding: not used, as by DeepGEMM on Hopper.
        expected_m_for_psum_layout: an estimate of a group's rows.

    Raises:
        ValueError: shapes or devices do not fit together.
        TypeError: other dtypes.
        NoKernelError, DriverError: as `Library.grouped_mm`.
    """
    del compiled_dims, ensure_zero_padding
    _check_types(torch.bfloat16, a=a, b=b, d=d)
    ends = _ends(grouped_layout, a, b, psum=use_psum_layout)
    expected = None if expected_m_for_psum_layout is None else expected_m_for_psum_layout * len(b)
    aotmm.grouped_mm(a, b.mT, offs=ends, out=d, expected_rows=expected)


def m_grouped_bf16_gemm_nt_masked(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    compiled_dims: str = "nk",
) -> None:
    """Write a[g, :masked_m[g]] @ b[g].T to d[g, :masked_m[g]] for every group; other rows of d stay undefined.

    Args:
        a: bf16 (groups, M, K), its matrices one behind the other.
        b: bf16 (groups, N, K).
        d: bf16 (groups, M, N), likewise, written.
        masked_m: int32 (groups), on the device: the rows of each group.
        expected_m: an estimate of a group's rows, by which kernels are chosen.
        compiled_dims: not used: nothing is compiled.

    Raises:
        ValueError, TypeError, NoKernelError, DriverError: as `m_grouped_bf16_gemm_nt_contiguous`.
    """
    del compiled_dims
    _check_types(torch.bfloat16, a=a, b=b, d=d)
    aotmm.grouped_mm(a, b.mT, rows=masked_m, out=d, expected_rows=expected_m * len(b))


def m_grouped_fp8_gemm_nt_contiguous(
    a: Scaled,
    b: Scaled,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,  # noqa: FBT001, FBT002 - DeepGEMM's signature
    use_psum_layout: bool = False,  # noqa: FBT001, FBT002
    ensure_zero_padding: bool = True,  # noqa: FBT001, FBT002
    expected_m_for_psum_layout: int | None = None,
) -> None:
    """Do `m_grouped_bf16_gemm_nt_contiguous` for float8_e4m3fn with scales of blocks of 128 elements of K.

    Args:
        a: float8 (M, K), and its fp32 scales (M, ceil(K / 128)), any strides.
        b: float8 (groups, N, K), and its fp32 scales (groups, ceil(N / 128), ceil(K / 128)), any strides.
        d: bf16 (M, N), written.
        grouped_layout: as there.
        recipe: (1, 128, 128), the only one here.
        recipe_a: (1, 128). recipe_b: (128, 128).
        compiled_dims: not used: nothing is compiled.
        disable_ue8m0_cast: not used: scales stay fp32.
        use_psum_layout: as there.
        ensure_zero_padding: as there.
        expected_m_for_psum_layout: as there.

    Raises:
        ValueError: another recipe, or as there. TypeError, NoKernelError, DriverError: as there.
    """
    del compiled_dims, disable_ue8m0_cast, ensure_zero_padding
    _check_recipes(recipe, recipe_a, recipe_b)
    _check_types(torch.float8_e4m3fn, a=a[0], b=b[0])
    _check_types(torch.bfloat16, d=d)
    ends = _ends(grouped_layout, a[0], b[0], psum=use_psum_layout)
    expected = None if expected_m_for_psum_layout is None else expected_m_for_psum_layout * len(b[0])
    scales = {"scale_a": a[1], "scale_b": b[1].mT}
    aotmm.grouped_mm(a[0], b[0].mT, offs=ends, out=d, expected_rows=expected, **scales)


def m_grouped_fp8_gemm_nt_masked(
    a: Scaled,
    b: Scaled,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,  # noqa: FBT001, FBT002 - DeepGEMM's signature
) -> None:
    """Do `m_grouped_bf16_gemm_nt_masked` for float8_e4m3fn with scales of blocks of 128 elements of K.

    Args:
        a: float8 (groups, M, K), and its fp32 scales (groups, M, ceil(K / 128)), any strides.
        b: as in `m_grouped_fp8_gemm_nt_contiguous`.
        d: bf16 (groups, M, N), written.
        masked_m: as there.
        expected_m: as there.
        recipe: (1, 128, 128), the only one here.
        recipe_a: (1, 128). recipe_b: (128, 128).
        compiled_dims: not used: nothing is compiled.
        disable_ue8m0_cast: not used: scales stay fp32.

    Raises:
        ValueError: another recipe, or as there. TypeError, NoKernelError, DriverError: as there.
    """
    del compiled_dims, disable_ue8m0_cast
    _check_recipes(recipe, recipe_a, recipe_b)
    _check_types(torch.float8_e4m3fn, a=a[0], b=b[0])
    _check_types(torch.bfloat16, d=d)
    scales = {"scale_a": a[1], "scale_b": b[1].mT}
    aotmm.grouped_mm(a[0], b[0].mT, rows=masked_m, out=d, expected_rows=expected_m * len(b[0]), **scales)


def _check_recipes(*recipes: tuple[int, ...] | None) -> None:
    """Raise ValueError for recipes of both operands, of a or of b that are not the only ones here."""
    for name, found, known in zip(("recipe", "recipe_a", "recipe_b"), recipes, _RECIPES, strict=True):
        if found is not None and tuple(found) != known:
            raise ValueError(f"{name}={found}: kernels have {known} alone")


def _check_types(dtype: torch.dtype, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype is not dtype:
            raise TypeError(f"{name} must be {dtype}, found {tensor.dtype}")


def _ends(layout: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, psum: bool) -> torch.Tensor:
    """Return the ends of groups of whole multiples of 128 rows, int32 (groups) on the device."""
    if layout.dtype is not torch.int32:
        raise TypeError(f"grouped_layout must be torch.int32, found {layout.dtype}")
    if psum:
        return (layout + (_ALIGNMENT - 1)) & -_ALIGNMENT
    if layout.shape != a.shape[:1]:
        raise ValueError(f"grouped_layout must be ({len(a)},), one group for each row, found {tuple(layout.shape)}")
    first = layout[::_ALIGNMENT] & _SIGNLESS
    # A block of no group is computed with the group behind it; behind the last group it is not computed.
    of_blocks = first.flip(0).cummin(0).values.flip(0)
    groups = torch.arange(len(b), dtype=torch.int32, device=layout.device)
    return torch.searchsorted(of_blocks, groups, right=True, out_int32=True) * _ALIGNMENT
