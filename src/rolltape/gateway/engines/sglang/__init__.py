"""SGLang's native `/generate`: ids in; ids, logprobs, weight version, routed experts and kept ids out."""
