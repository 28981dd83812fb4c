"""The GLM-4 family: GLM-4-9B-0414, GLM-4-32B-0414, and their Z1 models."""
