"""A Llama of a few thousand random weights with its own tokenizer, as a Hugging Face folder on disk."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_ID = 2
N_TOKENS = 320

SENTENCES = (
    "The baker fires the oven before dawn and shapes the first loaves.",
    "Many hands knead the dough; one oven bakes for the whole town.",
    "A loaf boards the batch as soon as another leaves it.",
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_config(**changes: object) -> LlamaConfig:
    """Two layers of width 64 with grouped heads; `changes` replace fields."""
    fields: dict[str, object] = {
        "vocab_size": N_TOKENS,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": END_ID,
        "tie_word_embeddings": True,
        # Wider than the usual 0.02, so that logits of different tokens differ clearly.
        "initializer_range": 0.2,
    }
    return LlamaConfig.from_dict(fields | changes)


def random_model(config: PreTrainedConfig, kind: type[PreTrainedModel] = LlamaForCausalLM) -> PreTrainedModel:
    """The same random float32 weights for the same configuration, biases and norms too."""
    torch.manual_seed(0)
    model: PreTrainedModel = kind(config).train(False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
            elif parameter.ndim == 1:
                parameter.normal_(mean=1.0, std=0.2)
    return model


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of `N_TOKENS` entries: any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=N_TOKENS,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


def write_tiny_llama(folder: Path, *, max_shard_size: str = "1GB", **changes: object) -> Path:
    """Write model, tokenizer and generation defaults into `folder`; `changes` go to `tiny_config`."""
    random_model(tiny_config(**changes)).save_pretrained(folder, max_shard_size=max_shard_size)
    tiny_tokenizer().save_pretrained(folder)
    return folder
