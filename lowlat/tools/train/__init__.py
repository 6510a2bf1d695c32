"""Training of small targets and of draft models for them; nothing in the runtime imports it.

    python -m lowlat.tools.train.tokenizer   a byte-level BPE tokenizer made on a text
    python -m lowlat.tools.train.target      a small Llama target trained on a text, from scratch or from another on
    python -m lowlat.tools.train.draft_model a draft model of any method for a local Hugging Face target
    python -m lowlat.tools.train.evaluate    the acceptance of an EAGLE3 draft model on held-out prompts
    python -m lowlat.tools.train.questions   questions for a chat target to answer
    python -m lowlat.tools.train.plot        loss curves
    python -m lowlat.tools.train.long.texts  the documents of a text joined into long ones
    python -m lowlat.tools.train.long.losses a target's loss by the place in long texts

Needs the extra `train` (torch, transformers, tokenizers, safetensors, matplotlib).
"""
