"""GGUF files from a trainer's weights: every tensor in its place, and a sentence for each that has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from train.errors import BadInput, NoSuchPath
from train.online.gguf import Dtype, GgufExporter, pair_rows

LAYERS, HEADS, KV_HEADS, WIDTH, HIDDEN, VOCABULARY = 2, 4, 2, 32, 48, 50
HEAD = WIDTH // HEADS
SHAPES = {
    "model.embed_tokens.weight": (VOCABULARY, WIDTH),
    "model.norm.weight": (WIDTH,),
    **{
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(LAYERS)
        for name, shape in {
            "self_attn.q_proj": (WIDTH, WIDTH),
            "self_attn.k_proj": (KV_HEADS * HEAD, WIDTH),
            "self_attn.v_proj": (KV_HEADS * HEAD, WIDTH),
            "self_attn.o_proj": (WIDTH, WIDTH),
            "mlp.gate_proj": (HIDDEN, WIDTH),
            "mlp.up_proj": (HIDDEN, WIDTH),
            "mlp.down_proj": (WIDTH, HIDDEN),
            "input_layernorm": (WIDTH,),
            "post_attention_layernorm": (WIDTH,),
        }.items()
    },
}
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "model.layers": "blk",
}  # fmt: skip


def gguf_name(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(seed)
    return {name: numbers.standard_normal(shape, dtype=np.float32) for name, shape in SHAPES.items()}


def write_model(path: Path, architecture: str = "llama", extra: dict[str, Any] | None = None) -> Path:
    """A file such as llama.cpp's converter writes, with other numbers than `weights()`."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_context_length(2048)
    writer.add_token_list(["a", "ü", "<|im_end|>"])
    writer.add_token_types([1, 1, 3])
    writer.add_chat_template("{{ messages }}")
    for name, shape in SHAPES.items():
        writer.add_tensor(gguf_name(name), np.zeros(shape, np.float16))
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def like(tmp_path: Path) -> Path:
    return write_model(tmp_path / "like.gguf")


def tensors(path: Path) -> dict[str, np.ndarray]:
    return {t.name: np.array(t.data).reshape(tuple(t.shape)[::-1]) for t in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_each_tensor_is_in_its_place(tmp_path: Path, like: Path, dtype: Dtype) -> None:
    given = weights()
    written = tensors(GgufExporter(like, dtype).write(given.items(), tmp_path / "out.gguf"))
    assert set(written) == {gguf_name(name) for name in given}
    for name, value in given.items():
        found = written[gguf_name(name)]
        assert found.dtype == (np.float16 if dtype == "f16" and value.ndim > 1 else np.float32)
        if "q_proj" in name or "k_proj" in name:
            # llama.cpp rotates rows 2i and 2i+1 of a head together, transformers i and i + half
            heads = HEADS if "q_proj" in name else KV_HEADS
            for head in range(heads):
                rows = value[head * HEAD : (head + 1) * HEAD]
                pairs = np.stack([rows[: HEAD // 2], rows[HEAD // 2 :]], axis=1).reshape(HEAD, -1)
                assert np.allclose(found[head * HEAD : (head + 1) * HEAD], pairs, atol=5e-3)
        else:
            assert np.allclose(found, value, atol=5e-3)


def test_metadata_is_that_of_the_other_file(tmp_path: Path, like: Path) -> None:
    reader = gguf.GGUFReader(GgufExporter(like).write(weights().items(), tmp_path / "out.gguf"))
    contents = {name: field.contents() for name, field in reader.fields.items()}
    assert contents["tokenizer.ggml.tokens"] == ["a", "ü", "<|im_end|>"]
    assert contents["tokenizer.ggml.token_type"] == [1, 1, 3]
    assert contents["tokenizer.chat_template"] == "{{ messages }}"
    assert (contents["llama.context_length"], contents["general.file_type"]) == (2048, 0)


def test_one_exporter_writes_many_files(tmp_path: Path, like: Path) -> None:
    exporter = GgufExporter(like)
    for seed in (1, 2):
        written = tensors(exporter.write(weights(seed).items(), tmp_path / "out.gguf"))
        assert np.array_equal(written["output_norm.weight"], weights(seed)["model.norm.weight"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["like.gguf", "out.gguf"]


def test_a_tied_head_and_the_architectures_constants(tmp_path: Path) -> None:
    factors = np.arange(4, dtype=np.float32)
    like = write_model(tmp_path / "like.gguf", extra={"rope_freqs.weight": factors})
    tied = [*weights().items(), ("lm_head.weight", weights()["model.embed_tokens.weight"])]
    written = tensors(GgufExporter(like).write(tied, tmp_path / "out.gguf"))
    assert "output.weight" not in written and np.array_equal(written["rope_freqs.weight"], factors)


def test_weights_that_do_not_fit_are_a_sentence_and_no_file(tmp_path: Path, like: Path) -> None:
    exporter, good = GgufExporter(like), weights()
    cases = {
        "no place for the tensor model.layers.7": {
            **good,
            "model.layers.7.mlp.up_proj.weight": good["model.norm.weight"],
        },
        "no place for the tensor adapter.x": {**good, "adapter.x": good["model.norm.weight"]},
        "has the shape": {**good, "model.norm.weight": np.zeros(3, np.float32)},
        "no tensor for output_norm.weight": {
            name: value for name, value in good.items() if name != "model.norm.weight"
        },
        "no tensor for": {},
    }
    for says, given in cases.items():
        with pytest.raises(BadInput, match=says):
            exporter.write(given.items(), tmp_path / "out.gguf")
    with pytest.raises(BadInput, match="cannot be written"):
        exporter.write(good.items(), tmp_path / "no-such-folder" / "out.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["like.gguf"]


def test_files_that_cannot_be_like_it_are_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(NoSuchPath, match="give a GGUF file"):
        GgufExporter(tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("this is text and no model at all")
    (tmp_path / "empty.gguf").write_bytes(b"")
    for name in ("text.gguf", "empty.gguf"):
        with pytest.raises(BadInput, match="cannot be read as a GGUF file"):
            GgufExporter(tmp_path / name)
    with pytest.raises(BadInput, match="'mamba', whose weights cannot be written yet: only llama"):
        GgufExporter(write_model(tmp_path / "mamba.gguf", "mamba"))
    with pytest.raises(BadInput, match="give f32 or f16"):
        GgufExporter(write_model(tmp_path / "like.gguf"), "q4_0")  # type: ignore[arg-type]


def test_rows_of_a_head_are_paired() -> None:
    assert pair_rows(np.arange(8).reshape(8, 1), 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
