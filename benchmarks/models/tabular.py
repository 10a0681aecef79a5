"""Unity's models of tables and features: DLRM, XDL, CANDLE-Uno and its MLP; and TASO's NasRNN.

Sizes are those of the examples that ship with FlexFlow (examples/cpp, github.com/flexflow/FlexFlow) and TASO
(examples/nasrnn.py), but for DLRM's, which are MLPerf's. Losses stay outside.
"""

from __future__ import annotations

from benchmarks.models.sizes import Built, Size, rows_of, table_ids

# Rows of the 26 categorical features of the Criteo Terabyte set, at most 40 million each, as MLPerf Training's DLRM
# has them (mlcommons/training, recommendation/dlrm)
CRITEO_ROWS = (
    39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10, 2208, 11938, 155, 4, 976,
    14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36,
)  # fmt: skip
CELL, DESCRIPTORS, FINGERPRINTS = 942, 5270, 2048  # features of CANDLE-Uno's cells and drugs


def make_dlrm(size: Size, batch: int | None) -> Built:
    """DLRM (Naumov et al. 2019): features [b, 13], ids [b, tables, bag] -> logit [b, 1].

    `full` is MLPerf's: 26 tables of width 128 with 188 million rows (96 GB in float32; shapes only, on a laptop).
    """
    from benchmarks.models.mlp import Dlrm

    if size == "small":
        tables = (32,) * 4
        module = Dlrm(tables, dense=16, bottom=(32, 16), top=(32, 16, 1))
        return module, (*rows_of(batch or 8, 16), *table_ids(tables, batch or 8, 2))
    module = Dlrm(CRITEO_ROWS, dense=13, bottom=(512, 256, 128), top=(1024, 1024, 512, 256, 1))
    return module, (*rows_of(batch or 64, 13), *table_ids(CRITEO_ROWS, batch or 64, 1))


def make_xdl(size: Size, batch: int | None) -> Built:
    """XDL as in FlexFlow's examples/cpp/XDL: ids [b, tables, bag] -> class scores [b, 2]; the last layer a sigmoid."""
    from benchmarks.models.mlp import Xdl

    tables, width, layers = ((32,) * 4, 16, (16, 16, 2)) if size == "small" else ((10**6,) * 4, 64, (256, 256, 2))
    bag = 2 if size == "small" else 1
    return Xdl(tables, width, layers), table_ids(tables, batch or (8 if size == "small" else 64), bag)


def make_candle_uno(size: Size, batch: int | None) -> Built:
    """CANDLE-Uno as in FlexFlow's examples/cpp/candle_uno: two doses, a cell and two drugs of two feature sets each.

    Cell and drug features pass through encoders of their own; all is concatenated, a stack of layers gives growth
    [b, 1].
    """
    from benchmarks.models.mlp import CandleUno

    if size == "small":
        features = (16, 24, 16, 24, 16)
        return CandleUno(features, (16, 16), (32, 16)), rows_of(batch or 8, 1, 1, *features)
    features = (CELL, DESCRIPTORS, FINGERPRINTS, DESCRIPTORS, FINGERPRINTS)
    return CandleUno(features, (4192,) * 8, (4192,) * 4), rows_of(batch or 64, 1, 1, *features)


def make_mlp(size: Size, batch: int | None) -> Built:
    """Two stacks of layers over two inputs, added, softmax: FlexFlow's examples/cpp/MLP_Unify."""
    from benchmarks.models.mlp import TwoTowers

    ci, layers = (16, (32, 32, 16)) if size == "small" else (1024, (8192,) * 8)
    return TwoTowers(ci, layers), rows_of(batch or (8 if size == "small" else 64), ci, ci)


def make_nasrnn(size: Size, batch: int | None) -> Built:
    """A recurrent cell found by architecture search (Zoph and Le 2017), five steps as in TASO's examples/nasrnn.py.

    Every step has weights of its own. Inputs [b, steps, d] -> state [b, d].
    """
    import torch

    from benchmarks.models.mlp import NasRnn

    steps, width = (2, 16) if size == "small" else (5, 512)
    return NasRnn(steps, width), (torch.randn(batch or (8 if size == "small" else 64), steps, width),)
