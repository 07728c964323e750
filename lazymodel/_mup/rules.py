"""The tables of Tensor Programs V as numbers: what width does to a variable's initial values and learning rate.

Yang et al., Tensor Programs V: Tuning Large Neural Networks via Zero-Shot Hyperparameter Transfer, 2022. Table 3 is the
rule; where one variable is both embedding and readout, it is the embedding's, and Table 8's multiplier of the readout
is the code's. Both are relative to a base model. Depth follows Yang et al., Tensor Programs VI, 2023.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["input", "hidden", "output", "vector", "fixed"]
Rule: TypeAlias = Literal["adam", "sgd"]

KINDS: dict[Kind, str] = {
    "input": "fixed size to width",
    "hidden": "width to width",
    "output": "width to fixed size",
    "vector": "one number for each unit",
    "fixed": "does not grow",
}


@dataclasses.dataclass(frozen=True)
class Scaling:
    """What a variable's values and updates are multiplied by, relative to the base model's."""

    std: float  # of initial values
    adam: float  # learning rate of Adam and others that do not see how large a gradient is
    sgd: float  # learning rate of SGD, with momentum or not


def kind_of(fan_in: bool, fan_out: bool, *, vector: bool) -> Kind:
    """The kind of a variable, from whether its fan-in and its fan-out grow."""
    if fan_in:
        return "hidden" if fan_out else "output"
    return ("vector" if vector else "input") if fan_out else "fixed"


def scaling(kind: Kind, fan_in: float, fan_out: float) -> Scaling:
    """Table 3, of how many times the base model's a variable's fan-in and fan-out are.

    The table's SGD column takes all widths to be one; where they grow differently a hidden variable's update is
    multiplied by fan-out / fan-in, which keeps it of the size of its values.
    """
    if kind == "hidden":
        return Scaling(fan_in**-0.5, 1 / fan_in, fan_out / fan_in)
    if kind == "output":
        return Scaling(1 / fan_in, 1 / fan_in, 1 / fan_in)
    return Scaling(1.0, 1.0, fan_out)  # input weights and all biases; what is fixed has a fan-out of 1


def deepened(scaled: Scaling, layers: float, power: float) -> Scaling:
    """Of a variable in a residual branch that the code multiplies by `layers ** -power`, `layers` times the base's.

    All branches together then learn as one did: each moves by 1 / layers. Adam does not see the multiplier in the
    gradient, SGD does. A power of 1/2 is Tensor Programs VI's; 1 is CompleteP's (Dey et al. 2025).
    """
    adam, sgd = layers ** (power - 1), layers ** (2 * power - 1)
    return dataclasses.replace(scaled, adam=scaled.adam * adam, sgd=scaled.sgd * sgd)
