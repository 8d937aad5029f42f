"""What a model writes through each cache: the same prompt, always the likeliest token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from qkv.cli.generate import encode_prompt
from qkv.named_caches import as_argument
from qkv_eval.peers import Progress, attend_as_meant

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from qkv.named_caches import NamedCache

PROMPT = "Explain to a child why the sky is blue and the sunset is red."


@dataclass(frozen=True)
class Sample:
    """A text that was written through a cache.

    Attributes:
        same: tokens at the start that are those of the first cache of the run.
        same_text: these tokens as text.
    """

    format: str
    text: str
    tokens: int
    same: int
    same_text: str


@torch.inference_mode()
def write_samples(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    caches: Sequence[NamedCache],
    prompt: str = PROMPT,
    tokens: int = 64,
    progress: Progress | None = None,
) -> list[Sample]:
    """Lets the model write greedily through each cache, and says how long the texts agree with that of the first.

    The model is left plain. A cache of transformers that fails has its error as its text.

    Args:
        model, tokenizer: a causal language model and its tokenizer.
        caches: the first is the one that the others are held against.
        prompt: a user's message, in the chat template where there is one.
        tokens: new tokens at most.
        progress: called with what is done, how many caches so far, and how many in all.
    """
    inputs = encode_prompt(tokenizer, prompt)
    begin = inputs["input_ids"].shape[1]
    writer: Any = model  # what transformers says about `generate` confuses mypy
    samples: list[Sample] = []
    first: list[int] = []
    for number, named in enumerate(caches):
        if progress is not None:
            progress("writing samples", number, len(caches))
        attend_as_meant(model, named)
        try:
            output = writer.generate(
                **inputs, **as_argument(named.make(model.config)), max_new_tokens=tokens, do_sample=False
            )
        except RuntimeError as error:
            if named.is_ours:
                raise
            # HQQ's 4 bits, for one, refuse an odd number of groups. That is a finding, and no reason to lose the rest.
            samples.append(Sample(named.name, f"failed on this prompt: {error}", 0, 0, ""))
            continue
        new = output[0, begin:].tolist()
        first = first or new
        same = next((i for i, (a, b) in enumerate(zip(first, new, strict=False)) if a != b), min(len(first), len(new)))
        samples.append(
            Sample(
                named.name,
                str(tokenizer.decode(new, skip_special_tokens=True)),
                len(new),
                same,
                str(tokenizer.decode(new[:same], skip_special_tokens=True)),
            )
        )
    attend_as_meant(model, caches[0])
    if progress is not None:
        progress("writing samples", len(caches), len(caches))
    return samples
