"""The functions of every method that `catalog.quantization.methods` lists."""

from __future__ import annotations

from backend.engine.quantization import bitsandbytes, comfy_kitchen, torchao
from backend.engine.quantization.backend_type import Backend
from backend.engine.quantization.int8 import INT8

BACKENDS: dict[str, Backend] = {
    "int8": INT8,
    "bitsandbytes_nf4": bitsandbytes.NF4,
    "bitsandbytes_fp4": bitsandbytes.FP4,
    "bitsandbytes_int8": bitsandbytes.LLM_INT8,
    "torchao_int8_w8a16": torchao.method("Int8WeightOnlyConfig"),
    "torchao_fp8_w8a16": torchao.method("Float8WeightOnlyConfig"),
    "torchao_int4_w4a16": torchao.method("Int4WeightOnlyConfig"),
    "torchao_int8_w8a8": torchao.method("Int8DynamicActivationInt8WeightConfig"),
    "torchao_fp8_w8a8": torchao.method("Float8DynamicActivationFloat8WeightConfig"),
    "torchao_nvfp4_w4a16": torchao.method("NVFP4WeightOnlyConfig"),
    "torchao_nvfp4_w4a4": torchao.method("NVFP4DynamicActivationNVFP4WeightConfig"),
    "torchao_mxfp4_w4a4": torchao.method("MXDynamicActivationMXWeightConfig", numbers="float4_e2m1fn_x2"),
    "torchao_mxfp8_w8a8": torchao.method("MXDynamicActivationMXWeightConfig", numbers="float8_e4m3fn"),
    "torchao_int4_w4a8": torchao.method("Float8DynamicActivationInt4WeightConfig"),
    "comfy_kitchen_int8_w8a8": comfy_kitchen.method("TensorWiseINT8Layout"),
    "comfy_kitchen_fp8_w8a8": comfy_kitchen.method("TensorCoreFP8Layout"),
}
