"""The Kimi K2 family: K2-Base, K2-Instruct and K2-Thinking."""
