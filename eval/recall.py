"""``qkv eval recall``: does a model still find in its cache what it read, near or far back?

Three tasks, none of which needs a data set. Everything is drawn from a seed, and all caches of a run read the same
tokens.

- ``passkey``: one sentence with a five-digit key, somewhere in running prose; the model is asked for the key. This is
  the pass-key retrieval of Mohtashami and Jaggi (https://arxiv.org/abs/2305.16300), put as a text to be completed, with
  prose that does not repeat itself.
- ``many_keys``: several sentences all over the prose, each giving a secret word to another name; the model is asked for
  one of them. To choose the right one it has to match the name, so that errors of the keys show earlier.
- ``copy``: a random sequence of common tokens, twice. The second copy can be predicted from the first one alone, which
  even small models do well, and each of its tokens is a reading of one place in the cache.

How answers come about. The document (for ``copy``: the first sequence) goes into the cache first, then the question,
and the answer is what the model finds likeliest, token by token. Where a pass over several tokens attends to stored
values (tried out, see ``qkv_eval.faithful``), document and question, and the second copy, come in chunks; otherwise the
document is one pass, as in generation, and all behind it comes token by token, so that every answer is read from stored
values.

The model is always given the right answer so far. Whether all its choices are right is the same as whether it would
have written the answer by itself, and the loss of the answer is there too: it shows drift long before a choice changes.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import qkv
from qkv.named_caches import UNQUANTIZED, NamedCache, as_argument
from qkv_eval.divergence import token_losses
from qkv_eval.faithful import check_cache
from qkv_eval.peers import Progress, attend_as_meant, with_baseline
from qkv_eval.perplexity import check_context
from qkv_eval.text import Text, load_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.cache_utils import Cache

TASKS = ("passkey", "many_keys", "copy")
# Tokens in one pass, where a cache allows to cut passes at all.
_CHUNK = 256
# Names and secret words for `many_keys`: common, and far apart in meaning.
# fmt: off
_WORDS = (
    "apple", "river", "engine", "window", "garden", "doctor", "guitar", "mountain", "paper", "silver", "tiger",
    "bridge", "kitchen", "summer", "castle", "rocket", "pencil", "island", "winter", "camera", "butter", "forest",
    "market", "ocean", "planet", "school", "spider", "temple", "violin", "wagon",
)
# fmt: on
# Random sequences for `copy` are drawn from this many of the commonest tokens.
_COMMON = 1000


@dataclass(frozen=True)
class RecallSettings:
    """What to ask, how often, and at which places.

    Attributes:
        formats: caches beside ``dynamic``.
        context: tokens in all: document, question and answer, or both copies.
        depths: places of the sentence that is asked for, as a share of the prose: 0 is before all of it, 1 behind it.
        n: answers in a row of the results; for ``copy``, sequences.
        keys: sentences with a secret word in a document of ``many_keys``, those at ``depths`` included.
        text: a text file to take the prose from, or None for the embedded text.
        batch: documents in one pass.
    """

    formats: tuple[str, ...] = ("int8", "fp8_e4m3")
    tasks: tuple[str, ...] = TASKS
    context: tuple[int, ...] = (512, 1024)
    depths: tuple[float, ...] = (0.1, 0.5, 0.9)
    n: int = 8
    keys: int = 4
    text: str | None = None
    batch: int = 4
    seed: int = 0


@dataclass(frozen=True)
class Question:
    """What is asked about the documents of a group, one answer for each.

    Attributes:
        depth: the place that is asked for; None: all places, as in ``copy``.
        tokens: question and answer, int64 ``[documents, tokens]``.
        answer: tokens of the answer, at the end of ``tokens``.
        whole: an answer counts only as a whole (``exact_match`` is the share of answers), not token by token.
    """

    depth: float | None
    tokens: torch.Tensor
    answer: int
    whole: bool


@dataclass(frozen=True)
class Group:
    """Documents of one task and context that are read together, int64 ``[documents, tokens]``, and the questions."""

    task: str
    context: int
    documents: torch.Tensor
    questions: tuple[Question, ...]

    @property
    def work(self) -> int:
        """Tokens that a model has to read."""
        return self.documents.numel() + sum(question.tokens.numel() for question in self.questions)


@torch.inference_mode()
def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: RecallSettings,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Asks a model for what it read, through each cache; ``dynamic`` is always one of them. Leaves the model plain.

    Returns:
        ``rows``, one for each task, context, depth and cache, with the keys

        - ``task, format, context, depth`` (null for ``copy``), ``n``;
        - ``exact_match``: the share of answers that are right in every token; for ``copy``, of tokens of the second
          copy that are the likeliest;
        - ``loss``: nats per token of the right answer;
        - ``baseline, drift``: the exact match of ``dynamic``, and how far this one is above it; ``loss_drift`` is that
          of the loss;
        - ``scoring``: ``chunked`` or ``stepwise``, as in ``qkv_eval.perplexity``;

        ``text`` (name and SHA-256 of the prose); and ``notes``, lines that a reader of the figures should know.

    Raises:
        ValueError: an unknown cache or task, a depth outside 0 .. 1, a context beyond the model's limit or too short
            for a question, a number below 1, or a text that is too short.
    """
    check_settings(settings)
    caches = with_baseline(settings.formats)
    for context in settings.context:
        check_context(model, context)
    text = load_text(settings.text)
    groups = list(make_groups(tokenizer, text, settings))
    # (task, context, depth) -> cache -> hits and losses
    found: dict[tuple[str, int, float | None], dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]]] = {}
    try:
        in_chunks = {cache.name: check_cache(model, cache, settings.seed).faithful for cache in caches}
        report = _counted(progress, len(caches) * sum(group.work for group in groups))
        for group, cache in itertools.product(groups, caches):
            for question, hits, losses in _ask(model, group, cache, in_chunks[cache.name], report):
                by_cache = found.setdefault((group.task, group.context, question.depth), {})
                all_hits, all_losses = by_cache.setdefault(cache.name, ([], []))
                all_hits.append(hits.all(dim=1) if question.whole else hits.flatten())
                all_losses.append(losses.flatten())
    finally:
        qkv.disable(model)
    rows = []
    for (task, context, depth), by_cache in found.items():
        figures = {
            name: (torch.cat(hits).double().mean().item(), torch.cat(losses).double().mean().item())
            for name, (hits, losses) in by_cache.items()
        }
        baseline, baseline_loss = figures[UNQUANTIZED]
        for cache in caches:
            exact_match, loss = figures[cache.name]
            rows.append(
                {
                    "task": task,
                    "format": cache.name,
                    "context": context,
                    "depth": depth,
                    "n": settings.n,
                    "exact_match": exact_match,
                    "loss": loss,
                    "baseline": baseline,
                    "drift": exact_match - baseline,
                    "loss_drift": loss - baseline_loss,
                    "scoring": "chunked" if in_chunks[cache.name] else "stepwise",
                }
            )
    return {"rows": rows, "text": {"name": text.name, "sha256": text.sha256}, "notes": _notes(rows)}


