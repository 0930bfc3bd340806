"""Static figures of models, plans, tuning results and copies."""
