"""The GLM-4 MoE family: GLM-4.5, 4.5-Air, 4.6 and 4.7."""
