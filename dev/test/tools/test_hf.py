"""dev/tools/export_hf.py and dev/tools/import_hf.py: what is trained opens in transformers, and the way back."""

import json
import os
import pathlib
import resource
import struct
import subprocess
import sys

import ml_dtypes
import numpy
import pytest

from conftest import ROOT, TINY, write_shard
from llmc_files import (
    ORDER,
    header_bytes,
    mean_loss,
    model_bytes,
    random_model,
    tokenizer_bytes,
    validation_batches,
)

TYPES = {"F32": numpy.dtype("<f4"), "F16": numpy.dtype("<f2"), "BF16": numpy.dtype(ml_dtypes.bfloat16)}
END = b"<|endoftext|>"

# transformers' names of llm.c's tensors. It stores all matrices but wte and wpe transposed.
GPT2 = {
    "wte": "wte.weight",
    "wpe": "wpe.weight",
    "ln1w": "h.{}.ln_1.weight",
    "ln1b": "h.{}.ln_1.bias",
    "qkvw": "h.{}.attn.c_attn.weight",
    "qkvb": "h.{}.attn.c_attn.bias",
    "attprojw": "h.{}.attn.c_proj.weight",
    "attprojb": "h.{}.attn.c_proj.bias",
    "ln2w": "h.{}.ln_2.weight",
    "ln2b": "h.{}.ln_2.bias",
    "fcw": "h.{}.mlp.c_fc.weight",
    "fcb": "h.{}.mlp.c_fc.bias",
    "fcprojw": "h.{}.mlp.c_proj.weight",
    "fcprojb": "h.{}.mlp.c_proj.bias",
    "lnfw": "ln_f.weight",
    "lnfb": "ln_f.bias",
}


def tool(name, *arguments, **settings):
    command = [sys.executable, str(ROOT / "dev" / "tools" / f"{name}_hf.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **settings)


def made(name, *arguments, **settings):
    result = tool(name, *arguments, **settings)
    assert result.returncode == 0, result.stderr
    return result.stdout


def failed(name, *arguments, **settings):
    """The one line of a user's mistake."""
    result = tool(name, *arguments, **settings)
    assert result.returncode == 2, result.stdout + result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def transformers_tensors(model, prefix="transformer."):
    """A model as transformers holds it: {name: array}."""
    tensors = {}
    for name, values in model.items():
        rows = enumerate(values) if ORDER[name].startswith("L") else [(0, values)]
        for layer, part in rows:
            is_matrix = part.ndim == 2 and name not in ("wte", "wpe")
            tensors[prefix + GPT2[name].format(layer)] = part.T if is_matrix else part
    return tensors


def llmc_model(tensors, layers):
    """The same, turned around."""
    model = {}
    for name, letters in ORDER.items():
        parts = [tensors["transformer." + GPT2[name].format(layer)].astype("<f4") for layer in range(layers)]
        parts = [part.T if part.ndim == 2 and name not in ("wte", "wpe") else part for part in parts]
        model[name] = numpy.stack(parts) if letters.startswith("L") else parts[0]
    return model


def read_safetensors(path):
    """({name: array}, metadata). The header's end, the order and the end of the values are checked."""
    data = path.read_bytes()
    length = struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8:8 + length])
    values, at = data[8 + length:], 0
    assert (8 + length) % 8 == 0
    metadata = header.pop("__metadata__", None)
    tensors = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        assert begin == at, "values lie one after another, without gaps"
        tensors[name] = numpy.frombuffer(values[begin:end], TYPES[entry["dtype"]]).reshape(entry["shape"])
        at = end
    assert at == len(values)
    return tensors, metadata


