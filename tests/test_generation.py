"""Ways to generate, in double precision where rounding decides nothing: each gives what single steps give.

What a mode is held against is a row alone, one token at a time, over a cache of the same format and with transformers'
own attention; for the format ``none`` that cache is a ``DynamicCache``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from conftest import make_tiny_model
from families import FAMILIES, WINDOW
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    LogitsProcessor,
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

import qkv
from qkv.named_caches import as_argument

pytestmark = pytest.mark.filterwarnings("ignore::qkv.SlowPathWarning")

NAMES = ["tiny Llama", "Mistral", "Gemma 3"]
LENGTH = 24  # of a prompt: past the windows of 16
NEW = 12
PAD = 0

Choose = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

NONE = {"format": "none"}
INT8 = {"format": "int8", "equalize": False}
WINDOW_ONLY = {**INT8, "residual_length": 5}
RESIDUAL = {**INT8, "residual_length": 5, "sink_tokens": 3}
# Keys in groups of tokens, the last of which waits until it is full; rotated values.
CHANNELS = {"format": "int4_rot", "key_format": "int4", "key_granularity": "channel", "key_group_size": 16}
# Keys that are equalized by given vectors, and so from the first token on; `cache_of` makes some for the model.
VECTORS = {"format": "int4_rot", "key_format": "int8", "vectors": "given"}


class Case(NamedTuple):
    """A model, a format, and whether attention reads its codes."""

    name: str
    way: dict[str, Any]
    fused: bool

    def __str__(self) -> str:
        return " ".join([self.name, *map(str, self.way.values()), "fused" if self.fused else "decoded"])

    def model(self) -> PreTrainedModel:
        return built(self.name)

    def switch(self) -> None:
        """Gives the model the attention of this case."""
        (qkv.enable if self.fused else qkv.disable)(self.model())

    def cache(self) -> qkv.QKVCache:
        """An empty cache; the model gets the attention that goes with it."""
        self.switch()
        return cache_of(self.model(), self.way, **({"backend": "reference"} if self.fused else {}))


# With a residual window and without the fused attention a prompt in one pass is seen as it ends up stored, and so not
# as in single steps: README, Limits.
CASES = [
    Case("tiny Llama", NONE, True),
    Case("tiny Llama", RESIDUAL, True),
    Case("tiny Llama", CHANNELS, True),
    Case("Mistral", INT8, False),
    Case("Mistral", RESIDUAL, True),
    Case("Mistral", VECTORS, True),
    Case("Gemma 3", NONE, False),
    Case("Gemma 3", INT8, True),
    Case("Gemma 3", CHANNELS, True),
]
# Tokens can be taken back from these without a trace.
TOKEN_WISE = [
    Case("tiny Llama", INT8, True),
    Case("tiny Llama", VECTORS, True),
    Case("Mistral", NONE, True),
    Case("Mistral", INT8, False),
    Case("Gemma 3", NONE, False),
    Case("Gemma 3", INT8, True),
    Case("Gemma 3", VECTORS, False),
]
# Sinks and groups of tokens count padding as tokens, so that with them a row in a batch differs from the row alone.
PADDED = [Case(name, WINDOW_ONLY if way == RESIDUAL else way, fused) for name, way, fused in CASES if way != CHANNELS]


@functools.cache
def built(name: str) -> PreTrainedModel:
    model = (make_tiny_model() if name == "tiny Llama" else FAMILIES[name]()).double()
    if name != "tiny Llama":
        with torch.no_grad():  # weights as they are usually made give predictions that no cache could spoil
            for parameter, weight in model.named_parameters():
                if weight.dim() > 1 and "embed" not in parameter:
                    weight *= 6
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


@pytest.fixture(autouse=True)
def _as_it_was(keep_threads: None) -> Iterator[None]:
    """Transformers' own attention before and after; one thread, since two wait for each other in models so small."""
    torch.set_num_threads(1)
    yield
    for name in NAMES:
        qkv.disable(built(name))


def prompt(batch: int, length: int = LENGTH, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 90, (batch, length), generator=torch.Generator().manual_seed(seed))


