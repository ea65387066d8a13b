"""`make agreement` runs this with transformers: tiny random models of each family, and what transformers makes of them.

python make.py golden FOLDER               a folder of config.json, model.safetensors and expected.safetensors a family
python make.py greedy MODEL.gguf OUT.json  64 greedy tokens after each of 20 openings, float32

Needs torch and transformers, and nothing of ours: what it writes is the other side of the comparison. The weights are
stored in the type that each family's entry says, and the logits are those of the stored weights in float32.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf import GGUFReader
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

PROMPTS = (21, 40)  # tokens
DECODES = 5  # after each prompt, one at a time over transformers' own cache
NEW_TOKENS = 64
BASE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,  # small, so that pairs of all three speeds turn within the prompts
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "llama2": ("llama", torch.float32, {"num_key_value_heads": 4}),
    "llama3": ("llama", torch.bfloat16, {"rope_parameters": LLAMA3}),
    "llama-linear": ("llama", torch.bfloat16, {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "smollm2": ("llama", torch.float16, {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 24, "tie_word_embeddings": True}),
    "mistral": ("mistral", torch.bfloat16, {"sliding_window": 16, "head_dim": 8}),
    "qwen2": ("qwen2", torch.bfloat16, {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 28}),
    "qwen2-tied": ("qwen2", torch.float16, {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", torch.bfloat16, {"head_dim": 12, "tie_word_embeddings": True}),
}  # fmt: skip
OPENINGS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "The three primary colours are",
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969, the first humans",
    "To make a good cup of tea, first",
    "The opposite of hot is",
    "A triangle has three sides. A square has",
    "SELECT name FROM users WHERE",
    "My favourite season is autumn, because the",
    "Photosynthesis is the process by which",
    "Two plus two equals",
    "The quick brown fox jumps over the",
    "Mount Everest is the highest",
    "She opened the door slowly and saw",
    "The mitochondria is the powerhouse of",
    "Q: Who wrote Romeo and Juliet?\nA:",
    "Ein Hund ist ein Tier. Eine Rose ist eine",
)


@torch.inference_mode()
def golden(folder: Path, family: str) -> None:
    kind, stored, changes = FAMILIES[family]
    torch.manual_seed(sorted(FAMILIES).index(family))
    config = AutoConfig.for_model(kind, **(BASE | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, weight in model.named_parameters():
        if weight.dim() == 1:  # norms would all be 1 and biases 0
            weight.copy_(torch.randn_like(weight) * 0.2 + (0.0 if name.endswith("bias") else 1.0))
        weight.copy_(weight.to(stored).to(torch.float32))
    out = folder / family
    expected = {}
    for length in PROMPTS:
        ids = torch.randint(0, config.vocab_size, (1, length + DECODES))
        past = model(ids[:, :length], use_cache=True)
        logits = [past.logits[0]]
        for at in range(length, length + DECODES):
            past = model(ids[:, at : at + 1], past_key_values=past.past_key_values, use_cache=True)
            logits.append(past.logits[0])
        expected |= {f"ids.{length}": ids[0].to(torch.float32), f"logits.{length}": torch.cat(logits).contiguous()}
    # Last, because it rounds RoPE's frequencies too.
    model.to(stored).save_pretrained(out, max_shard_size="16KB" if family == "llama3" else "1GB")
    (out / "generation_config.json").unlink(missing_ok=True)
    save_file(expected, out / "expected.safetensors")
    sys.stdout.write(f"{family}: {sum(path.stat().st_size for path in out.iterdir())} bytes\n")


@torch.inference_mode()
def greedy(file: Path, out: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    eps = float(GGUFReader(file).get_field("llama.attention.layer_norm_rms_epsilon").parts[-1][0])
    for module in model.modules():  # transformers 5.19 keeps its default epsilon, whatever the file says
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = eps
    prompts = [tokenizer(opening, add_special_tokens=False).input_ids for opening in OPENINGS]
    tokens: dict[int, list[int]] = {}
    for length in {len(prompt) for prompt in prompts}:  # those of equal length side by side: nothing is padded
        group = [at for at, prompt in enumerate(prompts) if len(prompt) == length]
        past = model(torch.tensor([prompts[at] for at in group]), use_cache=True)
        columns = [past.logits[:, -1].argmax(-1, keepdim=True)]
        while len(columns) < NEW_TOKENS:
            past = model(columns[-1], past_key_values=past.past_key_values, use_cache=True)
            columns.append(past.logits[:, -1].argmax(-1, keepdim=True))
        sys.stdout.write(f"{len(group)} prompts of {length} tokens\n")
        sys.stdout.flush()
        tokens |= dict(zip(group, torch.cat(columns, dim=1).tolist(), strict=True))
    replies = [{"prompt": prompt, "tokens": tokens[at]} for at, prompt in enumerate(prompts)]
    made = {"transformers": transformers.__version__, "torch": torch.__version__, "file": file.name, "replies": replies}
    out.write_text(json.dumps(made) + "\n")
    sys.stdout.write(f"{out}: {len(replies)} replies\n")


if __name__ == "__main__":
    if sys.argv[1] == "golden":
        for each in FAMILIES:
            golden(Path(sys.argv[2]), each)
    else:
        greedy(Path(sys.argv[2]), Path(sys.argv[3]))
