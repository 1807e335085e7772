"""The table of types names every decoder of the pinned transformers, and what is read is said to be read."""

from __future__ import annotations

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.model_fuzz import FAMILIES as FUZZED
from nas.train.adapt.checkpoints import FAMILIES
from nas.train.adapt.model_types import MODEL_TYPES, NO_DECODERS, NOT_SMALL


def test_every_type_of_transformers_is_in_one_list() -> None:
    lists = [*MODEL_TYPES, *NOT_SMALL, *NO_DECODERS]
    assert sorted(lists) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_odd_configurations_of_every_type_that_is_read_are_tried() -> None:
    assert FUZZED.keys() == FAMILIES.keys()


def test_what_is_read_lacks_nothing() -> None:
    assert {name for name, kind in MODEL_TYPES.items() if not kind.missing} == FAMILIES.keys() - {"hilnas"}
