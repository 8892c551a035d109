"""llm.c's files and its model once more, written from their description and not from this project's code.

A file is a header of 256 int32, then data, little-endian:

    model      {20240326, 3 (fp32) or 5 (bf16), T, V, L, heads, C, Vp}, then the tensors of ORDER; Vp is V
               rounded up to 128, and the rows between are zero
    tokens     {20240520, 1, count}, then uint16
    tokenizer  {20240328, 2, count, end of text}, then of each token a byte with its length, and its bytes
"""

import numpy

# L stands for layers, C for channels, V for the padded vocabulary, T for positions.
ORDER = {
    "wte": "V C",
    "wpe": "T C",
    "ln1w": "L C",
    "ln1b": "L C",
    "qkvw": "L 3C C",
    "qkvb": "L 3C",
    "attprojw": "L C C",
    "attprojb": "L C",
    "ln2w": "L C",
    "ln2b": "L C",
    "fcw": "L 4C C",
    "fcb": "L 4C",
    "fcprojw": "L C 4C",
    "fcprojb": "L C",
    "lnfw": "C",
    "lnfb": "C",
}


def header_bytes(*values):
    return numpy.array(values, "<i4").tobytes() + bytes(4 * (256 - len(values)))


def random_model(seed=1, L=2, C=32, V=64, T=16, exact_in=5):
    """{name: float32 array}, wte with V rows. exact_in: a version of the file that holds these values."""
    random = numpy.random.default_rng(seed)
    sizes = {"L": L, "C": C, "V": V, "T": T, "3C": 3 * C, "4C": 4 * C}
    tensors = {}
    for name, letters in ORDER.items():
        values = random.normal(0, 0.3, [sizes[letter] for letter in letters.split()]).astype("<f4")
        values += name in ("ln1w", "ln2w", "lnfw")
        tensors[name] = (values.view("<u4") & (0xFFFF0000 if exact_in == 5 else 0xFFFFFFFF)).view("<f4")
    return tensors


def model_bytes(tensors, heads, version):
    V, C = tensors["wte"].shape
    T, L, padded = len(tensors["wpe"]), len(tensors["ln1w"]), -(-V // 128) * 128
    wte = numpy.concatenate([tensors["wte"], numpy.zeros((padded - V, C), "<f4")])
    data = b"".join(tensors[name].tobytes() if name != "wte" else wte.tobytes() for name in ORDER)
    if version == 5:
        data = numpy.frombuffer(data, "<u2")[1::2].tobytes()
    return header_bytes(20240326, version, T, V, L, heads, C, padded) + data


def token_bytes(tokens):
    return header_bytes(20240520, 1, len(tokens)) + numpy.array(tokens, "<u2").tobytes()


def tokenizer_bytes(tokens, end_of_text):
    data = b"".join(bytes([len(token)]) + token for token in tokens)
    return header_bytes(20240328, 2, len(tokens), end_of_text) + data


def layernorm(x, weight, bias):
    centered = x - x.mean(-1, keepdims=True)
    return centered / numpy.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5) * weight + bias


def attention(qkv, heads):
    """qkv: (N, T, 3C), in each row queries, then keys, then values of all heads."""
    N, T, width = qkv.shape
    q, k, v = (part.reshape(N, T, heads, -1).transpose(0, 2, 1, 3) for part in numpy.split(qkv, 3, -1))
    scores = q @ k.transpose(0, 1, 3, 2) / numpy.sqrt(q.shape[-1])
    scores[..., numpy.triu_indices(T, 1)[0], numpy.triu_indices(T, 1)[1]] = -numpy.inf
    weights = numpy.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return (weights @ v).transpose(0, 2, 1, 3).reshape(N, T, width // 3)


def mean_loss(tensors, heads, inputs, targets):
    """Cross entropy of GPT-2 in float64.   inputs, targets: (N, T)"""
    p = {name: values.astype(float) for name, values in tensors.items()}
    x = p["wte"][inputs] + p["wpe"][: inputs.shape[1]]
    for layer in range(len(p["ln1w"])):
        w = {name: values[layer] for name, values in p.items() if ORDER[name].startswith("L")}
        qkv = layernorm(x, w["ln1w"], w["ln1b"]) @ w["qkvw"].T + w["qkvb"]
        x = x + attention(qkv, heads) @ w["attprojw"].T + w["attprojb"]
        h = layernorm(x, w["ln2w"], w["ln2b"]) @ w["fcw"].T + w["fcb"]
        h = h / 2 * (1 + numpy.tanh(numpy.sqrt(2 / numpy.pi) * (h + 0.044715 * h**3)))
        x = x + h @ w["fcprojw"].T + w["fcprojb"]
    logits = layernorm(x, p["lnfw"], p["lnfb"]) @ p["wte"].T
    logits -= logits.max(-1, keepdims=True)
    log_sums = numpy.log(numpy.exp(logits).sum(-1))
    return (log_sums - numpy.take_along_axis(logits, targets[..., None], -1)[..., 0]).mean()


def validation_batches(tokens, B, T):
    """(inputs, targets) of all whole batches, one after another."""
    rows = (len(tokens) - 1) // (B * T) * B
    tokens = numpy.asarray(tokens, int)
    return tokens[: rows * T].reshape(rows, T), tokens[1 : rows * T + 1].reshape(rows, T)
