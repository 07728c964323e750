"""KerasHub without TensorFlow: a process of its own generates the same, and one that has imported it is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import keras_hub
import pytest

import lazymodel as lm
import lazymodel_keras as lk
from tests.keras.models import GEMMA
from tests.keras.versions import needs_keras_hub
from tests.sentence_piece import WORDS, gemma_vocabulary

WITHOUT = """
import json, sys, lazymodel_keras as lk
lk.leave_out_tensorflow()
lk.leave_out_tensorflow()
import keras_hub
model = lk.from_preset(keras_hub.models.GemmaCausalLM, sys.argv[1], progress=False)
text = model.generate(sys.argv[2], max_length=8)
import keras, numpy as np
image = keras.layers.RandomFlip("horizontal")(np.ones((1, 4, 4, 3), "float32"))  # asks if TensorFlow traces it
try:
    import tensorflow
except ModuleNotFoundError:
    print(json.dumps([text, float(image.sum())]))
"""


@pytest.mark.large
@needs_keras_hub("0.32", "tokenizers without TensorFlow")
def test_a_process_without_tensorflow_generates_the_same(tmp_path: Path) -> None:
    tokenizer = keras_hub.models.GemmaTokenizer(proto=gemma_vocabulary())
    backbone = keras_hub.models.GemmaBackbone(**GEMMA | {"vocabulary_size": tokenizer.vocabulary_size()})
    preprocessor = keras_hub.models.GemmaCausalLMPreprocessor(tokenizer, sequence_length=8)
    model = keras_hub.models.GemmaCausalLM(backbone, preprocessor)
    model.save_to_preset(str(tmp_path / "gemma"))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(tmp_path / "gemma"), WORDS], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [model.generate(WORDS, max_length=8), 48]


def test_it_is_too_late_after_keras_hub() -> None:
    with pytest.raises(lm.LazyModelError, match=r"above `import keras_hub`"):
        lk.leave_out_tensorflow()
