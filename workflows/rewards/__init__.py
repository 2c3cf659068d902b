"""Reward functions: plain functions of the prompt, the completion, their ids and the dataset row's fields."""
