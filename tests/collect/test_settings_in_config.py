"""The `rolltape` block of a trainer's config, and the trainer's own values for what it leaves out."""

from rolltape.collect.settings import settings_in_config


def test_sampling_in_a_block_replaces_only_what_it_names() -> None:
    own = {"source": "math", "sampling": {"temperature": 0.7, "top_p": 0.9}}
    settings = settings_in_config({"sampling": {"top_p": 0.5, "seed": 3}}, own, "rolltape")
    sampling = settings.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.7, 0.5, 3)
    assert settings_in_config({}, own, "rolltape").sampling.top_p == 0.9
