"""The model ``qkv`` for lm-eval: its Hugging Face model, with every score and every text made through a cache.

lm-eval's own ``hf`` model scores a text in one pass without a cache, so whatever a cache does to the stored values, it
does not show. Here the scored pass attends to them:

- A cache of which one pass over several tokens sees the stored values, as ours do with ``qkv.enable`` (found out by
  trying it, see ``qkv_eval.faithful``), is scored ``chunked``: the context goes through the model once for all its
  continuations (the choices of a question), and then the continuations do, side by side.
- Any other is scored ``stepwise``, as in generation: the context up to its last token in one pass, then token by token,
  so that every prediction that counts is made from what is stored. That is slow.

Contexts in one pass are of equal length, so no padding is ever stored before a token that counts; continuations are
padded behind their ends, where under a causal mask nothing sees it. Texts are written by transformers' ``generate``,
given the cache.

From Python::

    from qkv_eval.lm import QKVLM
    lm_eval.simple_evaluate(QKVLM("HuggingFaceTB/SmolLM2-135M-Instruct", cache="int8"), tasks=["arc_easy"])

On lm-eval's own command line. It knows the models of its own package and those that were registered before it looks;
it has no entry points for others. Importing this module registers ``qkv``. ``python -m qkv_eval.lm`` does that and is
then lm-eval's command, all of it::

    python -m qkv_eval.lm --model qkv --model_args pretrained=smollm2,cache=int8 --tasks hellaswag --batch_size 32

The command ``lm_eval`` itself knows the model once it has read one of our task files by its path, since those name a
function of this module::

    lm_eval --model qkv --model_args pretrained=smollm2,cache=int8 --batch_size 32 \\
        --tasks .../qkv_eval/tasks/piqa.yaml,hellaswag --metadata '{"data": "DIR"}'

Arguments beside those of ``hf``: ``cache``, any cache by name (``int8``, ``fp8_e4m3``, ``dynamic``, ``hf-hqq8``, the
path of a YAML file); ``pretrained=smollm2`` is the embedded model.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers.utils import logging

import qkv
from qkv.models import EMBEDDED, load_model
from qkv.named_caches import NamedCache, as_argument, named_cache
from qkv_eval.divergence import token_losses
from qkv_eval.faithful import check_cache
from qkv_eval.lm_tasks import local_documents
from qkv_eval.peers import Progress, attend_as_meant

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

__all__ = ["QKVLM", "local_documents", "main"]

# Logits held at a time: at most this many numbers.
_MOST_LOGITS = 1 << 25
# Tokens of padding by which a batch may grow for another context: about what a pass of its own would cost, since a pass
# has to read the weights of the model whatever it computes.
_MOST_PADDING = 32


@dataclass(frozen=True)
class _Request:
    """A continuation to score: its place among the results, and its tokens after those of its context."""

    place: int
    context: tuple[int, ...]
    continuation: tuple[int, ...]


class QKVLM(HFLM):
    """lm-eval's Hugging Face model over a cache, for decoder-only models.

    Log-probabilities are computed in float32, whatever the model's dtype. After each call the model has its own
    attention again.

    Args:
        pretrained: a name, a folder, a loaded ``PreTrainedModel``, or ``smollm2`` (the embedded model).
        cache: what to score and write through, by name or as a ``NamedCache``.
        progress: called with what is done, how much of it, and how much in all; None: lm-eval's kind of bar.
        batch_size: continuations in one pass, a number.
        **arguments: as ``lm_eval.models.huggingface.HFLM`` takes them.

    Attributes:
        named_cache: the cache.
        shortened: how many contexts were longer than the model's limit and lost their beginning so far.

    Raises:
        ValueError: an unknown cache or model, ``batch_size="auto"``, or an encoder-decoder model.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel = EMBEDDED,
        cache: str | NamedCache = "int8",
        progress: Progress | None = None,
        batch_size: int | str | None = 32,
        **arguments: Any,
    ) -> None:
        self.named_cache = cache if isinstance(cache, NamedCache) else named_cache(str(cache))
        size = str(batch_size if batch_size is not None else 1)
        if not size.isdecimal() or int(size) < 1:
            raise ValueError(f"batch_size={batch_size!r}: the model 'qkv' needs a number of at least 1, such as 32")
        if pretrained == EMBEDDED:
            pretrained, arguments = _embedded(arguments)
        super().__init__(pretrained, batch_size=int(size), **arguments)
        if self.backend != "causal":
            raise ValueError("the model 'qkv' is for decoder-only models; this one has an encoder")
        self._progress = progress
        self._keeps_last = "logits_to_keep" in inspect.signature(self.model.forward).parameters
        self._faithful: bool | None = None
        self._written = self._to_write = 0
        self.shortened = 0

    @property
    def scoring(self) -> str:
        """How texts are scored: ``chunked`` or ``stepwise``."""
        return "chunked" if self._sees_stored() else "stepwise"

    def _sees_stored(self) -> bool:
        """Whether one pass over several tokens sees the stored values."""
        if self._faithful is None:
            self._faithful = check_cache(self.model, self.named_cache).faithful
        return self._faithful

    # ---- scores -----------------------------------------------------------------------------------------------------

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-likelihood in nats of each whole text; a long one is cut into windows as by ``hf``.

        Args:
            requests: lm-eval's instances, each with a text as its only argument.
            disable_tqdm: show no bar.
        """
        windows: list[Any] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(number)
        sums = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            sums[owner] += score
        for request, score in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, score)
        return sums

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Scores continuations; lm-eval's other methods of scoring come through here.

        Args:
            requests: ``(texts or None, context tokens, continuation tokens)`` each.
            disable_tqdm: show no bar.
            override_bs: continuations in one pass, in place of the model's own number.

        Returns:
            For each request the sum of the log-probabilities in nats, and whether every token was the likeliest.

        Raises:
            ValueError: a context or continuation without tokens, or a continuation longer than the model's limit.
        """
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        prepared = [self._prepare(place, request[1], request[2]) for place, request in enumerate(requests)]
        batches = _batches(prepared, override_bs or self.batch_size)
        done, what = 0, f"scoring through {self.named_cache.name}"
        is_hidden = disable_tqdm or self.rank != 0 or self._progress is not None
        self._report(what, 0, len(requests))
        with logging.tqdm(total=len(requests), desc=what, disable=is_hidden) as bar, self._through_cache():
            for batch in batches:
                for request, score in self._score(batch):
                    results[request.place] = score
                    texts = requests[request.place][0]
                    if texts is not None:
                        self.cache_hook.add_partial("loglikelihood", texts, score)
                    done += 1
                    bar.update()
                self._report(what, done, len(requests))
        return results

    def _prepare(self, place: int, context: Sequence[int], continuation: Sequence[int]) -> _Request:
        if not context or not continuation:
            raise ValueError("a context and a continuation need at least one token each")
        room = self.max_length + 1 - len(continuation)  # the last token is predicted and not put in
        if room < 1:
            raise ValueError(
                f"a continuation of {len(continuation)} tokens is longer than the model's limit of {self.max_length}"
            )
        self.shortened += len(context) > room
        return _Request(place, tuple(context[-room:]), tuple(continuation))

    def _score(self, batch: Sequence[_Request]) -> list[tuple[_Request, tuple[float, bool]]]:
        """Scores continuations of contexts of equal length; those of one context lie side by side."""
        contexts = list(dict.fromkeys(request.context for request in batch))
        places = {context: place for place, context in enumerate(contexts)}
        owner = self._tensor([places[request.context] for request in batch])
        inputs = self._tensor(contexts)
        lengths = self._tensor([len(request.continuation) for request in batch])
        longest = _longest(batch)
        targets = self._tensor(
            [[*request.continuation, *[0] * (longest - len(request.continuation))] for request in batch]
        )
        losses = torch.zeros(targets.shape)
        is_top = torch.ones(targets.shape, dtype=torch.bool)

        def take(rows: torch.Tensor, begin: int, logits: torch.Tensor) -> None:
            wanted = targets[rows, begin : begin + logits.shape[1]]
            place = rows.cpu()
            losses[place, begin : begin + logits.shape[1]] = token_losses(logits, wanted)
            is_top[place, begin : begin + logits.shape[1]] = (logits.argmax(-1) == wanted).cpu()

        cache = self.named_cache.make(self.model.config)
        rows = torch.arange(len(batch), device=self.device)
        if self._sees_stored():
            take(rows, 0, self._forward(inputs, cache, last_only=True)[owner])
            rows = rows[lengths > 1]
            if len(rows):
                # This selects rows of any cache, those with linear attention too, and may take one several times.
                cache.reorder_cache(owner[rows])  # type: ignore[arg-type]
                for begin, logits in self._passes(targets[rows, :-1], cache):
                    take(rows, begin + 1, logits)
        else:
            inputs = inputs[owner]
            if inputs.shape[1] > 1:
                self._forward(inputs[:, :-1], cache, last_only=True)
            for begin, logits in self._passes(torch.cat([inputs[:, -1:], targets[:, :-1]], dim=1), cache):
                take(rows, begin, logits)
        scores = []
        for row, request in enumerate(batch):
            length = len(request.continuation)
            total = -float(losses[row, :length].double().sum())
            scores.append((request, (total, bool(is_top[row, :length].all()))))
        return scores

    def _passes(self, tokens: torch.Tensor, cache: Cache) -> Iterator[tuple[int, torch.Tensor]]:
        """Puts tokens ``[rows, n]`` through a cache in as many passes as it takes; gives each start and its logits."""
        vocabulary = self.model.get_output_embeddings().weight.shape[0]
        step = max(1, _MOST_LOGITS // (len(tokens) * vocabulary)) if self._sees_stored() else 1
        for begin in range(0, tokens.shape[1], step):
            yield begin, self._forward(tokens[:, begin : begin + step], cache)

    def _forward(self, tokens: torch.Tensor, cache: Cache, last_only: bool = False) -> torch.Tensor:
        more: dict[str, Any] = {"logits_to_keep": 1} if last_only and self._keeps_last else {}
        mixed = self.mixed_precision_dtype
        with torch.autocast(device_type=self.device.type, dtype=mixed, enabled=mixed is not None):
            logits: torch.Tensor = self.model(input_ids=tokens, use_cache=True, **as_argument(cache), **more).logits
        return logits[:, -1:] if last_only else logits

    def _model_call(
        self, inps: torch.Tensor, attn_mask: torch.Tensor | None = None, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns the logits ``[rows, n, vocabulary]`` of tokens ``[rows, n]``, padded behind their ends, all through a
        fresh cache."""
        if attn_mask is not None or labels is not None:
            raise ValueError("the model 'qkv' is for decoder-only models")
        cache = self.named_cache.make(self.model.config)
        with self._through_cache():
            return torch.cat([logits for _, logits in self._passes(inps, cache)], dim=1)

    # ---- texts ------------------------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Writes a text for each request; see ``HFLM``."""
        self._written, self._to_write = 0, len(requests)
        self._report(self._writing, 0, self._to_write)
        texts: list[str] = super().generate_until(requests, disable_tqdm or self._progress is not None)
        return texts

    @property
    def _writing(self) -> str:
        return f"writing through {self.named_cache.name}"

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **arguments: Any
    ) -> torch.Tensor:
        """Lets ``generate`` write through a fresh cache.

        Where a stored padding token would change what others are stored as (it would be a sink, or have a share in
        their scale), rows of unequal length are written apart.

        Args:
            context: int64 ``[rows, n]``, padded on the left.
            max_length: tokens at most, the context's included.
            stop: texts that end the writing.
            arguments: ``attention_mask``, int64 ``[rows, n]``, and what ``generate`` takes.

        Returns:
            int64 ``[rows, n + new]``, padded on the right.
        """
        mask = arguments.pop("attention_mask", None)
        if mask is None:
            mask = torch.ones_like(context)
        padding = (mask == 0).sum(dim=1)
        groups = [torch.arange(len(context), device=context.device)]
        if int(padding.max()) and not _takes_padding(self.named_cache.make(self.model.config)):
            groups = [torch.nonzero(padding == count)[:, 0] for count in padding.unique()]
        written: list[torch.Tensor] = [context] * len(context)
        with self._through_cache():
            for rows in groups:
                unused = int(padding[rows].min())
                output = super()._model_generate(
                    context[rows, unused:],
                    max_length - unused,
                    stop,
                    attention_mask=mask[rows, unused:],
                    **as_argument(self.named_cache.make(self.model.config)),
                    **arguments,
                )
                for row, text in zip(rows.tolist(), output, strict=True):
                    written[row] = torch.cat([context[row, :unused], text])
        self._written += len(context)
        self._report(self._writing, self._written, self._to_write)
        return torch.nn.utils.rnn.pad_sequence(written, batch_first=True, padding_value=self.tokenizer.pad_token_id)

    # -----------------------------------------------------------------------------------------------------------------

    def _through_cache(self) -> _Attending:
        self._sees_stored()  # it tries the cache out and leaves the model plain, so it comes first
        return _Attending(self.model, self.named_cache)

    def _tensor(self, numbers: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def _report(self, what: str, done: int, total: int) -> None:
        if self._progress is not None and total:
            self._progress(what, done, total)


class _Attending:
    """The context in which a model attends to a cache as it is meant; no gradients; the model is plain afterwards."""

    def __init__(self, model: PreTrainedModel, cache: NamedCache) -> None:
        self._model, self._cache = model, cache
        self._inference = torch.inference_mode()

    def __enter__(self) -> None:
        self._inference.__enter__()
        attend_as_meant(self._model, self._cache)

    def __exit__(self, *error: Any) -> None:
        qkv.disable(self._model)
        self._inference.__exit__(*error)


def _batches(requests: Sequence[_Request], size: int) -> list[list[_Request]]:
    """Puts requests together whose contexts are of equal length, at most ``size``, those of one context side by side.

    The longest come first: what does not fit into memory shows at once, and estimates of the time are too long rather
    than too short.
    """
    by_context: dict[tuple[int, ...], list[_Request]] = {}
    for request in requests:
        by_context.setdefault(request.context, []).append(request)
    pieces = [found[i : i + size] for found in by_context.values() for i in range(0, len(found), size)]
    pieces.sort(key=lambda piece: (len(piece[0].context), _longest(piece)), reverse=True)
    batches: list[list[_Request]] = []
    for piece in pieces:
        last = batches[-1] if batches else []
        both = last + piece
        if (
            last
            and len(last[0].context) == len(piece[0].context)
            and len(both) <= size
            and _padding(both) <= _padding(last) + _padding(piece) + _MOST_PADDING
        ):
            batches[-1] = both
        else:
            batches.append(piece)
    return batches


def _longest(batch: Sequence[_Request]) -> int:
    return max(len(request.continuation) for request in batch)


def _padding(batch: Sequence[_Request]) -> int:
    return sum(_longest(batch) - len(request.continuation) for request in batch)


def _takes_padding(cache: Cache) -> bool:
    """Whether tokens of padding before a text leave what is stored of the text as it is."""
    from transformers import DynamicCache

    if not isinstance(cache, qkv.QKVCache):
        return type(cache) is DynamicCache
    return all(
        row["granularity"] in (None, "token", "group") and cache.config.for_layer(row["layer"]).sink_tokens == 0
        for row in cache.stats()["layers"]
    )


def _embedded(arguments: dict[str, Any]) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The embedded model, where and in which dtype the arguments say; and the arguments with its tokenizer."""
    arguments = dict(arguments)
    dtype, device = arguments.pop("dtype", None), arguments.pop("device", None)
    model, tokenizer = load_model(EMBEDDED, "float32" if dtype in (None, "auto") else dtype)
    placed: Any = model  # what transformers says about `to` confuses mypy
    # lm-eval's command asks for a GPU where nothing else is said, and its own model does without where there is none.
    if device is not None and (torch.cuda.is_available() or not str(device).startswith("cuda")):
        placed.to(device)
    return model, {"tokenizer": tokenizer, **arguments}


def main() -> None:
    """Runs lm-eval's own command line, which knows the model ``qkv`` by then."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    # The module under its own name, so that the model is not registered twice.
    from qkv_eval import lm

    lm.main()
else:
    register_model("qkv")(QKVLM)
