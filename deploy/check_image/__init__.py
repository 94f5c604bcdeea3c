"""The Dockerfile's steps run without a container engine, and the image that they make tried: ``make image-check``."""