def write_safetensors(path, tensors):
    names = {stored: name for name, stored in TYPES.items()}
    header, at = {}, 0
    for name, values in tensors.items():
        header[name] = {"dtype": names[values.dtype], "shape": values.shape,
                        "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(v.tobytes() for v in tensors.values()))


def config_of(model, heads=2, **others):
    V, C = model["wte"].shape
    return {"model_type": "gpt2", "vocab_size": V, "n_positions": len(model["wpe"]), "n_embd": C,
            "n_layer": len(model["ln1w"]), "n_head": heads, **others}


def write_folder(folder, model, tensors=None, **others):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(model, **others)))
    write_safetensors(folder / "model.safetensors", tensors or transformers_tensors(model))
    return folder


def bits(tensors):
    return {name: (values.dtype, values.shape, values.tobytes()) for name, values in tensors.items()}


@pytest.fixture
def model_file(tmp_path):
    (tmp_path / "m.bin").write_bytes(model_bytes(random_model(), 2, 3))
    return tmp_path / "m.bin"


@pytest.mark.parametrize("version, dtype", [(3, "F32"), (5, "BF16")])
def test_every_exported_tensor_is_the_models_in_transformers_shape(tmp_path, version, dtype):
    model = random_model(V=100)
    (tmp_path / "m.bin").write_bytes(model_bytes(model, 2, version))
    (tmp_path / "out").mkdir()  # an empty folder may be there
    made("export", tmp_path / "m.bin", tmp_path / "out", "--no-tokenizer")
    tensors, metadata = read_safetensors(tmp_path / "out" / "model.safetensors")
    expected = {name: values.astype(TYPES[dtype]) for name, values in transformers_tensors(model).items()}
    assert bits(tensors) == bits(expected)
    assert metadata == {"format": "pt"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = {**config_of(model), "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
                "tie_word_embeddings": True, "eos_token_id": None}
    assert config.items() >= expected.items()
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"model.safetensors", "config.json", "generation_config.json"}


@pytest.mark.parametrize("version", [3, 5])
def test_export_and_import_give_back_every_bit(tmp_path, version):
    """Of any bits: also of values that are not finite, denormal or -0."""
    model = random_model(V=100)
    random = numpy.random.default_rng(3)
    for values in model.values():
        halves = random.integers(0, 1 << 16, values.shape).astype("<u4")
        low = random.integers(0, 1 << 16, values.shape).astype("<u4") if version == 3 else 0
        values[...] = (halves << 16 | low).view("<f4")
    content = model_bytes(model, 2, version)
    (tmp_path / "m.bin").write_bytes(content)
    made("export", tmp_path / "m.bin", tmp_path / "out", "--no-tokenizer")
    made("import", tmp_path / "out", tmp_path / "back.bin")
    assert (tmp_path / "back.bin").read_bytes() == content


def test_dtypes_are_converted_exactly_or_to_nearest(tmp_path):
    model = random_model()
    for seed, values in enumerate(model.values()):  # all 32 bits, ties among them
        values[...] = numpy.random.default_rng(seed).normal(0, 1, values.shape)
        values.reshape(-1)[:4] = [1 + 2**-8, 1 + 3 * 2**-8, numpy.inf, numpy.nan]
    (tmp_path / "m.bin").write_bytes(model_bytes(model, 2, 3))
    made("export", tmp_path / "m.bin", tmp_path / "half", "--no-tokenizer", "--dtype", "bfloat16")
    tensors, _ = read_safetensors(tmp_path / "half" / "model.safetensors")
    nearest = {name: values.astype(TYPES["BF16"]) for name, values in model.items()}
    assert bits(tensors) == bits(transformers_tensors(nearest))
    made("import", tmp_path / "half", tmp_path / "wide.bin", "--dtype", "float32")
    wide = {name: values.astype("<f4") for name, values in nearest.items()}
    assert (tmp_path / "wide.bin").read_bytes() == model_bytes(wide, 2, 3)


TRAINED = {"-x": 40, "-v": 40, "-m": 0, "-l": 0.01}  # fp32, as TINY says


