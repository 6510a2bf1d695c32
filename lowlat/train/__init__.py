"""Training of small targets and of EAGLE3 heads; nothing in the runtime imports it.

    python -m lowlat.train.tokenizer   a byte-level BPE tokenizer made on a text
    python -m lowlat.train.target      a small Llama target trained from scratch on a text
    python -m lowlat.train.head        an EAGLE3 head for any local Hugging Face target
    python -m lowlat.train.evaluate    the acceptance of such a head on held-out prompts
    python -m lowlat.train.questions   questions for a chat target to answer
    python -m lowlat.train.plot        loss curves

Needs the extra `train` (torch, transformers, tokenizers, safetensors, matplotlib).
"""
