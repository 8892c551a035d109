"""Files that tests give to the trainer, written independently of the C++ code."""

import numpy


def write_tokenizer(path, vocab_size):
    """llm.c's tokenizer file of version 2: one letter a token, the last token is the end of text."""
    header = numpy.zeros(256, dtype="<i4")
    header[:4] = [20240328, 2, vocab_size, vocab_size - 1]
    path.write_bytes(header.tobytes() + b"".join(bytes([1, 33 + i % 90]) for i in range(vocab_size)))
