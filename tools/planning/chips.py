"""The accelerators that a run can be planned for, and the machines made of them.

Every figure is one that its maker publishes; `Chip.source` says where. Rates are peaks, in one
direction where a link has two: an estimate made of them is a ceiling, not a forecast.
"""

from __future__ import annotations

import dataclasses
import difflib
import math

__all__ = ["CHIPS", "Chip", "PlanError", "Target", "parse_target"]

_TPU_DOCS = (
    "Google Cloud TPU documentation, system architecture page of the version; link rates from "
    "'How to Scale Your Model' (Austin et al., 2025), table of TPU specifications"
)


class PlanError(ValueError):
    """What was asked for cannot be planned; the message says what would do."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device as JAX counts devices.

    Attributes:
      name: Short name, as in a target.
      platform: "tpu" or "gpu".
      flops: Dense bfloat16 FLOP/s.
      memory: Bytes of main memory.
      memory_rate: Bytes/s to and from it.
      link_rate: Bytes/s that one device can send over all links inside a slice (TPU) or inside a
        node (GPU), one direction.
      node: Devices that `link_rate` holds among; 0 = all of the machine (a TPU slice).
      network_rate: Bytes/s that one device can send to another node, one direction.
      shapes: Known slices (TPU), as text.
      source: Where the figures come from.
    """

    name: str
    platform: str
    flops: float
    memory: float
    memory_rate: float
    link_rate: float
    node: int
    network_rate: float
    shapes: tuple[str, ...]
    source: str


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = (
    "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16",
    "16x16x16",
)  # fmt: skip


def _nvidia(name: str, flops: float, memory: float, rate: float, nvlink: float, network: float):
    source = (
        f"NVIDIA {name.upper()} data sheet (dense bfloat16, memory, NVLink: half of its total of "
        "both directions); between nodes one network port per GPU as in DGX systems"
    )
    return Chip(name, "gpu", flops, memory, rate, nvlink, 8, network, (), source)


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        # Links: three axes (v4, v5p) or two (v5e, v6e), both ways of a ring at once.
        Chip("v4", "tpu", 275e12, 32 * 2**30, 1.2e12, 270e9, 0, 0.0, _CUBES, _TPU_DOCS),
        Chip("v5e", "tpu", 197e12, 16 * 2**30, 0.81e12, 180e9, 0, 0.0, _FLAT, _TPU_DOCS),
        Chip("v5p", "tpu", 459e12, 95 * 2**30, 2.765e12, 540e9, 0, 0.0, _CUBES, _TPU_DOCS),
        Chip("v6e", "tpu", 918e12, 32 * 2**30, 1.64e12, 360e9, 0, 0.0, _FLAT, _TPU_DOCS),
        _nvidia("a100", 312e12, 80e9, 2.039e12, 300e9, 25e9),
        _nvidia("h100", 989e12, 80e9, 3.35e12, 450e9, 50e9),
        _nvidia("h200", 989e12, 141e9, 4.8e12, 450e9, 50e9),
        _nvidia("b200", 2250e12, 180e9, 8.0e12, 900e9, 50e9),
    )
}
"""By name. Devices of v4 and v5p are chips (two cores each): Google's "v5p-256" is 128 of them."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A machine.

    Attributes:
      text: As it was written, e.g. "v5p:4x4x4".
      chip: What it is made of.
      devices: How many.
    """

    text: str
    chip: Chip
    devices: int

    def rate(self, inner: int, size: int) -> float:
        """Bytes/s that a device can send in a ring over a mesh axis.

        Args:
          inner: Product of the mesh axes inside of this one (those after it).
          size: Size of the axis.
        """
        chip = self.chip
        if chip.node == 0 or inner * size <= chip.node:
            return chip.link_rate
        # Of the ring's members `node / inner` are in one node and share its network ports.
        return chip.network_rate * max(1, min(chip.node // max(inner, 1), size))


def parse_target(text: str) -> Target:
    """Reads "v5p:4x4x4" (a TPU slice) or "h200:64" (a number of GPUs).

    Raises:
      PlanError: No such chip or slice; the valid ones are listed.
    """
    name, _, size = text.partition(":")
    if name not in CHIPS:
        near = difflib.get_close_matches(name, CHIPS, 1)
        known = ", ".join(f"{c.name}:{c.shapes[-2] if c.shapes else 64}" for c in CHIPS.values())
        raise PlanError(
            f"target {text!r}: unknown chip {name!r}"
            + (f", did you mean {near[0]!r}?" if near else "")
            + f"; valid ones look like {known}"
        )
    chip = CHIPS[name]
    if chip.platform == "tpu":
        if size not in chip.shapes:
            raise PlanError(
                f"target {text!r}: {name} has no topology {size!r}; valid ones: "
                + ", ".join(f"{name}:{shape}" for shape in chip.shapes)
            )
        return Target(text, chip, math.prod(int(n) for n in size.split("x")))
    count = int(size) if size.isdigit() else 0
    if count < 1 or (count > chip.node and count % chip.node):
        raise PlanError(
            f"target {text!r}: expected {name}:COUNT with 1 to {chip.node} devices or a multiple "
            f"of {chip.node}, e.g. {name}:8 or {name}:64"
        )
    return Target(text, chip, count)
