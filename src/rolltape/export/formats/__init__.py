"""Samples and rollouts → other programs' formats: one module per framework or format, as functions and as files."""

from rolltape.export.formats.areal import tensor_dict
from rolltape.export.formats.atif import trajectory, write_trajectories
from rolltape.export.formats.datasets import write_dataset
from rolltape.export.formats.files import FRAMEWORKS, Choices, Written, write_samples_for
from rolltape.export.formats.fitting import LeftOutWarning
from rolltape.export.formats.inspect import write_inspect_log
from rolltape.export.formats.prime_rl import training_samples
from rolltape.export.formats.skyrl import generator_output
from rolltape.export.formats.slime import post_process_rewards, slime_samples
from rolltape.export.formats.tinker import datums
from rolltape.export.formats.trl import rollout_result
from rolltape.export.formats.verl import data_proto_fields

__all__ = [
    "FRAMEWORKS",
    "Choices",
    "LeftOutWarning",
    "Written",
    "data_proto_fields",
    "datums",
    "generator_output",
    "post_process_rewards",
    "rollout_result",
    "slime_samples",
    "tensor_dict",
    "training_samples",
    "trajectory",
    "write_dataset",
    "write_inspect_log",
    "write_samples_for",
    "write_trajectories",
]
