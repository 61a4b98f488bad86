"""Patch and build vLLM, SGLang and FlashInfer for NVIDIA SM12x GPUs, with evidence."""

__version__ = "0.1.0"
