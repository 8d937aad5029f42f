"""Shared models: tiny random ones that need no file, and the embedded SmolLM2, each made once for all tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

# Before anything imports transformers: no test may wait for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import qkv
from qkv.formats import get_format

VOCABULARY = 260
# English of our own. What Python carries differs between its versions, and near ties of a text lie where they lie.
PROSE = (Path(__file__).parent / "prose.txt").read_text(encoding="utf-8")

Command = Callable[..., SimpleNamespace]


def make_tiny_model(seed: int = 0, **changes: int) -> LlamaForCausalLM:
    """Return a random Llama of two layers, three query heads and one kv head, in evaluation mode."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 1024,
    }
    torch.manual_seed(seed)
    # Weights as they are usually made give nearly uniform predictions, which no cache could spoil.
    config = LlamaConfig(
        **{**sizes, **changes}, initializer_range=0.15, bos_token_id=256, eos_token_id=257, pad_token_id=258
    )
    return LlamaForCausalLM(config).eval()


def make_tiny_tokenizer(begins_with_bos: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each byte, and one token before each text if asked."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>"])
    if begins_with_bos:
        from tokenizers.processors import TemplateProcessing

        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


@pytest.fixture(scope="session")
def _tiny() -> PreTrainedModel:
    return make_tiny_model()


@pytest.fixture
def tiny_model(_tiny: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The tiny model, with transformers' own attention before and after the test."""
    qkv.disable(_tiny)
    yield _tiny
    qkv.disable(_tiny)


@pytest.fixture(scope="session")
def _wide() -> PreTrainedModel:
    return make_tiny_model(head_dim=32)


@pytest.fixture
def wide_model(_wide: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """As the tiny model, with a head size that every format has."""
    qkv.disable(_wide)
    yield _wide
    qkv.disable(_wide)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of bytes that fits the tiny model."""
    return make_tiny_tokenizer()


@pytest.fixture(scope="session")
def tiny_folder(
    _tiny: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with the tiny model and tokenizer, as `--model` takes it."""
    folder = tmp_path_factory.mktemp("tiny")
    _tiny.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def _smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    from qkv.models import embedded_gguf, load_model

    try:
        embedded_gguf()
    except ValueError as error:
        pytest.skip(str(error))
    return load_model("smollm2")


@pytest.fixture
def smollm2(
    _smollm2: tuple[PreTrainedModel, PreTrainedTokenizerFast],
) -> Iterator[tuple[PreTrainedModel, PreTrainedTokenizerFast]]:
    """The embedded SmolLM2-135M in float32 and its tokenizer, with transformers' own attention before and after."""
    qkv.disable(_smollm2[0])
    yield _smollm2
    qkv.disable(_smollm2[0])


@pytest.fixture
def keep_threads() -> Iterator[None]:
    """Set the number of torch's threads back after the test."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], keep_threads: None, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run `qkv` with arguments in this process, and return its `status`, `out` and `err`."""
    from qkv.cli import main

    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> SimpleNamespace:
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return SimpleNamespace(status=stop.value.code, out=captured.out, err=captured.err)

    return run


@pytest.fixture(scope="module")
def plain_int8() -> Iterator[None]:
    """Lets ``int8`` encode from the first token on, for tests about short texts: its keys are not equalized."""
    kind = type(get_format("int8"))
    kind.equalized = False
    yield
    kind.equalized = True
