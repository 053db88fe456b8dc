"""How were the checkpoints in this folder written? Run with the tool's name; needs the tool.

    python write.py autoawq | auto-gptq      torch 2.13.0, transformers 4.51.3, the tool
    python write.py gptqmodel | compressed-tensors   torch 2.13.0, transformers 5.24.0, the tool

Each tool packs the linears of one small random Llama; `reference.safetensors` holds what the tool
itself makes of its weights again, and the logits of transformers on those, both in float32.
"""

import importlib.metadata
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
GROUP = 32
TOKENS = [1, 17, 5, 42, 8, 23, 61, 4, 4, 30, 9, 12]
KEPT = ("layers.0.self_attn.k_proj", "layers.1.mlp.down_proj")


def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
        rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    made = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            spread = 0.3 if parameter.ndim == 2 else 0.1
            mean = 0.0 if parameter.ndim == 2 else 1.0
            parameter.copy_(mean + spread * torch.randn_like(parameter))
            if name.endswith("proj.weight"):  # off centre, so that zero points differ
                parameter += 0.1 * torch.randn(parameter.shape[0], 1)
    return made


def linears(made):
    return {
        name: module
        for name, module in made.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }


def save(name, made, packed, dequantised, quantization, tool, dense_dtype=torch.float16):
    """Writes the folder: packed tensors, the others in `dense_dtype`, the reference."""
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    modules = linears(made)
    tensors = {
        key: value.detach().to(dense_dtype)
        for key, value in made.state_dict().items()
        if key.removesuffix(".weight") not in modules
    }
    tensors |= {key: value.contiguous() for key, value in packed.items()}
    metadata = {"format": "pt", "written_by": f"{tool} {importlib.metadata.version(tool)}"}
    save_file(tensors, folder / "model.safetensors", metadata)
    config = made.config.to_dict() | {
        "architectures": ["LlamaForCausalLM"], "quantization_config": quantization,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    with torch.no_grad():
        for key, value in made.state_dict().items():
            module = key.removesuffix(".weight")
            value.copy_(dequantised[module] if module in dequantised else value.to(dense_dtype))
        logits = made.float()(torch.tensor([TOKENS])).logits[0]
    reference = {f"weight.{kept}": dequantised[f"model.{kept}"].float() for kept in KEPT}
    reference |= {"logits": logits, "tokens": torch.tensor(TOKENS)}
    save_file({key: value.contiguous() for key, value in reference.items()},
              folder / "reference.safetensors")  # fmt: skip


def autoawq():
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.quantize.quantizer import AwqQuantizer
    from awq.utils.packing_utils import dequantize_gemm

    made = model()
    packed, dequantised = {}, {}
    quantizer = SimpleNamespace(group_size=GROUP, zero_point=True, w_bit=4)
    for name, module in linears(made).items():
        weight, scales, zeros = AwqQuantizer.pseudo_quantize_tensor(quantizer, module.weight.data)
        module.weight.data = weight
        awq = WQLinear_GEMM.from_linear(
            module, 4, GROUP, scales=scales.t().contiguous(), zeros=zeros.t().contiguous()
        )
        for key in ("qweight", "qzeros", "scales"):
            packed[f"{name}.{key}"] = getattr(awq, key)
        dequantised[name] = dequantize_gemm(
            awq.qweight, awq.qzeros, awq.scales.float(), 4, GROUP
        ).T  # fmt: skip
    quantization = {
        "quant_method": "awq", "zero_point": True, "group_size": GROUP, "bits": 4,
        "version": "gemm", "modules_to_not_convert": None,
    }  # fmt: skip
    save("autoawq", made, packed, dequantised, quantization, "autoawq")


def asymmetric(weight, bits):
    """Scales and zero points [N, G] that are never 0: v1 cannot hold that one."""
    groups = weight.reshape(weight.shape[0], -1, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / (2**bits - 1)).half().float()
    return scales, torch.clamp(torch.round(-low / scales), 1, 2**bits - 1)


def auto_gptq():
    from auto_gptq.nn_modules.qlinear.qlinear_cuda_old import QuantLinear

    for bits in (4, 3):
        made = model()
        packed, dequantised = {}, {}
        for name, module in linears(made).items():
            scales, zeros = asymmetric(module.weight.data, bits)
            groups = scales.repeat_interleave(GROUP, 1), zeros.repeat_interleave(GROUP, 1)
            codes = torch.round(module.weight.data / groups[0] + groups[1])
            module.weight.data = (torch.clamp(codes, 0, 2**bits - 1) - groups[1]) * groups[0]
            linear = QuantLinear(
                bits, GROUP, module.in_features, module.out_features, False,
                weight_dtype=torch.float32,
            )  # fmt: skip
            linear.pack(module, scales, zeros, None)
            for key in ("qweight", "qzeros", "scales", "g_idx"):
                value = getattr(linear, key)
                packed[f"{name}.{key}"] = value.half() if key == "scales" else value
            dequantised[name] = linear(torch.eye(module.in_features)).T
        quantization = {
            "quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": False,
            "sym": False, "damp_percent": 0.01, "static_groups": False, "true_sequential": True,
            "model_name_or_path": None, "model_file_base_name": "model",
        }  # fmt: skip
        save(f"auto_gptq_{bits}bit", made, packed, dequantised, quantization, "auto-gptq")


def gptqmodel():
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import FORMAT
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    for name, bits, symmetric, act_order, version in (
        ("gptqmodel_v2_act_order", 4, False, True, "gptq_v2"),
        ("gptqmodel_v1", 4, False, False, "gptq"),
        ("gptqmodel_8bit_sym", 8, True, False, "gptq"),
    ):
        made = model()
        packed, dequantised = {}, {}
        for i, (key, module) in enumerate(linears(made).items()):
            num_in = module.in_features
            g_idx = torch.arange(num_in) // GROUP
            if act_order:  # q, k and v see the same inputs, so GPTQ orders them alike
                torch.manual_seed(100 + (0 if i % 7 < 3 else i))
                g_idx = g_idx[torch.randperm(num_in)]
            order = torch.argsort(g_idx, stable=True)
            scales, zeros = asymmetric(module.weight.data[:, order], bits)
            if symmetric:
                zeros = torch.full_like(zeros, 2 ** (bits - 1))
            elif i % 2:  # zero points of 0: the least weight of a row is positive
                zeros[::5] = 0
            linear = TorchLinear(
                bits=bits, group_size=GROUP, sym=symmetric, desc_act=act_order,
                in_features=num_in, out_features=module.out_features, bias=False,
                format=FORMAT(version),
            )  # fmt: skip
            linear.pack_original(module, scales, zeros, g_idx.to(torch.int32))
            linear.post_init()
            stored, linear.scales = linear.scales, linear.scales.float()
            dequantised[key] = linear.dequantize_weight().T.float()
            linear.scales = stored
            if version == "gptq":
                config = SimpleNamespace(bits=bits, pack_dtype=torch.int32)
                convert_gptq_v2_to_v1_format_module(linear, config)
            for tensor in ("qweight", "qzeros", "scales", "g_idx"):
                packed[f"{key}.{tensor}"] = getattr(linear, tensor).clone()
        quantization = {
            "quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": act_order,
            "sym": symmetric, "lm_head": False, "checkpoint_format": version,
            "pack_dtype": "int32",
            "meta": {"quantizer": [f"gptqmodel:{importlib.metadata.version('gptqmodel')}"]},
        }  # fmt: skip
        save(name, made, packed, dequantised, quantization, "gptqmodel")


def compressed_tensors():
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    forms = {
        "compressed_w4a16": ("pack-quantized", dict(num_bits=4, group_size=GROUP)),
        "compressed_w4a16_asym": (
            "pack-quantized", dict(num_bits=4, group_size=GROUP, symmetric=False),
        ),
        "compressed_int8": ("int-quantized", dict(num_bits=8, strategy="channel")),
        "compressed_fp8": ("float-quantized", dict(num_bits=8, type="float", strategy="channel")),
    }  # fmt: skip
    for name, (form, arguments) in forms.items():
        made = model()
        args = QuantizationArgs(**arguments)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
        if form != "pack-quantized":
            scheme.input_activations = QuantizationArgs(
                num_bits=8, type=args.type, strategy="token", dynamic=True
            )
        compressor = BaseCompressor.get_value_from_registry(form)
        packed, dequantised = {}, {}
        for key, module in linears(made).items():
            weight = module.weight.data.bfloat16()
            size = args.group_size or weight.shape[1]
            groups = weight.reshape(weight.shape[0], -1, size)
            scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
            state = {"weight": weight, "weight_scale": scale.bfloat16(), "weight_zero_point": zero}
            stored = compressor.compress(state, scheme)
            packed |= {f"{key}.{suffix}": value for suffix, value in stored.items()}
            # In float32, so that both sides round once; the values are the library's own.
            restored = dict(stored) | {"weight_scale": stored["weight_scale"].float()}
            dequantised[key] = compressor.decompress(restored, scheme)["weight"].float()
        quantization = {
            "quant_method": "compressed-tensors", "format": form,
            "quantization_status": "compressed", "ignore": ["lm_head"], "kv_cache_scheme": None,
            "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        }  # fmt: skip
        if form == "float-quantized":
            kv = QuantizationArgs(num_bits=8, type="float", strategy="tensor")
            quantization["kv_cache_scheme"] = json.loads(kv.model_dump_json())
            for layer in range(made.config.num_hidden_layers):
                for kind, value in (("k", 0.03), ("v", 0.007)):
                    packed[f"model.layers.{layer}.self_attn.{kind}_scale"] = torch.tensor(
                        [value * (layer + 1)], dtype=torch.bfloat16
                    )
        save(
            name, made, packed, dequantised, quantization, "compressed-tensors",
            torch.bfloat16,
        )  # fmt: skip


if __name__ == "__main__":
    {
        "autoawq": autoawq,
        "auto-gptq": auto_gptq,
        "gptqmodel": gptqmodel,
        "compressed-tensors": compressed_tensors,
    }[sys.argv[1]]()
