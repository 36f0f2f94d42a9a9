#!/usr/bin/env bash
# transformers 5.23.0: tie_word_embeddings in the text_config of a multimodal model is not read.
#
# Behaviour: Gemma3Config has a text_config, which is the config of a whole text model and has a
# tie_word_embeddings of its own. Gemma3ForConditionalGeneration goes by the flag of the outer
# config alone, whose default is true. With text_config saying false, the LM head is tied all the
# same; the text model alone, made of the same text_config, is not tied. A converter that reads the
# text_config for the text part gets a model with another LM head.
#
# Output seen:
#   text model alone is tied: False; the same text_config with images is tied: True
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0 numpy==2.4.6
"$place/venv/bin/python" - 2>/dev/null <<'PYTHON'
from transformers import Gemma3Config, Gemma3ForCausalLM, Gemma3ForConditionalGeneration
from transformers import Gemma3TextConfig

sizes = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "tie_word_embeddings": False,
}
vision = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def is_tied(model):
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


alone = is_tied(Gemma3ForCausalLM(Gemma3TextConfig(**sizes)))
config = Gemma3Config(text_config=sizes, vision_config=vision, mm_tokens_per_image=4)
assert config.text_config.tie_word_embeddings is False
whole = is_tied(Gemma3ForConditionalGeneration(config))
print(f"text model alone is tied: {alone}; the same text_config with images is tied: {whole}")
assert not alone and whole, "the behaviour changed"
PYTHON
