"""A model and a tokenizer so small that a test may make its own."""

import jax
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from helios_jax.config import ModelConfig
from helios_jax.llm import LLM
from helios_jax.model import init_params
from helios_jax.model.forms import serving_form
from helios_jax.tokenizer import Tokenizer

BOS, EOS = 256, 257
# Few sizes, so that few programs are compiled: one chunk, rounds of 1, 2 and 4 rows.
ENGINE = dict(
    max_num_seqs=4, max_num_rows=8, max_num_batched_tokens=32, kv_cache_memory_bytes=1 << 20
)  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def config(**changes) -> ModelConfig:
    """A Llama of two layers over bytes and two special tokens."""
    fields = dict(
        architecture="llama", vocab_size=258, hidden_size=32, intermediate_size=64, num_layers=2,
        num_heads=4, num_kv_heads=2, head_dim=16, max_model_len=512, tie_word_embeddings=True,
        bos_token_id=BOS, eos_token_ids=(EOS,),
    )  # fmt: skip
    return ModelConfig(**(fields | changes))


def tokenizer(**changes) -> Tokenizer:
    """One token per byte, so token ids are easy to think about."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<bos>", "<eos>"])
    fields = dict(bos_token_id=BOS, eos_token_ids=(EOS,), chat_template=TEMPLATE)
    return Tokenizer(backend, **(fields | changes))


def llm(dtype: str = "float32", seed: int = 0, **options) -> LLM:
    """Random weights; what it says means nothing, but always the same."""
    params = init_params(config(), jax.random.key(seed))
    # Larger weights than training starts from, so that the logits differ clearly.
    params = jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim == 2 else leaf, params)
    form = serving_form(config(), params, dtype)
    return LLM(form, tokenizer(), config=config(), seed=seed, **(ENGINE | options))
