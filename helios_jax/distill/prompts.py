"""Where do prompts come from when there is no traffic to distil on?

    python -m helios_jax.distill.prompts --out prompts.jsonl --count 1500

Two sources, neither of which is anybody's benchmark:

- The target's own samples: a chat prompt is ended inside the user's message, after a few opening
  words of `OPENERS`, and the target writes the rest of the message (arXiv 2406.08464 does so with
  an aligned model and no opening words; a model of 135M parameters needs some to vary).
- Passages of the Python language reference that every Python carries (`pydoc_data.topics`, PSF
  licence), put into one of `TASKS`, for longer contexts and answers that copy from them.

A command, a seed and a Python version give the same file everywhere, up to near-ties of the
target's rounding.
"""

import argparse
import json
import pydoc_data.topics
import random
import re
import sys
from pathlib import Path

from helios_jax.llm import LLM, load
from helios_jax.sampling import SamplingParams

OPENERS = (
    "Write a short story about", "Write a poem about", "Write an email to", "Write a blog post",
    "Write a speech", "Write a review of", "Write a dialogue between", "Draft a letter",
    "Imagine you are", "Pretend that you are", "You are a", "Act as a", "Tell me about",
    "Explain why", "Explain how", "Explain the difference between", "What is", "What are",
    "What happens when", "What was the", "Who was", "Who wrote", "Who is the", "When did",
    "When was the", "Where is", "Where did", "Why do", "Why is", "How do I", "How does",
    "How many", "How can I", "How much", "Describe", "Compare", "List", "Give me", "Name three",
    "Suggest", "Can you", "Is it", "If a train", "If I have", "A farmer has", "A shop sells",
    "There are 12", "Solve the equation", "Calculate", "Find the area of", "A student bought",
    "Write a Python function", "Write a program", "Implement", "Fix this code:", "def ",
    "Translate the following sentence from German into English: ", "Translate from German: Die",
    "Translate into English: Der", "Translate to French:", "Correct the grammar:",
    "Rewrite the sentence:", "Summarize the following text:", "Summarize this article: The",
    "Summarize: (Reuters)", "Read the following passage and answer the question.",
    "Based on the text below, answer the question.\n\n", "Extract the names from this text:",
    "Classify", "Discuss", "Analyze", "In what year", "The theory of", "Design a",
    "Create a plan", "Help me", "I want to", "My friend",
)  # fmt: skip
TASKS = (
    "Summarize the following text:\n\n{passage}",
    "Summarize this in two sentences.\n\n{passage}",
    "{passage}\n\nSummarize the text above.",
    "Answer the question based on the text below.\n\n{passage}\n\nQuestion: What does it describe?",
    "Context: {passage}\n\nQuestion: What is the most important rule here?\nAnswer:",
    "Explain the following passage to a beginner:\n\n{passage}",
    "List the key points of this text:\n\n{passage}",
    "Rewrite the following text in simple words:\n\n{passage}",
)
# Words of a passage: from a paragraph to a page.
_PASSAGE_WORDS = (60, 320)
_MAX_MESSAGE_TOKENS = 96
_BATCH = 64
# Per message that is kept.
_MAX_TRIES = 64
# A message that ends at once, or never.
_MIN_CHARS = 12


def self_written(llm: LLM, count: int, seed: int) -> list[str]:
    """Users' messages that the target itself wrote after an opener, `count` of them.

    Raises:
      ValueError: it ends hardly any message; another target does better.
    """
    messages: list[str] = []
    tries = 0
    while len(messages) < count:
        starts = [OPENERS[(tries + i) % len(OPENERS)] for i in range(_BATCH)]
        prompts = [_unfinished(llm, start) for start in starts]
        params = [
            SamplingParams(temperature=1.0, max_tokens=_MAX_MESSAGE_TOKENS, seed=seed + tries + i)
            for i in range(_BATCH)
        ]
        outputs = llm.generate(prompts, params)
        for start, output in zip(starts, outputs, strict=True):
            completion = output.outputs[0]
            text = start + completion.text
            if completion.finish_reason == "stop" and len(text) >= len(start) + _MIN_CHARS:
                messages.append(text.strip())
        tries += _BATCH
        if len(messages) * _MAX_TRIES < tries:
            raise ValueError(
                f"target: ended {len(messages)} of {tries} messages within {_MAX_MESSAGE_TOKENS} "
                "tokens; use a model that was trained on chats, or prompts of your own"
            )
        print(f"{len(messages)} of {count} messages, {tries} tries", file=sys.stderr, flush=True)
    return messages[:count]


def with_passages(count: int, seed: int) -> list[str]:
    """Tasks about passages of the Python reference."""
    draw = random.Random(seed)
    words = {
        name: re.sub(r"[*_=\-~^\"]{3,}", " ", text).split()
        for name, text in sorted(pydoc_data.topics.topics.items())
    }
    names = [name for name, text in words.items() if len(text) > _PASSAGE_WORDS[0]]
    messages = []
    for _ in range(count):
        text = words[draw.choice(names)]
        length = draw.randint(*_PASSAGE_WORDS)
        first = draw.randrange(max(1, len(text) - length))
        messages.append(draw.choice(TASKS).format(passage=" ".join(text[first : first + length])))
    return messages


def _unfinished(llm: LLM, start: str) -> list[int]:
    """Token ids of a chat prompt that ends with the opening words of the user's message."""
    mark = "\N{WHITE SQUARE}"
    text = llm.tokenizer.apply_chat_template([{"role": "user", "content": mark}])
    return llm.tokenizer.encode(text[: text.index(mark)] + start)


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes prompts for distillation.")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=1500)
    parser.add_argument("--passages", type=float, default=0.15, help="Share of `with_passages`.")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    num_passages = round(given.count * given.passages)
    llm = load(given.target, dtype="bfloat16", max_num_seqs=32, max_model_len=1024)
    messages = self_written(llm, given.count - num_passages, given.seed)
    messages += with_passages(num_passages, given.seed)
    random.Random(given.seed).shuffle(messages)
    lines = [
        json.dumps({"messages": [{"role": "user", "content": text}]}, ensure_ascii=False)
        for text in messages
    ]
    given.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(given.out)


if __name__ == "__main__":
    main()
