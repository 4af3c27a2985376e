"""What is being run: the model's shapes (model.py), the engine's settings (engine.py), flags."""
