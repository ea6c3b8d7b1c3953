"""Runs on a Ray cluster, recorded in MLflow."""
