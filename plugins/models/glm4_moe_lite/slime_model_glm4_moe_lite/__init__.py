"""The GLM-4.7-Flash family: latent attention and experts."""
