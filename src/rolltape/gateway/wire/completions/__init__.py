"""OpenAI's older Completions: a prompt as text or ids; and vLLM's `/tokenize` and `/detokenize`."""