def tiny_run(train, tokens):
    """A short training, what it says of the validation data at its end, and that data."""
    run = train("run", TRAINED)
    stream = numpy.fromfile(next(tokens.glob("x_val_*.bin")), "<u2", offset=1024)
    loss = run.lines("eval")[-1]["loss"]
    assert loss < 0.9 * numpy.log(64), "it has learned something"
    return run.folder / "model_00000040.bin", loss, validation_batches(stream, TINY["-b"], TINY["-t"])


def test_an_exported_model_has_the_trainers_validation_loss(train, tokens, tmp_path):
    """By a GPT-2 in NumPy, on what lies in the folder."""
    model, loss, (inputs, targets) = tiny_run(train, tokens)
    made("export", model, tmp_path / "out", "--no-tokenizer")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    tensors, _ = read_safetensors(tmp_path / "out" / "model.safetensors")
    ours = mean_loss(llmc_model(tensors, config["n_layer"]), config["n_head"], inputs, targets)
    assert ours == pytest.approx(loss, abs=2e-5)


def test_an_exported_model_has_the_trainers_validation_loss_in_transformers(train, tokens, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model, loss, (inputs, targets) = tiny_run(train, tokens)
    made("export", model, tmp_path / "out", "--no-tokenizer")
    peer = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        logits = peer(torch.tensor(inputs)).logits
    theirs = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten()).item()
    print(f"validation loss: trainer {loss:.7f}, transformers {theirs:.7f}")
    assert theirs == pytest.approx(loss, abs=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_of_transformers_has_its_loss_in_the_trainer(train, tokens, tmp_path, dtype):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    peer = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    peer.to(getattr(torch, dtype)).save_pretrained(tmp_path / "peer", max_shard_size="30KB")
    assert (tmp_path / "peer" / "model.safetensors.index.json").exists()
    made("import", tmp_path / "peer", tmp_path / "m.bin")
    stream = numpy.fromfile(next(tokens.glob("x_val_*.bin")), "<u2", offset=1024)
    inputs, targets = validation_batches(stream, TINY["-b"], TINY["-t"])
    with torch.no_grad():
        logits = peer.float()(torch.tensor(inputs)).logits
    theirs = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten()).item()
    given = {"--layers": None, "--heads": None, "--channels": None, "--vocab-size": None}
    run = train("run", {**given, "-e": tmp_path / "m.bin", "-x": 0, "-v": 1, "-m": 0})
    assert run.lines("eval")[0]["loss"] == pytest.approx(theirs, abs=1e-4)


# Tokenizers


LINE = "{}: the quick brown fox's über-naïve – jumps\n\t over {}  dogs\n"
DOCUMENTS = ["".join(LINE.format(i * j, i) for i in range(5)) for j in range(100)]
TEXT = END.decode().join(["", *DOCUMENTS])


def prepare(folder, tokenizer):
    """Tokenizes DOCUMENTS. Returns the shard's tokens and the size of the vocabulary."""
    (folder / "a.txt").write_text(TEXT, encoding="utf-8")
    command = [sys.executable, ROOT / "data" / "prepare.py", "--text", folder / "a.txt", "--out", folder]
    subprocess.run([*command, "--tokenizer", tokenizer, "--validation", "0"], check=True)
    stream = numpy.fromfile(folder / "a_train_000000.bin", "<u2", offset=1024).tolist()
    return stream, int(numpy.fromfile(folder / "tokenizer.bin", "<i4", 3)[2])


