"""vLLM's `/inference/v1/generate`: token ids in, token ids and logprobs out."""
