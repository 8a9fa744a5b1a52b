"""Reusable KFP components, one file each: resolve artifacts, call one library function."""

IMAGE = "rekindle/train:0.1.0"
