"""The village's tokenizer and tiny model; `AutoTokenizer` and `AutoModelForCausalLM` load both from a folder."""

from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed


SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
TAG_TOKENS = tuple(f"<{slash}{tag}>" for tag in ("mem", "think", "tool_call", "answer") for slash in ("", "/"))
CALL_TOKENS = ('{"name": "search", "arguments": {"query": "', '"}}')
"""The fixed parts of a search call; as one token each they make every turn a good deal shorter."""

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""ChatML with every message rendered as it is: nothing that the model wrote is dropped or moved."""


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """
    Train a byte-level BPE tokenizer in which every word of `texts` is one token, with and without a leading space.

    Any text survives encoding and decoding byte for byte, since all 256 bytes are in the vocabulary.

    Args:
        texts (`Iterable[str]`):
            What the model will read and write.

    Returns:
        [`~transformers.PreTrainedTokenizerFast`]: with `<|im_end|>` as end, `<|endoftext|>` as padding, the protocol's
        tags as added tokens that are not special, and a ChatML template.
    """
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces = {text[start:end] for text in texts for _, (start, end) in byte_level.pre_tokenize_str(text)}
    words = {piece.strip() for piece in pieces} | {"system", "user", "assistant", "tool"}
    # Bare words come far more often, so that the merges build them first and a word with its space is only one merge
    # more, instead of a second chain of merges that starts at the space.
    words = sorted(word for word in words if word.isalnum())
    training_texts = words * 100 + [f" {word}" for word in words] + sorted(pieces)

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in TAG_TOKENS + CALL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
        model_input_names=["input_ids", "attention_mask"],
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast,
    hidden_size: int = 64,
    num_layers: int = 3,
    num_heads: int = 4,
    seed: int = 0,
) -> LlamaForCausalLM:
    """
    Build an untrained Llama for a tokenizer.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]):
            Gives the vocabulary and the ids of end and padding.
        hidden_size (`int`, *optional*, defaults to `64`):
            Width of the model.
        num_layers (`int`, *optional*, defaults to `3`):
            Number of layers; copying from the context needs at least two.
        num_heads (`int`, *optional*, defaults to `4`):
            Attention heads per layer.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the weights.

    Returns:
        [`~transformers.LlamaForCausalLM`]
    """
    set_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=2048,
        initializer_range=hidden_size**-0.5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    # The agent's work is copying, so the weights start close to it (https://huggingface.co/papers/2305.09828 does the
    # like for vision): a token attends to equal ones (K = Q) and passes on what it attends to (O = V transposed).
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.data.copy_(layer.self_attn.q_proj.weight.data)
        layer.self_attn.o_proj.weight.data.copy_(layer.self_attn.v_proj.weight.data.T)
    # A word is written with a leading space in some places and without in others: both start from similar embeddings.
    vocab = tokenizer.get_vocab()
    embeddings = model.get_input_embeddings().weight.data  # (V, H)
    for token, i in vocab.items():
        if token.startswith("Ġ") and token[1:] in vocab:
            embeddings[i] = (embeddings[i] + 3 * embeddings[vocab[token[1:]]]) / 10**0.5
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model
