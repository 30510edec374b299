"""Weights between transformers and llama.cpp: a trainer's weights as a GGUF file, and a GGUF file as a model folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from train.errors import BadInput, NoSuchPath
from train.extras import optional

#: Architectures whose tensors are known to be only renamed and reordered: Llama, Mistral and SmolLM are "llama".
ARCHITECTURES: Final = ("llama",)
Dtype = Literal["f32", "f16"]
#: `general.file_type` of llama.cpp.
_FILE_TYPES: Final[Mapping[Dtype, int]] = {"f32": 0, "f16": 1}


class GgufExporter:
    """Writes GGUF files `like` a given one: the same tokenizer, template and sizes, with a trainer's weights.

    Matrices are written as `dtype`, vectors as f32. With f32 and an exact engine (`bench serve --gguf` starts one) its
    logprobs are within 1e-3 of the trainer's; f16 has half the size, and they differ by up to 1e-2.
    Raises `BadInput` for a file that is not GGUF or whose architecture is not known.
    """

    def __init__(self, like: str | Path, dtype: Dtype = "f32") -> None:
        self._gguf = _package()
        if dtype not in _FILE_TYPES:
            raise BadInput(f"dtype {dtype!r}: give {' or '.join(_FILE_TYPES)}")
        self._dtype: Dtype = dtype
        self._like = Path(like)
        self._reader = _open(self._gguf, self._like)
        architecture = self._field("general.architecture")
        if architecture not in ARCHITECTURES:
            raise BadInput(
                f"{like} is of the architecture {architecture!r}, whose weights cannot be written yet: only "
                f"{', '.join(ARCHITECTURES)}; serve it with vLLM or SGLang instead"
            )
        self._heads = int(self._field(f"{architecture}.attention.head_count"))
        self._kv_heads = int(self._field(f"{architecture}.attention.head_count_kv") or self._heads)
        layers = int(self._field(f"{architecture}.block_count"))
        self._names = self._gguf.get_tensor_name_map(self._gguf.MODEL_ARCH.LLAMA, layers)
        #: Shape by name, as numpy has it: GGUF has the fastest dimension first.
        self._shapes = {tensor.name: tuple(int(n) for n in tensor.shape)[::-1] for tensor in self._reader.tensors}

    def write(self, weights: Iterable[tuple[str, Any]], out: str | Path) -> Path:
        """Writes `weights`, pairs of a name as in `model.named_parameters()` and a tensor, to `out`, all or nothing.

        Raises `BadInput` for a tensor that the model does not have, or of another shape, and where one is missing.
        """
        out = Path(out)
        partial = out.with_name(f".{out.name}.partial")
        writer = self._gguf.GGUFWriter(partial, "llama")
        try:
            self._add_metadata(writer)
            self._add_tensors(writer, weights)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            partial.replace(out)
        except OSError as error:
            raise BadInput(
                f"{out} cannot be written: {error.strerror or error}; free some space, or name another folder"
            ) from error
        finally:
            partial.unlink(missing_ok=True)
        return out

    def _add_metadata(self, writer: Any) -> None:
        array = self._gguf.GGUFValueType.ARRAY
        for field in self._reader.fields.values():
            if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
                continue
            if field.types[0] == array:
                writer.add_key_value(field.name, field.contents(), array, sub_type=field.types[-1])
            else:
                writer.add_key_value(field.name, field.contents(), field.types[0])
        writer.add_file_type(_FILE_TYPES[self._dtype])

    def _add_tensors(self, writer: Any, weights: Iterable[tuple[str, Any]]) -> None:
        missing = dict(self._shapes)
        for name, tensor in weights:
            found = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
            if found == "output.weight" and found not in self._shapes:
                continue  # tied to the embeddings, which are written
            if found not in missing:
                raise BadInput(
                    f"{self._like} has no place for the tensor {name}: give the file that the model came from"
                )
            array = _array(tensor)
            if array.shape != missing.pop(found):
                raise BadInput(
                    f"the tensor {name} has the shape {array.shape}, in {self._like} it has {self._shapes[found]}: "
                    "give the file that the model came from"
                )
            if found.endswith(".attn_q.weight"):
                array = pair_rows(array, self._heads)
            elif found.endswith(".attn_k.weight"):
                array = pair_rows(array, self._kv_heads)
            writer.add_tensor(found, array.astype("float16" if self._dtype == "f16" and array.ndim > 1 else "float32"))
        for tensor in self._reader.tensors:
            if tensor.name == "rope_freqs.weight" and missing.pop(tensor.name, None):  # a constant of the architecture
                writer.add_tensor(tensor.name, tensor.data)
        if missing:
            raise BadInput(f"the weights have no tensor for {next(iter(missing))}: give all of the model's parameters")

    def _field(self, name: str) -> Any:
        field = self._reader.get_field(name)
        return None if field is None else field.contents()


def pair_rows(weight: Any, heads: int) -> Any:
    """The rows of a query or key projection in llama.cpp's order.

    For the rotary embedding llama.cpp pairs neighbouring rows of a head, transformers a row of the first half with one
    of the second.
    """
    rows = weight.shape[0] // heads
    return weight.reshape(heads, 2, rows // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def to_folder(gguf: str | Path, out: str | Path) -> Path:
    """Writes the model and the tokenizer of a GGUF file to a folder that `from_pretrained` loads, in float32.

    A trainer starts from it where the engine serves that file. Quantized weights are written as the numbers they stand
    for. Needs torch, transformers and gguf.
    """
    gguf, out = Path(gguf), Path(out)
    _open(_package(), gguf)
    models = optional("transformers", needed_for="reading a model needs the trl extra", extra="trl")
    torch = optional("torch", needed_for="reading a model needs the trl extra", extra="trl")
    loaded = models.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    with torch.device("meta"):
        plain = type(loaded)(loaded.config)  # what was loaded refuses to be saved: it counts as quantized
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    plain.save_pretrained(out)
    models.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)
    return out


def _package() -> Any:
    return optional("gguf", needed_for="GGUF files need the trl extra", extra="trl")


def _open(package: Any, path: Path) -> Any:
    if not path.is_file():
        raise NoSuchPath(f"{path}: no such file; give a GGUF file")
    try:
        return package.GGUFReader(path)
    except (ValueError, IndexError, OSError, KeyError) as error:
        raise BadInput(f"{path} cannot be read as a GGUF file: {error}; give another") from error


def _array(tensor: Any) -> Any:
    """A tensor of torch, in any dtype and on any device, or an array, as float32."""
    import numpy as np

    if hasattr(tensor, "detach"):
        tensor = tensor.detach().float().cpu().numpy()
    return np.asarray(tensor, dtype=np.float32)