def make_groups(tokenizer: PreTrainedTokenizerBase, text: Text, settings: RecallSettings) -> Iterator[Group]:
    """Writes the documents and questions of a run, ``settings.batch`` documents at a time.

    Each document begins with the token that the tokenizer puts before a text, if it does that. Document, question and
    answer are ``context`` tokens together, one less for ``copy`` of an odd context.

    Raises:
        ValueError: a context that is too short for its question, or a text shorter than a context.
    """
    writer = _Writer(tokenizer, text)
    for task in settings.tasks:
        for context in settings.context:
            for start in range(0, settings.n, settings.batch):
                numbers = range(start, min(start + settings.batch, settings.n))
                # A generator for each document: what it holds depends on neither the batch nor the other tasks.
                chances = [random.Random(f"{settings.seed} {task} {context} {number}") for number in numbers]
                if task == "copy":
                    yield _copy_group(writer, context, chances)
                elif task == "passkey":
                    yield from _passkey_groups(writer, context, chances, settings.depths)
                else:
                    yield _many_keys_group(writer, context, chances, settings)


class _Writer:
    """Makes tokens out of prose, facts and questions.

    Attributes:
        first: the token before a text, or nothing.
        common: the commonest tokens of the prose that are words.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: Text) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._prose = self.encode(text.content)
        # verbose: a whole text is longer than the model's limit, of which the tokenizer would warn.
        self.first = list(tokenizer("", verbose=False)["input_ids"])[:1]
        counts = Counter(self._prose)
        words = [token for token, _ in counts.most_common() if str(tokenizer.decode([token])).strip().isalpha()]
        self.common = words[:_COMMON]

    def encode(self, content: str) -> list[int]:
        return list(self._tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"])

    def answered(self, question: str, answer: str) -> tuple[list[int], int]:
        """The tokens of a question with its answer, and how many of them are the answer's."""
        whole, alone = self.encode(question + answer), self.encode(question)
        same = next((i for i, (a, b) in enumerate(zip(whole, alone, strict=False)) if a != b), len(alone))
        return whole, len(whole) - same

    def number(self, chance: random.Random) -> str:
        """A number of five digits; all have the same count of tokens."""
        usual = len(self.encode(" 73829"))
        while True:
            number = str(chance.randrange(10_000, 100_000))
            if len(self.encode(f" {number}")) == usual:
                return number

    def words(self) -> list[str]:
        """Words that have the same count of tokens."""
        lengths = {word: len(self.encode(f" {word}")) for word in _WORDS}
        usual = Counter(lengths.values()).most_common(1)[0][0]
        return [word for word, length in lengths.items() if length == usual]

    def document(
        self, chance: random.Random, intro: str, facts: Sequence[tuple[float, str]], room: int, least: int
    ) -> list[int]:
        """Prose of random origin with facts in it, ``room`` tokens.

        Args:
            chance: says where in the text the prose begins.
            intro: what comes first.
            facts: sentences and their depths.
            room: tokens in all.
            least: tokens that the context has beside the document, for the message.
        """
        begin = [*self.first, *self.encode(intro)]
        sentences = sorted(((depth, self.encode(fact)) for depth, fact in facts), key=lambda item: item[0])
        fixed = len(begin) + sum(len(tokens) for _, tokens in sentences)
        length = room - fixed
        if length < 1:
            raise ValueError(
                f"context={room + least} is too short: what is asked for takes {fixed + least} tokens, and at least "
                "one of prose has to be around it; use a longer context"
            )
        if length > len(self._prose):
            raise ValueError(
                f"the text {self._text.name!r} has {len(self._prose)} tokens, and a context of {room + least} needs "
                f"{length}; use a longer text or a shorter context"
            )
        start = chance.randrange(len(self._prose) - length + 1)
        prose = self._prose[start : start + length]
        tokens, at = begin, 0
        for depth, sentence in sentences:
            place = round(depth * length)
            tokens += prose[at:place] + sentence
            at = place
        return tokens + prose[at:]


