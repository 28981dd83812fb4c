"""The DeepSeek-V3 family: DeepSeek-V3, V3.1 and R1, and Moonlight."""
