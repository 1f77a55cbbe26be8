"""Trained models for other tools: Hugging Face weights and back, and a look at what a model says.

    python -m fgd_jax.export DIR --out=FOLDER                 the model of a run as Hugging Face Llama weights
    python -m fgd_jax.export sample DIR --prompt="def "       what it says; DIR is a run or such a FOLDER

trained.py reads the model of a run, huggingface.py translates, sampling.py continues text.
"""

from fgd_jax.export.huggingface import read_folder, write_folder
from fgd_jax.export.sampling import continue_tokens
from fgd_jax.export.start import first_params
from fgd_jax.export.trained import Trained, read_run

__all__ = ["Trained", "continue_tokens", "first_params", "read_folder", "read_run", "write_folder"]