def export_with_tokenizer(folder, size):
    (folder / "m.bin").write_bytes(model_bytes(random_model(V=size), 2, 3))
    for name, tokenizer in (("out", folder / "tokenizer.bin"), ("same", folder)):
        made("export", folder / "m.bin", folder / name, "--tokenizer", tokenizer)
    assert (folder / "same/tokenizer.json").read_bytes() == (folder / "out/tokenizer.json").read_bytes()
    return folder / "out"


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:600"])
def test_the_exported_tokenizer_makes_the_tokens_that_the_model_was_trained_on(tmp_path, tokenizer):
    tokenizers = pytest.importorskip("tokenizers")
    stream, size = prepare(tmp_path, tokenizer)
    out = export_with_tokenizer(tmp_path, size)
    peer = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    assert peer.encode(TEXT).ids == stream
    assert peer.decode(stream) == "".join(DOCUMENTS)
    end_of_text = json.loads((out / "config.json").read_text())["eos_token_id"]
    assert peer.id_to_token(end_of_text) == END.decode()


def test_merges_follow_from_the_tokens_where_there_is_no_tokenizer_json(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    stream, size = prepare(tmp_path, "bpe:600")
    original = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").unlink()
    out = export_with_tokenizer(tmp_path, size)
    recovered = json.loads((out / "tokenizer.json").read_text())
    assert recovered["model"]["merges"] == original["model"]["merges"] and len(stream) > 1000
    peer = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    assert peer.encode(TEXT).ids == stream
    assert peer.decode(stream) == "".join(DOCUMENTS)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:600"])
def test_transformers_opens_the_exported_tokenizer(tmp_path, tokenizer):
    transformers = pytest.importorskip("transformers")
    stream, size = prepare(tmp_path, tokenizer)
    peer = transformers.AutoTokenizer.from_pretrained(export_with_tokenizer(tmp_path, size))
    assert peer.encode(TEXT) == stream
    assert peer.decode(stream, skip_special_tokens=True) == "".join(DOCUMENTS)
    assert peer.eos_token_id == stream[0] and len(peer) == size


def test_gpt2_without_a_network_is_a_clear_error(model_file, tmp_path):
    pytest.importorskip("tiktoken")
    nowhere = "http://127.0.0.1:9"
    environment = {**os.environ, "TIKTOKEN_CACHE_DIR": str(tmp_path), "HTTPS_PROXY": nowhere,
                   "https_proxy": nowhere}
    message = failed("export", model_file, tmp_path / "out", "--tokenizer", "gpt2", env=environment)
    assert "GPT-2's tokenizer cannot be loaded from tiktoken" in message and "--no-tokenizer" in message


# Mistakes, and what the disk does


def test_wrong_input_of_an_export_is_one_line_and_nothing_is_written(model_file, tmp_path):
    content = model_file.read_bytes()
    (tmp_path / "cut.bin").write_bytes(content[:-4])
    (tmp_path / "other.bin").write_bytes(header_bytes(20240520, 1, 5) + bytes(10))
    (tmp_path / "damaged.bin").write_bytes(header_bytes(20240326, 3, 16, 64, 1 << 24, 2, 32, 128))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    letters = [bytes([33 + i]) for i in range(63)] + [END]
    (tmp_path / "letters.bin").write_bytes(tokenizer_bytes(letters, 63))
    every_byte = [bytes([i]) for i in range(256)] + [END]
    (tmp_path / "bytes.bin").write_bytes(tokenizer_bytes(every_byte, 256))
    (tmp_path / "short.bin").write_bytes(tokenizer_bytes(every_byte, 256)[:-1])
    (tmp_path / "pair").mkdir()
    (tmp_path / "pair" / "tokenizer.bin").write_bytes(tokenizer_bytes(every_byte, 256))
    (tmp_path / "pair" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}, "added_tokens": []}')
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    out = tmp_path / "out"
    alone = "--no-tokenizer"
    assert "exists" in failed("export", model_file, ".", alone, cwd=tmp_path / "empty")
    for arguments, what in [
        ([model_file, out], "give --tokenizer FILE"),
        ([model_file, out, alone, "--tokenizer", "t.bin"], "give --tokenizer FILE"),
        ([tmp_path / "none.bin", out, alone], "cannot be read"),
        ([tmp_path / "cut.bin", out, alone], "is truncated"),
        ([tmp_path / "other.bin", out, alone], "is not a model file"),
        ([tmp_path / "damaged.bin", out, alone], "is truncated"),
        ([model_file, tmp_path / "full", alone], "exists"),
        ([model_file, model_file, alone], "exists"),
        ([model_file, tmp_path / "no" / "out", alone], "cannot be read or written"),
        ([model_file, out, alone, "--dtype", "int4"], "--dtype"),
        ([model_file, out, "--tokenizer", model_file], "is not a tokenizer"),
        ([model_file, out, "--tokenizer", tmp_path / "short.bin"], "is damaged"),
        ([model_file, out, "--tokenizer", tmp_path / "letters.bin"], "not those of a byte-level BPE"),
        ([model_file, out, "--tokenizer", tmp_path / "bytes.bin"], "has 257 tokens"),
        ([model_file, out, "--tokenizer", tmp_path / "pair" / "tokenizer.bin"], "has other tokens"),
    ]:
        assert what in failed("export", *arguments), what
    assert sorted(tmp_path.rglob("*")) == before


