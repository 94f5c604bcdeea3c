"""The engine process: admission, steps, the model runner, sampling, stop decisions. Never imports ``server``."""
