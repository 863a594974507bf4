"""Plugin that lets vLLM serve 4-bit weights on CPUs without AVX-512, for which vLLM's wheel has no kernel.

vLLM 0.32 selects its kernel there all the same, loads the model, and dies of the first request (`'_OpNamespace' '_C'
object has no attribute 'cpu_gemm_wna16'`). This plugin puts a kernel before it that unpacks the weights once, when
they are loaded, and multiplies in 16 bits from then on: right and as fast as an unquantized model, but not smaller.
vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`).
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear


def register() -> None:
    """Register the portable 4-bit kernel with vLLM on CPUs without AVX-512; elsewhere, or when repeated, do nothing."""
    if torch.cpu._is_avx512_supported():
        return
    from vllm.model_executor.kernels import linear as kernels
    from vllm.platforms import PlatformEnum, current_platform

    if not current_platform.is_cpu():
        return
    current_platform.import_kernels()
    offered = kernels._POSSIBLE_KERNELS[PlatformEnum.CPU]
    if not hasattr(torch.ops._C, "cpu_gemm_wna16") and not any(k.__name__ == "PortableInt4Kernel" for k in offered):
        offered.insert(0, _kernel())


def _kernel() -> type:
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel, MPLinearLayerConfig
    from vllm.model_executor.layers.quantization.utils import replace_parameter
    from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32
    from vllm.scalar_type import scalar_types

    class PortableInt4Kernel(MPLinearKernel):
        """Linear layer kernel for 4-bit weights and 16-bit activations, which unpacks the weights at load time.

        Format: W4A16 of compressed-tensors, with weights [output, input / 8] and zero points [output / 8, groups].
        """

        @classmethod
        def get_min_capability(cls) -> int:
            return -1

        @classmethod
        def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
            served = c.weight_type in (scalar_types.uint4, scalar_types.uint4b8)
            return served, None if served else f"{c.weight_type} is no 4-bit integer"

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            packed, scales, packed_zeros = self._get_weight_params(layer)
            codes = unpack_quantized_values_into_int32(packed.data, self.config.weight_type, 1)
            zeros = self._zeros(packed_zeros, scales)
            groups = codes.unflatten(1, (scales.shape[1], -1)) - zeros.unsqueeze(-1)
            weights = (groups * scales.data.unsqueeze(-1)).flatten(1)
            replace_parameter(layer, self.w_q_name, torch.nn.Parameter(weights.to(scales.dtype), requires_grad=False))

        def _zeros(self, packed: torch.Tensor | None, scales: torch.Tensor) -> torch.Tensor:
            if not self.config.zero_points or packed is None:
                return torch.full(scales.shape, self.config.weight_type.bias, dtype=torch.int32)
            return unpack_quantized_values_into_int32(packed.data, self.config.weight_type, 0)

        def apply_weights(
            self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            return linear(x, getattr(layer, self.w_q_name), bias)

    return PortableInt4Kernel