def changed(model, name, values):
    return {**transformers_tensors(model), name: values}


def test_an_import_takes_only_the_trainers_gpt2(tmp_path):
    model = random_model()
    wte, missing = "transformer.wte.weight", transformers_tensors(model)
    del missing["transformer.h.1.mlp.c_fc.bias"]
    untransposed = changed(model, "transformer.h.0.attn.c_attn.weight", model["qkvw"][0])
    for i, (others, tensors, what) in enumerate([
        ({"model_type": "llama"}, None, "type 'llama'"),
        ({"activation_function": "gelu"}, None, "activation_function 'gelu'"),
        ({"layer_norm_epsilon": 1e-6}, None, "layer_norm_epsilon 1e-06"),
        ({"scale_attn_by_inverse_layer_idx": True}, None, "scale_attn_by_inverse_layer_idx True"),
        ({"tie_word_embeddings": False}, None, "tie_word_embeddings False"),
        ({"n_inner": 64}, None, "n_inner 64"),
        ({"n_layer": "2"}, None, "n_layer"),
        ({"n_layer": 1 << 24}, None, "no tensor transformer.h.2.ln_1.weight"),
        ({"heads": 3}, None, "an impossible model"),
        ({"n_layer": 1}, None, "which GPT-2 does not"),
        ({}, missing, "no tensor transformer.h.1.mlp.c_fc.bias"),
        ({}, untransposed, "has the shape (96, 32)"),
        ({}, changed(model, wte, model["wte"][:63]), "has the shape (63, 32)"),
        ({}, changed(model, "score.weight", model["wte"]), "which GPT-2 does not"),
        ({}, changed(model, "lm_head.weight", model["wte"] + 1), "is a different matrix"),
    ]):
        folder = write_folder(tmp_path / str(i), model, tensors, **others)
        assert what in failed("import", folder, tmp_path / "m.bin"), what
    assert "exists" in failed("import", tmp_path / "0", tmp_path / "0" / "config.json")
    assert not list(tmp_path.glob("*m.bin*"))


