"""Random tensors, the same bits as every other backend's (philox.cl; see contract/philox.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from apps.gradient.backends.backend import Call
from apps.gradient.opencl.emitter import Emitter, Inputs, Lower
from apps.gradient.opencl.rows import launch_items
from apps.gradient.opencl.values import Read, View, Write

WORDS = 4  # elements of one block of the generator
MOST_BLOCKS = 8  # of one item
OPERATIONS = 40  # of one element


def _random(bernoulli: bool) -> Lower:
    def lower(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
        seed, step = inputs
        assert seed is not None and step is not None
        out, stream = emit.like(call.outputs[0]), call.attrs["stream"]
        width = min(emit.device.vector_width, MOST_BLOCKS)
        items = -(-out.numel // (WORDS * width))
        launch_items(
            emit,
            "philox.cl",
            "philox",
            (items,),
            [
                *(Read(seed), Read(step), Write(out), out.numel),
                *(stream - (1 << 32) if stream >= 1 << 31 else stream, float(call.attrs.get("p", 0.0))),
            ],
            defines={"BERNOULLI": int(bernoulli), "VW": width, "WIDE": int(not emit.device.group_form)},
            flops=OPERATIONS * out.numel,
        )
        return [out]

    return lower


OPS: Mapping[str, Lower] = {
    "random_bernoulli": _random(bernoulli=True),
    "random_uniform": _random(bernoulli=False),
}
