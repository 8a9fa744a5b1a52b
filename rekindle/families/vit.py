"""ViT, which reads patches of images."""

from rekindle.families.family import Family, sizes

FAMILIES = {
    "vit": Family(
        sizes(768, 3072, 12, 12, 0, image_size=224, patch_size=16, num_channels=3),
        causal=False, score_bias=True, patches=True,
    ),
}  # fmt: skip