def _passkey_groups(
    writer: _Writer, context: int, chances: Sequence[random.Random], depths: Sequence[float]
) -> Iterator[Group]:
    for depth in depths:
        documents, questions, answer = [], [], 0
        for chance in chances:
            number = writer.number(chance)
            question, answer = writer.answered("\n\nThe pass key is", f" {number}")
            fact = f"\n\nThe pass key is {number}. Remember it. {number} is the pass key.\n\n"
            intro = "A pass key is hidden in the following text.\n\n"
            room = context - len(question)
            documents.append(writer.document(chance, intro, [(depth, fact)], room, len(question)))
            questions.append(question)
        asked = Question(depth, torch.tensor(questions), answer, whole=True)
        yield Group("passkey", context, torch.tensor(documents), (asked,))


def _many_keys_group(
    writer: _Writer, context: int, chances: Sequence[random.Random], settings: RecallSettings
) -> Group:
    words, documents = writer.words(), []
    count = max(settings.keys, len(settings.depths))
    if 2 * count > len(words):
        raise ValueError(
            f"keys={settings.keys} at {len(settings.depths)} depths are too many; there are words for {len(words) // 2}"
        )
    asked: list[list[list[int]]] = [[] for _ in settings.depths]
    answer = 0
    for chance in chances:
        chosen = chance.sample(words, 2 * count)
        names, secrets = chosen[:count], chosen[count:]
        depths = [*settings.depths, *(chance.random() for _ in range(count - len(settings.depths)))]
        facts = [
            (depth, f"\n\nThe secret word of the {name} is {secret}.\n\n")
            for depth, name, secret in zip(depths, names, secrets, strict=True)
        ]
        for place, name, secret in zip(asked, names, secrets, strict=False):
            question, answer = writer.answered(f"\n\nThe secret word of the {name} is", f" {secret}")
            place.append(question)
        least = len(asked[0][-1])
        documents.append(writer.document(chance, "", facts, context - least, least))
    questions = tuple(
        Question(depth, torch.tensor(tokens), answer, whole=True)
        for depth, tokens in zip(settings.depths, asked, strict=True)
    )
    return Group("many_keys", context, torch.tensor(documents), questions)