def cache_of(model: PreTrainedModel, way: dict[str, Any], **more: Any) -> qkv.QKVCache:
    options = {name: value for name, value in way.items() if name != "vectors"}
    if "vectors" in way:
        config = model.config
        generator = torch.Generator().manual_seed(8)
        shape = (config.num_key_value_heads, config.head_dim)
        options["scales"] = {
            f"layers.{layer}.{kind}": torch.rand(shape, generator=generator) + 0.2
            for layer in range(config.num_hidden_layers)
            for kind in ("key_centre", "key_multiplier")
        }
    return qkv.QKVCache(model.config, **options, **more)


def plain_cache(model: PreTrainedModel, way: dict[str, Any]) -> Any:
    return DynamicCache(config=model.config) if way == NONE else cache_of(model, way)


@contextlib.contextmanager
def own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Transformers' own attention for a while."""
    fused = model.config._attn_implementation == "qkv"
    qkv.disable(model)
    yield
    if fused:
        qkv.enable(model)


def greedy(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores.argmax(-1)


@torch.no_grad()
def single_steps(
    model: PreTrainedModel, way: dict[str, Any], ids: torch.Tensor, tokens: int = NEW, choose: Choose = greedy
) -> tuple[torch.Tensor, torch.Tensor]:
    """New tokens ``[rows, tokens]``, made one at a time, and the logits ``[rows, tokens, vocabulary]`` behind them."""
    cache, start = plain_cache(model, way), ids.shape[1]
    logits = []
    with own_attention(model):
        for i in range(start + tokens - 1):
            step = model(ids[:, i : i + 1], **as_argument(cache)).logits[:, -1].float()
            if i >= start - 1:
                logits.append(step)
                ids = torch.cat([ids, choose(ids, step.clone())[:, None]], dim=1)
    return ids[:, start:], torch.stack(logits, dim=1)


@torch.no_grad()
def logits_of(model: PreTrainedModel, way: dict[str, Any], ids: torch.Tensor, at_once: int = 1) -> torch.Tensor:
    """The logits at every position of given rows: ``at_once`` tokens in one pass, then a token at a time."""
    cache = plain_cache(model, way)
    pieces = [ids[:, :at_once], *ids[:, at_once:].split(1, dim=1)]
    with own_attention(model):
        return torch.cat([model(piece, **as_argument(cache)).logits.float() for piece in pieces], dim=1)


def generate(model: PreTrainedModel, ids: torch.Tensor, cache: Any, **options: Any) -> Any:
    # All tokens are seen unless it is said; what was written may hold the token that is for padding.
    usual = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    return model.generate(ids, **as_argument(cache), **{**usual, **options})


def assert_same_logits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """generate hands out float32, so this is double precision but for one rounding."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-7 * float(expected.abs().max()))


# ---- beams -----------------------------------------------------------------------------------------------------------


def along_the_beams(out: Any, length: int) -> torch.Tensor:
    """The logits that each returned sequence was made from, ``[sequences, new tokens, vocabulary]``."""
    assert int(out.beam_indices.min()) >= 0
    steps = range(out.sequences.shape[1] - length)
    return torch.stack([out.logits[i][out.beam_indices[:, i]] for i in steps], dim=1)


BEAMS: dict[str, Any] = {
    "num_beams": 3,
    "num_return_sequences": 3,
    "return_dict_in_generate": True,
    "output_logits": True,
}
SEARCHES = [
    Case(name, way, fused)
    for name in NAMES
    for way, fused in (
        (NONE, False),
        (NONE, True),
        (INT8, False),
        (INT8, True),
        (RESIDUAL, False),
        (RESIDUAL, True),
        (CHANNELS, True),
        (VECTORS, False),
        (VECTORS, True),
    )
]


@pytest.mark.parametrize(
    ("case", "sample"),
    [*((case, False) for case in SEARCHES), *((case, True) for case in CASES)],
    ids=lambda x: str(x) if isinstance(x, Case) else ("sampling" if x else "search"),
)
def test_every_beam_sees_what_a_row_that_was_never_moved_sees(case: Case, sample: bool) -> None:
    """With a residual window the prompt is so short that the first tokens are encoded in the middle of the search."""
    model = case.model()
    length = 6 if case.way == RESIDUAL else LENGTH
    ids = prompt(2, length)
    options = {**BEAMS, "do_sample": sample, "max_new_tokens": 16}
    torch.manual_seed(3)
    out = generate(model, ids, case.cache(), **options)
    stayed = torch.arange(3).repeat(2) + torch.arange(2).repeat_interleave(3) * 3
    moves = sum(bool((rows != stayed).any()) for rows in out.beam_indices[:, 1:].T)
    assert moves > 3  # or there was nothing to get wrong
    at_once = length if case.way == RESIDUAL and not case.fused else 1
    expected = logits_of(model, case.way, out.sequences[:, :-1], at_once)[:, length - 1 :]
    assert_same_logits(along_the_beams(out, length), expected)
    if case.way == NONE:
        torch.manual_seed(3)
        theirs = generate(model, ids, DynamicCache(config=model.config), **options)
        assert torch.equal(out.sequences, theirs.sequences)
        assert torch.equal(out.beam_indices, theirs.beam_indices)


@pytest.mark.parametrize("way", [NONE, INT8, RESIDUAL, CHANNELS, VECTORS], ids=str)
def test_a_beam_search_goes_on_over_full_segments_and_a_full_residual_buffer(way: dict[str, Any]) -> None:
    case = Case("tiny Llama", way, True)
    options = {**BEAMS, "num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 100}
    out = generate(case.model(), prompt(1, 6), case.cache(), **options)
    expected = logits_of(case.model(), way, out.sequences[:, :-1])[:, 5:]
    assert_same_logits(along_the_beams(out, 6), expected)


@pytest.mark.parametrize("way", [NONE, INT8, RESIDUAL, CHANNELS, VECTORS], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_beams_over_the_kernel_differ_from_rows_that_were_never_moved_far_less_than_the_format_does(
    name: str, way: dict[str, Any]
) -> None:
    """In float32, where rounding flips single codes by one step."""
    model = qkv.enable(copy.deepcopy(built(name)).float())
    cache = cache_of(model, way)
    out = generate(model, prompt(2), cache, **BEAMS)
    assert {row["backend"] for row in cache.stats()["layers"]} == {"cpu"}
    rows, at = out.sequences[:, :-1], slice(LENGTH - 1, None)
    stored, exact = logits_of(model, way, rows)[:, at], logits_of(model, NONE, rows)[:, at]
    difference = along_the_beams(out, LENGTH) - stored
    if way == NONE:
        assert float(difference.abs().max()) <= 2e-5 * float(exact.abs().max())
    else:
        assert float(difference.square().mean()) < 0.05 * float((stored - exact).square().mean())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_copied_prefix_repeated_for_beams_gives_what_a_fresh_cache_gives(case: Case) -> None:
    model = case.model()
    options = {**BEAMS, "output_scores": True}
    ids = prompt(1, LENGTH + 7)
    expected = generate(model, ids, case.cache(), **options)
    kept = case.cache()
    with torch.no_grad():
        model(ids[:, :LENGTH], **as_argument(kept))
    for _ in range(2):
        cache = copy.deepcopy(kept)
        cache.batch_repeat_interleave(3)
        actual = generate(model, ids, cache, **options)
        assert torch.equal(actual.sequences, expected.sequences)
        assert_same_logits(torch.stack(actual.logits), torch.stack(expected.logits))
        assert kept.get_seq_length() == LENGTH


@pytest.mark.parametrize("way", [NONE, INT8, {"format": "int4", "granularity": "group"}], ids=str)
@pytest.mark.parametrize("name", ["T5", "BART"])
def test_beams_of_an_encoder_decoder_see_what_rows_that_were_never_moved_see(name: str, way: dict[str, Any]) -> None:
    """The cache of the cross-attention is rearranged as well; the encoder's rows differ in length."""
    model = FAMILIES[name]().double()
    model.generation_config.eos_token_id = None
    ids, mask = padded([prompt(1, 12), prompt(1, 7, seed=2)])

    def both(make: Callable[[], Any]) -> EncoderDecoderCache:
        return EncoderDecoderCache(make(), make())

    qkv.enable(model)
    cache = both(lambda: qkv.QKVCache(model.config, **way, backend="reference"))
    out = generate(model, ids, cache, attention_mask=mask, **BEAMS)
    mask_of_rows = mask.repeat_interleave(3, dim=0)
    plain = both(lambda: plain_cache(model, way))
    with torch.no_grad(), own_attention(model):
        encoded = model.get_encoder()(ids.repeat_interleave(3, dim=0), mask_of_rows)
        steps = [
            model(decoder_input_ids=x, encoder_outputs=encoded, attention_mask=mask_of_rows, **as_argument(plain))
            for x in out.sequences[:, :-1].split(1, dim=1)
        ]
    assert_same_logits(along_the_beams(out, 1), torch.cat([step.logits.float() for step in steps], dim=1))


# ---- constraints and sampling ----------------------------------------------------------------------------------------


class OtherParity(LogitsProcessor):
    """After an even token comes an odd one, and the other way round."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        same = torch.arange(scores.shape[1])[None] % 2 == input_ids[:, -1:] % 2
        return scores.masked_fill(same, -torch.inf)


def allowed(row: int, ids: torch.Tensor) -> list[int]:
    """Twenty tokens, others after every token."""
    start = 3 + int(ids[-1]) * 7 % 60
    return list(range(start, start + 20))


def constraint(kind: str, free: list[int], beams: int = 1) -> tuple[dict[str, Any], LogitsProcessorList]:
    """What generate is to be told so that it cannot write ``free``, and the same as processors."""
    if kind == "allowed tokens":
        return {"prefix_allowed_tokens_fn": allowed}, LogitsProcessorList(
            [PrefixConstrainedLogitsProcessor(allowed, beams)]
        )
    if kind == "bad words":
        bad = [[free[1]], free[4:6]]
        return {"bad_words_ids": bad}, LogitsProcessorList([NoBadWordsLogitsProcessor(bad)])
    custom = LogitsProcessorList([OtherParity()])
    return {"logits_processor": custom}, custom


CONSTRAINTS = ["allowed tokens", "bad words", "other parity"]
CONSTRAINED = [
    Case("tiny Llama", RESIDUAL, True),
    Case("tiny Llama", CHANNELS, True),
    Case("Mistral", INT8, False),
    Case("Gemma 3", NONE, True),
]


@pytest.mark.parametrize("kind", CONSTRAINTS)
@pytest.mark.parametrize("case", CONSTRAINED, ids=str)
def test_constrained_text_is_that_of_constrained_single_steps(case: Case, kind: str) -> None:
    model, ids = case.model(), prompt(1)
    free, _ = single_steps(model, case.way, ids)
    told, processors = constraint(kind, free[0].tolist())
    expected, _ = single_steps(model, case.way, ids, choose=lambda ids, scores: processors(ids, scores).argmax(-1))
    assert not torch.equal(expected, free)
    assert torch.equal(generate(model, ids, case.cache(), **told)[:, LENGTH:], expected)


@pytest.mark.parametrize("kind", CONSTRAINTS)
@pytest.mark.parametrize("case", CONSTRAINED, ids=str)
def test_constrained_beams_keep_the_constraint_and_see_what_rows_that_were_never_moved_see(
    case: Case, kind: str
) -> None:
    model, ids = case.model(), prompt(2)
    free, _ = single_steps(model, case.way, ids)
    told, processors = constraint(kind, free[0].tolist(), beams=3)
    out = generate(model, ids, case.cache(), **BEAMS, **told)
    expected = logits_of(model, case.way, out.sequences[:, :-1])[:, LENGTH - 1 :]
    assert_same_logits(along_the_beams(out, LENGTH), expected)
    for i in range(NEW):
        before, chosen = out.sequences[:, : LENGTH + i], out.sequences[:, LENGTH + i, None]
        assert bool(processors(before, expected[:, i].clone()).gather(1, chosen).isfinite().all())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sampling_with_a_seed_draws_what_single_steps_draw(case: Case) -> None:
    model, ids = case.model(), prompt(3)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(1.7), TopKLogitsWarper(40), TopPLogitsWarper(0.95)])

    def draw(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.multinomial(warpers(ids, scores).softmax(-1), 1)[:, 0]

    torch.manual_seed(11)
    expected, logits = single_steps(model, case.way, ids, choose=draw)
    assert not torch.equal(expected, logits.argmax(-1))
    for _ in range(2):
        torch.manual_seed(11)
        drawn = generate(model, ids, case.cache(), do_sample=True, temperature=1.7, top_k=40, top_p=0.95)
        assert torch.equal(drawn[:, LENGTH:], expected)


# ---- what generate hands out -----------------------------------------------------------------------------------------


class Collector(BaseStreamer):
    """Keeps what it is given, and how many tokens the cache held then."""

    def __init__(self, cache: qkv.QKVCache):
        self.cache = cache
        self.pieces: list[torch.Tensor] = []
        self.held: list[int] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.pieces.append(value.flatten())
        self.held.append(self.cache.get_seq_length())

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_streamer_gets_every_token_as_soon_as_it_is_chosen(case: Case) -> None:
    model, ids = case.model(), prompt(1)
    expected, _ = single_steps(model, case.way, ids)
    cache = case.cache()
    streamer = Collector(cache)
    out = generate(model, ids, cache, streamer=streamer)
    assert torch.equal(torch.cat(streamer.pieces), out[0])
    assert torch.equal(torch.cat(streamer.pieces[1:]), expected[0])
    # The prompt before anything is stored; then a token each, before that token itself goes through the model.
    assert [len(piece) for piece in streamer.pieces] == [LENGTH] + [1] * NEW
    assert streamer.held == [0, *range(LENGTH, LENGTH + NEW)]
    assert streamer.ended == 1


@pytest.mark.parametrize("case", TOKEN_WISE, ids=str)
def test_a_streamer_of_assisted_generation_gets_accepted_tokens_only(case: Case) -> None:
    model, ids = case.model(), prompt(1, LENGTH // 3).repeat(1, 3)
    expected, _ = single_steps(model, case.way, ids)
    cache = case.cache()
    streamer = Collector(cache)
    generate(model, ids, cache, streamer=streamer, prompt_lookup_num_tokens=4)
    assert torch.equal(torch.cat(streamer.pieces[1:]), expected[0])
    assert max(streamer.held) > LENGTH + 3  # the cache held candidates when the tokens before them were handed out


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_dictionary_holds_the_cache_and_the_logits_and_scores_of_single_steps(case: Case) -> None:
    model, ids = case.model(), prompt(1)
    parity = OtherParity()
    expected, logits = single_steps(model, case.way, ids, choose=lambda ids, scores: parity(ids, scores).argmax(-1))
    cache = case.cache()
    options = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    out = generate(model, ids, cache, logits_processor=LogitsProcessorList([parity]), **options)
    assert torch.equal(out.sequences[:, LENGTH:], expected)
    assert_same_logits(torch.stack(out.logits, dim=1), logits)
    assert len(out.scores) == NEW
    for i, scores in enumerate(out.scores):
        assert torch.equal(scores, parity(out.sequences[:, : LENGTH + i], out.logits[i]))
    assert out.past_key_values is cache
    assert cache.get_seq_length() == LENGTH + NEW - 1


@pytest.mark.parametrize("way", [NONE, INT8], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_eager_attention_gives_weights_and_those_of_a_prompt_are_those_of_single_steps(
    name: str, way: dict[str, Any]
) -> None:
    model = copy.deepcopy(built(name))
    model.set_attn_implementation("eager")
    ids = prompt(2)
    options = {"return_dict_in_generate": True, "output_attentions": True}
    out = generate(model, ids, qkv.QKVCache(model.config, **way), **options)
    theirs = generate(model, ids, DynamicCache(config=model.config), **options)
    assert [[x.shape for x in step] for step in out.attentions] == [[x.shape for x in s] for s in theirs.attentions]
    assert len(out.attentions) == NEW
    assert out.attentions[0][-1].shape == (2, model.config.num_attention_heads, LENGTH, LENGTH)
    for step, their_step in zip(out.attentions, theirs.attentions, strict=True):
        for weights, their_weights in zip(step, their_step, strict=True):
            sums = weights.sum(-1)
            torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-6)  # eager's softmax is float32
            assert torch.equal(weights, their_weights) == (way == NONE)
    cache = plain_cache(model, way)
    for i, token in enumerate(out.sequences[:, :-1].split(1, dim=1)):
        with torch.no_grad():
            alone = model(token, **as_argument(cache), output_attentions=True).attentions
        for layer, weights in enumerate(alone):
            seen = weights.shape[-1]
            if i < LENGTH:
                same = out.attentions[0][layer][:, :, i, i + 1 - seen : i + 1]
            else:
                same = out.attentions[i - LENGTH + 1][layer][:, :, 0]
            torch.testing.assert_close(same, weights[:, :, 0], rtol=0, atol=1e-6)


# ---- rows of a batch -------------------------------------------------------------------------------------------------


def padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``[1, n]`` padded on the left to one length, and their mask."""
    longest = max(row.shape[1] for row in rows)
    ids = [torch.nn.functional.pad(row, (longest - row.shape[1], 0), value=PAD) for row in rows]
    mask = [torch.nn.functional.pad(torch.ones_like(row), (longest - row.shape[1], 0)) for row in rows]
    return torch.cat(ids), torch.cat(mask)


@pytest.mark.parametrize("case", PADDED, ids=str)
def test_rows_of_a_padded_batch_that_end_at_different_times_equal_the_rows_alone(case: Case) -> None:
    """Also where the padding alone is longer than a window, and where a row ends long before the others."""
    model = case.model()
    rows = [prompt(1, n, seed=n) for n in (LENGTH, 3, 14)]
    free = [single_steps(model, case.way, row, 20)[0][0] for row in rows]
    eos = [int(free[0][3]), int(free[1][11])]
    ends = [next((i for i, token in enumerate(row.tolist()) if token in eos), 19) + 1 for row in free]
    assert len(set(ends)) > 1
    ids, mask = padded(rows)
    out = generate(model, ids, case.cache(), attention_mask=mask, max_new_tokens=20, eos_token_id=eos)[:, LENGTH:]
    assert out.shape[1] == max(ends)
    for row, alone, end in zip(out, free, ends, strict=True):
        assert torch.equal(row[:end], alone[:end])
        assert bool((row[end:] == PAD).all())


@pytest.mark.parametrize("case", PADDED, ids=str)
def test_beams_of_a_padded_batch_score_what_they_score_alone(case: Case) -> None:
    model = case.model()
    rows = [prompt(1, n, seed=n) for n in (LENGTH, 9)]
    ids, mask = padded(rows)
    options = {**BEAMS, "output_scores": True}
    out = generate(model, ids, case.cache(), attention_mask=mask, **options)
    for i, row in enumerate(rows):
        alone = generate(model, row, case.cache(), **options)
        of_row = slice(3 * i, 3 * i + 3)
        assert torch.equal(out.sequences[of_row, LENGTH:], alone.sequences[:, row.shape[1] :])
        torch.testing.assert_close(out.sequences_scores[of_row], alone.sequences_scores, rtol=0, atol=1e-6)


# ---- a cache that lives longer than one call -------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*CASES, Case("Mistral", NONE, True), Case("tiny Llama", INT8, False)], ids=str)
def test_three_turns_on_one_cache_give_what_single_steps_over_the_whole_conversation_give(case: Case) -> None:
    model, cache, ids = case.model(), case.cache(), prompt(1, 6)
    for turn, length in enumerate((6, 20, 1)):
        ids = torch.cat([ids, prompt(1, length, seed=turn + 5)], dim=1)
        expected, _ = single_steps(model, case.way, ids)
        before = ids.shape[1]
        ids = generate(model, ids, cache)
        assert torch.equal(ids[:, before:], expected)
        assert cache.get_seq_length() == ids.shape[1] - 1


@pytest.mark.parametrize("case", TOKEN_WISE, ids=str)
def test_a_turn_with_look_up_leaves_a_cache_for_a_turn_without(case: Case) -> None:
    """Not the other way round: on a cache that is not empty transformers' look-up runs the whole prompt once more."""
    model, cache = case.model(), case.cache()
    ids = prompt(1, LENGTH // 3).repeat(1, 3)
    first = generate(model, ids, cache, prompt_lookup_num_tokens=3)
    assert torch.equal(first[:, LENGTH:], single_steps(model, case.way, ids)[0])
    turns = torch.cat([first, prompt(1, 3, seed=9)], dim=1)
    second = generate(model, turns, cache)
    assert torch.equal(second[:, turns.shape[1] :], single_steps(model, case.way, turns)[0])


@pytest.mark.parametrize("case", PADDED, ids=str)
def test_a_second_turn_of_a_padded_batch_equals_the_rows_alone(case: Case) -> None:
    model, cache = case.model(), case.cache()
    lengths = (LENGTH, 11)
    ids, mask = padded([prompt(1, n, seed=n) for n in lengths])
    turns = torch.cat([generate(model, ids, cache, attention_mask=mask), prompt(2, 5, seed=4)], dim=1)
    mask = torch.nn.functional.pad(mask, (0, turns.shape[1] - LENGTH), value=1)
    answer = generate(model, turns, cache, attention_mask=mask)[:, turns.shape[1] :]
    for row, length in enumerate(lengths):
        alone, _ = single_steps(model, case.way, turns[row : row + 1, LENGTH - length :])
        assert torch.equal(answer[row], alone[0])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_copies_of_a_prefix_answer_several_questions_as_fresh_caches_do(case: Case) -> None:
    """The first question once more at the end: answering others from copies left the prefix as it was."""
    model, prefix = case.model(), prompt(1, 20)
    kept = case.cache()
    with torch.no_grad():
        model(prefix, **as_argument(kept))
    for seed, length in ((2, 6), (3, 1), (4, 14), (2, 6)):
        ids = torch.cat([prefix, prompt(1, length, seed=seed)], dim=1)
        expected, _ = single_steps(model, case.way, ids, 8)
        copied = copy.deepcopy(kept)
        assert torch.equal(generate(model, ids, copied, max_new_tokens=8)[:, 20 + length :], expected)
        assert copied.get_seq_length() == 20 + length + 8 - 1
        assert kept.get_seq_length() == 20


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_prompt_in_chunks_across_a_window_gives_what_single_steps_give(case: Case) -> None:
    model, ids = case.model(), prompt(1, 40)
    expected, logits = single_steps(model, case.way, ids, 4)
    options = {"max_new_tokens": 4, "return_dict_in_generate": True, "output_logits": True}
    for chunk in (1, 5, WINDOW, WINDOW + 1, 39, 100):
        out = generate(model, ids, case.cache(), prefill_chunk_size=chunk, **options)
        assert torch.equal(out.sequences[:, 40:], expected)
        assert_same_logits(torch.stack(out.logits, dim=1), logits)


# ---- an assistant with a cache of its own ----------------------------------------------------------------------------


class Assistant:
    """Gives a model a cache of its own for drafts.

    ``generate`` has no argument for it: ``past_key_values`` is left out of what an assistant is told, which makes a
    ``DynamicCache`` for its first draft and is given that one again for every later one. So the cache is put in at the
    first draft. Tokens are taken back from it, hence the recording, which only a cache made there would get by itself.
    """

    def __init__(self, model: PreTrainedModel, cache: Any):
        self.model, self.cache = model, cache
        self.drafts = 0
        self.cropped: list[int] = []
        cache.activate_past_recording()
        self._generate, self._crop = model.generate, cache.crop
        model.generate, cache.crop = self.generate, self.crop

    def generate(self, *arguments: Any, **options: Any) -> Any:
        self.drafts += 1
        if self.drafts == 1:
            assert all(options.get(name) is None for name in as_argument(self.cache))
            options |= as_argument(self.cache)
        assert as_argument(self.cache).items() <= options.items()
        return self._generate(*arguments, **options)

    def crop(self, tokens_to_remove: int) -> None:
        self.cropped.append(tokens_to_remove)
        self._crop(tokens_to_remove)


def often_wrong(name: str) -> PreTrainedModel:
    changed = copy.deepcopy(built(name))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in changed.parameters():
            if weight.dim() > 1:
                weight += 0.05 * weight.std() * torch.randn(weight.shape, generator=generator)
    return changed


@pytest.mark.parametrize("way", [NONE, INT8], ids=str)
@pytest.mark.parametrize("case", TOKEN_WISE, ids=str)
def test_an_assistant_with_a_cache_of_its_own_changes_nothing_but_the_way(case: Case, way: dict[str, Any]) -> None:
    model, ids, new = case.model(), prompt(1), 20
    expected, _ = single_steps(model, case.way, ids, new)
    other = often_wrong(case.name)
    if case.fused:
        qkv.enable(other)
    assistant = Assistant(other, qkv.QKVCache(other.config, **way, backend="reference"))
    cache = case.cache()
    out = generate(model, ids, cache, assistant_model=other, max_new_tokens=new)
    assert torch.equal(out[:, LENGTH:], expected)
    assert 1 < assistant.drafts < new - 1  # some drafts were right
    assert min(assistant.cropped) < 0  # and some were taken back
    assert cache.get_seq_length() == LENGTH + new - 1
    assert assistant.cache.get_seq_length() > LENGTH


@pytest.mark.parametrize("name", NAMES)
def test_speculative_sampling_with_two_caches_draws_what_it_draws_with_two_dynamic_caches(name: str) -> None:
    """There the probabilities of the draft count too, so that a wrong one in the assistant's cache would show."""
    model, other, ids = built(name), often_wrong(name), prompt(1)

    def run(make: Callable[[Any], Any]) -> tuple[torch.Tensor, list[int]]:
        assistant = Assistant(copy.deepcopy(other), make(other.config))
        torch.manual_seed(5)
        options = {"do_sample": True, "max_new_tokens": 20}
        return generate(model, ids, make(model.config), assistant_model=assistant.model, **options), assistant.cropped

    expected = run(lambda config: DynamicCache(config=config))
    qkv.enable(model)
    qkv.enable(other)
    actual = run(lambda config: qkv.QKVCache(config, "none", backend="reference"))
    assert torch.equal(actual[0], expected[0])
    assert actual[1] == expected[1]
    assert min(expected[1]) < 0


# ---- torch's own modes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_cache_made_in_inference_mode_goes_on_outside_of_it_and_back(case: Case) -> None:
    model, cache, ids = case.model(), case.cache(), prompt(1, 18)
    for turn, mode in enumerate((torch.inference_mode, torch.no_grad, torch.inference_mode)):
        expected, _ = single_steps(model, case.way, ids)
        before = ids.shape[1]
        with mode():
            out = generate(model, ids, cache)
        assert torch.equal(out[:, before:], expected)
        ids = torch.cat([out.clone(), prompt(1, 2, seed=turn)], dim=1)
    with torch.enable_grad():
        assert model(ids[:, -2:], **as_argument(cache)).logits.isfinite().all()


@pytest.mark.parametrize(("way", "fused"), [(NONE, False), (INT8, False), (INT8, True), (RESIDUAL, True)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_autocast_to_bfloat16_is_as_close_to_dynamic_cache_as_bfloat16_is_to_float32(
    name: str, way: dict[str, Any], fused: bool
) -> None:
    """Keys come in float32 then, out of the rotation, and values in bfloat16."""
    model = copy.deepcopy(built(name)).float()
    ids = prompt(2, 40)

    @torch.no_grad()
    def run(cache: Any, autocast: bool) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            pieces = [ids[:, :30], *ids[:, 30:].split(1, dim=1)]
            return torch.cat([model(piece, **as_argument(cache)).logits for piece in pieces], dim=1).float()

    exact = run(DynamicCache(config=model.config), False)
    theirs = run(DynamicCache(config=model.config), True)
    error = float((theirs - exact).square().mean())
    assert error > 0
    if fused:
        qkv.enable(model)
    ours = run(qkv.QKVCache(model.config, **way), True)
    # Two independent errors of one size would be twice as large together.
    assert float((ours - theirs).square().mean()) < 2 * error
    assert float((ours - exact).square().mean()) < 2 * error


class Mark(torch.autograd.Function):
    """The identity, with an object that lives as long as the graph does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, held: Any) -> torch.Tensor:
        ctx.held = held
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class Held:
    """Something to hold a weak reference to."""


PASSES = (LENGTH, 1, 4, 1)


def graph_outlives_the_logits(model: PreTrainedModel, cache: Any) -> bool:
    held = Held()
    alive = weakref.ref(held)

    def mark(module: Any, inputs: Any, output: torch.Tensor, held: Held = held) -> torch.Tensor:
        return Mark.apply(output, held)

    hook = model.get_input_embeddings().register_forward_hook(mark)
    try:
        with torch.enable_grad():
            for n in PASSES:
                logits = model(prompt(2, n), **as_argument(cache)).logits
                assert logits.requires_grad
    finally:
        hook.remove()
    del logits, held, hook, mark
    gc.collect()
    return alive() is not None


@pytest.mark.parametrize("case", [*CASES, Case("Mistral", {**INT8, "granularity": "head"}, True)], ids=str)
def test_with_gradients_enabled_no_graph_is_kept_and_the_same_is_stored(case: Case) -> None:
    model, cache = case.model(), case.cache()
    assert graph_outlives_the_logits(model, DynamicCache(config=model.config))
    assert not graph_outlives_the_logits(model, cache)
    planes = [p for layer in cache.layers for segment in layer.store.segments() for p in segment.planes()]
    tensors = [tensor for plane in planes for tensor in plane.tensors()]
    assert tensors
    assert not any(tensor.requires_grad for tensor in tensors)
    twin = case.cache()
    with torch.no_grad():
        for n in PASSES:
            model(prompt(2, n), **as_argument(twin))
        ids = prompt(2, 3, seed=6)
        assert torch.equal(model(ids, **as_argument(cache)).logits, model(ids, **as_argument(twin)).logits)
