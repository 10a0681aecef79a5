"""Image models: ViT and ResNet-50 from transformers, Inception-v3, ResNeXt-50 and SqueezeNet from their papers.

Batch normalisation runs in training mode, dropout is left out; images [b, 3, h, w] in, logits [b, classes] out. The
convolutional ones here are `Conv` layers put together by `nn.Sequential` and `Parallel`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.models.language import NO_ENCODER_DROPOUT, SDPA, SMALL_ENCODER
from benchmarks.models.sizes import Built, Size, choose, images

if TYPE_CHECKING:
    import torch


def make_vit(size: Size, batch: int | None) -> Built:
    """ViT-B/16 with its classification head; images [b, 3, h, w] -> logits [b, classes]."""
    from transformers.models.vit.configuration_vit import ViTConfig
    from transformers.models.vit.modeling_vit import ViTForImageClassification

    class Vit(ViTForImageClassification):  # type: ignore[no-untyped-call]
        def forward(self, pixel_values: torch.Tensor) -> Any:
            return super().forward(pixel_values).logits

    small = {"image_size": 32, "patch_size": 8, "num_labels": 16} | SMALL_ENCODER
    full = {"image_size": 224, "num_labels": 1000}
    config = ViTConfig.from_dict(choose(size, small=small, full=full) | NO_ENCODER_DROPOUT | SDPA)
    return Vit(config), images(batch or 8, 32 if size == "small" else 224)


def make_resnet(size: Size, batch: int | None) -> Built:
    """ResNet-50 (bottlenecks, batch normalisation in training mode); images [b, 3, h, w] -> logits [b, classes]."""
    from transformers.models.resnet.configuration_resnet import ResNetConfig
    from transformers.models.resnet.modeling_resnet import ResNetForImageClassification

    class ResNet(ResNetForImageClassification):  # type: ignore[no-untyped-call]
        def forward(self, pixel_values: torch.Tensor) -> Any:
            return super().forward(pixel_values).logits

    small = {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [2, 2], "num_labels": 16}
    config = ResNetConfig.from_dict(choose(size, small=small, full={"num_labels": 1000}))
    return ResNet(config), images(batch or 8, 32 if size == "small" else 224)


def make_inception(size: Size, batch: int | None) -> Built:
    """Inception-v3 without its auxiliary head (Szegedy et al., "Rethinking the Inception Architecture", 2015; widths
    as torchvision.models.inception_v3 has them). `small` has one block of each kind.
    """
    from benchmarks.models.convolution import inception

    side = 107 if size == "small" else 299  # leaves 2x2 points, so that no statistics are taken over the batch alone
    module = inception(classes=16, thin=True) if size == "small" else inception(classes=1000, thin=False)
    return module, images(batch or 8, side)


def make_resnext(size: Size, batch: int | None) -> Built:
    """ResNeXt-50 32x4d (Xie et al., "Aggregated Residual Transformations", CVPR 2017, table 1)."""
    from benchmarks.models.convolution import resnext

    if size == "small":
        return resnext(stem=16, depths=(1, 1), width=16, groups=8, classes=16), images(batch or 8, 32)
    return resnext(stem=64, depths=(3, 4, 6, 3), width=128, groups=32, classes=1000), images(batch or 8, 224)


def make_squeezenet(size: Size, batch: int | None) -> Built:
    """SqueezeNet 1.1 (Iandola et al. 2016; the released v1.1, whose squeezes come after its poolings)."""
    from benchmarks.models.convolution import squeezenet

    if size == "small":
        thin = ((8, 16), (8, 16)), ((16, 32),)
        return squeezenet(stem=16, fires=thin, classes=16), images(batch or 8, 31)
    fires = ((16, 64), (16, 64)), ((32, 128), (32, 128)), ((48, 192), (48, 192), (64, 256), (64, 256))
    return squeezenet(stem=64, fires=fires, classes=1000), images(batch or 8, 224)