def _copy_group(writer: _Writer, context: int, chances: Sequence[random.Random]) -> Group:
    length = (context - len(writer.first)) // 2
    if length < 2:
        raise ValueError(f"context={context} is too short for a sequence and its copy; use at least 5")
    if len(writer.common) < 2:
        raise ValueError("the text has no words to draw random sequences from; use another text")
    sequences = torch.tensor([chance.choices(writer.common, k=length) for chance in chances])
    first = torch.tensor(writer.first, dtype=torch.int64).expand(len(chances), len(writer.first))
    # The first token of the copy cannot be foreseen, and is the question.
    question = Question(None, sequences, length - 1, whole=False)
    return Group("copy", context, torch.cat([first, sequences], dim=1), (question,))


def _ask(
    model: PreTrainedModel, group: Group, named: NamedCache, in_chunks: bool, report: Callable[[int], None]
) -> Iterator[tuple[Question, torch.Tensor, torch.Tensor]]:
    """Yields each question with whether the model's choice is right, and the loss, both ``[documents, answer]``."""
    attend_as_meant(model, named)
    document = named.make(model.config)
    _read(model, group.documents, document, _CHUNK if in_chunks else group.documents.shape[1])
    report(group.documents.numel())
    for number, question in enumerate(group.questions):
        is_last = number == len(group.questions) - 1
        cache = document if is_last else copy.deepcopy(document)
        begin = question.tokens.shape[1] - question.answer
        # An answer to a question comes token by token, as it would be written.
        steps_from = begin if question.whole else question.tokens.shape[1]
        hits, losses = [], []
        for first, last in _passes(question.tokens.shape[1] - 1, steps_from if in_chunks else 0):
            # Of the question itself, only its last token foretells something that counts.
            kept = last - max(first, begin - 1)
            logits = _forward(model, question.tokens[:, first:last], cache, max(kept, 1))
            if kept > 0:
                targets = question.tokens[:, last - kept + 1 : last + 1]
                hits.append(logits.argmax(-1) == targets)
                losses.append(token_losses(logits, targets))
        report(question.tokens.numel())
        yield question, torch.cat(hits, dim=1), torch.cat(losses, dim=1)


def _passes(length: int, steps_from: int) -> Iterator[tuple[int, int]]:
    """Cuts tokens into passes: chunks up to ``steps_from``, single tokens behind it."""
    at = 0
    while at < length:
        end = min(at + _CHUNK, steps_from, length) if at < steps_from else at + 1
        yield at, end
        at = end


def _read(model: PreTrainedModel, tokens: torch.Tensor, cache: Cache, chunk: int) -> None:
    for start in range(0, tokens.shape[1], chunk):
        _forward(model, tokens[:, start : start + chunk], cache, 1)


def _forward(model: PreTrainedModel, tokens: torch.Tensor, cache: Cache, keep: int) -> torch.Tensor:
    """Logits ``[documents, keep, vocabulary]`` of the last ``keep`` tokens."""
    # The vocabulary is a large part of a small model's work, and is wanted for few tokens.
    spare = {"logits_to_keep": keep} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    tokens = tokens.to(model.device)
    return model(input_ids=tokens, **as_argument(cache), use_cache=True, **spare).logits[:, -keep:].cpu()


def check_settings(settings: RecallSettings) -> None:
    """Raises ``ValueError`` for what can be seen to be wrong without a model: tasks, depths, numbers."""
    for task in settings.tasks:
        if task not in TASKS:
            raise ValueError(f"unknown task {task!r}; use one of {', '.join(TASKS)}")
    for depth in settings.depths:
        if not 0 <= depth <= 1:
            raise ValueError(f"depth={depth} is not a place in a text; use shares from 0 (its start) to 1 (its end)")
    for name in ("tasks", "context", "depths"):
        values = getattr(settings, name)
        if len(set(values)) != len(values) or not values:
            raise ValueError(f"{name}={values} will not do; give one or several, each once")
    for name in ("n", "keys", "batch"):
        if getattr(settings, name) < 1:
            raise ValueError(f"{name}={getattr(settings, name)} is too few; use 1 or more")


def _notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    poor = {
        f"{row['task']} at {row['context']}"
        for row in rows
        if row["format"] == UNQUANTIZED and row["exact_match"] < 0.5
    }
    if not poor:
        return []
    return [
        f"without quantization the model is right less than half of the time ({', '.join(sorted(poor))}): "
        "look at the loss there"
    ]


def _counted(progress: Progress | None, total: int) -> Callable[[int], None]:
    done = 0

    def report(more: int) -> None:
        nonlocal done
        done += more
        if progress is not None:
            progress("recalling", done, total)

    report(0)
    return report
