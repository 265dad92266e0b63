"""A real byte-level BPE tokenizer of 384 entries, trained on a built-in text; training twice gives the same JSON.

16 specials (pad 0, eos 1, bos 2, unk 3, turn markers 4 and 5), 256 byte letters, 112 merges. Any text round-trips.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIALS = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<think>", "</think>"] + [
    f"<unused{i}>" for i in range(8)
]
TURN_END = SPECIALS.index("<turn|>")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|turn>' + ('model' if m['role']=='assistant' else m['role']) + '\n' + (m['content'] | trim) + '<turn|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"
)

_TEXT = """
A server keeps the keys and values of the tokens it has seen. When the next request begins with the same words, the
server reads them again from the cache instead of computing them, and the answer is the same answer, only sooner.
Some layers of the model look at every token that came before; other layers look through a window and see the last
few hundred tokens and nothing else. What the window has passed may be given back, and what is given back must not be
read again. A page is a row of slots; a slot is a place for one token; a prefix is a path from the root of the tree.
Two requests that share a prefix share its pages, and neither of them owns the pages alone. When memory runs short the
server gives up what nobody has used for the longest time, first the windows, then the leaves, never the locked path.
Write the reason down, count the slots before and after, and let the numbers say whether the books are balanced.
How many tokens are in the cache? Which request holds them? Who may free them, and when? Ask the ledger and it answers.
The user said hello, the model said hello again; the user asked for a poem about the sea, and the model began to write.
"""


def build_tokenizer(vocab_size: int) -> Tokenizer:
    """Train the tokenizer. Encoding adds ``<bos>`` unless special tokens are turned off."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.strip().splitlines(), trainer)
    bos = SPECIALS.index("<bos>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", bos)]
    )
    return tokenizer


def tokenizer_config(max_length: int) -> dict[str, Any]:
    """tokenizer_config.json; the class is named because AutoTokenizer would otherwise guess one from the model type."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
