"""A small model with random weights, and a tokenizer of words, for `vllm serve`. usage: make_model.py OUT LAYERS HIDDEN [--weights SEED] [--lora SEED]

Without weights it is served with `--load-format dummy`, and all models of one shape are the same one. With them two seeds make two models, and what a sleep of
level 2 dropped can be loaded again; ``--lora`` puts an adapter for its attention into OUT/lora. 8 layers of 4096 take 3.4 GiB. Needs transformers, tokenizers, safetensors and torch, as vLLM does.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

WORDS = 32000


def configuration(layers: int, hidden: int) -> dict[str, Any]:
    """Of a Qwen3."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": max(2, hidden // 512),
        "head_dim": 128,
        "intermediate_size": 3 * hidden,
        "vocab_size": WORDS,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_bias": False,
        "initializer_range": 0.02,
        "use_cache": True,
    }


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """name -> shape of each tensor in the checkpoint."""
    hidden, middle, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = (config[f"num_{kind}_heads"] * head for kind in ("attention", "key_value"))
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (WORDS, hidden),
        "lm_head.weight": (WORDS, hidden),
        "model.norm.weight": (hidden,),
    }
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        found |= {
            f"{layer}.self_attn.q_proj.weight": (queries, hidden),
            f"{layer}.self_attn.k_proj.weight": (keys, hidden),
            f"{layer}.self_attn.v_proj.weight": (keys, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, queries),
            f"{layer}.self_attn.q_norm.weight": (head,),
            f"{layer}.self_attn.k_norm.weight": (head,),
            f"{layer}.mlp.gate_proj.weight": (middle, hidden),
            f"{layer}.mlp.up_proj.weight": (middle, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, middle),
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
        }
    return found


def write_weights(out: Path, config: dict[str, Any], seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device=device).manual_seed(seed)
    made = {}
    for name, shape in shapes(config).items():
        if len(shape) == 1:
            made[name] = torch.ones(shape, dtype=torch.bfloat16)
        else:
            tensor = torch.randn(shape, generator=generator, device=device, dtype=torch.float32) * config["initializer_range"]
            made[name] = tensor.to(torch.bfloat16).cpu()
    save_file(made, out / "model.safetensors", metadata={"format": "pt"})


def write_lora(out: Path, config: dict[str, Any], seed: int, rank: int = 8) -> None:
    """An adapter, in the form that PEFT writes, large enough to change what is answered."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    targets = ["q_proj", "v_proj", "o_proj"]
    made = {}
    for name, shape in shapes(config).items():
        if name.split(".")[-2] in targets:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            made[f"{module}.lora_A.weight"] = (torch.randn(rank, shape[1], generator=generator) * 0.05).to(torch.bfloat16)
            made[f"{module}.lora_B.weight"] = (torch.randn(shape[0], rank, generator=generator) * 0.05).to(torch.bfloat16)
    out.mkdir(exist_ok=True)
    save_file(made, out / "adapter_model.safetensors", metadata={"format": "pt"})
    (out / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets, "bias": "none", "task_type": "CAUSAL_LM"}))


def write_tokenizer(out: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, WORDS)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **names).save_pretrained(out)


def load_format(model: str) -> list[str]:
    """What `vllm serve` must be told of *model*."""
    return [] if list(Path(model).glob("*.safetensors")) else ["--load-format", "dummy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("layers", type=int)
    parser.add_argument("hidden", type=int)
    parser.add_argument("--weights", type=int, metavar="SEED")
    parser.add_argument("--lora", type=int, metavar="SEED")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    config = configuration(chosen.layers, chosen.hidden)
    write_tokenizer(chosen.out)
    if chosen.weights is not None:
        write_weights(chosen.out, config, chosen.weights)
    if chosen.lora is not None:
        write_lora(chosen.out / "lora", config, chosen.lora)
    (chosen.out / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main()
