"""A vocabulary of SentencePiece with Gemma's special tokens."""

from __future__ import annotations

import io

WORDS = "the quick brown fox jumps over the lazy dog and sleeps"


def gemma_vocabulary() -> bytes:
    """The model of one that knows `WORDS`."""
    import sentencepiece

    proto = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([WORDS] * 4), model_writer=proto, vocab_size=40, model_type="BPE", pad_id=0, eos_id=1,
        bos_id=2, unk_id=3, pad_piece="<pad>", eos_piece="<eos>", bos_piece="<bos>", unk_piece="<unk>",
        user_defined_symbols=["<start_of_turn>", "<end_of_turn>"], minloglevel=2,
    )  # fmt: skip
    return proto.getvalue()
