"""Which step a run continues from, and that it is the same run."""

from __future__ import annotations

import json

import pytest

from jaxlib_papers.train import checkpoint, resume


def test_resume_modes():
    assert resume.resume_step("auto", None, "d") is None
    assert resume.resume_step("auto", 4, "d") == resume.resume_step("must", 4, "d") == 4
    assert resume.resume_step("never", 4, "d") is None
    with pytest.raises(checkpoint.CheckpointError, match="no complete checkpoint in d"):
        resume.resume_step("must", None, "d")
    with pytest.raises(ValueError, match="got 'maybe'"):
        resume.resume_step("maybe", 4, "d")


def test_other_configuration_is_refused_and_the_fields_are_named():
    saved = json.loads(json.dumps({"model": {"layers": 2, "shape": (1, 2)}, "lr": 0.1, "old": 1}))
    resume.check_config(saved, {"model": {"layers": 2, "shape": (1, 2)}, "lr": 0.1, "old": 1})
    with pytest.raises(resume.ConfigMismatchError) as error:
        resume.check_config(saved, {"model": {"layers": 4, "shape": (1, 2)}, "lr": 0.1, "new": 1})
    message = str(error.value)
    assert "model.layers: 2 in the checkpoint, 4 now" in message
    assert "old: 1 in the checkpoint, absent now" in message
    assert "new: absent in the checkpoint, 1 now" in message
    assert "lr:" not in message and "shape" not in message
