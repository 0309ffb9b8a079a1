"""The planner: exact where it can be, ordered where it estimates, and clear where it refuses."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import jax
import pytest

from experiments.presets import get_preset
from jaxlib_papers.train.flops import flops_per_token
from tools import plan
from tools.planning import ahead, chips, collectives, estimate, hlo, job, memory


def planned(preset="edl-3b", target="v5p:2x2x4", mesh="fsdp=16", **more):
    return job.make_job(preset, chips.parse_target(target), mesh, **more)


@pytest.mark.parametrize(
    ("target", "devices"),
    [("v5p:4x4x8", 128), ("v6e:16x16", 256), ("v5e:1x1", 1), ("h200:64", 64), ("h200:4", 4)],
)
def test_targets_have_their_devices(target, devices):
    assert chips.parse_target(target).devices == devices


def test_every_chip_has_a_source_and_positive_rates():
    for chip in chips.CHIPS.values():
        assert len(chip.source) > 20
        assert min(chip.flops, chip.memory, chip.memory_rate, chip.link_rate) > 0
        assert chip.network_rate > 0 or chip.node == 0


def test_links_between_nodes_are_shared_by_the_ranks_of_a_node():
    target = chips.parse_target("h200:64")
    chip = target.chip
    assert target.rate(1, 8) == chip.link_rate, "inside a node"
    assert target.rate(1, 64) == 8 * chip.network_rate, "eight ports serve one ring"
    assert target.rate(8, 8) == chip.network_rate, "one rank of a node in each ring"
    assert chips.parse_target("v5p:4x4x8").rate(1, 128) == chips.CHIPS["v5p"].link_rate


BAD = {
    "unknown chip": (["--target", "v5q:2x2"], ("unknown chip 'v5q'", "v5p:", "h200:64")),
    "unknown slice": (["--target", "v5p:3x3x3"], ("no topology '3x3x3'", "v5p:4x4x8")),
    "odd count": (["--target", "h200:12"], ("a multiple of 8",)),
    "mesh": (["--target", "v6e:2x2", "--mesh", "fsdp=3"], ("needs 3 devices, there are 4",)),
    "preset": (["--preset", "edl-15c"], ("did you mean 'edl-15b'",)),
    "parameter": (
        ["--preset", "edl-3b", "--target", "v6e:16x16", "--mesh", "expert=128,data=2"],
        ("not divisible by mesh axis expert",),
    ),
    "rows": (
        ["--preset", "edl-3b", "--target", "v6e:16x16", "--batch", "64", "--mesh", "fsdp=256"],
        ("micro-batch", "256"),
    ),
    "memory": (
        ["--preset", "edl-15b", "--target", "v5e:2x2"],
        ("GiB more than the usable", "--target v5e:", "--remat full"),
    ),
    "memory, batch": (
        ["--preset", "edl-3b", "--target", "v6e:2x2", "--batch", "1024"],
        ("GiB more than the usable", "--accum-steps"),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_planned_is_one_clear_line_and_exit_code_two(case, capsys):
    flags, messages = BAD[case]
    assert plan.main(flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("plan: ") and error.count("\n") == 1
    for message in messages:
        assert message in error


def test_what_a_refusal_proposes_fits():
    """The flags in the message are good for a plan."""
    with pytest.raises(chips.PlanError) as refused:
        estimate.require_fit(planned("edl-15b", "v5e:2x2", "fsdp=4"))
    words = str(refused.value).split()
    target = words[words.index("--target") + 1]
    devices = chips.parse_target(target).devices
    estimate.require_fit(planned("edl-15b", target, f"fsdp={devices}", rows=devices, remat="full"))


def test_state_is_exact():
    plan = planned()
    result = memory.estimate_memory(plan)
    norms = sum(p.size for p in plan.parameters if "embed" not in p.logical)
    assert result.parameters == 4 * ((plan.counts.total - norms) / 16 + norms)
    assert result.optimizer == pytest.approx(2 * result.parameters, abs=16)


# `memory_analysis()` of libtpu, arguments and temporaries in GiB; commands in docs/scale.md. The
# meshes with an expert axis: with room for twice the rows (receive_factor=2).
COMPILED = [
    ("edl-3b", "v5p:2x2x4", "fsdp=16", 16, "minimal", 2.053, 4.576),
    ("edl-8b", "v5p:2x2x4", "fsdp=16", 16, "minimal", 5.500, 7.904),
    ("edl-15b", "v5p:2x4x4", "fsdp=32", 32, "minimal", 5.271, 11.241),
    ("edl-3b", "v6e:4x4", "fsdp=16", 16, "full", 2.053, 2.814),
    ("edl-8b", "v6e:4x8", "fsdp=32", 32, "full", 2.751, 5.774),
    ("edl-15b", "v6e:8x8", "fsdp=64", 64, "full", 2.636, 7.571),
    ("edl-15b", "v5p:4x4x4", "fsdp=64", 64, "minimal", 2.636, 10.323),
    ("edl-15b", "v5p:4x4x4", "fsdp=4,expert=16", 64, "minimal", 4.174, 7.482),
    ("edl-15b", "v5p:4x4x4", "fsdp=4,expert=16", 256, "minimal", 4.174, 19.154),
    ("edl-15b", "v5p:4x8x8", "fsdp=8,expert=32", 256, "minimal", 1.455, 5.610),
]


@pytest.mark.parametrize("case", COMPILED, ids=lambda case: f"{case[0]}-{case[1]}")
def test_memory_is_near_the_compilers(case):
    preset, target, mesh, rows, remat, arguments, temporaries = case
    room = 2.0 if "expert" in mesh else None
    plan = planned(preset, target, mesh, rows=rows, remat=remat, receive_factor=room)
    result = memory.estimate_memory(plan)
    assert result.state / 2**30 == pytest.approx(arguments, rel=0.01)
    assert result.total / 2**30 == pytest.approx(arguments + temporaries, rel=0.15)


def test_flops_are_those_of_the_trainer_and_one_device_does_its_share():
    plan = planned(remat="none")
    result = estimate.estimate(plan)
    assert result.flops_per_token == flops_per_token(plan.config, 4096)
    model = result.flops_per_token * plan.rows * plan.seq_len / 16
    assert result.device_flops == pytest.approx(model, rel=0.01)
    again = estimate.estimate(planned(remat="full"))
    assert 1.2 < again.device_flops / result.device_flops < 4 / 3


def test_an_expert_axis_sends_tokens_instead_of_weights():
    alone = estimate.estimate(planned(remat="none"))
    experts = estimate.estimate(planned(mesh="fsdp=4,expert=4", remat="none"))
    assert experts.device_flops == alone.device_flops

    def sent(result, axis):
        return sum(e.bytes for e in result.exchanges if e.axis == axis)

    assert sent(experts, "fsdp") < 0.3 * sent(alone, "fsdp")
    plan = experts.job
    (rows,) = [e for e in experts.exchanges if e.kind == "all-to-all"]
    # Forward and backward, there and back: tokens x width x 2 x top-k x bytes, 3/4 of it elsewhere.
    once = 16 * 4096 * 1024 * 2 * 4 * 2 * 3 / 4
    assert collectives.exchange_bytes(plan) == once
    assert rows.bytes == 2 * once * plan.config.num_layers


def test_room_for_received_rows_is_memory():
    worst = memory.estimate_memory(planned(mesh="fsdp=4,expert=4"))
    twice = memory.estimate_memory(planned(mesh="fsdp=4,expert=4", receive_factor=2.0))
    assert twice.working < 0.7 * worst.working
    assert memory.estimate_memory(planned(receive_factor=2.0)) == memory.estimate_memory(planned())


def test_a_context_axis_fits_a_long_sequence():
    long = planned(target="v5p:4x4x4", mesh="fsdp=4,context=16", rows=4, seq_len=131_072)
    estimate.require_fit(long)
    assert long.tokens == 131_072 / 16
    kinds = {e.kind for e in estimate.estimate(long).exchanges if e.axis == "context"}
    assert kinds == {"collective-permute", "all-reduce"}


def test_more_of_everything_takes_more_memory():
    base = memory.estimate_memory(planned()).total
    assert memory.estimate_memory(planned(rows=512)).total > base
    assert memory.estimate_memory(planned(remat="none")).total > base
    assert memory.estimate_memory(planned(remat="full")).total < base
    assert memory.estimate_memory(planned(mesh="data=4,fsdp=4")).total > base


def test_largest_micro_batch_is_the_largest():
    plan = planned()
    rows = estimate.largest_rows(plan)
    usable = estimate.USABLE * plan.target.chip.memory

    def total(n):
        return memory.estimate_memory(dataclasses.replace(plan, rows=16 * n)).total

    assert rows > 0 and total(rows) <= usable < total(rows + 1)


def test_alternatives_fit_divide_and_come_in_order():
    plan = planned()
    others = estimate.alternatives(plan, most=20)
    assert len(others) > 5 and all(e.fits for e in others)
    order = [(e.largest_share > estimate.LARGEST_SHARE, e.serial) for e in others]
    assert order == sorted(order)
    target = plan.target
    best = estimate.recommended(lambda mesh: job.make_job("edl-3b", target, mesh), target)
    assert best.mesh == others[0].job.mesh
    for e in others:
        sizes = dataclasses.astuple(e.job.mesh)
        assert jax.numpy.prod(jax.numpy.array(sizes)) == 16
    assert "fsdp=16" in {e.job.mesh_text for e in others}


def test_without_a_mesh_the_best_one_is_planned(capsys):
    flags = ["--preset", "edl-3b", "--target", "v5p:2x2x4", "--alternatives", "1"]
    assert plan.main([*flags, "--batch", "2", "--seq-len", "131072", "--accum-steps", "1"]) == 0
    out = capsys.readouterr().out
    assert "context=" in out.splitlines()[0], "two rows for sixteen devices"
    assert plan.main(flags) == 0
    assert "mesh " in capsys.readouterr().out


def test_collectives_vanish_on_one_device_and_data_parallelism_sums_gradients_once():
    assert collectives.list_collectives(planned(target="v5p:2x2x1", mesh="data=4"))
    one = planned("tiny", "v5e:1x1", "data=1")
    assert collectives.list_collectives(one) == ()
    (only,) = collectives.list_collectives(planned("tiny", "v5e:2x2", "data=4"))
    held = sum(p.size for p in one.parameters)
    assert (only.kind, only.axis) == ("all-reduce", "data")
    assert only.bytes == pytest.approx(held * 4 * 2 * 3 / 4)


def test_compiled_programs_are_counted_with_their_loops():
    text = """
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %ag = f32[16,4]{1,0} all-gather(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
}
%cond (p: (s32[], f32[8])) -> pred[] {
}
ENTRY %main (a: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %ar = (bf16[10]{0}, bf16[2]{0}) all-reduce(%a, %b), replica_groups=[4,2]<=[8], to_apply=%cond
  %s = (f32[4]{0}, f32[8]{0}) all-gather-start(%a), replica_groups={{0,1}}, dimensions={0}
  %r = f32[6]{0} reduce-scatter(%a), replica_groups=mesh['x'=2,'y'=4] {'y'}, to_apply=%cond
  %r2 = f32[3]{0} reduce-scatter(%a), replica_groups=mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'x','y'}
  %few = bf16[100,8]{1,0} copy(%a)
  %ra = bf16[400,8]{1,0} ragged-all-to-all(%few, %z, %i), replica_groups={{0,1,2,3}}
  %rs = ((bf16[100,8]{1,0}, bf16[400,8]{1,0}, s64[4]{0}, /*index=5*/s64[4]{0}), bf16[400,8]{1,0}) ragged-all-to-all-start(%few, %z, %i), replica_groups={{0,1,2,3}}
  %p = f32[5]{0} collective-permute(%a), source_target_pairs={{0,1},{1,0}}
}
"""  # noqa: E501
    found = hlo.collectives_in_hlo(text)
    sent = {kind: (total.count, total.sent) for kind, total in found.items()}
    assert sent == {
        "all-gather": (4, 3 * 256 * 3 / 4 + 32 / 2),
        "all-reduce": (1, 2 * 24 / 2),
        "reduce-scatter": (2, 24 * 3 + 12 * 7),
        "ragged-all-to-all": (2, 2 * 1600 * 3 / 4),
        "collective-permute": (1, 20),
    }
    assert found["ragged-all-to-all"].results == 2 * 6400
    with pytest.raises(ValueError, match="not known"):
        hlo.collectives_in_hlo(text.replace("replica_groups={{0,1}}", "replica_groups=(0-1)"))


def test_step_that_is_compiled_is_the_trainers():
    """Lowered for devices that are here: the same entries as a training step, and it compiles."""
    plan = planned("tiny", "v5e:1x1", "data=1", rows=2, seq_len=16)
    lowered = ahead.lower_step(plan, jax.devices()[:1])
    assert lowered.compile().memory_analysis().argument_size_in_bytes > 12 * plan.counts.total


def test_command_prints_and_writes_the_plan(tmp_path):
    path = tmp_path / "plan.json"
    command = [sys.executable, "-m", "tools.plan", "--preset", "edl-8b", "--target", "h200:64"]
    done = subprocess.run(
        [*command, "--mesh", "fsdp=16,tensor=4", "--alternatives", "2", "--json", str(path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for words in (
        "largest micro-batch",
        "all-reduce",
        "tensor",
        "MFU",
        "limited by",
        "the best first",
    ):
        assert words in done.stdout
    written = json.loads(path.read_text())
    assert written["mesh"] == "fsdp=16,tensor=4" and len(written["alternatives"]) == 2
    assert 0 < written["mfu_serial"] <= written["mfu"] < 1
    assert get_preset("edl-8b").batch == 256
