"""``qkv generate``: let a model write through a cache."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from qkv.cli.options import DtypeOption, JsonOption, ModelOption, SeedOption, ThreadsOption
from qkv.cli.run import Run

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


def generate(
    prompt: Annotated[
        list[str],
        typer.Option(
            "--prompt",
            "-p",
            help="the text to answer or go on from; - reads it from standard input; given several times, what the "
            "prompts begin with is run once",
        ),
    ],
    cache_format: Annotated[
        str, typer.Option("--format", "-f", help="the cache: a format, a YAML file, dynamic, hf-...")
    ] = "int8",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1)] = 200,
    stream: Annotated[bool, typer.Option("--stream", help="show the text while it is written")] = False,
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="wrap the prompt in the model's chat template, if it has one")
    ] = True,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0: always the likeliest token")] = 0.0,
    top_p: Annotated[
        float, typer.Option("--top-p", min=0.0, max=1.0, help="sample from this share of the probability")
    ] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="sample from this many tokens; 0: from all")] = 0,
    prefix_cache: Annotated[
        Path | None,
        typer.Option(
            "--prefix-cache",
            help="go on from the cache in this file if it holds the first tokens of the prompt, or of all prompts; "
            "else save theirs",
            metavar="FILE",
        ),
    ] = None,
    model: ModelOption = "smollm2",
    dtype: DtypeOption = "float32",
    json: JsonOption = None,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
) -> None:
    """Let a model write through a cache of any format."""
    import torch

    import qkv
    from qkv.cli.prefix import cache_of_prefix, check_prefix_path, common_prefix
    from qkv.named_caches import as_argument, named_cache

    run = Run(json, seed, threads)
    texts = [sys.stdin.read() if text == "-" else text for text in prompt]
    if not all(text.strip() for text in texts):
        raise ValueError("the prompt is empty")
    named = named_cache(cache_format)
    if prefix_cache is not None:
        check_prefix_path(prefix_cache)
        if not named.is_ours:
            raise ValueError(f"--prefix-cache goes with caches of qkv, not with {named.name!r}; use --format int8")
    language_model: Any  # what transformers says about `generate` confuses mypy
    language_model, tokenizer = run.load_model(model, dtype)
    asked = [encode_prompt(tokenizer, text, chat=chat) for text in texts]
    cache = named.make(language_model.config)
    # A window shows the model no distance that it does not know.
    endless = isinstance(cache, qkv.QKVCache) and cache.config.on_full == "window"
    limit = getattr(language_model.config, "max_position_embeddings", None)
    prompt_tokens = max(inputs["input_ids"].shape[1] for inputs in asked)
    if limit is not None and prompt_tokens + max_new_tokens > limit and not endless:
        raise ValueError(
            f"{prompt_tokens} tokens of prompt and {max_new_tokens} new ones exceed the model's {limit} positions; "
            "shorten the prompt or lower --max-new-tokens"
        )
    if named.is_ours:
        qkv.enable(language_model)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    streamer = _Streamer(tokenizer, sys.stderr if json == "-" else sys.stdout) if stream else None

    began = time.perf_counter()
    loaded = 0
    several = len(asked) > 1
    if isinstance(cache, qkv.QKVCache) and (several or prefix_cache is not None):
        prefix = common_prefix([inputs["input_ids"] for inputs in asked])
        cache, loaded = cache_of_prefix(prefix_cache, cache, language_model, prefix, run, complete=several)
    rows = []
    for inputs in asked:
        if not several:
            own = cache
        else:
            own = cache.fork()[0] if isinstance(cache, qkv.QKVCache) else named.make(language_model.config)
        with torch.inference_mode():
            output = language_model.generate(
                **inputs, **as_argument(own), max_new_tokens=max_new_tokens, streamer=streamer, **sampling
            )
        now = time.perf_counter()
        seconds, began = now - began, now

        prompt_tokens = inputs["input_ids"].shape[1]
        new = output[0, prompt_tokens:]
        written = str(tokenizer.decode(new, skip_special_tokens=True))
        if streamer is None:
            run.out.print(written, markup=False, highlight=False, soft_wrap=True)
        row = {
            "format": named.name,
            "prompt_tokens": prompt_tokens,
            "loaded_tokens": loaded,
            "new_tokens": len(new),
            "seconds": seconds,
            "tokens_per_s": len(new) / seconds,
            "text": written,
        }
        size = ""
        if isinstance(own, qkv.QKVCache):
            row["kv_bytes"] = own.nbytes()
            row["bits_per_value"] = own.stats()["bits_per_value"]
            size = f", cache {own.nbytes() / 1e6:.1f} MB at {row['bits_per_value']:.2f} bits per value"
        run.warn(
            f"{named.name}: {prompt_tokens} + {len(new)} tokens in {seconds:.1f} s "
            f"({row['tokens_per_s']:.1f} new tokens/s, the prompt's pass included){size}"
        )
        rows.append(row)
    run.finish(rows)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str, chat: bool = True) -> dict[str, torch.Tensor]:
    """Turns a prompt into a model's inputs: ``input_ids`` and ``attention_mask``, int64 ``[1, tokens]``.

    Args:
        tokenizer: the model's.
        text: the prompt.
        chat: as a user's message in the tokenizer's chat template, where there is one.
    """
    if chat and tokenizer.chat_template:
        messages = [{"role": "user", "content": text}]
        encoded: Any = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoded = tokenizer(text, return_tensors="pt")
    return {key: encoded[key] for key in ("input_ids", "attention_mask")}


class _Streamer:
    """Writes a model's words as they come: what ``generate`` calls a streamer (``put`` for tokens, ``end``).

    A token may be half a character, so the text is decoded anew from the last line break and only its settled part is
    shown.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, out: TextIO) -> None:
        self._tokenizer = tokenizer
        self._out = out
        self._tokens: list[int] = []
        self._shown = 0
        self._is_prompt = True

    def put(self, tokens: torch.Tensor) -> None:
        if self._is_prompt:  # generate hands over the prompt first
            self._is_prompt = False
            return
        self._tokens.extend(int(token) for token in tokens.reshape(-1))
        text = self._decode()
        if text.endswith("\n"):
            self._show(text)
            self._tokens, self._shown = [], 0
        elif not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self._show(text)

    def end(self) -> None:
        self._show(self._decode() + "\n")
        self._tokens, self._shown, self._is_prompt = [], 0, True

    def _decode(self) -> str:
        return str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))

    def _show(self, text: str) -> None:
        self._out.write(text[self._shown :])
        self._out.flush()
        self._shown = len(text)
