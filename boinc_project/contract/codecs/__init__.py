"""Codecs: how an update becomes tensors to send, and back. Stateless; random numbers are the microtask's own.

    dense       float32 as it is
    int8, fp4   blocks of values share a scale
    sign        one bit a value
    qsgd        levels, rounded at random so that the mean is right
    random-k    a random share of the values, so that the mean is right
    low-rank    two thin factors of each matrix
    top-k       the largest values
    dct-top-k   the largest coefficients of a cosine transform

One file each (the method, its arithmetic, its paper); codec.py is what a microtask's document says. Agreement between
replicas is measured after decoding. Only float32 tensors are encoded; tensors of other dtypes (counters of batch norm)
always travel as they are, and so do buffers and metrics (update.py).
"""

from boinc_project.contract.codecs.codec import COMPRESSIONS, KINDS, PARAMETERS, VALUE_KINDS, Codec
from boinc_project.contract.codecs.method import CODES_SUFFIX, SCALES_SUFFIX, Array, CodecSeed, Method
from boinc_project.contract.codecs.part import PART_KINDS, Part

__all__ = [
    "CODES_SUFFIX",
    "COMPRESSIONS",
    "KINDS",
    "PARAMETERS",
    "PART_KINDS",
    "SCALES_SUFFIX",
    "VALUE_KINDS",
    "Array",
    "Codec",
    "CodecSeed",
    "Method",
    "Part",
]
