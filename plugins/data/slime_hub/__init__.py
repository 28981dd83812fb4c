"""Models and data of the Hugging Face hub: `fetch.py` brings them in, `push.py` takes a run out."""
