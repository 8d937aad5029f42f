"""``qkv compare``: what each cache format does to a model, what it saves and what it costs, in one table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from qkv.named_caches import UNQUANTIZED
from qkv_eval.bench.decode import measure_decode
from qkv_eval.bench.timing import noise_warning
from qkv_eval.peers import Progress, with_baseline
from qkv_eval.perplexity import check_context, score_caches, summarize
from qkv_eval.sample import PROMPT, write_samples
from qkv_eval.text import Text, cut_windows, load_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class CompareSettings:
    """What to compare, on which text, and at which size of cache.

    Attributes:
        text: a text file, or None for the embedded text.
        window, limit: tokens in a window, and windows scored.
        context, batch: tokens and sequences in the cache when a decode step is timed and memory is counted.
        rounds: timed steps of each cache.
        sample_tokens: length of the text written through each cache; 0 for none.
    """

    formats: tuple[str, ...] = ("none", "int8", "fp8_e4m3")
    text: str | None = None
    window: int = 2048
    limit: int = 2
    context: int = 4096
    batch: int = 4
    rounds: int = 11
    prompt: str = PROMPT
    sample_tokens: int = 48
    seed: int = 0


def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: CompareSettings,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Compares caches on one model and text; transformers' ``DynamicCache`` is the first row and the measure of all.

    Quality is scored through the stored values (see ``qkv_eval.perplexity``); ``bits_per_value`` and ``kv_bytes`` are
    those of the caches that were timed, at the stated context and batch, and a decode step is timed with all caches
    in turn.

    Returns:
        ``rows``, with the keys ``format, bits_per_value, kv_bytes, ppl, dppl_percent, kld_mean, same_top_percent,
        ms_per_step, ratio_to_dynamic`` and more on scoring and spread; ``samples``; ``text`` (name, SHA-256,
        windows); and ``notes``, lines that a reader of the figures should know.

    Raises:
        ValueError: an unknown cache, a text that is too short, or a size beyond the model or the memory.
    """
    caches = with_baseline(settings.formats)
    check_context(model, settings.window)
    text = load_text(settings.text)
    windows = cut_windows(tokenizer, text, settings.window, settings.limit)
    notes = [] if len(windows) == settings.limit else [_few_windows(text, len(windows), settings)]
    steps, timings = measure_decode(
        model,
        caches,
        settings.batch,
        settings.context,
        rounds=settings.rounds,
        seed=settings.seed,
        progress=progress,
    )
    scores = score_caches(model, windows, caches, progress=progress)
    rows = []
    for cache, step in zip(caches, steps, strict=True):
        quality = summarize(scores[cache.name], scores[UNQUANTIZED])
        step = {key: value for key, value in step.items() if key != "cache"}
        rows.append({"format": cache.name, **quality, **step})
    samples = []
    if settings.sample_tokens > 0:
        samples = write_samples(model, tokenizer, caches, settings.prompt, settings.sample_tokens, progress)
    noise = noise_warning(timings)
    if noise is not None:
        notes.append(noise)
    return {
        "rows": rows,
        "samples": [asdict(sample) for sample in samples],
        "text": {"name": text.name, "sha256": text.sha256, "windows": len(windows), "window": settings.window},
        "notes": notes,
    }


def _few_windows(text: Text, windows: int, settings: CompareSettings) -> str:
    return f"the text {text.name!r} gives {windows} windows of {settings.window} tokens, not {settings.limit}"
