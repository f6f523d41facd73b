"""Stages that are more than a line: one output goes to several of them, or one reads several."""