def test_damaged_files_are_refused(tmp_path):
    model = random_model()
    folder = write_folder(tmp_path / "folder", model)
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = struct.unpack_from("<Q", content)[0]
    header = json.loads(content[8:8 + length])

    def with_header(text):
        return struct.pack("<Q", len(text)) + text + content[8 + length:]

    def with_wpe(**fields):
        entry = {**header["transformer.wpe.weight"], **fields}
        return with_header(json.dumps({**header, "transformer.wpe.weight": entry}).encode())

    def moved(name, by):
        """A tensor's values are said to begin elsewhere."""
        entry = {**header[name], "data_offsets": [offset + by for offset in header[name]["data_offsets"]]}
        return with_header(json.dumps({**header, name: entry}).encode())

    places = sorted((*header[name]["data_offsets"], name) for name in header if name != "__metadata__")
    last = places[-1][2]
    for damaged, what in [
        (moved(last, -4), f"{last} that overlaps another"),
        (moved(places[1][2], -4), f"{places[1][2]} that overlaps another"),
        (moved(last, 4) + bytes(4), f"{last} that follows a gap"),
        (moved(places[0][2], 4), f"{places[0][2]} that follows a gap"),
        (content + bytes(4), "4 bytes that are no tensor's"),
        (b"", "is truncated"),
        (content[:-1], "is truncated"),
        (content[:100], "is truncated"),
        (struct.pack("<Q", 1 << 63) + content[8:], "is truncated"),
        (with_header(b"[" * 100000), "damaged header"),
        (with_header(b"[]"), "damaged header"),
        (with_wpe(data_offsets=[0, 1 << 60]), "is truncated"),
        (with_wpe(data_offsets=[-8, 2040]), "damaged header"),
        (with_wpe(data_offsets=[8]), "damaged header"),
        (with_wpe(shape=[16, 33]), "damaged header"),
        (with_wpe(shape=[1 << 40, 1 << 40]), "damaged header"),
        (with_wpe(shape="16"), "damaged header"),
        (with_wpe(dtype="F64"), "is F64"),
    ]:
        path.write_bytes(damaged)
        assert what in failed("import", folder, tmp_path / "m.bin"), what
    path.unlink()
    assert "neither model.safetensors nor" in failed("import", folder, tmp_path / "m.bin")
    index = folder / "model.safetensors.index.json"
    for text, what in [
        ("{", "is not a JSON object"),
        ('{"weight_map": 3}', "does not map"),
        ('{"weight_map": {"wte.weight": "../other/model.safetensors"}}', "does not map"),
        ('{"weight_map": {"wte.weight": "none.safetensors"}}', "cannot be read"),
    ]:
        index.write_text(text)
        assert what in failed("import", folder, tmp_path / "m.bin"), what
    assert not list(tmp_path.glob("*m.bin*"))


@pytest.mark.parametrize("form", ["no prefix, masks and head", "two files", "float16"])
def test_an_import_takes_what_transformers_has_written_over_the_years(tmp_path, form):
    model = random_model(V=100)
    for values in model.values():
        values[...] = values.astype("<f2")
    folder = write_folder(tmp_path / "folder", model)
    if form.startswith("no prefix"):
        tensors = transformers_tensors(model, prefix="")
        tensors |= {"h.0.attn.bias": numpy.ones((1, 1, 16, 16), "<f4"), "lm_head.weight": model["wte"]}
        write_safetensors(folder / "model.safetensors", tensors)
    if form == "float16":
        halves = {name: values.astype("<f2") for name, values in transformers_tensors(model).items()}
        write_safetensors(folder / "model.safetensors", halves)
    if form == "two files":
        (folder / "model.safetensors").unlink()
        tensors, places = transformers_tensors(model), {}
        for part in (0, 1):
            some = dict([*tensors.items()][part::2])
            places |= dict.fromkeys(some, f"model-{part}.safetensors")
            write_safetensors(folder / f"model-{part}.safetensors", some)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    made("import", folder, tmp_path / "m.bin")
    assert (tmp_path / "m.bin").read_bytes() == model_bytes(model, 2, 3)


def test_a_full_disk_is_one_line_and_leaves_nothing(model_file, tmp_path):
    folder = write_folder(tmp_path / "folder", random_model())
    before = sorted(tmp_path.rglob("*"))

    def small_disk():
        resource.setrlimit(resource.RLIMIT_FSIZE, (50000, 50000))

    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    for arguments in [("export", model_file, tmp_path / "out", "--no-tokenizer"),
                      ("import", folder, tmp_path / "back.bin")]:
        assert "cannot be read or written" in failed(*arguments, preexec_fn=small_disk, env=environment)
    assert sorted(tmp_path.rglob("*")) == before
