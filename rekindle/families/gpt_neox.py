"""GPT-NeoX and Pythia."""

from rekindle.families.family import Family, sizes

FAMILIES = {"gpt_neox": Family(sizes(6144, 24576, 44, 64, 50432))}
