"""Engines: run the ranks of a job and return their outcomes. Torch-free; knows neither cases nor checks."""
